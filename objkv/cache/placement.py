"""Which payloads are kept hot as well: small ones at once, larger ones when they are loaded often.

Redis pays for every megabyte twice, in memory and in its one thread, so both have a limit.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from time import monotonic

HOUR_S = 3600.0
_PATHS_MAX = 65_536
_BUCKET_S = 60.0
"""The budget of an hour is kept in pieces of this length."""


@dataclass(frozen=True, slots=True)
class HotLimits:
    """What the hot store takes, of ``Config``."""

    payload_bytes_max: int
    """Larger payloads never become hot; 0: none does."""
    save_bytes_max: int
    """Payloads up to this size become hot when they are saved."""
    promote_loads: int
    """So many loads from bulk within an hour make a payload hot."""
    promote_bytes_max: int
    """Bytes that this process promotes within an hour."""


def belongs_in_hot(payload_bytes: int, limits: HotLimits) -> bool:
    """Whether a payload of this size is copied to the hot store when it is saved."""
    return payload_bytes <= min(limits.payload_bytes_max, limits.save_bytes_max)


class OftenLoaded:
    """Counts loads from bulk, to find what deserves to be hot. Bounded; safe from many threads."""

    def __init__(self, limits: HotLimits, *, clock: Callable[[], float] = monotonic) -> None:
        assert limits.promote_loads >= 1
        self._limits = limits
        self._clock = clock
        self._lock = Lock()
        self._loads: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._spent: deque[tuple[float, int]] = deque()

    def note(self, path: str, nbytes: int) -> bool:
        """``path``, a payload of ``nbytes``, was loaded from bulk; True if it should become hot
        now. Says so once an hour at most, and only within the budget, which is charged then."""
        limits = self._limits
        if nbytes > min(limits.payload_bytes_max, limits.promote_bytes_max):
            return False
        now = self._clock()
        with self._lock:
            count, since = self._loads.pop(path, (0, now))
            if now - since >= HOUR_S:
                count, since = 0, now
            due = count + 1 == limits.promote_loads
            promoted = due and self._spend(nbytes, now)
            if promoted or not due:  # without budget, the next load asks again
                count = min(count + 1, limits.promote_loads)
            self._loads[path] = count, since
            while len(self._loads) > _PATHS_MAX:
                self._loads.popitem(last=False)
            return promoted

    def forget(self, path: str) -> None:
        """It did not become hot after all: count again."""
        with self._lock:
            self._loads.pop(path, None)

    def _spend(self, nbytes: int, now: float) -> bool:
        while self._spent and now - self._spent[0][0] >= HOUR_S + _BUCKET_S:
            self._spent.popleft()
        if sum(spent for _, spent in self._spent) + nbytes > self._limits.promote_bytes_max:
            return False
        if self._spent and now - self._spent[-1][0] < _BUCKET_S:
            since, spent = self._spent.pop()
            self._spent.append((since, spent + nbytes))
        else:
            self._spent.append((now, nbytes))
        return True
