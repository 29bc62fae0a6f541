import pytest

from objkv.errors import StoreDenied
from objkv.index.memory import MemoryIndex
from objkv.index.observe import ObserveIndex
from objkv.telemetry import MemoryRecorder
from objkv.testing.index_contract import FIELD, LONG_S, NAMESPACE, chunk, prefix_hash, shard
from tests.index.flaky_index import FlakyIndex


def test_lookups_are_counted_by_outcome_and_timed() -> None:
    recorder = MemoryRecorder()
    times = iter([10.0, 10.5, 20.0, 20.25])
    index = ObserveIndex(MemoryIndex(), recorder, clock=lambda: next(times))
    index.publish(chunk(), {FIELD: shard()}, ttl_s=LONG_S)
    index.lookup(NAMESPACE, [prefix_hash(n) for n in (1, 2, 3)])
    assert recorder.drain() == {
        "index_publish_seconds_count": 1.0,
        "index_publish_seconds_sum": 0.5,
        "index_publish_seconds_max": 0.5,
        "index_lookup_seconds_count": 1.0,
        "index_lookup_seconds_sum": 0.25,
        "index_lookup_seconds_max": 0.25,
        "index_calls": 2,
        "index_records_found": 1,
        "index_records_missing": 2,
    }


def test_errors_are_counted_by_class_and_passed_on() -> None:
    recorder = MemoryRecorder()
    inner = FlakyIndex(MemoryIndex())
    inner.error = StoreDenied("no")
    index = ObserveIndex(inner, recorder)
    with pytest.raises(StoreDenied):
        index.lookup(NAMESPACE, [prefix_hash(1)])
    assert recorder.value("index_lookup_errors") == 1
    assert recorder.value("index_lookup_errors_StoreDenied") == 1
    assert recorder.drain()["index_lookup_seconds_count"] == 1


def test_repr_names_the_inner_index() -> None:
    index = ObserveIndex(MemoryIndex(), MemoryRecorder())
    assert repr(index) == "<ObserveIndex <MemoryIndex 0 records, 0 leases>>"
