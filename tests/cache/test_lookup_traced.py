"""A lookup adds a span to the trace of its request: how many chunks it looked up and found."""

from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from objkv.cache.lookup import LookupLimits, LookupService
from objkv.errors import StoreUnavailable
from objkv.index.base import ChunkEntry, ShardRecord
from objkv.index.memory import MemoryIndex
from objkv.telemetry import MemoryRecorder
from objkv.tracing import OtelTracing
from tests.index.flaky_index import FlakyIndex
from tests.support.waiting import wait_until

NAMESPACE = "0" * 32
HASHES = [bytes([i]) * 20 for i in range(3)]
FIELD = "0.L0-2_H0-4"
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


class World:
    def __init__(self) -> None:
        inner = MemoryIndex()
        chunk = ChunkEntry(NAMESPACE, HASHES[0], b"p" * 20, 0, 64)
        record = ShardRecord(100, 80, "none", False, "0" * 32, 1)
        inner.publish(chunk, {FIELD: record}, ttl_s=60)
        self.index = FlakyIndex(inner)
        self.exporter, provider = InMemorySpanExporter(), TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.lookups = LookupService(
            self.index,
            [FIELD],
            MemoryRecorder(),
            LookupLimits(120.0, 4),
            tracing=OtelTracing(provider.get_tracer("objkv")),
        )

    def span(self) -> ReadableSpan:
        wait_until(lambda: bool(self.exporter.get_finished_spans()))
        (found,) = self.exporter.get_finished_spans()
        return found

    def ask(self, hashes: Sequence[bytes] = HASHES) -> None:
        wait_until(lambda: self.lookups.ask("r", NAMESPACE, hashes, PARENT) is not None)


@pytest.fixture
def world() -> World:
    return World()


def test_one_lookup_is_one_span_of_the_requests_trace(world: World) -> None:
    world.ask()
    world.ask()  # remembered
    span = world.span()
    world.lookups.close()
    assert span.name == "objkv.lookup"
    assert f"{span.context.trace_id:032x}" == TRACE
    assert dict(span.attributes or {}) == {
        "gen_ai.request.id": "r",
        "objkv.namespace": NAMESPACE,
        "objkv.chunks": 3,
        "objkv.chunks_found": 1,
    }
    assert span.status.is_unset


def test_an_index_that_fails_is_told(world: World) -> None:
    world.index.error = StoreUnavailable("gone")
    world.ask()
    span = world.span()
    world.lookups.close()
    assert span.status.description == "the lookup failed"
    assert (span.attributes or {})["objkv.chunks_found"] == 0


def test_a_lookup_that_is_refused_is_told() -> None:
    world = World()
    world.lookups.close()  # takes nothing more, as if its queue were full
    assert world.lookups.ask("r", NAMESPACE, HASHES, PARENT) == (None, None, None)
    assert world.span().status.description == "refused: the queue is full"
