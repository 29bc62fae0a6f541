"""The shared parts of both soaks: faults in turn, logged errors, and growth over time."""

import logging
import random
from collections import Counter
from collections.abc import Callable, Sequence

from objkv.stores.base import PruneStore
from tests.support.servers.redis import RedisServer

SPOILED_AT_ONCE = 8
LOGGED_MAX = 20


class FaultCycle:
    """Causes one fault after the other, each kind once before any kind comes again.

    A kind that lasts sets ``_mend``. ``redis`` and ``bulk`` are the places themselves, past all
    proxies and wrappers; ``_paths`` names stored payloads.
    """

    def __init__(self, redis: RedisServer, bulk: PruneStore, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        """By kind, how often each was caused."""
        self._redis, self._bulk = redis, bulk
        self._random = random.Random(seed)
        self._mend: Callable[[], None] = lambda: None
        self._coming: list[str] = []
        self._kinds: dict[str, Callable[[], None]] = {
            "stored bytes change": self._flip_stored,
            "payloads vanish": self._lose_payloads,
            "redis is killed": self._kill_redis,
            "redis freezes": self._freeze_redis,
        }

    def cause(self) -> str:
        """Cause the next fault; its name. It lasts until ``mend``, or is over at once."""
        if not self._coming:
            self._coming = list(self._kinds)
            self._random.shuffle(self._coming)
        name = self._coming.pop()
        self._mend = lambda: None
        self.counts[name] += 1
        self._kinds[name]()
        return name

    def mend(self) -> None:
        """End the fault that lasts, if any."""
        self._mend()
        self._mend = lambda: None

    def _paths(self) -> list[str]:
        raise NotImplementedError

    def _some_paths(self) -> list[str]:
        found = self._paths()
        return self._random.sample(found, min(len(found), SPOILED_AT_ONCE))

    def _kill_redis(self) -> None:
        self._redis.kill()
        self._mend = self._redis.restart

    def _freeze_redis(self) -> None:
        self._redis.pause()
        self._mend = self._redis.resume

    def _flip_stored(self) -> None:
        for path in self._some_paths():
            value = bytearray(self._bulk.get(path) or b"")
            if value:
                value[self._random.randrange(len(value))] ^= 1 << self._random.randrange(8)
                self._bulk.put(path, value)

    def _lose_payloads(self) -> None:
        for path in self._some_paths():
            self._bulk.delete(path)


class LoggedErrors(logging.Handler):
    """Keeps what objkv logs as an error: it means a bug, never a fault of a store."""

    def __init__(self, *, wanted: str | None = None) -> None:
        """Messages with ``wanted`` in them belong to the soak."""
        super().__init__(logging.ERROR)
        self.found: list[str] = []
        self._wanted = wanted

    def emit(self, record: logging.LogRecord) -> None:
        """See ``logging.Handler``."""
        text = record.getMessage()
        if len(self.found) < LOGGED_MAX and not (self._wanted and self._wanted in text):
            reason = repr(record.exc_info[1]) if record.exc_info else ""
            self.found.append(f"{text} {reason}")


def second_half_growth(points: Sequence[tuple[float, float]]) -> float:
    """Of values over time: the slope of a straight line through the second half, times its length.
    0 where there are fewer than three points."""
    half = points[len(points) // 2 :]
    if len(half) < 3:
        return 0.0
    mean_t = sum(t for t, _ in half) / len(half)
    mean = sum(value for _, value in half) / len(half)
    spread = sum((t - mean_t) ** 2 for t, _ in half)
    slope = sum((t - mean_t) * (value - mean) for t, value in half) / spread if spread else 0.0
    return slope * (half[-1][0] - half[0][0])
