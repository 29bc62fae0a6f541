"""When a request that is slow to be answered is sent once more: rarely, and late enough."""

import threading

SAMPLES = 256
SAMPLES_MIN = 20
LATE_MIN_S = 0.01
"""Sooner than this nothing is late: the second request would cost more than it can win."""
_SHARE = 0.95
_REFRESH = 16
_SAVED_MAX = 8.0
"""Hedges that may have been saved up: a store that slows down must not get twice the requests."""


class Hedge:
    """Observes how long answers take to begin. Safe from many threads.

    ``percent_max``: of requests, so many are sent twice; 0 is none.
    """

    def __init__(self, percent_max: int) -> None:
        self._share = percent_max / 100
        self._lock = threading.Lock()
        self._samples: list[float] = []
        self._count = 0
        self._late_s: float | None = None
        self._saved = 0.0

    def observe(self, first_byte_s: float) -> None:
        """Add what one request took from being sent to the first byte of its answer."""
        if not self._share:
            return
        with self._lock:
            if len(self._samples) < SAMPLES:
                self._samples.append(first_byte_s)
            else:
                self._samples[self._count % SAMPLES] = first_byte_s
            self._count += 1
            self._saved = min(_SAVED_MAX, self._saved + self._share)
            if self._count >= SAMPLES_MIN and self._count % _REFRESH == SAMPLES_MIN % _REFRESH:
                ranked = sorted(self._samples)
                self._late_s = max(LATE_MIN_S, ranked[int(_SHARE * (len(ranked) - 1))])

    def late_s(self) -> float | None:
        """After how many seconds an answer is late: later than 95 of 100. None while too few are
        known, or no request may be sent twice."""
        return self._late_s

    def take(self) -> bool:
        """Whether one more request may be sent twice; counts it if so."""
        with self._lock:
            if self._saved < 1:
                return False
            self._saved -= 1
            return True
