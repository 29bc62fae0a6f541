"""``BreakerStore``: a store that keeps failing is left alone, and found again."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from objkv.errors import (
    LeftAlone,
    StoreBusy,
    StoreDenied,
    StoreError,
    StoreUnavailable,
    ValueTooLong,
)
from objkv.net.breaker import Breakers, Change, Patience
from objkv.net.deadline import is_trial
from objkv.stores.breaker import BreakerStore
from objkv.stores.memory import MemoryStore
from objkv.telemetry import MemoryRecorder, NullRecorder
from objkv.testing.flaky import FlakyStore
from objkv.testing.store_contract import StoreContract

DOWN = StoreUnavailable("down")


class TestBreakerStore(StoreContract):
    @pytest.fixture
    def store(self) -> BreakerStore:
        return BreakerStore(MemoryStore(), Breakers("bulk", Patience(), NullRecorder()))


class Scene:
    """Breakers that open after three failures for ten seconds, and their clock."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.news: list[bool] = []
        self.inner = FlakyStore(MemoryStore())
        self.recorder = MemoryRecorder()
        self.breakers = Breakers(
            "bulk",
            Patience(failures=3, reset_s=10, reset_max_s=10),
            self.recorder,
            clock=lambda: self.now_s,
            on_change=self._hear,
        )
        self.breakers.read.draw = self.breakers.write.draw = lambda: 1.0
        self.store = BreakerStore(self.inner, self.breakers)

    def _hear(self, change: Change) -> None:
        assert change.end == "bulk"
        assert change.direction == "read"
        self.news.append(change.error is not None)

    def fail(self, times: int, error: StoreError = DOWN) -> None:
        self.inner.fail_next(error, times)
        for _ in range(times):
            with pytest.raises(type(error), match=str(error)):
                self.store.get("k")


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_after_so_many_failures_the_store_is_left_alone(scene: Scene) -> None:
    scene.fail(3)
    with pytest.raises(StoreUnavailable, match="left alone"):
        scene.store.get("k")
    with pytest.raises(StoreUnavailable, match="left alone"):
        next(scene.store.scan(""))
    assert len(scene.inner.calls) == 3
    assert scene.news == [True]


def test_a_success_in_between_starts_the_count_again(scene: Scene) -> None:
    scene.fail(2)
    assert scene.store.get("k") is None
    scene.fail(2)
    assert scene.store.get("k") is None
    assert scene.news == []


def test_errors_that_nobody_can_mend_do_not_count(scene: Scene) -> None:
    scene.fail(10, ValueTooLong("an answer all the same"))
    assert scene.store.get("k") is None
    assert scene.news == []


def test_a_store_that_refuses_is_left_alone_too(scene: Scene) -> None:
    scene.fail(3, StoreDenied("403"))
    with pytest.raises(StoreUnavailable, match="left alone"):
        scene.store.get("k")
    assert scene.news == [True]


def test_a_probe_that_succeeds_brings_the_store_back(scene: Scene) -> None:
    scene.fail(3)
    scene.now_s += 9.9
    with pytest.raises(StoreUnavailable, match="left alone"):
        scene.store.get("k")
    scene.now_s += 0.1
    assert scene.store.get("k") is None
    assert scene.store.get("k") is None
    assert scene.news == [True, False]


def test_a_probe_that_fails_leaves_it_alone_again_without_news(scene: Scene) -> None:
    scene.fail(3)
    for _ in range(3):
        scene.now_s += 10
        scene.fail(1)
        with pytest.raises(StoreUnavailable, match="left alone"):
            scene.store.get("k")
    assert scene.news == [True]
    scene.now_s += 10
    assert scene.store.get("k") is None
    assert scene.news == [True, False]


def test_a_store_that_answers_the_probe_with_a_refusal_is_not_back_and_that_is_news(
    scene: Scene,
) -> None:
    scene.fail(3)
    for _ in range(2):
        scene.now_s += 10
        scene.fail(1, StoreDenied("403"))
        with pytest.raises(StoreUnavailable, match="left alone"):
            scene.store.get("k")
    assert scene.news == [True, True]
    scene.now_s += 10
    assert scene.store.get("k") is None
    assert scene.news == [True, True, False]


def test_one_probe_at_a_time(scene: Scene) -> None:
    scene.fail(3)
    scene.now_s += 10
    gate = threading.Event()
    scene.inner.arrived.clear()
    scene.inner.hold(gate)
    with ThreadPoolExecutor(1) as pool:
        probe = pool.submit(scene.store.get, "k")
        assert scene.inner.arrived.wait(60)
        with pytest.raises(StoreUnavailable, match="left alone"):
            scene.store.get("k")
        gate.set()
        assert probe.result() is None
    assert scene.store.get("k") is None


