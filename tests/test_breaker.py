"""``Breaker``: when it tries again, over outages of all lengths, by a clock that is told."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from objkv.breaker import Breaker, Change, Patience
from objkv.errors import StoreDenied, StoreError, StoreUnavailable
from objkv.telemetry import MemoryRecorder, NullRecorder
from objkv.testing.clock import ManualClock

PATIENCE = Patience(failures=3, reset_s=1.0, reset_max_s=15.0)
DAY_S = 86_400.0


class Server:
    """Answers, or not, and counts who asks; time passes when told to."""

    def __init__(self, patience: Patience = PATIENCE) -> None:
        self.clock = ManualClock(0.0)
        self.changes: list[Change] = []
        self.recorder = MemoryRecorder()
        self.breaker = Breaker("bulk", "read", patience, self.recorder, self.changes.append)
        self.breaker.clock = self.clock
        self.error: StoreError | None = StoreUnavailable("down")
        self.asked_s: list[float] = []

    def call(self) -> bool:
        """Whether it answered."""
        try:
            self.breaker.call("get", self._answer)
        except StoreError:
            return False
        return True

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


def test_a_probe_that_does_not_return_is_not_the_last_but_threads_are_not_used_up() -> None:
    server = Server()
    for _ in range(PATIENCE.failures):
        server.call()
    server.error = None
    entered, gate = threading.Semaphore(0), threading.Event()

    def hang() -> None:
        entered.release()
        assert gate.wait(60)

    with ThreadPoolExecutor(2) as pool:
        probes = []
        for _ in range(2):
            server.clock.advance(PATIENCE.reset_max_s)
            probes.append(pool.submit(server.breaker.call, "get", hang))
            assert entered.acquire(timeout=60)
        server.clock.advance(PATIENCE.reset_max_s)
        assert not server.call()  # two threads are enough
        gate.set()
        for probe in probes:
            probe.result()
    assert server.call()
    assert [change.error is None for change in server.changes] == [False, True]


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
    server.error = StoreUnavailable("down")
    for _ in range(PATIENCE.failures):
        server.call()
    asked = len(server.asked_s)
    server.clock.advance(PATIENCE.reset_s)
    server.call()
    assert len(server.asked_s) == asked + 1


def test_a_server_that_is_back_for_a_moment_only_is_not_asked_ever_more_often() -> None:
    server = Server()
    for _ in range(6):
        server.error = StoreUnavailable("down")
        for _ in range(PATIENCE.failures):
            server.call()
        server.error = None
        while not server.call():
            server.clock.advance(0.25)
    server.error = StoreUnavailable("down")
    for _ in range(PATIENCE.failures):
        server.call()
    asked = len(server.asked_s)
    server.clock.advance(PATIENCE.reset_max_s / 2 - 0.1)
    server.call()
    assert len(server.asked_s) == asked


def test_refusals_and_failures_in_a_row_count_together_and_the_last_one_is_told() -> None:
    server = Server()
    server.call()
    server.call()
    server.error = StoreDenied("credentials expired")
    server.call()
    [change] = server.changes
    assert change.error is server.error
    assert server.recorder.value("breaker_open_bulk_read") == 1


def test_without_anybody_listening_it_works_as_well() -> None:
    breaker = Breaker("hot", "write", PATIENCE, NullRecorder())

    def fail() -> None:
        raise StoreUnavailable("down")

    for _ in range(5):
        with suppress(StoreUnavailable):
            breaker.call("put", fail)
    assert breaker.is_open
