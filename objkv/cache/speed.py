"""How fast something was lately: a meter of bytes and seconds, of bounded size, for decisions.

Nothing here reads a clock: whoever did the work says how long it took.
"""

from collections import deque
from math import ceil
from threading import Lock

_RECENT_MAX = 128
"""Durations kept for percentiles."""
_GETS_MIN = 8
"""Gets before which puts say more."""
_WEIGHT_MAX = 4
"""What a large piece of work counts for at most, in pieces of the usual size."""


class Meter:
    """Bytes per second, and the spread of durations, of recent pieces of work.

    Safe from many threads. What is ``half_life`` observations old counts half.
    """

    def __init__(self, half_life: int = 16) -> None:
        assert half_life > 0
        self._keep = 0.5 ** (1 / half_life)
        self._lock = Lock()
        self._bytes = 0.0
        self._seconds = 0.0
        self._recent: deque[float] = deque(maxlen=_RECENT_MAX)

    def observe(self, nbytes: int, seconds: float) -> None:
        """``nbytes`` took ``seconds``. What took no time, or moved nothing, says nothing."""
        if nbytes <= 0 or not seconds > 0:
            return
        with self._lock:
            # Both sums decay, so a large piece weighs more than a small one, as it should: the
            # quotient is the time that bytes take, not the mean of two speeds.
            self._bytes = self._bytes * self._keep + nbytes
            self._seconds = self._seconds * self._keep + seconds
            self._recent.append(seconds)

    @property
    def bytes_per_s(self) -> float | None:
        """Recent throughput; None before the first observation."""
        with self._lock:
            return self._bytes / self._seconds if self._seconds else None

    @property
    def count(self) -> int:
        """How many observations there are, 128 at most."""
        with self._lock:
            return len(self._recent)

    def seconds_percentile(self, q: float) -> float | None:
        """The duration that a share ``q`` (0 to 1) of the last 128 observations did not exceed;
        None before the first."""
        assert 0 <= q <= 1
        with self._lock:
            recent = sorted(self._recent)
        return recent[max(0, ceil(q * len(recent)) - 1)] if recent else None

    def __repr__(self) -> str:
        speed, half = self.bytes_per_s, self.seconds_percentile(0.5)
        if speed is None or half is None:
            return "<Meter, nothing measured>"
        return f"<Meter {speed / 1e6:.0f} MB/s, p50 {1000 * half:.1f} ms>"


class Typical:
    """Seconds that one unit of work (a byte, a token) typically took lately: the median, by units,
    of the last ``recent_max`` pieces of work.

    For decisions after which there is little to measure: an average would remember one piece that
    took a hundred times too long for as long as a hundred others take to come. One thread.
    """

    def __init__(self, recent_max: int = 9) -> None:
        assert recent_max > 0
        self._recent: deque[tuple[float, int]] = deque(maxlen=recent_max)
        self.count = 0
        """How many pieces of work there were."""
        self.seconds_per_unit: float | None = None
        """None before the first."""

    def observe(self, units: int, seconds: float) -> None:
        """``units`` took ``seconds``. What took no time, or had no units, says nothing."""
        if units <= 0 or not seconds > 0:
            return
        self.count += 1
        self._recent.append((seconds / units, units))
        self.seconds_per_unit = self._median()

    def _median(self) -> float:
        usual = sorted(units for _, units in self._recent)[len(self._recent) // 2]
        paces = [(pace, min(units, _WEIGHT_MAX * usual)) for pace, units in sorted(self._recent)]
        half = sum(weight for _, weight in paces) / 2
        for pace, weight in paces:
            half -= weight
            if half <= 0:
                return pace
        return paces[-1][0]  # never, but for rounding

    def __repr__(self) -> str:
        pace = self.seconds_per_unit
        return f"<Typical {f'{1 / pace:.4g} units/s' if pace else 'nothing measured'}>"


class LinkSpeed:
    """What one process sees of the way to the bulk store, one call at a time, of those that it has
    under way at once. Told by whoever puts and gets."""

    def __init__(self) -> None:
        self.puts = Meter()
        self.gets = Meter()

    @property
    def bytes_per_s(self) -> float | None:
        """Of a get, once a few were seen, because loading is what shall be fast; until then of a
        put. None while nothing is known."""
        gets = self.gets.bytes_per_s if self.gets.count >= _GETS_MIN else None
        return self.puts.bytes_per_s if gets is None else gets

    def __repr__(self) -> str:
        return f"<LinkSpeed puts {self.puts!r}, gets {self.gets!r}>"
