"""Reads and writes of payloads over bulk store, hot store and index, in a safe order.

A save writes the bulk store first, then the hot store, and the index record last; a forget begins
with the record. So a crash leaves orphans, but never a record of an unreadable payload. The bulk
store is authoritative: without a hot copy or the index only time is lost.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from threading import Lock
from time import monotonic
from typing import Final

from objkv.cache.quota import Quota
from objkv.cache.speed import LinkSpeed
from objkv.codec.header import header_bytes_needed, read_header
from objkv.codec.seal import Seal
from objkv.codec.values import Claim, Header
from objkv.errors import PayloadError, StoreError
from objkv.index.base import ChunkEntry, Lease, ShardRecord, WriteIndex
from objkv.keys.chunk import ChunkKey
from objkv.stores.base import Arrived, Buffer, Entry, HotStore, ReadStore, WriteStore
from objkv.telemetry import Recorder

_PATHS_MAX = 65_536
"""Maximum number of paths in each of the sets below; the oldest are removed."""


class _Paths:
    """The paths that were added last. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._until: OrderedDict[str, float] = OrderedDict()

    def __contains__(self, path: str) -> bool:
        until = self._until.get(path)
        return until is not None and self._clock() < until

    def add(self, path: str, seconds: float = inf) -> None:
        with self._lock:
            self._until[path] = self._clock() + seconds
            self._until.move_to_end(path)
            while len(self._until) > _PATHS_MAX:
                self._until.popitem(last=False)

    def remove(self, path: str) -> None:
        with self._lock:
            self._until.pop(path, None)


class HotCopies:
    """The hot copies of small payloads, by path. Errors of the hot store are counted and treated as
    missing copies, never raised. Thread-safe."""

    def __init__(self, store: HotStore | None, bytes_max: int, recorder: Recorder) -> None:
        """``bytes_max``: larger payloads have no copy."""
        self._store = store
        self._bytes_max = bytes_max
        self._recorder = recorder
        self._distrusted = _Paths()

    def get_into(
        self, path: str, buffer: memoryview, arrived: Arrived | None, start: int | None
    ) -> int | None:
        """Read a promised copy, see ``ReadStore``. Return None if the caller must read bulk: it
        then overwrites the buffer, and no lane may be copying reported bytes. So progress is
        reported only as 0, and as complete at the end."""
        if self._store is None or path in self._distrusted:
            return None
        waits = None if arrived is None else lambda _: arrived(0)
        try:
            nbytes = self._store.get_into(path, buffer, waits, start)
        except StoreError:
            self._recorder.count("hot_errors")
            return None
        self._recorder.count("hot_misses" if nbytes is None else "hot_hits")
        if arrived is not None and nbytes is not None:
            arrived(nbytes)
        return nbytes

    def distrust(self, path: str) -> None:
        """Do not read this copy, which was corrupt, until this process has made another."""
        self._distrusted.add(path)

    def has(self, path: str, nbytes: int) -> bool:
        """Whether there is a copy of this size. Costs a round trip."""
        if self._store is None or nbytes > self._bytes_max or path in self._distrusted:
            return False
        try:
            entry = self._store.head(path)
        except StoreError:
            self._recorder.count("hot_errors")
            return False
        return entry is not None and entry.nbytes == nbytes

    def put(self, path: str, payload: Buffer) -> bool:
        """Make a copy if ``payload`` is small. Return whether there is one now."""
        if self._store is None or len(payload) > self._bytes_max:
            return False
        try:
            self._store.put(path, payload)
        except StoreError:
            self._recorder.count("hot_errors")
            return False
        self._distrusted.remove(path)
        return True


_HEADER_GUESS = 16 << 10
"""Covers the header of most models, which saves a second request."""


def stored_header(bulk: ReadStore, entry: Entry, seal: Seal | None) -> Header | None:
    """Return the header of a payload, None if that is gone. Raises ``PayloadError`` unless its
    checksum or seal and its length are correct. The caller must compare its claim."""
    start = bulk.get(entry.key, 0, _HEADER_GUESS)
    if start is not None and (needed := header_bytes_needed(start)) > _HEADER_GUESS:
        start = bulk.get(entry.key, 0, needed)
    if start is None:
        return None
    header = read_header(start, seal=seal)
    if header.nbytes != entry.nbytes:
        raise PayloadError(f"{entry.nbytes} bytes, but the header states {header.nbytes}")
    return header


