"""A lookup adds a span to the trace of its request: how many chunks it looked up and found."""

import pytest

from objkv.cache.lookup import LookupLimits, LookupService
from objkv.errors import StoreUnavailable
from objkv.index.base import ChunkEntry, ShardRecord
from objkv.telemetry import MemoryRecorder
from tests.contracts.memory_index import MemoryIndex
from tests.index.flaky_index import FlakyIndex
from tests.support.waiting import wait_until
from tests.test_tracing import PARENT, TRACE, collected

NAMESPACE = "0" * 32
HASHES = [bytes([i]) * 20 for i in range(3)]
FIELD = "0.L0-2_H0-4"


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
    record = ShardRecord(100, 80, True, False, "0" * 32, 1)
    chunk = ChunkEntry(NAMESPACE, HASHES[0], b"p" * 20, 0, 64)
    index.publish(chunk, {FIELD: record}, ttl_s=60)
    lookups = LookupService(
        index, [FIELD], MemoryRecorder(), LookupLimits(120.0, 4), tracing=tracing
    )
    if fault == "down":
        index.error = StoreUnavailable("gone")
    elif fault == "closed":
        lookups.close()
    for _ in range(1 if fault == "closed" else 2):  # the second is remembered
        wait_until(lambda: lookups.ask("r", NAMESPACE, HASHES, PARENT) is not None)
    wait_until(lambda: bool(exporter.get_finished_spans()))
    lookups.close()
    (span,) = exporter.get_finished_spans()
    assert span.name == "objkv.lookup"
    assert f"{span.context.trace_id:032x}" == TRACE
    assert span.status.description == description
    told = dict(span.attributes or {})
    assert (told["gen_ai.request.id"], told["objkv.namespace"]) == ("r", NAMESPACE)
    assert (told.get("objkv.chunks"), told.get("objkv.chunks_found")) == counts
