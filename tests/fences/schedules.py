"""Who goes on next: at random, as was recorded, or by the systematic exploration of choices."""

import random
from collections.abc import Callable, Iterator, Sequence

from tests.fences.stage import Task


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
