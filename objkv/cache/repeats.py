"""Chunks that this process is saving, or has just saved, so that it does not save them again.

Prompts that arrive together share prefixes of which nobody can know yet that they are stored: each
was looked up before the first of them was saved. Without this every one of them would gather,
encode and upload the same chunks.
"""

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from time import monotonic

KEEP_S = 30.0
"""How long a lookup may have waited in a queue until its request is computed, as a rule. Whatever
makes the saved payload vanish meanwhile unseen delays its next save by as much."""
_SAVED_MAX = 65_536


class Repeats:
    """Bounded; safe from many threads."""

    def __init__(self, *, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._under_way: set[str] = set()
        self._saved: OrderedDict[str, float] = OrderedDict()

    def begin(self, path: str) -> bool:
        """Whether to save ``path`` now; after True, ``end`` must follow."""
        with self._lock:
            until = self._saved.get(path, 0.0)
            if path in self._under_way or self._clock() < until:
                return False
            self._under_way.add(path)
            return True

    def keep(self, path: str) -> None:
        """It is stored and announced."""
        with self._lock:
            self._saved.pop(path, None)
            self._saved[path] = self._clock() + KEEP_S
            while len(self._saved) > _SAVED_MAX:
                self._saved.popitem(last=False)

    def end(self, path: str) -> None:
        """The save that ``begin`` allowed is over, however it went."""
        with self._lock:
            self._under_way.discard(path)

    def forget(self, path: str) -> None:
        """It was found missing or corrupt: save it again."""
        with self._lock:
            self._saved.pop(path, None)
