"""``GuardedIndex``: counters, breakers by direction, read-only. ``tests/net/test_guard.py`` and
``tests/stores/test_guarded.py`` cover the behaviour of all guards."""

from typing import Any

import pytest

from objkv.errors import StoreDenied, StoreUnavailable
from objkv.index.base import PruneIndex
from objkv.index.guarded import INDEX_VERBS, GuardedIndex, for_operators
from objkv.telemetry import MemoryRecorder, Recorder
from tests.contracts.index_contract import FIELD, LONG_S, NAMESPACE, chunk, get, prefix_hash, shard
from tests.contracts.memory_index import MemoryIndex
from tests.index.flaky_index import FlakyIndex
from tests.stores.guards import guard_of


def guarded(inner: PruneIndex, recorder: Recorder | None = None, **options: Any) -> GuardedIndex:
    return GuardedIndex(inner, guard_of("index", recorder, verbs=INDEX_VERBS, **options))


def test_lookups_are_counted_by_outcome_and_timed() -> None:
    recorder = MemoryRecorder()
    times = iter([10.0, 10.5, 20.0, 20.25])
    index = guarded(MemoryIndex(), recorder, clock=lambda: next(times))
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


def test_a_scan_is_timed_by_record_and_is_no_call() -> None:
    recorder = MemoryRecorder()
    index = guarded(MemoryIndex(), recorder)
    index.publish(chunk(), {FIELD: shard()}, ttl_s=LONG_S)
    recorder.drain()
    assert len(list(index.scan(NAMESPACE))) == 1
    assert recorder.value("index_calls") == 0
    assert recorder.drain()["index_scan_seconds_count"] == 2


@pytest.fixture
def inner() -> FlakyIndex:
    return FlakyIndex(MemoryIndex())


def test_what_is_there_is_found_and_nothing_is_changed(inner: FlakyIndex) -> None:
    inner.publish(chunk(), {FIELD: shard()}, ttl_s=LONG_S)
    before, asked = get(inner), len(inner.calls)
    index = guarded(inner, may_write=False)
    index.publish(chunk(2), {FIELD: shard()}, ttl_s=LONG_S)
    index.touch(NAMESPACE, [prefix_hash(1)], ttl_s=LONG_S)
    assert index.forget(NAMESPACE, prefix_hash(1), FIELD, shard()) is False
    assert index.lease("x", "me", ttl_ms=60_000) is False
    index.release("x", "me")
    assert len(inner.calls) == asked
    assert get(index) == before
    assert [record.prefix_hash for record in index.scan(NAMESPACE)] == [prefix_hash(1)]
    assert index.find(NAMESPACE, [prefix_hash(1)], [FIELD]) == [{FIELD: shard()}]


def test_it_is_checked_by_reading(inner: FlakyIndex) -> None:
    index = guarded(inner, may_write=False)
    index.check()
    inner.error = StoreUnavailable("down")
    with pytest.raises(StoreUnavailable, match="down"):
        index.check()


def test_what_operators_do_is_denied_to_readers_with_what_to_set() -> None:
    index = MemoryIndex()
    assert for_operators(index) is index
    with pytest.raises(StoreDenied, match="role reader does not allow writes: set role to"):
        for_operators(None)
