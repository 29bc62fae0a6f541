"""``GuardedIndex``: counters, breakers by direction, read-only. ``tests/net/test_guard.py`` and
``tests/stores/test_guarded.py`` cover the behaviour of all guards."""

from typing import Any

import pytest

from objkv.errors import StoreDenied, StoreUnavailable
from objkv.index.base import PruneIndex
from objkv.index.guarded import INDEX_VERBS, GuardedIndex, for_operators
from objkv.index.memory import MemoryIndex
from objkv.net.breaker import Breakers, Patience
from objkv.telemetry import MemoryRecorder, NullRecorder, Recorder
from tests.contracts.index_contract import FIELD, LONG_S, NAMESPACE, chunk, get, prefix_hash, shard
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


def test_errors_are_counted_by_class_and_passed_on() -> None:
    recorder = MemoryRecorder()
    inner = FlakyIndex(MemoryIndex())
    inner.error = StoreDenied("no")
    index = guarded(inner, recorder)
    with pytest.raises(StoreDenied):
        index.lookup(NAMESPACE, [prefix_hash(1)])
    assert recorder.value("index_errors") == recorder.value("index_lookup_errors") == 1
    assert recorder.value("index_lookup_errors_StoreDenied") == 1
    assert recorder.drain()["index_lookup_seconds_count"] == 1


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


class Place:
    def __init__(self) -> None:
        self.inner = FlakyIndex(MemoryIndex())
        self.changes: list[bool] = []
        breakers = Breakers(
            "index",
            Patience(failures=3, reset_s=3600),
            NullRecorder(),
            on_change=lambda change: self.changes.append(change.error is not None),
        )
        self.index = guarded(self.inner, breakers=breakers)

    def fail(self, times: int) -> None:
        self.inner.error = StoreUnavailable("down")
        for _ in range(times):
            with pytest.raises(StoreUnavailable, match="down"):
                self.index.lookup(NAMESPACE, [])


@pytest.fixture
def place() -> Place:
    return Place()


def test_an_open_breaker_answers_without_asking(place: Place) -> None:
    place.fail(3)
    asked = len(place.inner.calls)
    for call in (
        lambda: place.index.lookup(NAMESPACE, []),
        lambda: place.index.find(NAMESPACE, [], []),
        lambda: next(place.index.scan(NAMESPACE)),
        lambda: place.index.namespaces(),
    ):
        with pytest.raises(StoreUnavailable, match="circuit open"):
            call()
    assert len(place.inner.calls) == asked
    assert place.changes == [True]


def test_writes_that_are_denied_do_not_stop_reads(place: Place) -> None:
    """As those of a replica that may only read."""
    place.inner.error = StoreDenied("no")
    for _ in range(3):
        with pytest.raises(StoreDenied):
            place.index.lease("x", "me", ttl_ms=1)
    with pytest.raises(StoreUnavailable, match="circuit open"):
        place.index.touch(NAMESPACE, [], ttl_s=1)
    place.inner.error = None
    assert place.index.lookup(NAMESPACE, []) == []


def test_checking_and_closing_ask_the_index_itself(place: Place) -> None:
    place.fail(3)
    place.index.check()
    place.index.close()


def test_repr_tells_the_state(place: Place) -> None:
    assert repr(place.index).startswith("<GuardedIndex reads closed, writes closed, of <")
    place.fail(3)
    assert repr(place.index).startswith("<GuardedIndex reads open, writes closed, of <")
