"""``Breaker``: when it tries again, over outages of all lengths, by a clock set by hand."""

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from objkv.errors import LeftAlone, StoreBusy, StoreDenied, StoreError, StoreUnavailable
from objkv.net.breaker import Attempt, Breaker, BreakerLimits, Breakers, Direction
from objkv.net.deadline import EndsBy
from objkv.telemetry import NullRecorder
from tests.contracts.clock import ManualClock

PATIENCE = BreakerLimits(failures=3, reset_s=1.0, reset_max_s=15.0)
DAY_S = 86_400.0


class Server:
    """Replies or fails, and counts callers. Its time passes on request."""

    def __init__(self, limits: BreakerLimits = PATIENCE) -> None:
        self.clock = ManualClock(0.0)
        self.breaker = Breaker("bulk", "read", limits, NullRecorder(), clock=self.clock)
        self.breaker.now_s = self.clock
        self.error: StoreError | None = StoreUnavailable("down")
        self.asked_s: list[float] = []

    def open(self, error: StoreError | None = None) -> None:
        """Fail until its breaker opens; ``error`` is what comes afterwards."""
        self.error = StoreUnavailable("down")
        for _ in range(PATIENCE.failures):
            assert not self.call()
        self.error = error

    def call(self) -> bool:
        try:
            self.make(self._answer)
        except StoreError:
            return False
        return True

    def make(self, call: Callable[[], object]) -> None:
        with Attempt(self.breaker, "get"):
            call()

    def _answer(self) -> None:
        self.asked_s.append(self.clock.now_s)
        if self.error is not None:
            raise self.error


@given(
    outages=st.lists(
        st.tuples(st.floats(0.1, 3 * DAY_S), st.floats(0.0, 100.0)), min_size=1, max_size=4
    ),
    draws=st.lists(st.floats(0.0, 1.0, exclude_max=True), min_size=1, max_size=7),
    every_s=st.sampled_from([0.25, 4.0]),
)
def test_an_outage_costs_its_own_length_and_a_bounded_time_more(
    outages: list[tuple[float, float]], draws: list[float], every_s: float
) -> None:
    server = Server()
    drawn = iter(draws * 20_000)
    server.breaker.draw = lambda: next(drawn)
    for outage_s, calm_s in outages:
        ends_s = server.clock.now_s + outage_s
        server.error = StoreUnavailable("down")
        for _ in range(PATIENCE.failures):
            assert not server.call()
        while server.clock.now_s < ends_s:  # calls come all the time; those in between are refused
            server.clock.advance(max(every_s, outage_s / 60))
            server.call()
        server.error = None
        bound_s = server.clock.now_s + PATIENCE.reset_max_s
        while not server.call():
            server.clock.advance(every_s)
            assert server.clock.now_s <= bound_s + every_s
        server.clock.advance(calm_s)
        assert server.call()


@settings(max_examples=30)
@given(st.floats(1.0, DAY_S))
def test_a_server_that_stays_away_is_seldom_asked(outage_s: float) -> None:
    server = Server()
    for _ in range(PATIENCE.failures):
        server.call()
    step_s = max(0.25, outage_s / 200)
    while server.clock.now_s < outage_s:
        server.clock.advance(step_s)
        server.call()
    pauses = [after - before for before, after in pairwise(server.asked_s[2:])]
    assert all(pause >= PATIENCE.reset_s / 2 for pause in pauses)
    assert all(pause >= PATIENCE.reset_max_s / 2 for pause in pauses[4:])
    assert all(pause <= PATIENCE.reset_max_s + step_s for pause in pauses)


def test_replicas_do_not_try_again_in_step() -> None:
    servers = [Server() for _ in range(50)]
    for now in range(600):
        for server in servers:
            server.clock.now_s = now / 4
            server.call()
    late = [tuple(at for at in server.asked_s if at > 60) for server in servers]
    assert all(late)
    by_moment: dict[float, int] = {}
    for moments in late:
        for at in moments:
            by_moment[at] = by_moment.get(at, 0) + 1
    assert max(by_moment.values()) < 25  # of 50, in one quarter of a second
    assert len(set(late)) > 40


def test_the_first_pause_is_short_again_after_the_server_was_back() -> None:
    server = Server()
    for _ in range(2):
        server.error = StoreUnavailable("down")
        for _ in range(100):
            server.call()
            server.clock.advance(15.0)
        server.error = None
        while not server.call():
            server.clock.advance(1.0)
        server.clock.advance(PATIENCE.reset_max_s + 1)
    server.open(StoreUnavailable("down"))
    asked = len(server.asked_s)
    server.clock.advance(PATIENCE.reset_s)
    server.call()
    assert len(server.asked_s) == asked + 1


def test_a_server_that_is_back_for_a_moment_only_is_not_asked_ever_more_often() -> None:
    server = Server()
    for _ in range(6):
        server.open()
        while not server.call():
            server.clock.advance(0.25)
    server.open(StoreUnavailable("down"))
    asked = len(server.asked_s)
    server.clock.advance(PATIENCE.reset_max_s / 2 - 0.1)
    server.call()
    assert len(server.asked_s) == asked


DOWN, DENIED = StoreUnavailable("down"), StoreDenied("403")


