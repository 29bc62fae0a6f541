"""The records of payloads that lookups of this node have found lately.

A client opens payloads by their keys. The agent needs a payload's record to fetch it, and has just
looked it up for the client, so it is kept for a while. A record that is not kept any more is looked
up again.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from threading import Lock
from time import monotonic
from typing import Final, NamedTuple

from objkv.cache.lookup import LOOKUP_TTL_S
from objkv.index.base import ShardRecord, Shards
from objkv.keys.chunk import ChunkKey

_CHUNKS_MAX: Final = 32_768
"""Chunks whose records are kept: about 25 MB. The oldest ones go first."""
_ANSWERS_MAX: Final = 4
"""Of one chunk: replicas of a node may ask for different payloads of it."""


class _Answer(NamedTuple):
    namespace: str
    """Chunks of different namespaces may have the same hash: a tier's are vLLM's."""
    shards: Shards
    end_s: float
    """When it is too old."""


class FoundRecords:
    """Thread-safe. Nothing waits."""

    def __init__(
        self, chunks_max: int = _CHUNKS_MAX, *, clock: Callable[[], float] = monotonic
    ) -> None:
        self._chunks_max, self._clock = chunks_max, clock
        self._lock = Lock()
        self._by_chunk: OrderedDict[bytes, tuple[_Answer, ...]] = OrderedDict()
        """The last answers about each chunk, the newest first."""

    def __len__(self) -> int:
        return len(self._by_chunk)

    def add(self, namespace: str, found: Iterable[tuple[bytes, Shards | None]]) -> None:
        """Keep what a lookup has found, by prefix hash."""
        end_s = self._clock() + LOOKUP_TTL_S
        with self._lock:
            for prefix_hash, shards in found:
                if shards is not None:
                    new = _Answer(namespace, shards, end_s)
                    others = self._by_chunk.pop(prefix_hash, ())
                    if others:
                        others = tuple(one for one in others if not _replaces(new, one))
                    self._by_chunk[prefix_hash] = (new, *others[: _ANSWERS_MAX - 1])
            while len(self._by_chunk) > self._chunks_max:
                self._by_chunk.popitem(last=False)

    def of(self, key: ChunkKey) -> ShardRecord | None:
        """Return a payload's record; None if it is not kept."""
        now = self._clock()
        for namespace, shards, end_s in self._by_chunk.get(key.prefix_hash, ()):
            if namespace == key.namespace and now < end_s and key.field in shards:
                return shards[key.field]
        return None

    def forget(self, prefix_hash: bytes) -> None:
        """Forget a chunk: something about its record has changed."""
        if prefix_hash in self._by_chunk:
            with self._lock:
                self._by_chunk.pop(prefix_hash, None)


def _replaces(new: _Answer, old: _Answer) -> bool:
    return new.namespace == old.namespace and all(field in new.shards for field in old.shards)
