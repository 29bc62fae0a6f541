"""The time of an index under test."""

import pytest

from objkv.testing.clock import ManualClock


class TimedContract:
    """What tests of an index need that let time pass; fixtures as in ``IndexContract``."""

    short_s = 100
    """A time to live that ``pass_time`` outlives, and that no test does."""

    @pytest.fixture
    def clock(self) -> ManualClock:
        """What the index under test reads the time from."""
        return ManualClock()

    def pass_time(self, clock: ManualClock, seconds: float) -> None:
        """Let ``seconds`` pass for the index."""
        clock.advance(seconds)
