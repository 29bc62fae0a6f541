"""Jobs and lookups of a secondary tier by themselves: one outcome each, whatever happens."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from threading import Thread
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.kv_offload.base import LookupResult

from objkv.cache.lookup import LookupLimits
from objkv.connector.tier.jobs import JobRow, Rows, TierJobs, TierLookups, chunk_key, row_layer
from objkv.errors import TransferError
from objkv.index.base import ChunkEntry, ShardRecord
from objkv.telemetry import MemoryRecorder, NullRecorder
from tests.contracts.clock import ManualClock
from tests.contracts.memory_index import MemoryIndex
from tests.support.waiting import wait_until

NAMESPACE = "0" * 32
ROWS = Rows(row_layer(8, "bfloat16"), 16, memoryview(bytes(8)))
RECORD = ShardRecord(10, 10, True, False, "0" * 32, 1)


def key(number: int) -> bytes:
    return number.to_bytes(36, "big")


def make(name: str = "load", **bounds: Any) -> TierJobs:
    values: dict[str, Any] = {"queue_max": 8, "deadline_s": 60} | bounds
    return TierJobs(name, ROWS, values.pop("recorder", NullRecorder()), **values)


def begin(jobs: TierJobs, job_id: int, *numbers: int) -> list[JobRow]:
    return jobs.begin(job_id, NAMESPACE, [key(n) for n in numbers], numbers)


@settings(deadline=None, max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    bad=st.sets(st.integers(0, 40)),
    queue_max=st.integers(1, 40),
    data=st.data(),
)
def test_every_job_has_one_outcome_which_tells_of_every_key(
    sizes: list[int], bad: set[int], queue_max: int, data: st.DataObject
) -> None:
    jobs = make(queue_max=queue_max, recorder=(recorder := MemoryRecorder()))
    first, expected, chunks = 0, dict[int, range](), list[JobRow]()
    for job_id, size in enumerate(sizes):
        expected[job_id] = range(first, first + size)
        chunks += begin(jobs, job_id, *expected[job_id])
        first += size
    assert len(chunks) == min(queue_max, first)
    assert recorder.value("load_refused") == first - len(chunks)
    for chunk in data.draw(st.permutations(chunks)):
        assert chunk.is_needed
        chunk.settle(done=chunk.row not in bad, noted=chunk.row in bad)
    found = {outcome.job_id: outcome for outcome in jobs.take_finished()}
    assert found.keys() == expected.keys()
    taken = {chunk.row for chunk in chunks}
    for job_id, rows in expected.items():
        outcome = found[job_id]
        assert sorted([*outcome.done, *outcome.failed]) == [key(row) for row in rows]
        assert set(outcome.done) == {key(row) for row in rows if row in taken - bad}
        assert set(outcome.noted) == {key(row) for row in rows if row in taken & bad}
    assert not jobs.take_finished()
    jobs.close(0)


def test_who_gives_a_job_up_waits_for_a_copy_and_for_nothing_else() -> None:
    memory = bytearray(8)
    jobs = TierJobs("load", replace(ROWS, memory=memoryview(memory)), NullRecorder(), deadline_s=60)
    (chunk,) = begin(jobs, 1, 0)
    new = memoryview(b"new page")
    copying, giving_up = Thread(target=chunk.take_pages, args=[[new]]), Thread(target=jobs.give_up)
    with jobs.copying:  # as another copy
        copying.start()
        (other,) = begin(jobs, 2, 2)
        other.settle(done=True)
        assert [job.job_id for job in jobs.take_finished()] == [2]
        giving_up.start()
        giving_up.join(0.05)
        assert copying.is_alive()
        assert giving_up.is_alive()
        assert memory == bytes(8)
    giving_up.join(60)
    copying.join(60)
    memory[:] = bytes(8)
    chunk.take_pages([new])
    assert memory == bytes(8)
    with pytest.raises(TransferError):
        chunk.write_pages(memoryview(bytearray(8)))
    chunk.settle(done=True)
    (outcome,) = jobs.take_finished()
    assert outcome.failed == [key(0)]
    assert not chunk.is_needed


def test_a_job_past_its_deadline_ends_and_what_waits_of_it_gives_its_place_to_others() -> None:
    clock, recorder = ManualClock(), MemoryRecorder()
    jobs = make("save", queue_max=3, deadline_s=10, recorder=recorder, clock=clock)
    (first,) = begin(jobs, 1, 1)
    begin(jobs, 2, 2, 3)
    assert not jobs.take_finished()
    clock.advance(11)
    assert [outcome.job_id for outcome in jobs.take_finished()] == [1, 2]
    assert recorder.value("save_deadlines") == 3
    assert first.deadline < clock()
    for chunk in begin(jobs, 3, 4, 5, 6):
        chunk.settle(done=True)
    (third,) = jobs.take_finished()
    assert not third.failed
    assert recorder.value("save_refused") == 0


class World:
    """Lookups over an index in memory, with a clock of their own."""

    def __init__(self, **limits: Any) -> None:
        self.index, self.clock, self.recorder = MemoryIndex(), ManualClock(), MemoryRecorder()
        values: dict[str, Any] = {"deadline_s": 1, "queue_max": 8} | limits
        self.lookups = TierLookups(
            self.index, self.recorder, LookupLimits(**values), clock=self.clock
        )

    def store(self, number: int) -> None:
        chunk = chunk_key(NAMESPACE, key(number))
        entry = ChunkEntry(NAMESPACE, chunk.prefix_hash, bytes(20), 0, 16)
        self.index.publish(entry, {chunk.field: RECORD}, ttl_s=60)

    def answers(self, request: str, numbers: Sequence[int]) -> list[LookupResult]:
        found: list[LookupResult] = []

        def settled() -> bool:
            found[:] = [self.lookups.ask(request, NAMESPACE, key(n)) for n in numbers]
            self.lookups.flush()
            return LookupResult.RETRY not in found

        wait_until(settled, "answers")
        return found


def test_nothing_is_asked_before_the_step_is_planned() -> None:
    world = World()
    assert world.lookups.ask("a", NAMESPACE, key(1)) is LookupResult.RETRY
    assert world.lookups.ask("b", NAMESPACE, key(1)) is LookupResult.RETRY
    world.clock.advance(2)
    assert world.lookups.ask("a", NAMESPACE, key(1)) is LookupResult.MISS
    assert world.recorder.value("lookup_deadlines") == 1
    world.lookups.close()


def test_an_answer_is_one_requests_until_it_ends() -> None:
    world = World()
    assert world.answers("a", [1]) == [LookupResult.MISS]
    world.store(1)
    assert world.answers("a", [1]) == [LookupResult.MISS]
    assert world.answers("b", [1]) == [LookupResult.HIT]
    world.lookups.forget("a")
    assert world.answers("a", [1]) == [LookupResult.HIT]
    world.lookups.deny([key(1), key(2)])
    assert world.answers("a", [1]) == [LookupResult.MISS], "and after a load that failed"
    world.lookups.close()


def test_a_full_queue_is_a_no(monkeypatch: pytest.MonkeyPatch) -> None:
    world, gate, begun = World(queue_max=2), threading.Event(), threading.Event()
    monkeypatch.setattr(world.index, "find", lambda *_: begun.set() or (gate.wait(60) and [None]))
    for number in (1, 2, 3):  # the first is being looked up, the second waits
        world.lookups.ask("a", NAMESPACE, key(number))
        world.lookups.flush()
        assert begun.wait(60)
    assert world.lookups.ask("a", NAMESPACE, key(3)) is LookupResult.MISS
    assert world.recorder.value("lookup_refused") == 1
    gate.set()
    world.lookups.close()
