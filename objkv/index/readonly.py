"""An index of which nothing is changed: for replicas that may only read it.

Whatever a replica tells an index is a hint that others can do without, so telling it becomes
nothing rather than an error that the server would answer each request with.
"""

from collections.abc import Mapping, Sequence

from objkv.index.base import ChunkEntry, ShardRecord
from objkv.index.guarded import WrappedIndex
from objkv.keys.identity import NAMESPACE_HEX
from objkv.keys.prefix import PREFIX_HASH_BYTES


class ReadOnlyIndex(WrappedIndex):
    """Reads ``inner`` and never writes it: nothing is published, touched or forgotten, and no lease
    is ever granted, so that whoever asks before saving does not save."""

    def __repr__(self) -> str:
        return f"<ReadOnlyIndex of {self._inner!r}>"

    def check(self) -> None:
        """One lookup: the inner index may try what a reader has no right to."""
        self._inner.lookup("0" * NAMESPACE_HEX, [bytes(PREFIX_HASH_BYTES)])

    def publish(self, chunk: ChunkEntry, shards: Mapping[str, ShardRecord], *, ttl_s: int) -> None:
        """Nothing."""

    def touch(self, namespace: str, prefix_hashes: Sequence[bytes], *, ttl_s: int) -> None:
        """Nothing: what only readers use expires."""

    def forget(self, namespace: str, prefix_hash: bytes, field: str, expected: ShardRecord) -> bool:
        """False: nothing is gone."""
        return False

    def lease(self, name: str, owner: str, *, ttl_ms: int) -> bool:
        """False: nobody is to save."""
        return False

    def release(self, name: str, owner: str) -> None:
        """Nothing."""
