"""``Guard``: each call passes role, slot, breaker, recorder and deadline, in this order."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import monotonic

import pytest

from objkv.errors import LeftAlone, StoreDenied, StoreUnavailable
from objkv.net.breaker import Breakers, Patience
from objkv.net.deadline import EndsBy, ends_s
from objkv.net.guard import Guard, Slots
from objkv.stores.guarded import STORE_VERBS
from objkv.telemetry import MemoryRecorder
from tests.stores.guards import guard_of

PATIENCE_S = 60.0


class World:
    """A guard with everything, and one slot, for which nothing waits."""

    def __init__(self, may_write: bool = True) -> None:
        self.recorder = MemoryRecorder()
        self.breakers = Breakers("bulk", Patience(failures=1, reset_s=3600), MemoryRecorder())
        self.guard = Guard(
            "bulk",
            STORE_VERBS,
            self.recorder,
            self.breakers,
            slots=Slots(1, 0.0),
            seconds=100.0,
            may_write=may_write,
        )


def fail(key: str) -> bytes | None:
    raise StoreUnavailable(f"{key}: down")


def never(_key: str, _value: bytes = b"") -> None:
    pytest.fail("called")


def hold_the_slot(world: World, while_held: Callable[[], None]) -> None:
    entered, gate = threading.Event(), threading.Event()

    def hold(_key: str) -> None:
        entered.set()
        assert gate.wait(PATIENCE_S)

    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(world.guard.call, "get", hold, "k")
        try:
            assert entered.wait(PATIENCE_S)
            world.recorder.drain()
            while_held()
        finally:
            gate.set()
        held.result()


def test_what_the_role_forbids_is_denied_before_anything_else() -> None:
    world = World(may_write=False)

    def write() -> None:
        with pytest.raises(StoreDenied, match="put k: role reader does not allow writes"):
            world.guard.call("put", never, "k", b"")

    hold_the_slot(world, write)
    assert "bulk_writes" not in world.recorder.drain()
    assert not world.breakers.read.is_open
    assert not world.breakers.write.is_open


def test_waiting_for_a_slot_is_neither_recorded_nor_a_failure_of_the_server() -> None:
    world = World()

    def read() -> None:
        with pytest.raises(
            StoreUnavailable, match="get: no free slot within 0 s, 1 calls in progress"
        ):
            world.guard.call("get", never, "k")
        assert world.recorder.drain() == {}

    hold_the_slot(world, read)
    assert not world.breakers.read.is_open
    assert not world.breakers.write.is_open


def test_a_call_that_waits_for_a_slot_gets_no_answer_of_the_breaker_before() -> None:
    world = World()

    def read() -> None:
        world.breakers.read.open(StoreUnavailable("down"))
        with pytest.raises(StoreUnavailable, match="no free slot"):
            world.guard.call("get", never, "k")

    hold_the_slot(world, read)


def test_a_refused_call_is_not_recorded_and_gives_its_slot_back() -> None:
    world = World()
    with pytest.raises(StoreUnavailable, match="k: down"):
        world.guard.call("get", fail, "k")
    assert world.recorder.drain()["bulk_get_errors_StoreUnavailable"] == 1
    for _ in range(3):
        with pytest.raises(LeftAlone):
            world.guard.call("get", never, "k")
    assert world.recorder.drain() == {}
    assert world.guard.call("put", lambda _key, _value: None, "k", b"v") is None


def test_a_write_that_gets_no_slot_gives_back_what_it_has() -> None:
    world = World()

    def write() -> None:
        for _ in range(3):
            with pytest.raises(StoreUnavailable, match="no free slot"):
                world.guard.call("put", never, "k", b"")

    hold_the_slot(world, write)
    world.guard.call("put", lambda _key, _value: None, "k", b"v")


@pytest.mark.parametrize(("verb", "seconds"), [("get", 100.0), ("scan", 1200.0)])
def test_the_deadline_bounds_the_call_and_what_walks_has_longer(verb: str, seconds: float) -> None:
    left: list[float] = []
    World().guard.call(verb, lambda _key: left.append(ends_s() - monotonic()), "k")
    assert seconds - 60 < left[0] <= seconds
    with EndsBy(monotonic() + 5):
        World().guard.call(verb, lambda _key: left.append(ends_s() - monotonic()), "k")
    assert left[1] <= 5


def test_without_a_deadline_of_its_own_the_callers_holds() -> None:
    ended: list[float] = []
    with EndsBy(5.0):
        guard_of().call("head", lambda _key: ended.append(ends_s()), "k")
    assert ended == [5.0]


def test_a_check_has_the_deadline_alone() -> None:
    with World().guard.deadline():
        assert 40 < ends_s() - monotonic() <= 100


def test_what_is_no_error_of_a_store_is_timed_and_counted_as_none() -> None:
    world = World()
    with pytest.raises(ZeroDivisionError):
        world.guard.call("get", lambda _key: 1 // 0, "k")  # type: ignore[arg-type]
    drained = world.recorder.drain()
    assert drained["bulk_get_seconds_count"] == drained["bulk_reads"] == 1
    assert not any("errors" in name for name in drained)
    assert not world.breakers.read.is_open
    assert not world.breakers.write.is_open
