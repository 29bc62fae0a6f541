"""The part of an index's contract about holders of payloads, and requests to them.

Every index passes it, also one that carries no requests. ``IndexContract`` contains it.
"""

from threading import Thread

import pytest

from objkv.index.base import REQUESTS_MAX, PruneIndex
from tests.contracts.clock import ManualClock

LONG_S = 1_000
"""A time to live that outlasts every test."""


class RequestContract:
    """Every ``PruneIndex`` passes all of these tests."""

    short_s = 100
    """A time to live that ends within ``pass_time``, but not during any other part of a test."""
    carries_requests = True
    """Whether it keeps holders, and requests to them."""

    @pytest.fixture
    def clock(self) -> ManualClock:
        """The time that the index under test uses."""
        return ManualClock()

    def pass_time(self, clock: ManualClock, seconds: float) -> None:
        """Let ``seconds`` pass for the index."""
        clock.advance(seconds)

    def test_a_sighting_keeps_its_first_holder(self, index: PruneIndex) -> None:
        assert index.holders([]) == []
        index.sight(["a", "b"], ttl_s=LONG_S, holder="me")
        index.sight(["b", "c"], ttl_s=LONG_S, holder="you")
        index.sight(["d"], ttl_s=LONG_S)
        index.sight(["d"], ttl_s=LONG_S, holder="you")
        found = ["you", "me", "me", "", ""] if self.carries_requests else [""] * 5
        assert index.holders(["c", "b", "a", "d", "e"]) == found

    def test_a_holder_lets_go_of_its_own_payloads_which_stay_sighted(
        self, index: PruneIndex
    ) -> None:
        index.sight(["a", "b"], ttl_s=LONG_S, holder="me")
        index.let_go([], "me")
        index.let_go(["a", "b", "c"], "you")
        index.let_go(["a", "c"], "me")
        assert index.holders(["a", "b", "c"]) == ["", "me" if self.carries_requests else "", ""]
        assert index.sight(["a", "b", "c"], ttl_s=LONG_S) == [True, True, False]

    def test_a_holder_is_forgotten_with_its_sighting(
        self, index: PruneIndex, clock: ManualClock
    ) -> None:
        index.sight(["a", "b"], ttl_s=self.short_s, holder="me")
        index.let_go(["b"], "me")
        self.pass_time(clock, self.short_s)
        assert index.holders(["a"]) == [""]
        assert index.sight(["a", "b"], ttl_s=LONG_S, holder="you") == [False, False]
        assert index.holders(["a", "b"]) == (["you", "you"] if self.carries_requests else ["", ""])

    def test_a_holder_reads_each_request_once_in_their_order(self, index: PruneIndex) -> None:
        assert not index.request("me", b"nobody reads")
        read = index.requests("me", wait_s=0.001)
        if not self.carries_requests:
            assert read is None
            assert not index.request("me", b"1")
            return
        assert read == []
        texts = [b"1", bytes(range(256)), b"x" * 65_536]
        assert [index.request("me", text) for text in texts] == [True] * 3
        assert not index.request("you", b"another")
        assert index.requests("me", wait_s=0.001) == texts
        assert index.requests("me", wait_s=0.001) == []

    def test_a_holder_that_waits_is_woken_by_a_request(self, index: PruneIndex) -> None:
        if index.requests("me", wait_s=0.001) is None:
            return
        found: list[bytes] = []

        def read() -> None:
            while not found:
                found.extend(index.requests("me", wait_s=1.0) or ())

        reader = Thread(target=read)
        reader.start()
        assert index.request("me", b"1")
        reader.join(60)
        assert found == [b"1"]

    def test_requests_that_nothing_reads_are_bounded(self, index: PruneIndex) -> None:
        if index.requests("me", wait_s=0.001) is None:
            return
        for number in range(3 * REQUESTS_MAX):
            assert index.request("me", b"%d" % number)
        read = []
        while some := index.requests("me", wait_s=0.001):
            read += some
        assert REQUESTS_MAX <= len(read) <= REQUESTS_MAX + 200
        assert read[-1] == b"%d" % (3 * REQUESTS_MAX - 1)
