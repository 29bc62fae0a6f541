"""Tells what happens again and again from what happens now and then."""

from collections import deque
from threading import Lock


class Burst:
    """Whether ``times`` of something lie within ``seconds`` and within ``calls``. Safe from many
    threads."""

    def __init__(self, times: int, *, seconds: float, calls: int) -> None:
        self._seconds = seconds
        self._calls = calls
        self._seen: deque[tuple[float, int]] = deque(maxlen=times)
        self._lock = Lock()

    def add(self, now_s: float, number: int) -> bool:
        """It happened to the call of that ``number``, of all that are made; True if that completes
        a burst, after which the next one begins."""
        with self._lock:
            self._seen.append((now_s, number))
            (first_s, first), is_full = self._seen[0], len(self._seen) == self._seen.maxlen
            if not is_full or now_s - first_s > self._seconds or number - first > self._calls:
                return False
            self._seen.clear()
            return True
