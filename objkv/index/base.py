"""The contract of an index: one record per chunk, one field per shard, and every entry expires.

The index is a hint. Losing it costs hits, and a wrong entry costs one failed get. Any thread may
call any method, which blocks until it returns, or raises ``StoreError`` and nothing else.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """One stored payload of a chunk. Compare-and-delete uses the equality of these records."""

    nbytes: int
    """Length of the whole payload, including the header."""
    raw_bytes: int
    """Length of its pages before compression."""
    is_plain: bool
    """Whether its pages are neither compressed nor encrypted."""
    hot: bool
    """Whether the hot store received a copy."""
    header_checksum: str
    """The first 16 hex digits of the header's own, which distinguish payloads of two writers."""
    created_s: int
    """Seconds since the epoch, by the writer's clock."""


@dataclass(frozen=True, slots=True)
class Record:
    """All that the index holds about one chunk."""

    prefix_hash: bytes
    parent_hash: bytes
    token_start: int
    token_end: int
    shards: Mapping[str, ShardRecord]
    """Keyed by field, see ``ChunkKey.field``: ``0``, ``0.L0-32_H0-4``."""
    hits: int = 0
    touched_s: int = 0
    """Seconds since the epoch of the last touch, by the toucher's clock; 0 if never."""
    pinned_until_s: int = 0
    """Seconds since the epoch when its pin ends; 0 without one that lasts."""

    @property
    def pinned(self) -> bool:
        """Whether a pin protects the chunk from eviction."""
        return self.pinned_until_s > 0

    @property
    def nbytes(self) -> int:
        """Of all its payloads."""
        return sum(shard.nbytes for shard in self.shards.values())


@dataclass(frozen=True, slots=True)
class Usage:
    """How much of a namespace is stored, according to its index."""

    namespace: str
    nbytes: int
    payloads: int
    counted_s: int
    """Seconds since the epoch of the last exact count, by the counter's clock; 0 if never. Since
    then this is a running total, wrong by records that expired, were evicted, or were published by
    a process that was then killed."""


@dataclass(frozen=True, slots=True)
class Savings:
    """What loads saved in one namespace and month, as the loading replicas measured it."""

    namespace: str
    month: str
    """By the replica's clock, UTC: ``2026-11``."""
    loads: int = 0
    """Loads of one request that succeeded as a whole."""
    tokens: int = 0
    """Tokens that they loaded."""
    timed_tokens: int = 0
    """Those of replicas that had measured how long they compute one."""
    compute_gpu_us: int = 0
    """Computing time of ``timed_tokens`` at that pace, times the replica's GPUs."""
    load_gpu_us: int = 0
    """Duration of their loads, times the replica's GPUs."""

    def __post_init__(self) -> None:
        assert re.fullmatch(r"[0-9]{4}-[0-9]{2}", self.month)


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a Redis-like server says of itself; None if it does not: managed ones often deny
    CONFIG."""

    product: str
    """``redis`` or ``valkey``."""
    version: str | None
    mode: str | None
    """``standalone``, ``cluster`` or ``sentinel``."""
    maxmemory_bytes: int | None
    maxmemory_policy: str | None
    used_bytes: int | None
    clock_skew_s: float | None
    """Server's clock minus this machine's, reduced by the possible duration of its answer."""
    denied: tuple[str, ...] = ()
    """Commands that the ACL denied."""


@dataclass(frozen=True, slots=True)
class ChunkEntry:
    """The chunk of a record."""

    namespace: str
    prefix_hash: bytes
    parent_hash: bytes
    token_start: int
    token_end: int


ShardRecords = Mapping[str, ShardRecord]
"""Shard records of one chunk, by field. Those that are found may be decoded only when read."""


class Lease(NamedTuple):
    """A lease and its owner, see ``WriteIndex.lease``."""

    name: str
    owner: str


class ReadIndex(Protocol):
    """Can be read."""

    def lookup(self, namespace: str, prefix_hashes: Sequence[bytes]) -> list[Record | None]:
        """Return the records of a whole prompt, in order, with None for missing ones, in one
        pipelined round trip (one per node on a cluster)."""

    def find(
        self, namespace: str, prefix_hashes: Sequence[bytes], fields: Sequence[str]
    ) -> list[ShardRecords | None]:
        """Return, for each chunk of a whole prompt, those of ``fields`` that its record has, or
        None without any. Takes as many round trips as ``lookup``. Each microsecond per chunk
        matters."""

    def scan(self, namespace: str) -> Iterator[Record]:
        """Yield all records of a namespace in no order. May miss or repeat concurrent changes."""

    def namespaces(self) -> list[str]:
        """Return the sorted namespaces that have records. May be slow, for operators."""

    def usage(self) -> list[Usage]:
        """Return how much is stored, sorted by namespace: exact, or running totals. Takes one round
        trip, or walks the whole store if that is the index."""

    def savings(self) -> list[Savings]:
        """Return what loads saved by namespace and month, if it is kept, in one round trip."""

    def check(self) -> None:
        """Make a cheap round trip. Raises ``StoreDenied`` with the fix or ``StoreUnavailable``."""

    def close(self) -> None:
        """Release connections. Idempotent."""


class WriteIndex(ReadIndex, Protocol):
    """Can also be written."""

    def publish(
        self, chunk: ChunkEntry, shards: ShardRecords, *, ttl_s: int, lease: Lease | None = None
    ) -> None:
        """Add or replace these shard fields of the chunk's record, whose payloads can be read
        already. It then lives for ``ttl_s`` seconds from now, or until its pin ends if that is
        later. Readers see all of these fields or none. ``lease``: one of this chunk's payloads,
        given back in the same call."""

    def touch(self, namespace: str, prefix_hashes: Sequence[bytes], *, ttl_s: int) -> None:
        """Count one hit for each record that exists, and renew its time to live."""

    def credit(self, savings: Savings) -> None:
        """Add to what loads saved. May be sent later, and lost if the process is killed."""

    def flush(self) -> None:
        """Send changes of totals that have waited for some seconds. For processes that may save and
        credit nothing any more."""

    def forget(self, namespace: str, prefix_hash: bytes, field: str, expected: ShardRecord) -> bool:
        """Delete one shard field if it equals ``expected``, whatever its hits, touches and pins.
        Return True if this call deleted it. A record without fields disappears."""

    def lease(self, name: str, owner: str, *, ttl_ms: int) -> bool:
        """Take or extend the lease ``name``. Return whether ``owner`` holds it now."""

    def release(self, name: str, owner: str) -> None:
        """Give back a lease early. Does nothing if ``owner`` does not hold it."""

    def record_sightings(self, names: Sequence[str], *, ttl_s: int) -> list[bool]:
        """Record that payloads were made, and return for each whether that was recorded before, at
        most ``ttl_s`` seconds ago. This is no record: nothing is stored, found or counted by it.
        Takes one pipelined round trip (one per node on a cluster). An index that keeps no sightings
        returns False for all."""


class PruneIndex(WriteIndex, Protocol):
    """Can also be changed by operators."""

    def pin(self, namespace: str, prefix_hash: bytes, *, until_s: int, ttl_s: int) -> bool:
        """Pin the record until ``until_s``, in seconds since the epoch; 0 unpins it. It lives for
        ``ttl_s`` from now, and at least until its pin ends. Return False if it does not exist."""

    def drop(self, namespace: str, prefix_hash: bytes) -> bool:
        """Remove a whole record, whatever its content. Return True if it existed."""

    def set_usage(self, usage: Usage) -> None:
        """Replace a namespace's running totals, if the index has such, with an exact count."""
