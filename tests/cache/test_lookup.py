"""Lookups in the background: polled, memoised, bounded, never waited for."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from threading import Event, Timer

import pytest

from objkv.background import Steps
from objkv.cache.lookup import LookupLimits, LookupService, Records
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
FOUND, NO_MATCH = ({FIELD: SHARD}, None, None), (None, None, None)
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


class World:
    """A service whose index holds the first of three chunks."""

    def __init__(self) -> None:
        self.index, self.clock, self.recorder = GatedIndex(), ManualClock(100.0), MemoryRecorder()
        self.index.publish(CHUNK, {FIELD: SHARD}, ttl_s=3600)
        self.service = LookupService(
            self.index, [FIELD], self.recorder, LIMITS, clock=self.clock
        )  # fmt: skip

    def ask(self, name: str = "r", hashes: Sequence[bytes] = HASHES) -> Records | None:
        return self.service.ask(name, NS, hashes)

    def answer(self, name: str = "r", hashes: Sequence[bytes] = HASHES) -> Records:
        """Poll as the scheduler does; real threads need real, if little, time."""
        found: list[Records | None] = []
        wait_until(lambda: found.append(self.ask(name, hashes)) or found[-1] is not None)
        assert found[-1] is not None
        return found[-1]


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.index.gate.set()
    world.service.close()


def test_an_answer_is_awaited_without_waiting_and_then_kept_until_it_is_forgotten(
    world: World,
) -> None:
    assert world.ask() is None
    started = time.monotonic()
    world.service.wait(0.001)
    Timer(0.05, world.index.gate.set).start()
    world.service.wait(PATIENCE_S)
    assert world.index.gate.is_set()
    assert time.monotonic() - started < PATIENCE_S / 2
    records = world.answer()
    assert isinstance(records, tuple)
    assert records == FOUND
    assert world.ask() is records
    assert world.index.asked == [HASHES]
    world.service.forget("r")
    assert world.answer() == records
    assert world.index.asked == [HASHES] * 2


def test_one_requests_lookup_is_awaited_while_others_hang(world: World) -> None:
    service = world.service
    assert not service.wait_for("r", PATIENCE_S)  # returns at once: nothing was asked
    assert world.ask() is None
    assert not service.wait_for("r", 0.001)
    assert not service.wait_for("other", PATIENCE_S)
    Timer(0.05, world.index.gate.set).start()
    assert service.wait_for("r", PATIENCE_S)
    assert service.wait_for("r", PATIENCE_S)
    assert world.ask() == FOUND
    assert not service.wait_for("r", PATIENCE_S)


def test_of_a_prompt_that_grew_only_the_new_chunks_are_asked_for(world: World) -> None:
    world.index.gate.set()
    assert world.ask(hashes=[]) == ()
    world.answer(hashes=HASHES[:1])
    assert world.answer() == FOUND
    assert world.index.asked == [HASHES[:1], HASHES[1:]]


def test_a_request_that_waits_long_after_its_answer_is_looked_up_anew(world: World) -> None:
    """The stored chunks may have changed; meanwhile the answer stays the same."""
    world.index.gate.set()
    found = world.answer()
    world.index.publish(replace(CHUNK, prefix_hash=HASHES[1]), {FIELD: SHARD}, ttl_s=3600)
    world.clock.advance(30)
    assert world.ask() is found
    world.clock.advance(1)
    assert world.answer() == ({FIELD: SHARD}, {FIELD: SHARD}, None)


def test_after_the_deadline_the_answer_is_no_match_and_stays_so(world: World) -> None:
    assert world.ask() is None
    world.clock.advance(1.0)
    assert world.ask() == NO_MATCH
    world.index.gate.set()
    assert world.ask() == NO_MATCH
    assert world.recorder.value("lookup_deadlines") == 1


@pytest.mark.parametrize("error", [StoreUnavailable("gone"), AttributeError("a bug")])
def test_a_failed_lookup_is_no_match_and_a_bug_is_told_once(world: World, error: Exception) -> None:
    world.index.error = error
    world.index.gate.set()
    if isinstance(error, AttributeError):
        with pytest.raises(AttributeError):
            world.answer()
    assert world.answer() == NO_MATCH
    assert world.recorder.value("lookup_errors") == 1


def test_what_does_not_fit_the_queue_is_no_match_at_once(world: World) -> None:
    assert [world.ask(name) for name in "abc"] == [None, None, NO_MATCH]
    assert world.recorder.value("lookup_refused") == 1


def test_a_forgotten_request_that_waits_gives_its_place_to_another(world: World) -> None:
    """Else those whose clients have gone keep the others from being looked up."""
    limits = LookupLimits(PATIENCE_S, queue_max=5)
    world.service.close()
    world.service = service = LookupService(world.index, [FIELD], world.recorder, limits)
    busy = Event()
    assert service.submit(lambda: busy.wait(PATIENCE_S) and None)  # type: ignore[func-returns-value]
    for name in "abc":
        world.ask(name)
    assert world.ask("waits") is None
    service.forget("waits")
    assert world.ask("next") is None
    assert world.recorder.value("lookup_refused") == 0
    busy.set()
    world.index.gate.set()
    assert world.answer("next") == FOUND
    assert len(world.index.asked) == 4


@pytest.mark.parametrize("error", [StoreUnavailable("gone"), TransferError("lost")])
def test_a_failing_background_job_is_counted(world: World, error: Exception) -> None:
    def job() -> None:
        raise error

    assert world.service.submit(job)
    wait_until(lambda: bool(world.recorder.value("background_errors")))


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
