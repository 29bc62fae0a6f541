"""``Guard``: each call passes role, breaker, recorder and deadline, in this order."""

from time import monotonic

import pytest

from objkv.errors import LeftAlone, StoreDenied, StoreUnavailable
from objkv.net.breaker import BreakerLimits, Breakers
from objkv.net.deadline import EndsBy, ends_s
from objkv.telemetry import MemoryRecorder
from tests.stores.guards import guard_of


class World:
    """A guard with everything. One failure opens its breaker."""

    def __init__(self, may_write: bool = True) -> None:
        self.recorder = MemoryRecorder()
        self.breakers = Breakers("bulk", BreakerLimits(failures=1, reset_s=3600), MemoryRecorder())
        options = {"breakers": self.breakers, "seconds": 100.0, "may_write": may_write}
        self.guard = guard_of(recorder=self.recorder, **options)

    def is_open(self) -> bool:
        return self.breakers.read.is_open or self.breakers.write.is_open


def fail(key: str) -> bytes | None:
    raise StoreUnavailable(f"{key}: down")


def never(_key: str, _value: bytes = b"") -> None:
    pytest.fail("called")


def test_what_the_role_forbids_is_denied_before_anything_else() -> None:
    world = World(may_write=False)
    world.breakers.write.open(StoreUnavailable("down"))
    with pytest.raises(StoreDenied, match="put k: role reader does not allow writes"):
        world.guard.call("put", never, "k", b"")
    assert world.recorder.drain() == {}


def test_a_call_that_the_breaker_refuses_is_not_recorded() -> None:
    world = World()
    with pytest.raises(StoreUnavailable, match="k: down"):
        world.guard.call("get", fail, "k")
    assert world.recorder.drain()["bulk_get_errors_StoreUnavailable"] == 1
    for _ in range(3):
        with pytest.raises(LeftAlone):
            world.guard.call("get", never, "k")
    assert world.recorder.drain() == {}
    assert world.guard.call("put", lambda _key, _value: None, "k", b"v") is None


@pytest.mark.parametrize(("verb", "seconds"), [("get", 100.0), ("scan", 1200.0)])
def test_the_deadline_bounds_the_call_and_what_walks_has_longer(verb: str, seconds: float) -> None:
    left: list[float] = []
    World().guard.call(verb, lambda _key: left.append(ends_s() - monotonic()), "k")
    assert seconds - 60 < left[0] <= seconds
    with EndsBy(monotonic() + 5):
        World().guard.call(verb, lambda _key: left.append(ends_s() - monotonic()), "k")
    assert left[1] <= 5
    with World().guard.deadline():  # that of a check
        assert 40 < ends_s() - monotonic() <= 100


def test_without_a_deadline_of_its_own_the_callers_holds() -> None:
    ended: list[float] = []
    with EndsBy(5.0):
        guard_of().call("head", lambda _key: ended.append(ends_s()), "k")
    assert ended == [5.0]


def test_what_is_no_error_of_a_store_is_timed_and_counted_as_none() -> None:
    world = World()
    with pytest.raises(ZeroDivisionError):
        world.guard.call("get", lambda _key: 1 // 0, "k")  # type: ignore[arg-type]
    drained = world.recorder.drain()
    assert drained["bulk_get_seconds_count"] == drained["bulk_reads"] == 1
    assert not any("errors" in name for name in drained)
    assert not world.is_open()
