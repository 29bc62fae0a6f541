"""Recorders of counters and observations. Prometheus, vLLM's stats and tables read them.

Pure modules and stores never log. They only count, which is thread-safe.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping
from logging import Logger
from threading import Lock
from typing import Protocol

_LEVELS = ("breaker_open_", "admission_switched")
"""How the names of levels begin."""
_SAMPLES_MAX = 1000
"""Single observations kept per name until they are drained. Sums and counts include all."""


class Recorder(Protocol):
    """Collects numbers. Names are ``noun_unit`` (``load_bytes``, ``lookup_misses``)."""

    def count(self, name: str, amount: float = 1) -> None:
        """Add ``amount`` to the counter ``name``."""

    def observe(self, name: str, value: float) -> None:
        """Add one observation (a duration in seconds, a size in bytes) to ``name``."""

    def level(self, name: str, value: float) -> None:
        """Set the gauge ``name``. Its usual value is 0."""


class FailureLog:
    """Logs once when something begins to fail, and once when it works again."""

    def __init__(self, logger: Logger, what: str) -> None:
        self._logger = logger
        self._what = what
        self._lock = Lock()
        self._failing = False

    def failed(self, reason: BaseException) -> None:
        """Report a failure. Only the first of consecutive failures is logged."""
        with self._lock:
            news, self._failing = not self._failing, True
        if news:  # as text: a log that keeps records would keep what the failed call held
            text = str(reason)
            self._logger.warning("%s failing, serving without them reason=%s", self._what, text)

    def worked(self) -> None:
        """Report a success."""
        if not self._failing:
            return
        with self._lock:
            news, self._failing = self._failing, False
        if news:
            self._logger.warning("%s working again", self._what)


class NullRecorder:
    """Drops all numbers."""

    def count(self, name: str, amount: float = 1) -> None:
        """Drop it."""

    def observe(self, name: str, value: float) -> None:
        """Drop it."""

    def level(self, name: str, value: float) -> None:
        """Drop it."""


def added(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """Combine the numbers of two recorders: the sum per name, for maxima and levels the larger."""
    sums = dict(one)
    for name, value in other.items():
        mine = sums.get(name, 0.0)
        sums[name] = max(mine, value) if name.endswith("_max") or is_level(name) else mine + value
    return sums


def is_level(name: str) -> bool:
    """Whether ``name`` is a level. Reports from other processes contain names only."""
    return name.startswith(_LEVELS)


class MemoryRecorder:
    """Keeps counters, and count, sum and maximum per observed name, until they are drained."""

    def __init__(self, sampled: Collection[str] = ()) -> None:
        """``sampled``: names whose single observations are kept as well."""
        self._lock = Lock()
        self._samples: dict[str, list[float]] = {name: [] for name in sampled}
        self._counters: defaultdict[str, float] = defaultdict(float)
        self._observed: dict[str, tuple[int, float, float]] = {}
        self._levels: dict[str, float] = {}

    def count(self, name: str, amount: float = 1) -> None:
        """Add ``amount`` to the counter ``name``."""
        with self._lock:
            self._counters[name] += amount

    def observe(self, name: str, value: float) -> None:
        """Add one observation to ``name``."""
        with self._lock:
            n, total, largest = self._observed.get(name, (0, 0.0, value))
            self._observed[name] = (n + 1, total + value, max(largest, value))
            samples = self._samples.get(name)
            if samples is not None and len(samples) < _SAMPLES_MAX:
                samples.append(value)

    def level(self, name: str, value: float) -> None:
        """Set the level ``name``."""
        assert is_level(name)
        with self._lock:
            self._levels[name] = value

    def value(self, name: str) -> float:
        """Return the level ``name``, else the counter since the last drain, else 0."""
        with self._lock:
            return self._levels.get(name, self._counters.get(name, 0.0))

    def drain(self) -> dict[str, float]:
        """Return and clear everything since the last drain: counters under their name, observations
        under ``name_count``, ``name_sum`` and ``name_max``. A level is included unless it was 0 at
        the last drain and still is."""
        with self._lock:
            out = self._read()
            self._levels = {name: value for name, value in self._levels.items() if value}
            self._counters.clear()
            self._observed.clear()
            return out

    def read(self) -> dict[str, float]:
        """Return what ``drain`` would, and clear nothing."""
        with self._lock:
            return self._read()

    def _read(self) -> dict[str, float]:
        out = self._counters | self._levels
        for name, (n, total, largest) in self._observed.items():
            out |= {f"{name}_count": float(n), f"{name}_sum": total, f"{name}_max": largest}
        return out

    def samples(self) -> dict[str, list[float]]:
        """Return and clear the single observations since the last call, for ``sampled`` names."""
        with self._lock:
            taken = {name: values for name, values in self._samples.items() if values}
            self._samples |= {name: [] for name in taken}
            return taken
