"""Plays lives on stages, in orders at random, recorded or explored by system, and says how to play
one again that was broken."""

import random
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.fences.lives import COPY_S, REGISTER_S, Life, at_random, knobs_of, situations
from tests.fences.stage import Broken, Task, on_stage
from tests.fences.world import Engine, Knobs, listening, play

__all__ = ["Found", "Tally", "listening", "play_seed", "play_situations"]


WORLDS = {
    "hurried": Knobs(drain_ms=0),
    "patient": Knobs(),
    "hurried host": Knobs(late=False, drain_ms=0),
    "patient host": Knobs(late=False),
    "slow": Knobs(copy_s=COPY_S),
    "many threads": Knobs(load_threads=2, spans=2),
    "scarce": Knobs(copy_s=COPY_S, load_threads=2, arena_pages=2),
    "kept": Knobs(copy_s=COPY_S, arena_pages=2, keeps=True),
    "registering": Knobs(frames="registering", register_s=REGISTER_S),
    "registered": Knobs(frames="registering", arena_pages=2),
    "refused": Knobs(copy_s=COPY_S, frames="refused"),
    "early": Knobs(copy_s=COPY_S, writes_early=True),
    "roomy": Knobs(copy_s=COPY_S, writes_early=True, roomy=True),
    "short of time": Knobs(copy_s=COPY_S, save_ms=1),
}


class Recorded:
    """Begins as told, goes on by default, and remembers what there was to choose."""

    def __init__(self, choices: Sequence[int] = ()) -> None:
        self.choices = list(choices)
        self.options: list[int] = []

    def choose(self, options: Sequence[Task | None], current: Task | None) -> int:
        at = len(self.options)
        self.options.append(len(options))
        if at == len(self.choices):
            self.choices.append(self._pick(options, current))
        return self.choices[at]

    def _pick(self, options: Sequence[Task | None], current: Task | None) -> int:
        return 0


class Random(Recorded):
    """A walk by a seed. Each has habits of its own, so that some rarely switch and some often; and
    some threads are slow: they go on only when nobody else can, for a while."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._switches = self._random.choice((0.02, 0.1, 0.3, 0.7))
        self._time_passes = self._random.choice((0.0, 0.0, 0.002, 0.02))
        self._laggard = -1

    def _pick(self, options: Sequence[Task | None], current: Task | None) -> int:
        dice = self._random
        if dice.random() < 0.02:
            self._laggard = dice.choice((-1, *(t.number for t in options if t is not None)))
        threads = [i for i, task in enumerate(options) if task is not None]
        if len(threads) < len(options) and dice.random() < self._time_passes:
            return len(options) - 1
        if options[0] is current and dice.random() >= self._switches:
            return 0
        quick = [i for i in threads if options[i].number != self._laggard]  # type: ignore[union-attr]
        return dice.choice(quick or threads)


def explore(
    play: Callable[[Recorded], None], *, preemptions: int, stride: int = 1, first: int = 0
) -> Iterator[Recorded]:
    """Play every interleaving with at most so many preemptions, of which every ``stride``-th, from
    the ``first`` on; ``play`` raises for one that is broken. Switches where a thread cannot go on
    are varied one at a time as well. Yields what was played."""
    waiting: list[tuple[list[int], int]] = [([], 0)]
    number = 0
    while waiting:
        choices, used = waiting.pop()
        recorded = Recorded(choices)
        play(recorded)
        yield recorded
        if used == preemptions:
            continue
        for at in range(len(choices), len(recorded.options)):
            for other in range(1, recorded.options[at]):
                number += 1
                if number % stride == first % stride:
                    waiting.append(([*recorded.choices[:at], other], used + 1))


class Found(Broken):
    """An interleaving that breaks something."""


@dataclass
class Tally:
    plays: int = 0
    switches: int = 0
    copies: int = 0

    def add(self, recorded: Recorded, engine: Engine) -> None:
        self.plays += 1
        self.switches += sum(1 for choice in recorded.choices if choice)
        self.copies += engine.hands.touches


def play_seed(seed: int, tally: Tally) -> None:
    """One life at random in one order at random. Raises ``Found``."""
    _play(at_random(seed), knobs_of(seed), seed, tally, f"--seed {seed}", Random(seed))


def play_situations(
    *,
    preemptions: int,
    tally: Tally,
    stride: int = 1,
    first: int = 0,
    only: str = "",
    worlds: Sequence[Knobs] = tuple(WORLDS.values()),
) -> Iterator[str]:
    """Every event at every time of a load and of a save, with every switch of threads, as far as
    the bounds go. Yields after each. Raises ``Found``."""
    for knobs in worlds:
        for name, life in situations().items():
            if only not in name:
                continue
            one = partial(_play, life, knobs, 0, tally, f"{name}, {knobs}, choices")
            for _ in explore(one, preemptions=preemptions, stride=stride, first=first):
                yield name


def _play(
    life: Life, knobs: Knobs, seed: int, tally: Tally, where: str, schedule: Recorded
) -> None:
    with on_stage(schedule) as stage:
        try:
            engine = play(stage, life, knobs, seed)
        except Exception as exc:
            raise Found(f"{where} {_short(schedule)}: {exc!r} in {_line_of(exc)}") from exc
    tally.add(schedule, engine)


def _line_of(exc: BaseException) -> str:
    last = traceback.extract_tb(exc.__traceback__)[-1]
    return f"{Path(last.filename).name}:{last.lineno} {last.line}"


def _short(recorded: Recorded) -> str:
    return str({at: choice for at, choice in enumerate(recorded.choices) if choice})
