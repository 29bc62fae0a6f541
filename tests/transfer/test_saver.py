"""What a save may take and leave behind, what is saved once, and how it ends."""

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from threading import Event
from typing import Any

import pytest

from objkv.agent.messages import CommitStatus, SavedPart
from objkv.cache.chunks import InFlightSaves
from objkv.errors import TransferError
from objkv.keys.chunk import ChunkKey
from objkv.keys.prefix import token_digest
from objkv.stores.base import Buffer
from objkv.transfer import saver as module
from objkv.transfer.lanes import Lane, Mark
from objkv.transfer.plan import SaveMove, SavePlan
from objkv.transfer.saver import SaveLimits, Saver
from tests.contracts.clock import ManualClock
from tests.contracts.memory_index import MemoryIndex
from tests.contracts.memory_store import MemoryStore
from tests.support.device import ON_HOST
from tests.support.paged_cache import CHUNK, NAMESPACE, TOKENS, Replica, stores
from tests.support.paged_shapes import Model, ShapedReplica, ShapeOfReplica
from tests.support.waiting import PATIENCE_S, wait_until


def plan_of(replica: Replica, *chunks: int, request: str = "r") -> tuple[SavePlan]:
    digest = token_digest(TOKENS[:CHUNK])
    saves = (SaveMove(replica.move(chunk, 1), digest, None) for chunk in chunks)
    return (SavePlan(request, NAMESPACE, tuple(saves)),)


@pytest.fixture
def four() -> Replica:
    return Replica(*stores(), seed=1, slabs=4)


def saver_on(replica: Replica, lane: Lane, *, queue_max: int = 6, seconds: float = 60.0) -> Saver:
    return replica.saver_of(SaveLimits(queue_max, seconds, "w"), lane)


def gathered(saver: Saver, plans: tuple[SavePlan, ...]) -> set[tuple[str, int]]:
    """Have plans gathered. Returns what was dropped."""
    saver.gather(plans)
    assert saver._gathers.drain(PATIENCE_S)
    return saver.take_dropped()


class SlowStore(MemoryStore):
    """Counts puts, which wait until ``go`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.go = Event()
        self.puts = 0

    def put_if_absent(self, key: str, value: Buffer) -> bool:
        self.puts += 1
        assert self.go.wait(PATIENCE_S)
        return super().put_if_absent(key, value)


# How it ends.


def test_after_closing_nothing_is_saved_and_no_slab_is_leased() -> None:
    replica = Replica(*stores(), seed=1)
    replica.save(range(2))
    replica.saver.close(PATIENCE_S)
    assert replica.saver._saves.threads == replica.saver._gathers.threads == 0
    replica.saver.gather(plan_of(replica, 2))
    assert replica.saver.take_dropped() == {("r", 2)}
    assert replica.saver.left_device("r")
    assert replica.save_slabs.leased == 0


def test_a_put_that_does_not_end_holds_up_no_shutdown_and_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = SlowStore()
    replica = Replica(store, MemoryIndex(), seed=1, slabs=4)
    replica.saver._batch = 1
    assert gathered(replica.saver, plan_of(replica, 0, 1, 2)) == set()
    wait_until(lambda: store.puts > 0)
    with caplog.at_level(logging.WARNING):
        replica.saver.close(0.0)
    assert "saves dropped at shutdown count=3" in caplog.text
    store.go.set()
    wait_until(lambda: replica.save_slabs.leased == 0)
    assert replica.recorder.value("save_drops") == 2, "all but the one that was on the wire"


# Prompts that arrive together share chunks that nobody knows to be stored: each is saved once.


@pytest.fixture
def store() -> SlowStore:
    return SlowStore()


@pytest.fixture
def replica(store: SlowStore) -> Replica:
    replica = Replica(store, MemoryIndex(), seed=1, slabs=1)
    # What was saved is remembered, however long a busy machine takes.
    replica.cache.in_flight = InFlightSaves(clock=ManualClock())
    return replica


def gather(replica: Replica, request: str) -> set[tuple[str, int]]:
    return gathered(replica.saver, plan_of(replica, 0, request=request))


def test_requests_of_one_step_save_their_common_chunk_once(
    replica: Replica, store: SlowStore
) -> None:
    dropped = [gather(replica, f"r{i}") for i in range(20)]
    store.go.set()
    assert replica.saver.drain(PATIENCE_S)
    assert not any(dropped), "a repeat needs no slab of its own, and is no drop"
    assert replica.recorder.value("saves") == 1
    replica.save(range(1), request="later")
    assert store.puts == 1
    assert replica.recorder.value("save_repeats") == 20


def test_a_drop_is_counted_and_leaves_the_chunk_to_the_next_request(
    replica: Replica, store: SlowStore
) -> None:
    slab = replica.save_slabs.lease()
    assert gather(replica, "without a slab") == {("without a slab", 0)}
    slab.release()
    assert replica.recorder.value("save_drops") == 1
    assert replica.recorder.value("save_drop_bytes") == replica.paged.raw_bytes
    store.go.set()
    assert gather(replica, "with one") == set()
    assert replica.saver.drain(PATIENCE_S)
    assert store.puts == 1


def test_a_step_whose_copies_fail_while_it_is_asked_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread that hands over forgets a mark when the device fails."""
    marks = iter([Mark(), None, None])
    monkeypatch.setattr(module._Step, "mark", property(lambda _: next(marks)))
    step = object.__new__(module._Step)
    step.is_submitted = True
    assert step.has_left()


