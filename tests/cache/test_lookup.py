"""Lookups in the background: polled, memoised, bounded, never waited for."""

import time
from collections.abc import Callable, Iterator, Sequence
from threading import Event, Timer

import pytest

from objkv.background import Steps
from objkv.cache.lookup import LookupLimits, LookupService
from objkv.errors import StoreUnavailable, TransferError
from objkv.index.base import ChunkEntry, ShardRecord, ShardRecords
from objkv.telemetry import MemoryRecorder
from tests.contracts.clock import ManualClock
from tests.contracts.memory_index import MemoryIndex
from tests.index.flaky_index import FlakyIndex
from tests.support.waiting import PATIENCE_S, wait_until
from tests.test_tracing import PARENT, TRACE, collected

NS = "0" * 32
HASHES = [bytes([i]) * 20 for i in range(3)]
CHUNK = ChunkEntry(NS, HASHES[0], b"p" * 20, 0, 64)
SHARD = ShardRecord(100, 80, True, False, "0" * 32, 1)
FIELD = "0.L0-2_H0-4"
LIMITS = LookupLimits(deadline_s=1.0, queue_max=2, age_max_s=30.0)


class GatedIndex:
    """Replies when the test allows it, and counts calls."""

    def __init__(self) -> None:
        self.index = MemoryIndex()
        self.publish = self.index.publish
        self.gate = Event()
        self.asked: list[Sequence[bytes]] = []
        self.error: Exception | None = None

    def find(
        self, namespace: str, prefix_hashes: Sequence[bytes], fields: Sequence[str]
    ) -> Steps[list[ShardRecords | None]]:
        self.asked.append(prefix_hashes)
        while not self.gate.wait(0.001):
            yield None
        if self.error is not None:
            raise self.error
        return self.index.find(namespace, prefix_hashes, fields)


@pytest.fixture
def index() -> GatedIndex:
    index = GatedIndex()
    index.publish(CHUNK, {FIELD: SHARD}, ttl_s=3600)
    return index


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


@pytest.fixture
def recorder() -> MemoryRecorder:
    return MemoryRecorder()


@pytest.fixture
def service(
    index: GatedIndex, clock: ManualClock, recorder: MemoryRecorder
) -> Iterator[LookupService]:
    service = LookupService(index, [FIELD], recorder, LIMITS, clock=clock)
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


def test_an_answer_is_awaited_without_waiting_and_then_kept_until_it_is_forgotten(
    service: LookupService, index: GatedIndex
) -> None:
    assert service.ask("r", NS, HASHES) is None
    started = time.monotonic()
    service.wait(0.001)
    Timer(0.05, index.gate.set).start()
    service.wait(PATIENCE_S)
    assert index.gate.is_set()
    assert time.monotonic() - started < PATIENCE_S / 2
    records = answer(lambda: service.ask("r", NS, HASHES))
    assert isinstance(records, tuple)
    assert records == ({FIELD: SHARD}, None, None)
    assert service.ask("r", NS, HASHES) is records
    assert index.asked == [HASHES]
    service.forget("r")
    assert answer(lambda: service.ask("r", NS, HASHES)) == records
    assert index.asked == [HASHES] * 2


def test_one_requests_lookup_is_awaited_while_others_hang(
    service: LookupService, index: GatedIndex
) -> None:
    assert not service.wait_for("r", PATIENCE_S)  # returns at once: nothing was asked
    assert service.ask("r", NS, HASHES) is None
    assert not service.wait_for("r", 0.001)
    assert not service.wait_for("other", PATIENCE_S)
    Timer(0.05, index.gate.set).start()
    assert service.wait_for("r", PATIENCE_S)
    assert service.wait_for("r", PATIENCE_S)
    assert service.ask("r", NS, HASHES) == ({FIELD: SHARD}, None, None)
    assert not service.wait_for("r", PATIENCE_S)


def test_of_a_prompt_that_grew_only_the_new_chunks_are_asked_for(
    service: LookupService, index: GatedIndex
) -> None:
    index.gate.set()
    assert service.ask("r", NS, []) == ()
    answer(lambda: service.ask("r", NS, HASHES[:1]))
    assert answer(lambda: service.ask("r", NS, HASHES)) == ({FIELD: SHARD}, None, None)
    assert index.asked == [HASHES[:1], HASHES[1:]]