def stored_payloads(bulk: ReadStore, prefix: str) -> Iterator[tuple[ChunkKey, Entry]]:
    """Yield the payloads whose paths begin with ``prefix``, those of one chunk in a row."""
    for entry in bulk.scan(prefix):
        try:
            key = ChunkKey.parse(entry.key)
        except ValueError:
            continue
        yield key, entry


KEEP_S = 30.0
"""How long a chunk is not saved again: requests looked up before its save may be queued."""


class InFlightSaves:
    """Chunks that this process is saving or has just saved. Bounded and thread-safe.

    Prompts that arrive together share prefixes that are not stored yet. Each was looked up before
    the first of them was saved, and would otherwise gather, encode and upload the same chunks.
    """

    def __init__(self, *, clock: Callable[[], float] = monotonic) -> None:
        self._lock = Lock()
        self._under_way: set[str] = set()
        self._saved = _Paths(clock)

    def __len__(self) -> int:
        return len(self._under_way)

    def begin(self, path: str) -> bool:
        """Return whether to save ``path`` now; then the caller must call ``end``."""
        with self._lock:
            if path in self._under_way or path in self._saved:
                return False
            self._under_way.add(path)
            return True

    def mark_saved(self, path: str) -> None:
        self._saved.add(path, KEEP_S)

    def is_saved(self, path: str) -> bool:
        return path in self._saved

    def end(self, path: str) -> None:
        with self._lock:
            self._under_way.discard(path)

    def forget(self, path: str) -> None:
        """Allow another save, because the payload was found missing or corrupt."""
        self._saved.remove(path)


LEASE_MS: Final = 30_000
"""How long a save may take before others do it too: several times what a put takes."""


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """The cache's part of ``Config``."""

    writer: str
    """Identifies this process in leases."""
    ttl_s: int
    lease_ms: int
    hot_save_bytes_max: int


