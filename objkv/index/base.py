"""What an index promises. One record per chunk, one field per shard; every entry expires.

The index is a hint: losing it costs hits, a wrong entry costs one failed get, nothing more.
Every method is safe from many threads, raises ``StoreError`` (and subclasses) and nothing else.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """One stored payload of a chunk. Equality is what compare-and-delete compares."""

    nbytes: int
    """Length of the whole payload, header included."""
    raw_bytes: int
    """Length of its pages before compression."""
    codec: str
    hot: bool
    """Whether a copy was put in the hot store as well; the bulk store always has it."""
    header_checksum: str
    """The payload header's own checksum, 32 hex digits: tells two writers' payloads apart."""
    created_s: int
    """Seconds since the epoch, by the writer's clock."""


@dataclass(frozen=True, slots=True)
class Record:
    """What is known of one chunk."""

    prefix_hash: bytes
    parent_hash: bytes
    token_start: int
    token_end: int
    shards: Mapping[str, ShardRecord]
    """By shard field, ``<group>.<shard>``, e.g. ``0.L0-32_H0-8``."""
    hits: int = 0
    touched_s: int = 0
    """Seconds since the epoch of the last touch, by the toucher's clock; 0 if never."""
    pinned_until_s: int = 0
    """Seconds since the epoch when its pin ends; 0 where there is none, or none any longer."""

    @property
    def pinned(self) -> bool:
        """Whether it is kept for now, however little it is used."""
        return self.pinned_until_s > 0

    @property
    def nbytes(self) -> int:
        """Bytes of all its payloads."""
        return sum(shard.nbytes for shard in self.shards.values())


@dataclass(frozen=True, slots=True)
class Usage:
    """How much of a namespace is stored, by its index."""

    namespace: str
    nbytes: int
    """Bytes of the payloads that are published, and neither forgotten nor dropped."""
    payloads: int
    counted_s: int
    """Seconds since the epoch when this was last counted rather than added up, by the clock of
    who counted; 0 if never. Records that expired, were evicted or were published by a process that
    was killed since may make it wrong."""


@dataclass(frozen=True, slots=True)
class ChunkEntry:
    """Names one chunk in calls to the index."""

    namespace: str
    prefix_hash: bytes
    parent_hash: bytes
    token_start: int
    token_end: int


Shards = Mapping[str, ShardRecord]
"""Some shard records of one chunk by field, as a reader asked for them; may decode each only when
it is read."""


class ReadIndex(Protocol):
    """An index that can be asked."""

    def lookup(self, namespace: str, prefix_hashes: Sequence[bytes]) -> list[Record | None]:
        """The records of a whole prompt, in order, None where there is none.

        One pipelined round trip whatever the length (one per node on a cluster).
        """

    def find(
        self, namespace: str, prefix_hashes: Sequence[bytes], fields: Sequence[str]
    ) -> list[Shards | None]:
        """What a reader needs of a whole prompt, in order: of each chunk those of the shard
        ``fields`` that its record has, None where it has none of them.

        Round trips as ``lookup``; made for requests, where every microsecond a chunk counts.
        """

    def scan(self, namespace: str) -> Iterator[Record]:
        """All records of a namespace, in no order; may miss or repeat what changes meanwhile."""

    def namespaces(self) -> list[str]:
        """Namespaces that have records, sorted. May take long: for operators, not for requests."""

    def usage(self) -> list[Usage]:
        """How much is stored, by namespace, sorted; the records that say which shapes are in use do
        not count. An index that can tell exactly does; others keep running totals. One round trip,
        except where the index is the store itself: there it walks all of it."""

    def check(self) -> None:
        """One cheap round trip. ``StoreDenied`` with what to fix, or ``StoreUnavailable``."""

    def close(self) -> None:
        """Release connections. Idempotent."""


class WriteIndex(ReadIndex, Protocol):
    """An index that can also be told."""

    def publish(self, chunk: ChunkEntry, shards: Mapping[str, ShardRecord], *, ttl_s: int) -> None:
        """Add or replace these shard fields of the chunk's record, and give the record ``ttl_s``
        seconds from now (a pinned one lives until its pin ends, if that is later). Called only
        after the payloads can be read. Atomic per record: readers see all of these fields or
        none."""

    def touch(self, namespace: str, prefix_hashes: Sequence[bytes], *, ttl_s: int) -> None:
        """Count one hit for each record that exists and renew its time to live."""

    def forget(self, namespace: str, prefix_hash: bytes, field: str, expected: ShardRecord) -> bool:
        """Compare-and-delete one shard field; True if it was there, equal, and is gone now.

        Hits, touches and pins do not count in the comparison. A record without fields disappears.
        """

    def lease(self, name: str, owner: str, *, ttl_ms: int) -> bool:
        """Take the lease ``name`` if nobody holds it; True if ``owner`` holds it now.

        A lease ends by itself after ``ttl_ms``. Whoever holds it already gets True again.
        """

    def release(self, name: str, owner: str) -> None:
        """Give a lease back early; nothing happens if ``owner`` does not hold it."""


class PruneIndex(WriteIndex, Protocol):
    """An index that operators may change by hand."""

    def pin(self, namespace: str, prefix_hash: bytes, *, until_s: int, ttl_s: int) -> bool:
        """Pin until ``until_s``, seconds since the epoch, or, with 0, unpin; False if there is no
        such record. It lives for ``ttl_s`` from now, and at least until its pin ends."""

    def drop(self, namespace: str, prefix_hash: bytes) -> bool:
        """Remove a whole record whatever it says; True if there was one."""

    def set_usage(self, usage: Usage) -> None:
        """Replace a namespace's running totals by what was counted. An index that is exact by
        itself ignores it."""
