"""``LimitStore``: bounded calls, bounded waiting."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from objkv.errors import StoreError, StoreUnavailable
from objkv.net.deadline import EndsBy
from objkv.stores.limit import LimitStore
from objkv.stores.memory import MemoryStore
from objkv.testing.flaky import FlakyStore
from objkv.testing.store_contract import StoreContract


class TestLimitStore(StoreContract):
    @pytest.fixture
    def store(self) -> LimitStore:
        return LimitStore(MemoryStore(), calls_max=2, wait_s=60)


def test_no_more_calls_go_through_than_allowed() -> None:
    inner, gate = FlakyStore(MemoryStore()), threading.Event()
    inner.hold(gate)
    store = LimitStore(inner, calls_max=3, wait_s=60)
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(store.get, "k") for _ in range(8)]
        while len(inner.calls) < 3:
            pass
        assert len(inner.calls) == 3
        gate.set()
        assert [call.result() for call in calls] == [None] * 8
    assert len(inner.calls) == 8


def test_waiting_ends_in_unavailable() -> None:
    inner, gate = FlakyStore(MemoryStore()), threading.Event()
    inner.hold(gate)
    store = LimitStore(inner, calls_max=1, wait_s=0)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(store.get, "k")
        assert inner.arrived.wait(60)
        with pytest.raises(StoreUnavailable, match="1 calls under way"):
            store.get("k")
        gate.set()
        assert first.result() is None
    assert store.get("k") is None


def test_a_call_that_fails_gives_its_slot_back() -> None:
    inner = FlakyStore(MemoryStore())
    store = LimitStore(inner, calls_max=1, wait_s=0)
    inner.fail_next(StoreError("once"))
    with pytest.raises(StoreError, match="once"):
        store.get("k")
    assert store.get("k") is None


def test_a_scan_holds_no_slot_while_its_consumer_works() -> None:
    store = LimitStore(MemoryStore(), calls_max=1, wait_s=0)
    store.put("a", b"")
    store.put("b", b"")
    for entry in store.scan(""):
        assert store.get(entry.key) == b""


def test_repr_is_a_status_line() -> None:
    store = LimitStore(MemoryStore(), calls_max=3, wait_s=1)
    assert repr(store) == "<LimitStore 3 calls of <MemoryStore 0 values>>"


def test_writes_leave_half_of_the_slots_to_reads() -> None:
    inner, gate = FlakyStore(MemoryStore()), threading.Event()
    inner.hold(gate)
    store = LimitStore(inner, calls_max=4, wait_s=60)
    with ThreadPoolExecutor(10) as pool:
        puts = [pool.submit(store.put, f"k{i}", b"v") for i in range(8)]
        while len(inner.calls) < 2:
            pass
        gets = [pool.submit(store.get, "k0") for _ in range(2)]
        while inner.calls.count("get") < 2:
            pass
        assert inner.calls.count("put") == 2
        gate.set()
        for call in (*puts, *gets):
            call.result()
    assert inner.calls.count("put") == 8


def test_whoever_has_less_time_waits_less() -> None:
    inner, gate = FlakyStore(MemoryStore()), threading.Event()
    inner.hold(gate)
    store = LimitStore(inner, calls_max=1, wait_s=3600)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(store.get, "k")
        assert inner.arrived.wait(60)
        with pytest.raises(StoreUnavailable), EndsBy(time.monotonic()):
            store.get("k")
        gate.set()
        assert first.result() is None
