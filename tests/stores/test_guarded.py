"""``GuardedStore``: counted, limited, given up and found again, read-only, and yet a good store."""

from collections.abc import Callable
from itertools import count

import pytest

from objkv.errors import StoreDenied, StoreError, StoreUnavailable, ValueTooLong
from objkv.net.breaker import BreakerLimits, Breakers
from objkv.stores.base import Unfinished
from objkv.stores.guarded import GuardedStore
from objkv.telemetry import MemoryRecorder, NullRecorder
from tests.contracts.flaky import FlakyStore
from tests.contracts.memory_store import MemoryStore
from tests.contracts.store_contract import StoreContract
from tests.stores.guards import guard_of

DOWN = StoreUnavailable("down")


class TestGuardedStore(StoreContract):
    @pytest.fixture
    def store(self) -> GuardedStore:
        return GuardedStore(MemoryStore(), guard_of(seconds=60))


def test_every_call_is_timed_and_bytes_misses_and_errors_are_counted() -> None:
    recorder, ticks, inner = MemoryRecorder(), count(), FlakyStore(MemoryStore())
    store = GuardedStore(inner, guard_of(recorder=recorder, clock=lambda: next(ticks)))
    store.put("a", b"12345")
    store.put_if_absent("b", b"123")
    store.put_if_absent("b", b"123")
    store.get("a")
    store.get("a", 1, 3)
    store.get_into("a", memoryview(bytearray(8)))
    drained = recorder.drain()
    assert drained["bulk_written_bytes"] == 8
    assert drained["bulk_duplicates"] == 1
    assert drained["bulk_read_bytes"] == 12
    assert drained["bulk_reads"] == drained["bulk_writes"] == 3
    assert drained["bulk_put_if_absent_seconds_count"] == 2
    assert drained["bulk_get_into_seconds_sum"] == 1
    store.get_into("a", memoryview(bytearray(2)), start=4)
    store.delete("a")
    drained |= recorder.drain()
    assert drained["bulk_get_into_seconds_count"] == drained["bulk_read_bytes"] == 1
    assert drained["bulk_delete_seconds_count"] == 1
    assert drained["bulk_writes"] == 3, "a delete is no write of bytes"
    assert not any("misses" in name or "errors" in name for name in drained)
    store.get("absent")
    store.get_into("absent", memoryview(bytearray(1)))
    inner.fail_next(StoreDenied("403"))
    with pytest.raises(StoreDenied):
        store.put_if_absent("k", b"")
    drained = recorder.drain()
    assert drained["bulk_get_misses"] == drained["bulk_get_into_misses"] == 1
    assert drained["bulk_put_if_absent_errors_StoreDenied"] == drained["bulk_write_errors"] == 1
    assert "bulk_read_errors" not in drained


@pytest.mark.parametrize(
    "write",
    [
        lambda store: store.put("k", b"2"),
        lambda store: store.put_if_absent("l", b"2"),
        lambda store: store.delete("k"),
        lambda store: store.discard(Unfinished("k", "x", 1, 0.0)),
    ],
)
def test_what_would_write_is_denied_with_what_to_set_and_sent_nowhere(
    write: Callable[[GuardedStore], object],
) -> None:
    inner = FlakyStore(MemoryStore())
    inner.put("k", b"1")
    asked = len(inner.calls)
    store = GuardedStore(inner, guard_of(may_write=False))
    with pytest.raises(StoreDenied, match="set role to writer or sweeper"):
        write(store)
    assert len(inner.calls) == asked
    assert store.get("k") == b"1"
    assert [entry.key for entry in store.scan("")] == ["k"]


