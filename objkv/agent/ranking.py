"""The order in which resident payloads are evicted: S3-FIFO, with half of the memory on probation.

A new payload joins the probation queue. At its end it moves to the main queue if it was read
meanwhile, and is evicted if not: prompts that occur once do not push out those that recur. A
payload that comes back soon after its eviction joins the main queue at once. A payload of the main
queue is spared as often as it was read, at most three times. A read only counts.

Source: Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023, which keeps a
tenth on probation. Decision 35 compares them on a request trace.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

_READS_MAX: Final = 3
_PROBATION: Final = 1 / 2
"""Share of the memory. With a tenth, most conversations were gone before their next turn."""


class _Fifo:
    """A queue of keys with their sizes and reads."""

    def __init__(self) -> None:
        self.keys: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self.nbytes = 0

    def push(self, key: str, nbytes: int) -> None:
        """Add a key that was not read yet."""
        self.keys[key] = nbytes, 0
        self.nbytes += nbytes

    def pop(self, key: str) -> int:
        """Remove a key and return its size."""
        nbytes, _ = self.keys.pop(key)
        self.nbytes -= nbytes
        return nbytes


class Ranking:
    """Payloads by key. Thread safety is the caller's."""

    def __init__(self, nbytes_max: int) -> None:
        self._nbytes_max = nbytes_max
        self._new, self._main = _Fifo(), _Fifo()
        self._gone: OrderedDict[int, int] = OrderedDict()
        """Sizes of evicted ones, by hash. A wrong match only means the wrong queue."""
        self._gone_bytes = 0

    def add(self, key: str, nbytes: int, *, is_unread: bool = False) -> None:
        """Add a payload. ``is_unread``: it was prefetched, and is on probation in any case."""
        assert key not in self
        known = self._gone.pop(hash(key), 0)
        self._gone_bytes -= known
        (self._main if known and not is_unread else self._new).push(key, nbytes)

    def use(self, key: str) -> None:
        """Record that a payload was read."""
        keys = self._main.keys if key in self._main.keys else self._new.keys
        nbytes, reads = keys[key]
        keys[key] = nbytes, min(_READS_MAX, reads + 1)

    def remove(self, key: str, *, was_read: bool = True) -> None:
        """Forget a payload. ``was_read``: whether it has proved its worth if it comes back soon."""
        if key in self._main.keys:
            self._main.pop(key)
        elif key in self._new.keys:
            nbytes = self._new.pop(key)
            if not was_read:
                return
            self._gone[hash(key)] = nbytes
            self._gone_bytes += nbytes
            while self._gone_bytes > self._nbytes_max:
                self._gone_bytes -= self._gone.popitem(last=False)[1]

    def victim(self, is_free: Callable[[str], bool]) -> str | None:
        """Return the next one to evict for which ``is_free`` is true, or None. It stays ranked."""
        on_probation_first = self._new.nbytes >= _PROBATION * self._nbytes_max
        if on_probation_first or not self._main.keys:
            return self._from_new(is_free) or self._from_main(is_free)
        return self._from_main(is_free) or self._from_new(is_free)

    def __len__(self) -> int:
        return len(self._new.keys) + len(self._main.keys)

    def __contains__(self, key: str) -> bool:
        return key in self._new.keys or key in self._main.keys

    def _from_new(self, is_free: Callable[[str], bool]) -> str | None:
        keys = self._new.keys
        for _ in range(len(keys)):
            key, (_, reads) = next(iter(keys.items()))
            if reads:
                self._main.push(key, self._new.pop(key))
            elif is_free(key):
                return key
            else:
                keys.move_to_end(key)
        return None

    def _from_main(self, is_free: Callable[[str], bool]) -> str | None:
        keys = self._main.keys
        for _ in range((_READS_MAX + 1) * len(keys)):
            key, (nbytes, reads) = next(iter(keys.items()))
            if is_free(key):
                if not reads:
                    return key
                keys[key] = nbytes, reads - 1
            keys.move_to_end(key)
        return None
