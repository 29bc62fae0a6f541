"""``ObserveStore``: what happened, as numbers."""

from itertools import count

import pytest

from objkv.errors import StoreDenied
from objkv.stores.memory import MemoryStore
from objkv.stores.observe import ObserveStore
from objkv.telemetry import MemoryRecorder, NullRecorder
from objkv.testing.flaky import FlakyStore
from objkv.testing.store_contract import StoreContract


class TestObserveStore(StoreContract):
    @pytest.fixture
    def store(self) -> ObserveStore:
        return ObserveStore(MemoryStore(), NullRecorder(), "bulk")


def test_every_call_is_timed_and_its_bytes_are_counted() -> None:
    recorder, ticks = MemoryRecorder(), count()
    store = ObserveStore(MemoryStore(), recorder, "bulk", clock=lambda: next(ticks))
    store.put("a", b"12345")
    store.put_if_absent("b", b"123")
    store.put_if_absent("b", b"123")
    store.get("a")
    store.get_range("a", 1, 3)
    store.get_into("a", memoryview(bytearray(8)))
    drained = recorder.drain()
    assert drained["bulk_written_bytes"] == 8
    assert drained["bulk_duplicates"] == 1
    assert drained["bulk_read_bytes"] == 12
    assert drained["bulk_put_if_absent_seconds_count"] == 2
    assert drained["bulk_get_into_seconds_sum"] == 1
    assert not any("misses" in name or "errors" in name for name in drained)


def test_misses_and_errors_are_counted_by_verb() -> None:
    recorder, inner = MemoryRecorder(), FlakyStore(MemoryStore())
    store = ObserveStore(inner, recorder, "hot")
    store.get("absent")
    store.get_into("absent", memoryview(bytearray(1)))
    store.head("absent")
    inner.fail_next(StoreDenied("403"))
    with pytest.raises(StoreDenied):
        store.put_if_absent("k", b"")
    drained = recorder.drain()
    assert drained["hot_get_misses"] == drained["hot_get_into_misses"] == 1
    assert drained["hot_head_misses"] == 1
    assert drained["hot_put_if_absent_errors"] == 1
    assert drained["hot_put_if_absent_errors_StoreDenied"] == 1
    assert drained["hot_put_if_absent_seconds_count"] == 1


def test_the_end_of_a_scan_is_no_miss() -> None:
    recorder = MemoryRecorder()
    store = ObserveStore(MemoryStore(), recorder, "bulk")
    assert list(store.scan("")) == []
    assert recorder.value("bulk_scan_misses") == 0


def test_repr_says_what_is_observed() -> None:
    store = ObserveStore(MemoryStore(), NullRecorder(), "bulk")
    assert repr(store) == "<ObserveStore bulk <MemoryStore 0 values>>"