class ChunkCache:
    """Payloads by key. Thread-safe. Raises ``StoreError`` only for the bulk store."""

    def __init__(
        self,
        bulk: WriteStore,
        hot: HotStore | None,
        index: WriteIndex,
        settings: CacheSettings,
        recorder: Recorder,
        *,
        room: Quota | None = None,
        seal: Seal | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.seal = seal
        """Required to write and read payloads; None if they are not sealed."""
        self._bulk = bulk
        self._room = room
        self.hot = HotCopies(hot, settings.hot_save_bytes_max, recorder)
        self._index = index
        self._settings = settings
        self._recorder = recorder
        self._suspects = _Paths()
        self._clock = clock
        self.in_flight = InFlightSaves()
        self.link = LinkSpeed()

    def get_into(
        self,
        key: ChunkKey,
        buffer: memoryview,
        arrived: Arrived | None = None,
        start: int | None = None,
    ) -> int | None:
        """Read the payload, or a part, see ``ReadStore``. The caller verifies it."""
        return self._bulk.get_into(key.path(), buffer, arrived, start)

    def has_room(self) -> bool:
        """Whether to save anything at all: False above the quota."""
        return self._room is None or self._room.has_room()

    def take_lease(self, path: str) -> bool:
        """Return whether this process may save a payload now; also if the index fails, because a
        duplicate is harmless."""
        try:
            return self._index.lease(path, self._settings.writer, ttl_ms=self._settings.lease_ms)
        except StoreError:
            self._recorder.count("lease_errors")
            return True

    def release_lease(self, path: str) -> None:
        """Give the lease of a failed save back early, so that another process can save."""
        try:
            self._index.release(path, self._settings.writer)
        except StoreError:
            self._recorder.count("lease_errors")

    def record_sightings(self, paths: Sequence[str]) -> list[bool]:
        """Return whether each was made before, see ``WriteIndex``; none if the index fails."""
        if not paths:
            return []
        try:
            return self._index.record_sightings(paths, ttl_s=self._settings.ttl_s)
        except StoreError:
            self._recorder.count("agent_sighting_drops", len(paths))
            return [False] * len(paths)

    def flush_totals(self) -> None:
        with suppress(StoreError):
            self._index.flush()

    def record_of(self, key: ChunkKey) -> ShardRecord | None:
        """Raises ``StoreError``."""
        (shards,) = self._index.find(key.namespace, [key.prefix_hash], (key.field,))
        return None if shards is None else shards.get(key.field)

    def save(self, path: str, payload: Buffer, header: Header) -> bool:
        """Store ``payload``, then publish its record, which gives back the caller's lease. No
        reference to ``payload`` is kept. Return False if another writer's existed, whose record is
        published.

        Raises ``StoreError`` if the bulk store fails. No record is published then, and the lease is
        still held.
        """
        if path in self._suspects:
            self._bulk.put(path, payload)
            self._suspects.remove(path)
        elif not self._put_if_absent(path, payload):
            existing = self._existing(path, header.claim)
            if existing is None:
                self._bulk.put(path, payload)
            else:
                self._publish(path, existing, hot=self.hot.has(path, existing.nbytes))
                return False
        if self._room is not None:
            self._room.add(header.nbytes)
        self._publish(path, header, hot=self.hot.put(path, payload))
        return True

    def close(self) -> None:
        """End background work. Waits at most a second. Idempotent."""
        if self._room is not None:
            self._room.close()

    def reject(self, key: ChunkKey, record: ShardRecord | None, *, corrupt: bool) -> None:
        """Forget the ``record``, if any, of a payload that was missing or ``corrupt``. This
        process's next save replaces a corrupt one. Never raises."""
        path = key.path()
        self.in_flight.forget(path)
        if corrupt:
            self._suspects.add(path)
        if record is None:
            return
        if corrupt and record.hot:
            self.hot.distrust(path)
        try:
            self._index.forget(key.namespace, key.prefix_hash, key.field, record)
        except StoreError:
            self._recorder.count("forget_errors")

    def _put_if_absent(self, path: str, payload: Buffer) -> bool:
        started = self._clock()
        written = self._bulk.put_if_absent(path, payload)
        if written:  # otherwise little or nothing was sent
            self.link.puts.observe(len(payload), self._clock() - started)
        return written

    def _existing(self, path: str, claim: Claim) -> Header | None:
        """Return the stored payload's header; None if it is truncated, of another claim, or not
        sealed as required. Does not check its frames."""
        entry = self._bulk.head(path)
        try:
            header = None if entry is None else stored_header(self._bulk, entry, self.seal)
        except PayloadError:
            return None
        return header if header is not None and header.claim == claim else None

    def _publish(self, path: str, header: Header, *, hot: bool) -> None:
        lease, ttl_s = Lease(path, self._settings.writer), self._settings.ttl_s
        try:
            publish_record(self._index, header, hot=hot, ttl_s=ttl_s, lease=lease)
        except StoreError:
            self._recorder.count("publish_errors")
            self.release_lease(path)
        else:
            # If it was found corrupt meanwhile, the next save repairs it.
            if path not in self._suspects:
                self.in_flight.mark_saved(path)


def publish_record(
    index: WriteIndex, header: Header, *, hot: bool, ttl_s: int, lease: Lease | None = None
) -> None:
    """Publish the record of a stored payload. See ``WriteIndex.publish``."""
    claim, key = header.claim, header.claim.key
    chunk = ChunkEntry(
        key.namespace, key.prefix_hash, claim.parent_hash, claim.token_start, claim.token_end
    )
    index.publish(chunk, {key.field: shard_record(header, hot=hot)}, ttl_s=ttl_s, lease=lease)


def shard_record(header: Header, *, hot: bool = False) -> ShardRecord:
    return ShardRecord(
        nbytes=header.nbytes,
        raw_bytes=header.raw_bytes,
        is_plain=header.codec == "none",
        hot=hot,
        header_checksum=header.checksum[:16],
        created_s=header.provenance.created_s,
    )
