"""``SharedGets``: one call for many callers, and no buffer touched too late."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from objkv.errors import StoreDenied, StoreError, StoreUnavailable
from objkv.net.deadline import EndsBy
from objkv.stores.memory import MemoryStore
from objkv.stores.singleflight import SharedGets
from tests.contracts.flaky import FlakyStore
from tests.contracts.store_contract import StoreContract


class TestSharedGets(StoreContract):
    @pytest.fixture
    def store(self) -> SharedGets:
        return SharedGets(MemoryStore(), wait_s=60)


class Scene:
    """A store with ``k`` = ``value`` whose calls wait at a gate."""

    def __init__(self, pool: ThreadPoolExecutor, wait_s: float) -> None:
        self.pool = pool
        self.gate = threading.Event()
        self.inner = FlakyStore(MemoryStore())
        self.inner.put("k", b"value")
        self.inner.calls.clear()
        self.inner.arrived.clear()
        self.inner.hold(self.gate)
        self.store = SharedGets(self.inner, wait_s=wait_s)

    def lead(self, call: Callable[[], Any]) -> "Future[Any]":
        leader = self.pool.submit(call)
        assert self.inner.arrived.wait(60)
        return leader

    def follow(self, *calls: Callable[[], Any]) -> "list[Future[Any]]":
        followers = [self.pool.submit(call) for call in calls]
        while self.store.waiting < len(calls):
            pass
        return followers


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as running:
        yield running


@pytest.fixture
def scene(pool: ThreadPoolExecutor) -> Scene:
    return Scene(pool, wait_s=60)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda store: store.get("k"), b"value"),
        (lambda store: store.get_range("k", 1, 3), b"al"),
        (lambda store: store.head("k").nbytes, 5),
        (lambda store: store.get("absent"), None),
    ],
)
def test_callers_of_one_moment_share_one_call(
    scene: Scene, call: Callable[[SharedGets], Any], expected: Any
) -> None:
    leader = scene.lead(lambda: call(scene.store))
    followers = scene.follow(*[lambda: call(scene.store)] * 4)
    scene.gate.set()
    assert [future.result() for future in [leader, *followers]] == [expected] * 5
    assert len(scene.inner.calls) == 1


def test_everybody_gets_the_bytes_in_a_buffer_of_his_own(scene: Scene) -> None:
    buffers = [bytearray(b"." * 8) for _ in range(4)]
    calls = [lambda b=buffer: scene.store.get_into("k", memoryview(b)) for buffer in buffers]
    leader = scene.lead(calls[0])
    followers = scene.follow(*calls[1:])
    scene.gate.set()
    assert [future.result() for future in [leader, *followers]] == [5] * 4
    assert buffers == [bytearray(b"value...")] * 4
    assert scene.inner.calls == ["get_into"]


def test_buffers_of_another_length_make_a_call_of_their_own(scene: Scene) -> None:
    short, long = bytearray(2), bytearray(8)
    leader = scene.lead(lambda: scene.store.get_into("k", memoryview(short)))
    other = scene.pool.submit(scene.store.get_into, "k", memoryview(long))
    scene.gate.set()
    with pytest.raises(StoreError, match="exceeds the buffer"):
        leader.result()
    assert other.result() == 5


def test_other_keys_ranges_and_verbs_are_not_shared(scene: Scene) -> None:
    scene.gate.set()
    leader = scene.lead(lambda: scene.store.get("k"))
    others = [
        scene.pool.submit(scene.store.get, "other"),
        scene.pool.submit(scene.store.get_range, "k", 0, 1),
        scene.pool.submit(scene.store.get_range, "k", 0, 2),
    ]
    assert [future.result() for future in [leader, *others]] == [b"value", None, b"v", b"va"]
    assert len(scene.inner.calls) == 4


def test_followers_fail_with_their_leader(scene: Scene) -> None:
    error = StoreDenied("403")
    scene.inner.fail_next(error)
    leader = scene.lead(lambda: scene.store.get("k"))
    followers = scene.follow(*[lambda: scene.store.get("k")] * 2)
    scene.gate.set()
    assert leader.exception() is error
    for follower in followers:
        assert type(follower.exception()) is StoreDenied
        assert follower.exception() is not error  # tracebacks are not shared among threads
    assert scene.store.get("k") == b"value"


def test_followers_of_an_interrupted_leader_get_the_value_all_the_same(scene: Scene) -> None:
    scene.inner.fail_next(MemoryError())
    leader = scene.lead(lambda: scene.store.get("k"))
    followers = scene.follow(*[lambda: scene.store.get("k")] * 3)
    scene.gate.set()
    assert type(leader.exception()) is MemoryError
    assert [follower.result() for follower in followers] == [b"value"] * 3


class NoLongerWantedError(Exception):
    """Ends one caller's get."""


def test_a_caller_that_ends_its_get_ends_nobody_elses(scene: Scene) -> None:
    def refuse(_nbytes: int) -> None:
        raise NoLongerWantedError

    told: list[int] = []
    mine, its = bytearray(8), bytearray(8)
    leader = scene.lead(lambda: scene.store.get_into("k", memoryview(its), refuse))
    (follower,) = scene.follow(lambda: scene.store.get_into("k", memoryview(mine), told.append))
    scene.gate.set()
    assert type(leader.exception()) is NoLongerWantedError
    assert follower.result() == 5
    assert mine[:5] == b"value"
    assert told[-1] == 5


def test_a_follower_that_gave_up_has_its_buffer_to_itself(pool: ThreadPoolExecutor) -> None:
    scene = Scene(pool, wait_s=0)
    leader = scene.lead(lambda: scene.store.get_into("k", memoryview(bytearray(8))))
    mine = bytearray(b"." * 8)
    with pytest.raises(StoreUnavailable, match="took longer than"):
        scene.store.get_into("k", memoryview(mine))
    scene.gate.set()
    assert leader.result() == 5
    assert mine == b"." * 8


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda store: store.put("k", b"new"), b"new"),
        (lambda store: store.delete("k"), None),
        (lambda store: store.delete("k") and store.put_if_absent("k", b"newer"), b"newer"),
    ],
)
def test_who_reads_after_a_change_does_not_join_a_call_from_before(
    scene: Scene, change: Callable[[SharedGets], Any], expected: bytes | None
) -> None:
    leader = scene.lead(lambda: scene.store.get("k"))
    scene.inner.mend()
    change(scene.store)
    assert scene.store.get("k") == expected
    scene.gate.set()
    leader.result()


def test_followers_with_more_time_than_the_leader_ask_again(scene: Scene) -> None:
    def hurried() -> bytes | None:
        with EndsBy(time.monotonic()):
            return scene.store.get("k")

    scene.inner.fail_next(StoreUnavailable("too late"))
    leader = scene.lead(hurried)
    (follower,) = scene.follow(lambda: scene.store.get("k"))
    scene.gate.set()
    with pytest.raises(StoreUnavailable):
        leader.result()
    assert follower.result() == b"value"
