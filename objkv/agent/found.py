"""The records of payloads that lookups of this node have found lately.

A client opens payloads by their keys. The agent needs a payload's record to fetch it, and has just
looked it up for the client, so it is kept for a while. A record that is not kept any more is looked
up again.
"""

from collections.abc import Iterable
from threading import Lock
from typing import Final

from objkv.index.base import ShardRecord, Shards
from objkv.keys.chunk import ChunkKey

_CHUNKS_MAX: Final = 65_536
"""Chunks whose records are kept: about 25 MB. The oldest ones go first."""


class FoundRecords:
    """Thread-safe."""

    def __init__(self, chunks_max: int = _CHUNKS_MAX) -> None:
        self._chunks_max = chunks_max
        self._lock = Lock()
        self._by_chunk: dict[bytes, Shards] = {}

    def __len__(self) -> int:
        return len(self._by_chunk)

    def add(self, found: Iterable[tuple[bytes, Shards | None]]) -> None:
        """Keep what a lookup has found, by prefix hash. It replaces what was kept of a chunk."""
        by_chunk = self._by_chunk
        with self._lock:
            for prefix_hash, shards in found:
                if shards is not None:
                    by_chunk.pop(prefix_hash, None)
                    by_chunk[prefix_hash] = shards
            while len(by_chunk) > self._chunks_max:
                del by_chunk[next(iter(by_chunk))]

    def of(self, key: ChunkKey) -> ShardRecord | None:
        """Return a payload's record; None if it is not kept."""
        # The hash of a chunk covers its namespace, too.
        shards = self._by_chunk.get(key.prefix_hash)
        return None if shards is None else shards.get(key.field)

    def forget(self, prefix_hash: bytes) -> None:
        """Forget a chunk: something about its record has changed."""
        if prefix_hash in self._by_chunk:
            with self._lock:
                self._by_chunk.pop(prefix_hash, None)
