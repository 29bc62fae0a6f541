"""Lookups in the background: polled, memoised, bounded, never waited for."""

import time
from collections.abc import Callable, Iterator, Sequence
from threading import Event

import pytest

from objkv.cache.lookup import LookupService
from objkv.errors import StoreUnavailable
from objkv.index.base import ChunkEntry, Record, ShardRecord
from objkv.index.memory import MemoryIndex
from objkv.telemetry import MemoryRecorder

NS = "0" * 32
HASHES = [bytes([i]) * 20 for i in range(3)]
PATIENCE_S = 120
"""For other threads to come, on a machine that is busy with other things."""
SHARD = ShardRecord(100, 80, "none", False, "0" * 32, 1)


class GatedIndex(MemoryIndex):
    """Answers when told; counts how often it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Event()
        self.asked = 0
        self.error: Exception | None = None

    def lookup(self, namespace: str, prefix_hashes: Sequence[bytes]) -> list[Record | None]:
        self.asked += 1
        assert self.gate.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        return super().lookup(namespace, prefix_hashes)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def index() -> GatedIndex:
    index = GatedIndex()
    chunk = ChunkEntry(NS, HASHES[0], b"p" * 20, 0, 64)
    index.publish(chunk, {"0.L0-2_H0-4": SHARD}, ttl_s=3600)
    return index


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def recorder() -> MemoryRecorder:
    return MemoryRecorder()


@pytest.fixture
def service(index: GatedIndex, clock: Clock, recorder: MemoryRecorder) -> Iterator[LookupService]:
    service = LookupService(index, recorder, deadline_s=1.0, queue_max=2, clock=clock)
    yield service
    index.gate.set()
    service.close()


def answer(ask: Callable[[], object]) -> object:
    """Poll as the scheduler does; real threads need real, if little, time."""
    end = time.monotonic() + PATIENCE_S
    while (found := ask()) is None:
        assert time.monotonic() < end
        time.sleep(0.001)
    return found


def test_an_answer_is_awaited_without_waiting_and_then_kept(
    service: LookupService, index: GatedIndex
) -> None:
    assert service.ask("r", NS, HASHES) is None
    assert service.pending
    index.gate.set()
    records = answer(lambda: service.ask("r", NS, HASHES))
    assert isinstance(records, tuple)
    assert [record is not None for record in records] == [True, False, False]
    assert service.ask("r", NS, HASHES) is records
    assert index.asked == 1
    assert not service.pending


def test_a_longer_prompt_is_looked_up_anew(service: LookupService, index: GatedIndex) -> None:
    index.gate.set()
    answer(lambda: service.ask("r", NS, HASHES[:1]))
    answer(lambda: service.ask("r", NS, HASHES))
    assert index.asked == 2


def test_a_prompt_without_chunks_needs_no_lookup(service: LookupService, index: GatedIndex) -> None:
    assert service.ask("r", NS, []) == ()
    assert index.asked == 0


def test_after_the_deadline_the_answer_is_no_match_and_stays_so(
    service: LookupService, index: GatedIndex, clock: Clock, recorder: MemoryRecorder
) -> None:
    assert service.ask("r", NS, HASHES) is None
    clock.now += 1.0
    assert service.ask("r", NS, HASHES) == (None, None, None)
    index.gate.set()
    assert service.ask("r", NS, HASHES) == (None, None, None)
    assert recorder.value("lookup_deadlines") == 1


def test_a_failed_lookup_is_no_match(
    service: LookupService, index: GatedIndex, recorder: MemoryRecorder
) -> None:
    index.error = StoreUnavailable("gone")
    index.gate.set()
    assert answer(lambda: service.ask("r", NS, HASHES)) == (None, None, None)
    assert recorder.value("lookup_errors") == 1


def test_what_does_not_fit_the_queue_is_no_match_at_once(
    service: LookupService, recorder: MemoryRecorder
) -> None:
    assert service.ask("a", NS, HASHES) is None
    assert service.ask("b", NS, HASHES) is None
    assert service.ask("c", NS, HASHES) == (None, None, None)
    assert recorder.value("lookup_refused") == 1


def test_a_forgotten_request_is_looked_up_anew(service: LookupService, index: GatedIndex) -> None:
    index.gate.set()
    answer(lambda: service.ask("r", NS, HASHES))
    service.forget("r")
    answer(lambda: service.ask("r", NS, HASHES))
    assert index.asked == 2


def test_a_closed_service_answers_no_match(service: LookupService) -> None:
    service.close()
    assert service.ask("r", NS, HASHES) == (None, None, None)


def test_a_failing_background_job_is_counted(
    service: LookupService, recorder: MemoryRecorder
) -> None:
    def job() -> None:
        raise StoreUnavailable("gone")

    assert service.submit(job)
    end = time.monotonic() + PATIENCE_S
    while not recorder.value("background_errors"):
        assert time.monotonic() < end
        time.sleep(0.001)


def test_its_repr_is_a_status_line(service: LookupService) -> None:
    service.ask("r", NS, HASHES)
    assert repr(service) == "<LookupService 1 pending, 1 remembered>"
