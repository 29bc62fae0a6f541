"""Meters of recent speed, for decisions. Callers pass the duration of their work."""

from bisect import bisect_left
from collections import deque
from itertools import accumulate
from threading import Lock

_RECENT_MAX = 9
"""Number of pieces of work of which a ``Typical`` is the median."""
_GETS_MIN = 8
"""Number of gets below which puts are the better estimate."""
_WEIGHT_MAX = 4
"""Maximum weight of a large piece of work, in pieces of the usual size."""


class Typical:
    """The typical recent time for one unit of work (a byte, a token): the median of the last few
    pieces, weighted by units. One that took a hundred times too long must not dominate.
    Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._recent: deque[tuple[float, int]] = deque(maxlen=_RECENT_MAX)
        self.count = 0
        self.seconds_per_unit: float | None = None
        """None before the first observation."""

    def observe(self, units: int, seconds: float) -> None:
        """Record that ``units`` took ``seconds``. Ignores zero durations and zero units."""
        if units <= 0 or not seconds > 0:
            return
        with self._lock:
            self.count += 1
            self._recent.append((seconds / units, units))
            self.seconds_per_unit = self._median()

    def _median(self) -> float:
        recent = sorted(self._recent)
        sizes = sorted([units for _, units in recent])
        most = _WEIGHT_MAX * sizes[len(sizes) // 2]
        weights = list(accumulate([min(units, most) for _, units in recent]))
        return recent[bisect_left(weights, weights[-1] / 2)][0]


class LinkSpeed:
    """The link to the bulk store, as one process measures it among concurrent calls."""

    def __init__(self) -> None:
        self.puts, self.gets = Typical(), Typical()

    @property
    def bytes_per_s(self) -> float | None:
        """Speed of gets, because loads must be fast, before a few gets of puts; None before any."""
        gets = self.gets.seconds_per_unit if self.gets.count >= _GETS_MIN else None
        pace = self.puts.seconds_per_unit if gets is None else gets
        return None if pace is None else 1 / pace
