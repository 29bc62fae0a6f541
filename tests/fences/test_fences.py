"""No copy touches what has changed hands, at whatever moment a replica is disturbed; and whoever
takes one of the fences away is found out."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from objkv.agent.connections import InsideAgent
from objkv.agent.core import Core
from objkv.agent.residents import Residents
from objkv.cache.chunks import ChunkCache
from objkv.connector.kv.worker import Rank, WorkerSide
from objkv.transfer import slabs
from objkv.transfer.loading import loader, loads
from objkv.transfer.loading.job import LoadJob
from objkv.transfer.loading.loader import Loader
from objkv.transfer.registration import Windows
from objkv.transfer.saver import Saver
from objkv.transfer.slabs import Slab, SlabPool
from tests.fences import device, world
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
from tests.fences.world import Knobs

SEEDS = range(1, 26)
STRIDE = 811
"""Of interleavings with one preemption, one of so many; ``python -m tests.fences`` plays all."""


@pytest.fixture(autouse=True)
def _listening() -> Iterator[None]:
    gc.collect()  # pools that other tests left log an error when they are freed
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


class _AlwaysDone(device.Mark):
    def done(self) -> bool:
        return True


class _FollowsNothing(LoadJob):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given[:-1])


def _poll_without_copies(self: LoadJob) -> Any:
    self._last_marks = {}
    return _poll(self)


def _poll_without_writers(self: LoadJob) -> Any:
    self._writing, writing = 0, self._writing
    try:
        return _poll(self)
    finally:
        self._writing = writing


def _close_without_copies(self: Loader) -> None:
    """Neither the loads wait, nor the thread that reads leased memory."""
    self._await = lambda _: True  # type: ignore[method-assign]
    for one in self._jobs.values():
        one._last_marks = {}
    _close(self)


def _wait_layer_without_copies(self: LoadJob, group: int, layer: int) -> list[Any]:
    _wait_layer(self, group, layer)
    return []


def _enter_always(self: LoadJob, _index: int) -> bool:
    with self._changed:
        self._writing += 1
    return True


def _leave_without_mark(self: LoadJob, *given: Any) -> None:
    known = dict(self._last_marks)
    _leave(self, *given)
    self._last_marks = known


def _leave_with_first_mark(self: LoadJob, *given: Any) -> None:
    known = dict(self._last_marks)
    _leave(self, *given)
    self._last_marks |= known


def _advance_without_cancelled(self: Loader, agent: Any) -> None:
    for one in self._reading:
        if not one.job.wanted(one.index):
            one.writer.mark = None
    _advance(self, agent)


def _leave_registered(self: Loader, agent: Any) -> None:
    agent.close()
    self._on_device.detach(lambda: None)  # type: ignore[union-attr]


def _register_for_ever(self: Windows, number: int) -> None:
    _register(self, number)
    self._undo[number] = lambda: None


def _has_at_once(self: Windows, address: int, nbytes: int) -> bool:
    _has(self, address, nbytes)
    return True


def _mark_once(self: WorkerSide, plan: Any) -> None:
    _before_forward(self, plan)
    self._before_forward = vars(self).setdefault("_kept", self._loader.mark_compute())


def _hand_over_at_once(self: Saver, gathered: Any) -> None:
    self._copied(gathered)
    self._pool.put(gathered.chunks)


def _keep_slab(self: Saver, chunks: Any, _mark: Any = None) -> set[tuple[str, int]]:
    return {self._drop(c.request_id, c.move, c.claim.key) for c in chunks}


def _rank_of_late_writer(*given: Any, writes_early: bool, **named: Any) -> Rank:
    return Rank(*given, **named)


_poll, _close, _wait_layer = LoadJob.poll, Loader.close, LoadJob.wait_layer
_enter, _leave = LoadJob.enter, LoadJob.leave
_advance = Loader._advance
_register, _has = Windows._register, Windows.has
_before_forward = WorkerSide.before_forward


@dataclass(frozen=True)
class Mutant:
    """A fence that is missing, and where that is found."""

    owner: Any
    name: str
    instead: Any
    situation: str
    world: Knobs = WORLDS["slow"]


MUTANTS = {
    "a closed load writes on": Mutant(
        LoadJob, "_wanted", lambda *_: True, "load async abort 1", WORLDS["patient"]
    ),
    "a closed load writes on, on a host": Mutant(
        LoadJob, "_wanted", lambda *_: True, "load async abort 1", WORLDS["patient host"]
    ),
    "nobody waits for writers": Mutant(
        LoadJob, "poll", _poll_without_writers, "load async abort 1", WORLDS["patient"]
    ),
    "nobody waits for writers on a host": Mutant(
        LoadJob, "poll", _poll_without_writers, "load async abort 1", WORLDS["patient host"]
    ),
    "nobody waits for a load's copies": Mutant(
        LoadJob, "poll", _poll_without_copies, "load async abort 1"
    ),
    "the end does not wait for a load's copies": Mutant(
        Loader, "close", _close_without_copies, "load async sleep 1"
    ),
    "computing does not wait for loads within the step": Mutant(
        LoadJob, "wait_layer", _wait_layer_without_copies, "load layerwise finish 1"
    ),
    "the later of two marks is lost": Mutant(
        LoadJob, "leave", _leave_with_first_mark, "load async abort 1"
    ),
    "a job does not keep its marks": Mutant(
        LoadJob, "leave", _leave_without_mark, "load async abort 1"
    ),
    "a closed job lets others write": Mutant(
        LoadJob, "enter", _enter_always, "load async abort 1", WORLDS["patient"]
    ),
    "loads follow nothing": Mutant(
        loads, "LoadJob", _FollowsNothing, "load async abort 1", WORLDS["patient"]
    ),
    "loads follow the mark of an earlier step": Mutant(
        WorkerSide, "before_forward", _mark_once, "load async abort 1", WORLDS["patient"]
    ),
    "computing does not wait for saves": Mutant(Saver, "fence", lambda *_: None, "save preempt 0"),
    "blocks of preempted requests are not fenced": Mutant(
        WorkerSide, "before_reuse", lambda *_: None, "save preempt 0"
    ),
    "nobody knows who writes early": Mutant(
        world, "Rank", _rank_of_late_writer, "save preempt 0", WORLDS["early"]
    ),
    "nobody knows who writes early in a step that is told": Mutant(
        world, "Rank", _rank_of_late_writer, "save preempt 0", WORLDS["roomy"]
    ),
    "a step that preempts is not told": Mutant(
        world.Engine, "_may_reuse", lambda _: False, "save preempt 0", WORLDS["early"]
    ),
    "blocks are free before saves have left": Mutant(
        Saver, "left_device", lambda *_: True, "save finish 0"
    ),
    "copies of saves are forgotten": Mutant(
        Saver, "_poll", lambda self: self._open.clear(), "save finish 0"
    ),
    "slabs of saves are free before their copies have passed": Mutant(
        Slab,
        "release_after",
        lambda self, _: self.release(),
        "save finish 0",
        WORLDS["short of time"],
    ),
    "slabs of loads are free before their copies have passed": Mutant(
        Slab,
        "release_after",
        lambda self, _: self.release(),
        "load async finish 1",
        WORLDS["refused"],
    ),
    "a pool looks at no mark when a slab is returned": Mutant(
        SlabPool,
        "take_back",
        lambda self, memory, _=None: self._put_back(memory),
        "load async finish 1",
        WORLDS["refused"],
    ),
    "a pool looks at no mark when it needs a slab": Mutant(
        slabs, "_is_done", lambda _: True, "load async finish 1", WORLDS["refused"]
    ),
    "leases end before their copies have passed": Mutant(
        loader, "_is_past", lambda _: True, "load async finish 1"
    ),
    "kept payloads make room before their copies have passed": Mutant(
        loader, "_is_past", lambda _: True, "load async finish 1", WORLDS["kept"]
    ),
    "leases of a cancelled load end before their copies have passed": Mutant(
        Loader, "_advance", _advance_without_cancelled, "load async abort 1"
    ),
    "leases of a lost connection end before their copies have passed": Mutant(
        Loader, "_await", lambda *_: True, "load async lost 1"
    ),
    "leases do not protect from those who need room": Mutant(
        Residents, "_is_free", lambda *_: True, "load async finish 1", WORLDS["kept"]
    ),
    "an arena is unmapped while it is registered": Mutant(
        Loader, "_leave", _leave_registered, "load async shutdown 2", WORLDS["registering"]
    ),
    "an arena stays registered": Mutant(
        Windows, "_register", _register_for_ever, "load async shutdown 2", WORLDS["registering"]
    ),
    "windows are read before they are registered": Mutant(
        Windows, "has", _has_at_once, "load async finish 1", WORLDS["registering"]
    ),
    "chunks are saved before their copies have passed": Mutant(
        Saver, "_hand_over", _hand_over_at_once, "save finish 0"
    ),
    "the end does not wait for copies": Mutant(
        Saver, "_copies_end", lambda *_: True, "save sleep 0", Knobs(copy_s=4.0)
    ),
    "slabs of dropped saves are kept": Mutant(
        Saver, "_give_up", _keep_slab, "save sleep 0", WORLDS["hurried"]
    ),
    "transfers do not follow computing": Mutant(
        device.WatchedLane, "follow", lambda *_: None, "save finish 0", WORLDS["hurried"]
    ),
    "nobody waits for a mark": Mutant(device, "Mark", _NoWait, "load async finish 1"),
    "marks are done too early": Mutant(device, "Mark", _AlwaysDone, "load async finish 1"),
    "computing waits for no mark": Mutant(device, "Mark", _NoHold, "save preempt 0"),
    "saves never end": Mutant(ChunkCache, "end_save", lambda *_: None, "save finish 0"),
    "leases are kept": Mutant(ChunkCache, "release_lease", lambda *_: None, "save finish 0"),
    "loads are not closed at the end": Mutant(
        Loader, "close", lambda _: None, "load async shutdown 1"
    ),
    "threads of the core go on after the end": Mutant(
        Core, "close", lambda *_: True, "load async shutdown 1"
    ),
    "the arena stays at the end": Mutant(
        InsideAgent, "_unmap", lambda _: None, "load async shutdown 1"
    ),
    "connections stay open at the end": Mutant(
        Loader, "_leave", lambda *_: None, "load async shutdown 1"
    ),
}
STRIDES = (13, 3, 1)
"""Most mutants are found by few interleavings; the others are looked for more densely."""


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fence_that_is_missing_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = MUTANTS[name]
    monkeypatch.setattr(mutant.owner, mutant.name, mutant.instead)
    with pytest.raises(Found) as found:
        _look(mutant)
    assert not isinstance(found.value.__cause__, (AttributeError, NameError, TypeError))


def _look(mutant: Mutant) -> None:
    """Play its situation with more and more interleavings."""
    for stride in STRIDES:
        for _ in play_situations(
            preemptions=1,
            tally=Tally(),
            stride=stride,
            only=mutant.situation,
            worlds=[mutant.world],
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