def test_calls_go_on_side_by_side(scene: Scene) -> None:
    gate = threading.Event()
    scene.inner.hold(gate)
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(scene.store.get, "k") for _ in range(4)]
        while len(scene.inner.calls) < 4:
            pass
        gate.set()
        assert [call.result() for call in calls] == [None] * 4


def test_a_late_success_of_an_earlier_call_does_not_close_it(scene: Scene) -> None:
    gate = threading.Event()
    scene.inner.hold(gate)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(scene.store.get, "k")
        assert scene.inner.arrived.wait(60)
        scene.inner.mend()
        scene.fail(3)
        gate.set()
        assert slow.result() is None
    with pytest.raises(StoreUnavailable, match="left alone"):
        scene.store.get("k")
    assert scene.news == [True]


def test_an_interrupt_is_no_failure_and_no_end_of_probing(scene: Scene) -> None:
    scene.fail(3)
    scene.now_s += 10
    scene.inner.fail_next(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        scene.store.get("k")
    assert scene.store.get("k") is None


def test_check_asks_the_place_itself(scene: Scene) -> None:
    scene.fail(3)
    scene.store.check()
    scene.inner.fail_until_mended(DOWN)
    with pytest.raises(StoreUnavailable, match="down"):
        scene.store.check()


def test_repr_is_a_status_line(scene: Scene) -> None:
    assert repr(scene.store).startswith("<BreakerStore reads closed, writes closed of")
    scene.fail(3)
    assert repr(scene.store).startswith("<BreakerStore reads open, writes closed of")


@pytest.mark.parametrize("error", [DOWN, StoreDenied("no space left")])
def test_writes_that_fail_do_not_stop_reads(error: StoreError) -> None:
    inner = FlakyStore(MemoryStore())
    store = BreakerStore(inner, Breakers("bulk", Patience(failures=3), NullRecorder()))
    for write in (
        lambda: store.put_if_absent("k", b"v"),
        lambda: store.put("k", b"v"),
        lambda: store.delete("k"),
    ):
        inner.fail_next(error)
        with pytest.raises(type(error), match=str(error)):
            write()
        assert store.get("k") is None
    with pytest.raises(StoreUnavailable, match="left alone"):
        store.put("k", b"v")
    assert store.head("k") is None
    assert list(store.scan("")) == []


def test_reads_that_fail_do_not_stop_writes(scene: Scene) -> None:
    scene.fail(3)
    assert scene.store.put_if_absent("k", b"v")


def test_state_openings_and_refused_calls_are_told(scene: Scene) -> None:
    scene.fail(3)
    for _ in range(4):
        with pytest.raises(StoreUnavailable, match="left alone"):
            scene.store.get("k")
    numbers = scene.recorder.drain()
    assert numbers == {
        "breaker_open_bulk_read": 1,
        "breaker_openings_bulk_read": 1,
        "breaker_refused_bulk_read": 4,
    }
    assert scene.recorder.drain() == {"breaker_open_bulk_read": 1}
    scene.now_s += 10
    scene.store.get("k")
    assert scene.recorder.drain() == {"breaker_open_bulk_read": 0}
    assert scene.recorder.drain() == {}


@pytest.mark.parametrize(("verb", "times"), [("get", 3), ("put", 1)])
def test_a_store_that_is_asked_too_much_is_spared_writes_first(verb: str, times: int) -> None:
    inner = FlakyStore(MemoryStore())
    store = BreakerStore(inner, Breakers("bulk", Patience(), NullRecorder()))
    inner.fail_next(StoreBusy("503"), times)
    for _ in range(times):
        with pytest.raises(StoreBusy):
            store.get("k") if verb == "get" else store.put("k", b"v")
    with pytest.raises(LeftAlone):
        store.put_if_absent("k", b"v")
    assert store.get("k") is None
    assert inner.calls == [*[verb] * times, "get"]


def test_a_probe_is_known_as_one(scene: Scene) -> None:
    trials: list[bool] = []

    class Asked(MemoryStore):
        def get(self, key: str) -> bytes | None:
            trials.append(is_trial())
            raise DOWN

    store = BreakerStore(Asked(), scene.breakers)
    for _ in range(4):
        with pytest.raises(StoreUnavailable):
            store.get("k")
    scene.now_s += 10
    with pytest.raises(StoreUnavailable, match="down"):
        store.get("k")
    assert trials == [False, False, False, True]