def test_a_request_that_waits_long_after_its_answer_is_looked_up_anew(
    service: LookupService, index: GatedIndex, clock: ManualClock
) -> None:
    """The stored chunks may have changed; meanwhile the answer stays the same."""
    index.gate.set()
    found = answer(lambda: service.ask("r", NS, HASHES))
    index.publish(ChunkEntry(NS, HASHES[1], b"p" * 20, 0, 64), {FIELD: SHARD}, ttl_s=3600)
    clock.advance(30)
    assert service.ask("r", NS, HASHES) is found
    clock.advance(1)
    assert answer(lambda: service.ask("r", NS, HASHES)) == ({FIELD: SHARD}, {FIELD: SHARD}, None)


def test_after_the_deadline_the_answer_is_no_match_and_stays_so(
    service: LookupService, index: GatedIndex, clock: ManualClock, recorder: MemoryRecorder
) -> None:
    assert service.ask("r", NS, HASHES) is None
    clock.advance(1.0)
    assert service.ask("r", NS, HASHES) == (None, None, None)
    index.gate.set()
    assert service.ask("r", NS, HASHES) == (None, None, None)
    assert recorder.value("lookup_deadlines") == 1


@pytest.mark.parametrize("error", [StoreUnavailable("gone"), AttributeError("a bug")])
def test_a_failed_lookup_is_no_match_and_a_bug_is_told_once(
    service: LookupService, index: GatedIndex, recorder: MemoryRecorder, error: Exception
) -> None:
    index.error = error
    index.gate.set()
    if isinstance(error, AttributeError):
        with pytest.raises(AttributeError):
            answer(lambda: service.ask("r", NS, HASHES))
    assert answer(lambda: service.ask("r", NS, HASHES)) == (None, None, None)
    assert recorder.value("lookup_errors") == 1


def test_what_does_not_fit_the_queue_is_no_match_at_once(
    service: LookupService, recorder: MemoryRecorder
) -> None:
    answers = [service.ask(name, NS, HASHES) for name in "abc"]
    assert answers == [None, None, (None, None, None)]
    assert recorder.value("lookup_refused") == 1


def test_a_forgotten_request_that_waits_gives_its_place_to_another(
    index: GatedIndex, recorder: MemoryRecorder
) -> None:
    """Else those whose clients have gone keep the others from being looked up."""
    service = LookupService(index, [FIELD], recorder, LookupLimits(PATIENCE_S, queue_max=5))
    busy = Event()
    assert service.submit(lambda: busy.wait(PATIENCE_S) and None)  # type: ignore[func-returns-value]
    for name in "abc":
        service.ask(name, NS, HASHES)
    assert service.ask("waits", NS, HASHES) is None
    service.forget("waits")
    assert service.ask("next", NS, HASHES) is None
    assert recorder.value("lookup_refused") == 0
    busy.set()
    index.gate.set()
    assert answer(lambda: service.ask("next", NS, HASHES)) == ({FIELD: SHARD}, None, None)
    assert len(index.asked) == 4
    service.close()


@pytest.mark.parametrize("error", [StoreUnavailable("gone"), TransferError("lost")])
def test_a_failing_background_job_is_counted(
    service: LookupService, recorder: MemoryRecorder, error: Exception
) -> None:
    def job() -> None:
        raise error

    assert service.submit(job)
    wait_until(lambda: bool(recorder.value("background_errors")))


@pytest.mark.parametrize(
    ("fault", "description", "counts"),
    [
        ("", None, (3, 1)),
        ("down", "the lookup failed", (3, 0)),
        ("closed", "refused: the queue is full", (None, None)),  # as if it were
    ],
)
def test_one_lookup_is_one_span_of_the_requests_trace(
    fault: str, description: str | None, counts: tuple[int | None, int | None]
) -> None:
    index, (tracing, exporter) = FlakyIndex(MemoryIndex()), collected()
    index.publish(CHUNK, {FIELD: SHARD}, ttl_s=60)
    lookups = LookupService(
        index, [FIELD], MemoryRecorder(), LookupLimits(120.0, 4), tracing=tracing
    )
    if fault == "down":
        index.error = StoreUnavailable("gone")
    elif fault == "closed":
        lookups.close()
    for _ in range(1 if fault == "closed" else 2):  # the second is remembered
        wait_until(lambda: lookups.ask("r", NS, HASHES, PARENT) is not None)
    wait_until(lambda: bool(exporter.get_finished_spans()))
    lookups.close()
    (span,) = exporter.get_finished_spans()
    assert span.name == "objkv.lookup"
    assert f"{span.context.trace_id:032x}" == TRACE
    assert span.status.description == description
    told = dict(span.attributes or {})
    assert (told["gen_ai.request.id"], told["objkv.namespace"]) == ("r", NS)
    assert (told.get("objkv.chunks"), told.get("objkv.chunks_found")) == counts