class Scene:
    """Breakers that open after three failures for ten seconds, and their clock."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.now_s = 1000.0
        self._log = caplog
        self.inner = FlakyStore(MemoryStore())
        self.recorder = MemoryRecorder()
        self.breakers = Breakers(
            "bulk",
            BreakerLimits(failures=3, reset_s=10, reset_max_s=10),
            self.recorder,
            clock=lambda: self.now_s,
        )
        self.breakers.read.draw = self.breakers.write.draw = lambda: 1.0
        self.store = GuardedStore(self.inner, guard_of(breakers=self.breakers))

    @property
    def news(self) -> list[bool]:
        """Whether each line of the log says that reads are stopped, and not that they work."""
        stopped = ("bulk reads keep failing, serving without them", "bulk reads are refused, ")
        lines = self._log.messages
        assert all(one.startswith((*stopped, "bulk reads work again")) for one in lines)
        return [one.startswith(stopped) for one in lines]

    def fail(self, times: int, error: StoreError = DOWN) -> None:
        self.inner.fail_next(error, times)
        for _ in range(times):
            with pytest.raises(type(error), match=str(error)):
                self.store.get("k")


@pytest.fixture
def scene(caplog: pytest.LogCaptureFixture) -> Scene:
    return Scene(caplog)


@pytest.mark.parametrize("error", [DOWN, StoreDenied("403")])
def test_after_so_many_failures_the_store_is_left_alone_until_a_probe_succeeds(
    scene: Scene, error: StoreError
) -> None:
    scene.fail(3, error)
    for _ in range(4):
        with pytest.raises(StoreUnavailable, match="circuit open"):
            scene.store.get("k")
    with pytest.raises(StoreUnavailable, match="circuit open"):
        next(scene.store.scan(""))
    assert len(scene.inner.calls) == 3
    assert scene.store.put_if_absent("other", b"v"), "writes go on"
    assert scene.news == [True]
    assert scene.recorder.drain() == {
        "breaker_open_bulk_read": 1,
        "breaker_openings_bulk_read": 1,
        "breaker_refused_bulk_read": 5,
    }
    assert scene.recorder.drain() == {"breaker_open_bulk_read": 1}
    scene.now_s += 9.9
    with pytest.raises(StoreUnavailable, match="circuit open"):
        scene.store.get("k")
    scene.now_s += 0.1
    scene.recorder.drain()
    for _ in range(2):
        assert scene.store.get("k") is None
    assert scene.news == [True, False]
    assert scene.recorder.drain() == {"breaker_open_bulk_read": 0}


def test_a_success_in_between_and_errors_that_are_answers_start_the_count_again(
    scene: Scene,
) -> None:
    scene.fail(2)
    assert scene.store.get("k") is None
    scene.fail(2)
    scene.fail(10, ValueTooLong("an answer all the same"))
    scene.fail(2)
    assert scene.store.get("k") is None
    assert scene.news == []


def test_a_store_that_answers_the_probe_with_a_refusal_is_not_back_and_that_is_news(
    scene: Scene,
) -> None:
    scene.fail(3)
    for _ in range(2):
        scene.now_s += 10
        scene.fail(1, StoreDenied("403"))
        with pytest.raises(StoreUnavailable, match="circuit open"):
            scene.store.get("k")
    assert scene.news == [True, True]
    scene.now_s += 10
    assert scene.store.get("k") is None
    assert scene.news == [True, True, False]


def test_check_asks_the_place_itself(scene: Scene) -> None:
    scene.fail(3)
    scene.store.check()
    scene.inner.fail_until_mended(DOWN)
    with pytest.raises(StoreUnavailable, match="down"):
        scene.store.check()


@pytest.mark.parametrize("error", [DOWN, StoreDenied("no space left")])
def test_writes_that_fail_do_not_stop_reads(error: StoreError) -> None:
    inner = FlakyStore(MemoryStore())
    store = GuardedStore(
        inner, guard_of(breakers=Breakers("bulk", BreakerLimits(failures=3), NullRecorder()))
    )
    for write in (
        lambda: store.put_if_absent("k", b"v"),
        lambda: store.put("k", b"v"),
        lambda: store.delete("k"),
    ):
        inner.fail_next(error)
        with pytest.raises(type(error), match=str(error)):
            write()
        assert store.get("k") is None
    with pytest.raises(StoreUnavailable, match="circuit open"):
        store.put("k", b"v")
    assert store.head("k") is None
    assert list(store.scan("")) == []
