from threading import Event

import pytest

from objkv.errors import StoreDenied, StoreUnavailable
from objkv.index.breaker import BreakerIndex
from objkv.index.memory import MemoryIndex
from objkv.net.breaker import Breakers, Patience
from objkv.telemetry import NullRecorder
from objkv.testing.clock import ManualClock
from objkv.testing.index_contract import NAMESPACE, at_once
from tests.index.flaky_index import FlakyIndex

RESET_S = 5
PATIENCE_S = 120
"""For other threads to come, on a machine that is busy with other things."""


class Place:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.inner = FlakyIndex(MemoryIndex())
        self.changes: list[bool] = []
        breakers = Breakers(
            "index",
            Patience(failures=3, reset_s=RESET_S, reset_max_s=RESET_S),
            NullRecorder(),
            clock=self.clock,
            on_change=lambda change: self.changes.append(change.error is not None),
        )
        self.breaker = BreakerIndex(self.inner, breakers)

    def fail(self, times: int) -> None:
        self.inner.error = StoreUnavailable("down")
        for _ in range(times):
            with pytest.raises(StoreUnavailable, match="down"):
                self.breaker.lookup(NAMESPACE, [])


@pytest.fixture
def place() -> Place:
    return Place()


def test_an_open_breaker_answers_without_asking(place: Place) -> None:
    place.fail(3)
    asked = len(place.inner.calls)
    for call in (
        lambda: place.breaker.lookup(NAMESPACE, []),
        lambda: place.breaker.find(NAMESPACE, [], []),
        lambda: next(place.breaker.scan(NAMESPACE)),
        lambda: place.breaker.namespaces(),
    ):
        with pytest.raises(StoreUnavailable, match="left alone"):
            call()
    assert len(place.inner.calls) == asked
    assert place.changes == [True]


def test_writes_that_are_denied_do_not_stop_reads(place: Place) -> None:
    """As those of a replica that may only read."""
    place.inner.error = StoreDenied("no")
    for _ in range(3):
        with pytest.raises(StoreDenied):
            place.breaker.lease("x", "me", ttl_ms=1)
    with pytest.raises(StoreUnavailable, match="left alone"):
        place.breaker.touch(NAMESPACE, [], ttl_s=1)
    place.inner.error = None
    assert place.breaker.lookup(NAMESPACE, []) == []


def test_failures_must_follow_one_another(place: Place) -> None:
    for _ in range(3):
        place.fail(2)
        place.inner.error = None
        place.breaker.lookup(NAMESPACE, [])
    assert place.changes == []


def test_a_probe_that_succeeds_closes_it(place: Place) -> None:
    place.fail(3)
    place.inner.error = None
    place.clock.advance(RESET_S)
    assert place.breaker.lookup(NAMESPACE, []) == []
    assert place.breaker.lookup(NAMESPACE, []) == []
    assert place.changes == [True, False]


def test_a_probe_that_fails_keeps_it_open_for_another_while_and_is_no_news(place: Place) -> None:
    place.fail(3)
    for _ in range(3):
        place.clock.advance(RESET_S)
        place.fail(1)
        with pytest.raises(StoreUnavailable, match="left alone"):
            place.breaker.lookup(NAMESPACE, [])
    assert place.changes == [True]


def test_only_one_call_probes(place: Place) -> None:
    place.fail(3)
    place.inner.error = None
    place.clock.advance(RESET_S)
    probing, refused = Event(), Event()
    place.inner.after = lambda: (probing.set(), refused.wait(PATIENCE_S))

    def probe() -> object:
        return place.breaker.lookup(NAMESPACE, [])

    def other() -> object:
        probing.wait(PATIENCE_S)
        try:
            with pytest.raises(StoreUnavailable, match="left alone"):
                place.breaker.lookup(NAMESPACE, [])
        finally:
            refused.set()
        return None

    assert at_once([probe, other]) == [[], None]
    assert place.changes == [True, False]


def test_calls_do_not_wait_for_one_another(place: Place) -> None:
    first, second = Event(), Event()
    waits = iter([(first, second), (second, first)])

    def meet() -> None:
        mine, others = next(waits)
        mine.set()
        assert others.wait(PATIENCE_S)

    place.inner.after = meet
    at_once([lambda: place.breaker.lookup(NAMESPACE, [])] * 2)


def test_a_call_that_began_before_it_opened_changes_nothing(place: Place) -> None:
    def fail_meanwhile() -> None:
        place.inner.after = lambda: None
        place.fail(3)
        place.inner.error = None

    place.inner.after = fail_meanwhile
    assert place.breaker.lookup(NAMESPACE, []) == []
    assert place.changes == [True]


def test_checking_and_closing_ask_the_index_itself(place: Place) -> None:
    place.fail(3)
    place.breaker.check()
    place.breaker.close()


def test_repr_tells_the_state(place: Place) -> None:
    assert repr(place.breaker).startswith("<BreakerIndex reads closed, writes closed of <")
    place.fail(3)
    assert repr(place.breaker).startswith("<BreakerIndex reads open, writes closed of <")
