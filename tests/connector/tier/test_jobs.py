"""Jobs and lookups of a secondary tier by themselves: one outcome each, whatever happens."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.kv_offload.base import LookupResult

from objkv.cache.lookup import LookupLimits
from objkv.connector.tier.jobs import JobLimits, JobOutcome, JobPart, TierChunk, TierJobs
from objkv.connector.tier.lookup import TierLookups
from objkv.connector.tier.rows import chunk_key
from objkv.errors import StoreUnavailable
from objkv.index.base import ChunkEntry, ShardRecord
from objkv.index.memory import MemoryIndex
from objkv.telemetry import MemoryRecorder, NullRecorder
from tests.contracts.clock import ManualClock
from tests.support.servers.redis import wait_until

NAMESPACE = "0" * 32
RECORD = ShardRecord(10, 10, "none", False, "0" * 32, 1)


def entries(*numbers: int) -> list[TierChunk]:
    return [TierChunk(key(number), number) for number in numbers]


def key(number: int) -> bytes:
    return number.to_bytes(36, "big")


def all_outcomes(jobs: TierJobs, count: int) -> dict[int, JobOutcome]:
    found: dict[int, JobOutcome] = {}

    def take() -> bool:
        for outcome in jobs.take_finished():
            assert outcome.job_id not in found
            found[outcome.job_id] = outcome
        return len(found) == count

    wait_until(take, "all jobs to end")
    return found


@settings(deadline=None, max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    bad=st.sets(st.integers(0, 40)),
    broken=st.sets(st.integers(0, 40)),
    part_max=st.integers(1, 3),
    queue_max=st.integers(1, 40),
)
def test_every_job_has_one_outcome_which_tells_of_every_key(
    sizes: list[int], bad: set[int], broken: set[int], part_max: int, queue_max: int
) -> None:
    def work(part: JobPart) -> None:
        for _, row, _ in part.entries:
            if row in broken:
                raise (StoreUnavailable, RuntimeError)[row % 2]("broken")
            if row not in bad:
                part.finish(key(row))

    jobs = TierJobs("load", work, JobLimits(2, queue_max, 60, part_max), NullRecorder())
    first, expected = 0, {}
    for job_id, size in enumerate(sizes):
        expected[job_id] = range(first, first + size)
        jobs.submit(job_id, NAMESPACE, entries(*expected[job_id]))
        first += size
    found = all_outcomes(jobs, len(sizes))
    jobs.close(0)
    for job_id, rows in expected.items():
        outcome = found[job_id]
        assert sorted([*outcome.done, *outcome.failed]) == [key(row) for row in rows]
        assert not {key(row) for row in bad | broken} & set(outcome.done)
        assert outcome.success == (not outcome.failed)
        if queue_max >= first and not broken & set(rows):
            assert set(outcome.failed) == {key(row) for row in rows if row in bad}
    assert not jobs.take_finished()


def test_who_gives_a_job_up_waits_for_a_copy_and_for_nothing_else() -> None:
    inside, leave, tried = threading.Event(), threading.Event(), threading.Event()
    allowed: list[bool] = []

    def work(part: JobPart) -> None:
        with part.touch() as first:
            allowed.append(first)
            inside.set()
            leave.wait(60)
        part.finish(part.entries[0].key)
        tried.wait(60)
        with part.touch() as second:
            allowed.append(second)

    jobs = TierJobs("load", work, JobLimits(1, 8, 60), NullRecorder())
    jobs.submit(1, NAMESPACE, entries(1))
    assert inside.wait(60)
    thread = threading.Thread(target=jobs.give_up)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    leave.set()
    thread.join(60)
    (outcome,) = jobs.take_finished()
    assert outcome.failed == (key(1),)
    tried.set()
    jobs.close(0)
    assert allowed == [True, False]


def test_a_job_past_its_deadline_ends_and_what_waits_of_it_gives_its_place_to_others() -> None:
    gate, clock = threading.Event(), ManualClock()
    recorder = MemoryRecorder()

    def work(part: JobPart) -> None:
        gate.wait(60)
        part.finish(part.entries[0].key)

    jobs = TierJobs("save", work, JobLimits(1, 2, 10), recorder, clock=clock)
    jobs.submit(1, NAMESPACE, entries(1))
    wait_until(lambda: "0 chunks waiting" in repr(jobs), "the thread to take it")
    jobs.submit(2, NAMESPACE, entries(2, 3))
    assert not jobs.take_finished()
    clock.advance(11)
    assert [outcome.job_id for outcome in jobs.take_finished()] == [1, 2]
    assert recorder.value("tier_save_deadlines") == 2
    jobs.submit(3, NAMESPACE, entries(4, 5))
    gate.set()
    assert all_outcomes(jobs, 1)[3].success
    assert recorder.value("tier_save_refused") == 0
    jobs.close(0)


class World:
    """Lookups over an index in memory, with a clock of their own."""

    def __init__(self, **limits: Any) -> None:
        self.index, self.clock, self.recorder = MemoryIndex(), ManualClock(), MemoryRecorder()
        values: dict[str, Any] = {"deadline_s": 1, "queue_max": 8, "age_max_s": 30} | limits
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
    assert world.recorder.value("tier_lookup_deadlines") == 1
    world.lookups.close()


def test_an_answer_lives_as_long_as_who_asked_and_is_not_told_to_the_new_when_old() -> None:
    world = World()
    assert world.answers("a", [1]) == [LookupResult.MISS]
    world.store(1)
    assert world.answers("b", [1]) == [LookupResult.MISS]
    world.clock.advance(31)
    assert world.answers("b", [1]) == [LookupResult.MISS]
    assert world.answers("c", [1]) == [LookupResult.HIT]
    for request in "abc":
        world.lookups.forget(request)
    assert repr(world.lookups) == "<TierLookups 0 keys of 0 requests>"
    world.lookups.close()


def test_what_was_denied_stays_denied_for_who_asks() -> None:
    world = World()
    world.store(1)
    assert world.answers("a", [1]) == [LookupResult.HIT]
    world.lookups.deny([key(1), key(2)])
    assert world.answers("a", [1]) == [LookupResult.MISS]
    world.lookups.close()


def test_a_full_queue_is_a_no(monkeypatch: pytest.MonkeyPatch) -> None:
    world, gate = World(queue_max=1), threading.Event()
    monkeypatch.setattr(world.index, "find", lambda *_: gate.wait(60) and [None])
    world.lookups.ask("a", NAMESPACE, key(1))
    world.lookups.flush()
    world.lookups.ask("a", NAMESPACE, key(2))
    world.lookups.flush()
    assert world.lookups.ask("a", NAMESPACE, key(2)) is LookupResult.MISS
    assert world.recorder.value("tier_lookup_refused") == 1
    gate.set()
    world.lookups.close()
