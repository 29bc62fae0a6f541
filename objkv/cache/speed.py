"""Meters of recent speed, in bytes and seconds, of bounded size, for decisions.

Nothing here reads a clock: callers pass the duration of their work.
"""

from collections import deque
from math import ceil
from threading import Lock

_RECENT_MAX = 128
"""Number of durations kept for percentiles."""
_GETS_MIN = 8
"""Number of gets below which puts are the better estimate."""
_WEIGHT_MAX = 4
"""Maximum weight of a large piece of work, in pieces of the usual size."""


class Meter:
    """Throughput and the distribution of durations of recent pieces of work. Thread-safe.

    The weight of an observation halves after ``half_life`` later ones.
    """

    def __init__(self, half_life: int = 16) -> None:
        assert half_life > 0
        self._keep = 0.5 ** (1 / half_life)
        self._lock = Lock()
        self._bytes = 0.0
        self._seconds = 0.0
        self._recent: deque[float] = deque(maxlen=_RECENT_MAX)

    def observe(self, nbytes: int, seconds: float) -> None:
        """Record that ``nbytes`` took ``seconds``. Ignores zero durations and zero bytes."""
        if nbytes <= 0 or not seconds > 0:
            return
        with self._lock:
            # Both sums decay, so that a large piece weighs more than a small one. Their quotient is
            # the time per byte, not the average of two speeds.
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
        """Number of observations, at most 128."""
        with self._lock:
            return len(self._recent)

    def seconds_percentile(self, q: float) -> float | None:
        """Return the duration that a share ``q`` (0 to 1) of the last 128 observations did not
        exceed; None before the first."""
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
    """The typical recent time for one unit of work (a byte, a token): the median, weighted by
    units, of the last ``recent_max`` pieces of work. Not thread-safe.

    For decisions that leave little to measure. With an average, one piece that took a hundred times
    too long would dominate until a hundred others follow.
    """

    def __init__(self, recent_max: int = 9) -> None:
        assert recent_max > 0
        self._recent: deque[tuple[float, int]] = deque(maxlen=recent_max)
        self.count = 0
        """Number of pieces of work."""
        self.seconds_per_unit: float | None = None
        """None before the first observation."""

    def observe(self, units: int, seconds: float) -> None:
        """Record that ``units`` took ``seconds``. Ignores zero durations and zero units."""
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
        return paces[-1][0]  # only because of rounding

    def __repr__(self) -> str:
        pace = self.seconds_per_unit
        return f"<Typical {f'{1 / pace:.4g} units/s' if pace else 'nothing measured'}>"


class LinkSpeed:
    """One process's view of the link to the bulk store: the speed of a single call among its
    concurrent ones. Callers that put and get report to it."""

    def __init__(self) -> None:
        self.puts = Meter()
        self.gets = Meter()

    @property
    def bytes_per_s(self) -> float | None:
        """Speed of a get after a few gets, because loads must be fast; before that, of a put. None
        if neither was measured."""
        gets = self.gets.bytes_per_s if self.gets.count >= _GETS_MIN else None
        return self.puts.bytes_per_s if gets is None else gets

    def __repr__(self) -> str:
        return f"<LinkSpeed puts {self.puts!r}, gets {self.gets!r}>"
