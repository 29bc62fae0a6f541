"""No copy touches what has changed hands, at whatever moment a replica is disturbed; and whoever
takes one of the fences away is found out."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from objkv.cache.chunks import ChunkCache
from objkv.transfer.job import LoadJob
from objkv.transfer.loader import Loader
from objkv.transfer.saver import Saver
from objkv.transfer.slabs import Slab
from tests.fences import device
from tests.fences.explorer import (
    WORLDS,
    Found,
    Tally,
    listening,
    play_seed,
    play_situations,
)
from tests.fences.lives import EVENTS, situations
from tests.fences.schedules import Random, Recorded, explore
from tests.fences.stage import Broken, Lock, Thread, on_stage

SEEDS = range(1, 26)
STRIDE = 613
"""Of interleavings with one preemption, one of so many; ``python -m tests.fences`` plays all."""


@pytest.fixture(autouse=True)
def _listening() -> Iterator[None]:
    with listening():
        yield


@pytest.mark.parametrize("event", EVENTS)
def test_no_event_at_any_time_breaks_a_fence(event: str) -> None:
    tally = Tally()
    for _ in play_situations(preemptions=1, tally=tally, stride=STRIDE, only=f" {event} "):
        pass
    assert tally.plays > 20
    assert tally.copies > 0


def test_no_life_at_random_breaks_a_fence(tmp_path: Any) -> None:
    tally = Tally()
    for seed in SEEDS:
        play_seed(seed, tally, tmp_path if seed % 8 == 0 else None)
    assert tally.copies > 100


def test_every_event_is_met_by_loads_and_saves() -> None:
    names = situations()
    for event in EVENTS:
        for kind in ("save", "load async", "load layerwise"):
            assert any(name.startswith(f"{kind} {event} ") for name in names)


def test_an_interleaving_can_be_played_again() -> None:
    def played() -> list[int]:
        tally, kept = Tally(), []

        class Kept(Random):
            def __init__(self, seed: int) -> None:
                super().__init__(seed)
                kept.append(self)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tests.fences.explorer.Random", Kept)
            play_seed(5, tally)
        return list(kept[0].choices)

    first = played()
    assert len(first) > 100
    assert played() == first


# The fences, one after the other taken away.


class _NoWait(device.Mark):
    def wait(self) -> None:
        """At once."""


class _NoHold(device.Mark):
    def hold_compute(self) -> None:
        """The model goes on."""


def _poll_without_copies(self: LoadJob) -> Any:
    self._last_marks = {}
    return _poll(self)


def _poll_without_writers(self: LoadJob) -> Any:
    self._writing, writing = 0, self._writing
    try:
        return _poll(self)
    finally:
        self._writing = writing


def _close_without_copies(self: Saver, _seconds: float) -> None:
    self._gives_up = True  # its threads end later, and the engine goes on
    self._gathered.close(0.0, give_up=self._give_up_gathered)
    self._pool._pool.close(0.0, give_up=self._give_up)


def _hand_over_at_once(self: Saver, gathered: Any) -> None:
    self._copied(gathered)
    self._pool.put(gathered.chunks)


def _keep_slab(self: Saver, chunks: Any, _mark: Any = None) -> set[tuple[str, int]]:
    return {self._drop(c.request_id, c.move, c.claim.key) for c in chunks}


_poll = LoadJob.poll
MUTANTS: dict[str, tuple[Any, str, Any, str]] = {
    "a closed load writes on": (
        LoadJob,
        "_wanted",
        lambda *_: True,
        "load async abort 1",
    ),
    "nobody waits for writers": (
        LoadJob,
        "poll",
        _poll_without_writers,
        "load async abort 1",
    ),
    "nobody waits for a load's copies": (
        LoadJob,
        "poll",
        _poll_without_copies,
        "load async abort 1",
    ),
    "computing does not wait for saves": (Saver, "fence", lambda *_: None, "save preempt 0"),
    "blocks are free before saves have left": (
        Saver,
        "left_device",
        lambda *_: True,
        "save finish 0",
    ),
    "slabs are free before their copies have passed": (
        Slab,
        "release_after",
        lambda self, _: self.release(),
        "load async finish 1",
    ),
    "chunks are saved before their copies have passed": (
        Saver,
        "_hand_over",
        _hand_over_at_once,
        "save finish 0",
    ),
    "the end does not wait for copies": (
        Saver,
        "close",
        _close_without_copies,
        "save sleep 0",
    ),
    "slabs of dropped saves are kept": (Saver, "_give_up", _keep_slab, "save sleep 0"),
    "transfers do not follow computing": (
        device.WatchedLane,
        "follow",
        lambda *_: None,
        "save finish 0",
    ),
    "nobody waits for a mark": (device, "Mark", _NoWait, "load async finish 1"),
    "computing waits for no mark": (device, "Mark", _NoHold, "save preempt 0"),
    "saves never end": (ChunkCache, "end_save", lambda *_: None, "save finish 0"),
    "leases are kept": (ChunkCache, "release_lease", lambda *_: None, "save finish 0"),
    "loads are not closed at the end": (
        Loader,
        "close",
        lambda _: None,
        "load async shutdown 1",
    ),
}


HARD = {
    "a closed load writes on": (0, 3),
    "blocks are free before saves have left": (0, 1),
    "nobody waits for writers": (0, 3),
    "nobody waits for a load's copies": (0, 1),
    "computing does not wait for saves": (0, 1),
    "computing waits for no mark": (0, 1),
    "the end does not wait for copies": (0, 1),
}
"""In which world, and how densely, others have to be looked for."""


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fence_that_is_missing_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, mutant, where = MUTANTS[name]
    world, stride = HARD.get(name, (0, 13))
    monkeypatch.setattr(owner, attribute, mutant)
    with pytest.raises(Found):
        for _ in play_situations(
            preemptions=1, tally=Tally(), stride=stride, only=where, worlds=[WORLDS[world]]
        ):
            pass


def test_what_waits_for_ever_is_found() -> None:
    left, right = Lock(), Lock()

    def both(first: Lock, second: Lock) -> Callable[[], None]:
        def run() -> None:
            with first, second:
                pass

        return run

    def play(recorded: Recorded) -> None:
        with on_stage(recorded) as stage:
            left._held = right._held = False

            def main() -> None:
                Thread(target=both(left, right)).start()
                Thread(target=both(right, left)).start()

            stage.play(main)

    with pytest.raises(Broken, match="all wait for each other"):
        for _ in explore(play, preemptions=1):
            pass
