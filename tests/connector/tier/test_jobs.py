"""Jobs of a secondary tier by themselves: one outcome each, whatever happens."""

from dataclasses import replace
from threading import Thread
from typing import Any

import pytest

from objkv.connector.tier.jobs import JobRow, Rows, TierJobs, row_layer
from objkv.errors import TransferError
from objkv.telemetry import MemoryRecorder, NullRecorder
from tests.contracts.clock import ManualClock

NAMESPACE = "0" * 32
ROWS = Rows(row_layer(8, "bfloat16"), 16, memoryview(bytes(8)))


def key(number: int) -> bytes:
    return number.to_bytes(36, "big")


def make(name: str = "load", **bounds: Any) -> TierJobs:
    values: dict[str, Any] = {"queue_max": 8, "deadline_s": 60} | bounds
    return TierJobs(name, ROWS, values.pop("recorder", NullRecorder()), **values)


def begin(jobs: TierJobs, job_id: int, *numbers: int) -> list[JobRow]:
    return jobs.begin(job_id, NAMESPACE, [key(n) for n in numbers], numbers)


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
