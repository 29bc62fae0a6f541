"""What one load took is told payload by payload, and where its bytes came from."""

from collections.abc import Iterator, Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from objkv.stores.memory import MemoryStore
from objkv.tracing import OtelTracing
from tests.transfer.world import CHUNK, Replica, stores

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class World:
    def __init__(self, hot: MemoryStore | None = None) -> None:
        self.store, self.index = stores()
        self.exporter, provider = InMemorySpanExporter(), TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        tracing = OtelTracing(provider.get_tracer("objkv"))
        writer = Replica(self.store, self.index, seed=1, hot=hot)
        writer.save(range(3))
        writer.close()
        self.reader = Replica(self.store, self.index, seed=2, hot=hot, tracing=tracing)

    def spans(self, name: str) -> Sequence[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]


@pytest.fixture(params=[False, True], ids=["between steps", "within the step"])
def sync(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.reader.close()


def attribute(span: ReadableSpan, name: str) -> object:
    return (span.attributes or {})[name]


def test_a_load_has_a_get_of_each_payload_with_its_decoding_and_copying(
    world: World, sync: bool
) -> None:
    world.reader.load(range(3), 1, sync=sync)
    world.reader.close()  # within a step nobody waits for the last copies but the threads
    (load,) = world.spans("objkv.load")
    gets = world.spans("objkv.get")
    assert sorted(attribute(get, "objkv.chunk") for get in gets) == [0, 1, 2]  # type: ignore[type-var]
    assert {attribute(get, "objkv.store") for get in gets} == {"bulk"}
    assert attribute(load, "objkv.chunks") == 3
    total = sum(attribute(get, "objkv.bytes") for get in gets)  # type: ignore[misc]
    assert attribute(load, "objkv.bytes") == total
    by_id = {get.context.span_id: get for get in gets}
    for name in ("objkv.decode", "objkv.copy"):
        parts = world.spans(name)
        parents = [part.parent.span_id for part in parts if part.parent]
        assert sorted(parents) == sorted(by_id)
        for part, parent in zip(parts, parents, strict=True):
            get = by_id[parent]
            times = (get.start_time, part.start_time, part.end_time, get.end_time)
            assert list(times) == sorted(time or 0 for time in times)


def test_hot_bytes_and_bulk_bytes_are_told_apart() -> None:
    world = World(hot=MemoryStore())
    world.reader.load(range(1), 1)
    assert {attribute(get, "objkv.store") for get in world.spans("objkv.get")} == {"hot"}
    numbers = world.reader.recorder.drain()
    assert numbers["hot_load_bytes"] == numbers["load_bytes"] > CHUNK
    assert "bulk_load_bytes" not in numbers
    world.reader.close()


def test_bytes_of_a_hot_copy_that_is_gone_came_from_bulk() -> None:
    hot = MemoryStore()
    world = World(hot=hot)
    hot.delete(world.reader.path(0))
    assert not world.reader.load(range(1), 1).failed
    numbers = world.reader.recorder.drain()
    assert numbers["bulk_load_bytes"] == numbers["load_bytes"]
    assert "hot_load_bytes" not in numbers
    world.reader.close()


def test_a_payload_that_is_gone_is_an_error_of_its_span_and_of_the_load(world: World) -> None:
    plan = world.reader.load_plan(range(2), 1)
    world.store.delete(world.reader.path(1))
    world.reader.loader.submit(plan)
    assert world.reader.outcome().failed
    (load,) = world.spans("objkv.load")
    assert load.status.status_code is StatusCode.ERROR
    failed = [s for s in world.spans("objkv.get") if s.status.status_code is StatusCode.ERROR]
    assert [(attribute(s, "objkv.chunk"), s.status.description) for s in failed] == [
        (1, "indexed, but gone")
    ]


def test_a_payload_that_is_corrupt_says_so_in_its_span(world: World) -> None:
    path = world.reader.path(0)
    payload = bytearray(world.store.get(path) or b"")
    payload[-1] ^= 1
    world.store.put(path, bytes(payload))
    assert world.reader.load(range(1), 1).failed
    (get,) = world.spans("objkv.get")
    assert get.status.status_code is StatusCode.ERROR
    assert get.status.description