# What a rank does not hand over of a payload that several ranks write, it drops: the agent does not
# wait for it.


def raising(error: Exception) -> Callable[..., object]:
    def fail(*_: object, **__: object) -> object:
        raise error

    return fail


PARTS = {
    "handed over": (("drain", lambda _: True), False),
    "above the quota": (("has_room", lambda: False), True),
    "no agent": (("save", raising(TransferError("no agent"))), True),
    "a bug": (("save", raising(RuntimeError("a bug"))), True),
    "not taken": (("save", lambda given: [CommitStatus.NO_ROOM] * len(given)), False),
    "an overloaded store": (("save", lambda given: [CommitStatus.SHED] * len(given)), False),
    "given up by the agent": (("save", lambda given: [CommitStatus.DROPPED] * len(given)), False),
}
"""How the save of a part ends, and whether it is dropped."""


@ON_HOST
@pytest.mark.parametrize(("fault", "is_dropped"), PARTS.values(), ids=PARTS)
def test_a_part_that_is_not_handed_over_is_dropped_and_no_other(
    fault: tuple[str, object], is_dropped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ShapedReplica(Model(chunks=1), ShapeOfReplica(tp=2), *stores()) as one:
        rank = one.ranks[0]
        saves, found, sent = rank.inside.saves, list[tuple[str, SavedPart]](), list[int]()
        monkeypatch.setattr(saves, *fault, raising=False)
        monkeypatch.setattr(saves, "drop", lambda *drop: found.append(drop))
        monkeypatch.setattr(saves, "send_drops", lambda: sent.append(len(found)))
        rank.save_all(rank.save_plan(number=7))
        key = ChunkKey(NAMESPACE, one.model.hashes[0], 0)
        place = rank.paged.position
        assert place is not None
        assert found == ([(key.path(), SavedPart(7, place))] if is_dropped else [])
        assert fault[0] != "save" or sent[-1] == is_dropped


@ON_HOST
@pytest.mark.parametrize("fault", ["no slab", "a full queue", "late"])
def test_a_chunk_that_a_rank_drops_is_dropped_of_the_whole_payload(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ShapedReplica(Model(chunks=1), ShapeOfReplica(tp=2), *stores()) as one:
        rank, found = one.ranks[0], list[int]()
        monkeypatch.setattr(rank.inside.saves, "drop", lambda path, part: found.append(part.number))
        limits = SaveLimits(0 if fault == "a full queue" else 8, 0.0 if fault == "late" else 60, "")
        saver = rank.saver_of(limits)
        leased = [rank.save_slabs.lease() for _ in range(8)] if fault == "no slab" else []
        dropped = gathered(saver, rank.save_plan(number=7))
        assert saver.drain(PATIENCE_S)
        assert dropped == (set() if fault == "late" else {("r", 0)})
        assert found == [7]
        for slab in leased:
            slab.release()
        saver.close(PATIENCE_S)


# Plans that wait for the thread that gathers.


class HeldLane(Lane):
    """Submits nothing before it is let go."""

    def __init__(self) -> None:
        self.came, self.go = Event(), Event()

    def follow(self, mark: Mark) -> None:
        self.came.set()
        assert self.go.wait(PATIENCE_S)


@pytest.fixture
def held(four: Replica) -> Iterator[tuple[HeldLane, Saver]]:
    """A saver whose thread is about to submit a chunk of the request "first"."""
    lane = HeldLane()
    saver = saver_on(four, lane)
    saver.gather(plan_of(four, 0, request="first"))
    assert lane.came.wait(PATIENCE_S)
    yield lane, saver
    lane.go.set()
    saver.close(PATIENCE_S)


@ON_HOST
def test_a_thread_that_submits_nothing_holds_up_one_fence_and_what_it_has_is_dropped(
    held: tuple[HeldLane, Saver], four: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane, saver = held
    monkeypatch.setattr(module, "FENCE_S", 0.01)
    saver.gather(plan_of(four, 1, request="second"))
    assert not saver.left_device("first")
    assert not saver.left_device("second")
    saver.fence()
    assert saver.left_device("first")
    assert saver.left_device("second")
    monkeypatch.setattr(module, "FENCE_S", math.inf)
    saver.gather(plan_of(four, 2, request="third"))
    saver.fence()  # there is nothing to wait for
    assert saver.take_dropped() == {("third", 2)}
    lane.go.set()
    assert saver.drain(PATIENCE_S)
    assert saver.take_dropped() == {("first", 0), ("second", 1)}
    assert four.recorder.value("saves") == four.save_slabs.leased == 0
    assert gathered(saver, plan_of(four, 0, 1, 2)) == set(), "it goes on"
    assert saver.drain(PATIENCE_S)
    assert four.recorder.value("saves") == 3


@ON_HOST
def test_a_plan_that_cannot_be_read_keeps_no_blocks(four: Replica) -> None:
    (plan,) = plan_of(four, 0)
    (save,) = plan.moves
    wrong = replace(save, move=replace(save.move, first_block=1))
    four.saver.gather((replace(plan, moves=(wrong,)),))
    assert four.saver.drain(PATIENCE_S)
    assert four.saver.left_device("r")


@ON_HOST
def test_too_many_plans_are_dropped_at_once(
    held: tuple[HeldLane, Saver], four: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane, saver = held
    monkeypatch.setattr(module, "_PLANNED_MAX", 2)
    saver.gather(plan_of(four, 1, 2))
    saver.gather(plan_of(four, 3, request="late"))
    assert saver.take_dropped() == {("late", 3)}
    assert saver.left_device("late")
    lane.go.set()
    assert saver.drain(PATIENCE_S)
    assert four.recorder.value("saves") == 3


@ON_HOST
def test_a_fence_waits_for_the_requests_that_it_is_for_alone(
    held: tuple[HeldLane, Saver], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, saver = held
    monkeypatch.setattr(module, "FENCE_S", math.inf)
    saver.fence({"another"})
    saver.fence(())


# A device that hangs or fails while it copies.


class HungMark(Mark):
    """Copies that do not end, or as ``done`` says."""

    def __init__(self, done: Callable[[], bool] = lambda: False) -> None:
        self.done = done  # type: ignore[method-assign]
        self.is_held = False

    def wait(self) -> None:
        raise AssertionError("a device that hangs would hold this thread for ever")

    def hold_compute(self) -> None:
        self.is_held = True


class HungLane(Lane):
    def __init__(self, mark: HungMark | None = None) -> None:
        self._mark = mark or HungMark()

    def mark(self) -> HungMark:
        return self._mark


@ON_HOST
@pytest.mark.parametrize(("takes_s", "is_told"), [(5.5, False), (math.inf, True)])
def test_a_device_that_does_not_end_its_copies_holds_up_no_shutdown_and_is_told(
    takes_s: float, is_told: bool, four: Replica, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock(0.0)
    closing = Event()

    def done() -> bool:
        if closing.is_set():
            clock.advance(0.25)  # so long until it is asked again
        return clock.now_s >= takes_s

    saver = four.saver_of(SaveLimits(8, 60.0, "w"), HungLane(HungMark(done)), clock=clock)
    gathered(saver, plan_of(four, 0))
    closing.set()
    saver.close(5.0)
    assert ("copies of saves did not finish" in caplog.text) is is_told
    assert (6.0 if is_told else 5.5) <= clock.now_s < 10.0
    assert saver._saves.threads == 0


@ON_HOST
@pytest.mark.parametrize("end", ["deadline", "closing", "fault"])
def test_a_slab_that_a_device_may_still_write_is_never_given_back(four: Replica, end: str) -> None:
    asked = list[int]()

    def done() -> bool:
        asked.append(1)
        if end == "fault" and len(asked) > 1:
            raise RuntimeError("an illegal memory access was encountered")
        return False

    lane = HungLane(HungMark(done))
    saver = saver_on(four, lane, seconds=0.05 if end == "deadline" else 60.0)
    assert gathered(saver, plan_of(four, 0, 1)) == set()
    if end == "closing":
        saver.close(-10.0)  # the time to look is over
        assert saver._saves.threads == 0
    else:
        assert saver.drain(PATIENCE_S)
        assert end == "fault" or not saver.left_device("r")
    assert four.save_slabs.leased == 2
    assert (four.recorder.value("saves"), four.recorder.value("save_drops")) == (0, 2)
    saver.close(-10.0)


@ON_HOST
def test_chunks_that_the_device_copies_count_as_queued(four: Replica) -> None:
    saver = saver_on(four, HungLane(), queue_max=3)
    assert gathered(saver, plan_of(four, 0, 1)) == set()
    assert gathered(saver, plan_of(four, 2, 3)) == {("r", 3)}
    saver.close(-10.0)


@ON_HOST
@pytest.mark.parametrize("call", ["mark_compute", "follow", "gather", "mark"])
def test_a_device_that_fails_costs_drops_and_no_slab_is_reused(
    call: str, four: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even when the pool is gone: nothing shows what such a device still copies."""
    lane = HungLane(HungMark(lambda: True))

    def fail(*_: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(lane, call, fail)
    saver = saver_on(four, lane)
    assert gathered(saver, plan_of(four, 0, 1)) == {("r", 0), ("r", 1)}
    assert four.recorder.value("save_drops") == 2
    assert four.save_slabs.leased == (0 if call in ("mark_compute", "gather") else 2)
    monkeypatch.undo()
    assert not gathered(saver, plan_of(four, 0, 1, request="next")), "they may be tried again"
    saver.close(PATIENCE_S)


@ON_HOST
@pytest.mark.parametrize("broken", ["begin_save", "lease"])
def test_a_save_that_fails_before_its_copy_keeps_no_slab_and_is_planned_again(
    four: Replica, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    owner = four.saver._target if broken == "begin_save" else four.save_slabs
    calls, method = list[Any](), getattr(owner, broken)

    def fails_the_second_time(*given: Any, **named: Any) -> Any:
        calls.append(given)
        if len(calls) == 2:
            raise RuntimeError("broken")
        return method(*given, **named)

    with monkeypatch.context() as patched:
        patched.setattr(owner, broken, fails_the_second_time)
        assert gathered(four.saver, plan_of(four, 0, 1, 2)) == {("r", 0), ("r", 1), ("r", 2)}
    assert four.save_slabs.leased == 0
    assert gathered(four.saver, plan_of(four, 0, 1, 2)) == set()
    assert four.saver.drain(PATIENCE_S)
    assert four.recorder.value("saves") == 3
