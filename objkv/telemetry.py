"""Numbers go to a ``Recorder``; what shows them (Prometheus, vLLM's stats, a table) reads it.

Pure modules and stores never log and never know who listens. Counting is thread-safe.
"""

from collections import defaultdict
from logging import Logger
from threading import Lock
from typing import Protocol


class Recorder(Protocol):
    """Where numbers are told. Names are ``noun_unit`` (``load_bytes``, ``lookup_misses``)."""

    def count(self, name: str, amount: float = 1) -> None:
        """Add ``amount`` to the counter ``name``."""

    def observe(self, name: str, value: float) -> None:
        """Add one observation (a duration in seconds, a size in bytes) to ``name``."""


class Trouble:
    """Tells the log once that something began to fail, and once that it works again."""

    def __init__(self, logger: Logger, what: str) -> None:
        self._logger = logger
        self._what = what
        self._lock = Lock()
        self._failing = False

    def failed(self, reason: BaseException) -> None:
        """It failed; only the first time in a row is told."""
        with self._lock:
            news, self._failing = not self._failing, True
        if news:
            self._logger.warning("%s failing, serving without them reason=%s", self._what, reason)

    def worked(self) -> None:
        """It worked."""
        if not self._failing:
            return
        with self._lock:
            news, self._failing = self._failing, False
        if news:
            self._logger.warning("%s working again", self._what)


class NullRecorder:
    """Nobody listens."""

    def count(self, name: str, amount: float = 1) -> None:
        """Forget it."""

    def observe(self, name: str, value: float) -> None:
        """Forget it."""


class MemoryRecorder:
    """Keeps counters, and (count, sum, max) per observed name, until somebody drains them."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._counters: defaultdict[str, float] = defaultdict(float)
        self._observed: dict[str, tuple[int, float, float]] = {}

    def count(self, name: str, amount: float = 1) -> None:
        """Add ``amount`` to the counter ``name``."""
        with self._lock:
            self._counters[name] += amount

    def observe(self, name: str, value: float) -> None:
        """Add one observation to ``name``."""
        with self._lock:
            n, total, largest = self._observed.get(name, (0, 0.0, value))
            self._observed[name] = (n + 1, total + value, max(largest, value))

    def value(self, name: str) -> float:
        """The counter ``name`` since the last drain; 0 if it was never counted."""
        with self._lock:
            return self._counters.get(name, 0.0)

    def drain(self) -> dict[str, float]:
        """Everything since the last drain, flat: counters by name, observations as
        ``name_count``, ``name_sum`` and ``name_max``. Empty if nothing happened."""
        with self._lock:
            out = dict(self._counters)
            for name, (n, total, largest) in self._observed.items():
                out |= {f"{name}_count": float(n), f"{name}_sum": total, f"{name}_max": largest}
            self._counters.clear()
            self._observed.clear()
            return out