@pytest.mark.parametrize(
    ("given_s", "spent_s", "error", "is_failure"),
    [
        *((given_s, given_s, DOWN, False) for given_s in (0.0, 0.005, 0.9)),
        (0.1, 0.08, DOWN, False),  # S3 begins none in the last quarter of the time there is
        (1.0, 1.0, DOWN, True),  # time enough
        *((0.1, 0.0, error, True) for error in (DOWN, DENIED)),
        *((0.1, 0.1, error, True) for error in (DENIED, StoreBusy("503"))),  # late answers
    ],
)
def test_a_failure_is_the_servers_unless_its_caller_had_too_little_time(
    given_s: float, spent_s: float, error: StoreError, is_failure: bool
) -> None:
    server = Server()

    def answer() -> None:
        server.clock.advance(spent_s)
        raise error

    def call() -> None:
        with pytest.raises(type(error), match=str(error)), EndsBy(server.clock.now_s + given_s):
            server.make(answer)

    for _ in range(PATIENCE.failures if is_failure else 10):
        assert not server.breaker.is_open
        call()
    assert server.breaker.is_open is is_failure
    if not is_failure:  # nor is it an answer
        server.call()
        server.call()
        call()
        server.call()
        assert server.breaker.is_open


def test_a_deadline_set_within_the_call_is_the_servers() -> None:
    server = Server()

    def stall() -> None:
        with EndsBy(server.clock.now_s + 0.1):
            server.clock.advance(0.1)
            raise DOWN

    for _ in range(PATIENCE.failures):
        with pytest.raises(StoreUnavailable):
            server.make(stall)
    assert server.breaker.is_open


def test_a_probe_cut_short_by_its_caller_keeps_its_pause_and_is_not_waited_for() -> None:
    server = Server()
    server.breaker.draw = lambda: 1.0
    server.open()

    def late() -> None:
        server.clock.advance(0.005)
        raise StoreUnavailable("the deadline passed")

    for _ in range(3):
        server.clock.advance(PATIENCE.reset_max_s)
        with pytest.raises(StoreUnavailable, match="passed"), EndsBy(server.clock.now_s + 0.005):
            server.make(late)
        assert not server.call()
    server.clock.advance(PATIENCE.reset_max_s)
    assert server.call()


def test_a_probe_that_raises_what_is_no_error_of_a_store_keeps_its_pause() -> None:
    server = Server()
    server.open()
    server.clock.advance(PATIENCE.reset_max_s)
    for number in range(10):
        with pytest.raises(LeftAlone if number else ZeroDivisionError):
            server.make(lambda: 1 // 0)
    server.clock.advance(PATIENCE.reset_max_s)
    server.error = None
    assert server.call()


def test_one_probe_at_a_time_and_no_call_from_before_closes_it() -> None:
    server = Server()
    server.make(server.open)
    assert server.breaker.is_open
    server.clock.advance(PATIENCE.reset_max_s)
    asked = len(server.asked_s)
    server.make(server.call)
    assert len(server.asked_s) == asked, "refused while another tries"
    assert server.call()


class Busy:
    """Breakers of a server that is overloaded now and then."""

    def __init__(self) -> None:
        self.clock = ManualClock(0.0)
        self.breakers = Breakers("bulk", PATIENCE, NullRecorder(), clock=self.clock)
        self.breakers.write.draw = lambda: 1.0

    def call(self, direction: Direction, error: StoreError | None = None) -> bool:
        try:
            with self.breakers.attempt(direction, "verb"):
                if error is not None:
                    raise error
        except StoreError:
            return False
        return True

    def busy_reads(self, count: int = 3) -> None:
        for _ in range(count):
            self.call("read", StoreBusy("503"))
            self.call("read")


@pytest.mark.parametrize(("reads", "pause_s"), [(98, 1.0), (0, 4.0)])
def test_a_read_now_and_then_that_is_too_much_stops_no_writes(reads: int, pause_s: float) -> None:
    server = Busy()
    for _ in range(100):
        server.busy_reads(1)
        assert sum(server.call("read") for _ in range(reads)) == reads
        server.clock.advance(pause_s)
        assert server.call("write")


def test_several_reads_that_are_too_much_stop_writes_for_the_first_pause_each_time() -> None:
    server = Busy()
    for _ in range(20):
        server.busy_reads(2)
        assert server.call("write")
        server.busy_reads(1)
        assert not server.call("write")
        server.clock.advance(PATIENCE.reset_s - 0.1)
        assert not server.call("write")
        server.clock.advance(0.2)
        assert server.call("write")
    for _ in range(PATIENCE.failures):  # nor is the next pause longer for it
        server.call("write", StoreUnavailable("down"))
    assert not server.call("write")
    server.clock.advance(PATIENCE.reset_s + 0.1)
    assert server.call("write")


def test_writes_that_fail_when_tried_again_are_left_alone_ever_longer_whatever_stopped_them() -> (
    None
):
    server = Busy()
    server.busy_reads()
    for pause_s in (1.0, 2.0, 4.0):
        server.clock.advance(pause_s - 0.1)
        assert not server.call("write")
        server.clock.advance(0.2)
        assert not server.call("write", StoreUnavailable("down"))
    server.clock.advance(7.9)
    assert not server.call("write")


def test_reads_that_are_too_much_make_no_pause_of_failing_writes_shorter() -> None:
    server = Busy()
    for _ in range(6):  # back for a moment only
        for _ in range(PATIENCE.failures):
            server.call("write", StoreUnavailable("down"))
        while not server.call("write"):
            server.clock.advance(0.25)
    server.busy_reads()
    while not server.call("write"):
        server.clock.advance(0.25)
    for _ in range(PATIENCE.failures):
        server.call("write", StoreUnavailable("down"))
    server.clock.advance(PATIENCE.reset_max_s - 0.1)
    assert not server.call("write")
