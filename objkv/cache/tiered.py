"""Reads and writes over bulk, hot and index, in the one right order.

Save: bulk first, then hot, the index record last. Forget: the index record first. So a crash
leaves orphans, never a record of something unreadable. The bulk store is the truth: a hot copy is
a shortcut, and an index that does not answer costs sharing, not correctness.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from threading import Lock
from time import monotonic

from objkv.cache.placement import HotLimits, belongs_in_hot
from objkv.cache.promotion import Promoter
from objkv.cache.repeats import Repeats
from objkv.cache.speed import LinkSpeed
from objkv.codec.payload import Claim, Header, header_bytes_needed, read_header
from objkv.errors import PayloadError, StoreError
from objkv.index.base import ChunkEntry, ShardRecord, WriteIndex
from objkv.keys.chunk import ChunkKey
from objkv.stores.base import Arrived, Buffer, WriteStore
from objkv.telemetry import Recorder

_SUSPECTS_MAX = 65_536
_LENGTH_BYTES = 8


class SaveOutcome(Enum):
    """What became of one save."""

    SAVED = "saved"
    EXISTED = "existed"
    """Another writer's payload was there already; its record was published."""


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """What the cache needs to know of ``Config``."""

    writer: str
    """Names this process in leases."""
    ttl_s: int
    lease_ms: int
    hot_payload_bytes_max: int
    hot_save_bytes_max: int = 256 << 10
    hot_promote_loads: int = 3
    hot_promote_bytes_max: int = 0
    """Bytes within an hour; 0: nothing is promoted."""

    @property
    def hot_limits(self) -> HotLimits:
        """The same, as placement wants it."""
        return HotLimits(
            self.hot_payload_bytes_max,
            self.hot_save_bytes_max,
            self.hot_promote_loads,
            self.hot_promote_bytes_max,
        )


class ChunkCache:
    """Payloads by key. Safe from many threads; raises ``StoreError`` from the bulk store only."""

    def __init__(
        self,
        bulk: WriteStore,
        hot: WriteStore | None,
        index: WriteIndex,
        settings: CacheSettings,
        recorder: Recorder,
        *,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._bulk = bulk
        self._hot = hot
        self._index = index
        self._settings = settings
        self._recorder = recorder
        self._lock = Lock()
        self._suspects: OrderedDict[str, None] = OrderedDict()
        self._repeats = Repeats()
        self._clock = clock
        self._hot_limits = settings.hot_limits
        self._promoter: Promoter | None = None
        if hot is not None and settings.hot_promote_bytes_max > 0:
            self._promoter = Promoter(
                bulk, hot, index, self._hot_limits, ttl_s=settings.ttl_s, recorder=recorder
            )
        self.link = LinkSpeed()
        """How fast puts and gets of the bulk store were lately."""

    def get_into(
        self, key: ChunkKey, buffer: memoryview, *, hot: bool, arrived: Arrived | None = None
    ) -> int | None:
        """The payload into ``buffer``; its length, or None. Unverified: the caller opens it.

        ``hot``: whether the record promised a copy in the hot store, which is then asked first.
        ``arrived`` begins from the front again if that store failed halfway.
        """
        path = key.path()
        nbytes = self._from_hot(hot, lambda store: store.get_into(path, buffer, arrived))
        return self._bulk.get_into(path, buffer, arrived) if nbytes is None else nbytes

    def get_range_into(
        self,
        key: ChunkKey,
        start: int,
        buffer: memoryview,
        *,
        hot: bool,
        arrived: Arrived | None = None,
    ) -> int | None:
        """Bytes ``[start, start + len(buffer))`` of the payload into ``buffer``, fewer where it
        ends before; how many, or None. Else as ``get_into``."""
        path = key.path()
        nbytes = self._from_hot(
            hot, lambda store: store.get_range_into(path, start, buffer, arrived)
        )
        if nbytes is not None:
            return nbytes
        return self._bulk.get_range_into(path, start, buffer, arrived)

    def begin_save(self, key: ChunkKey) -> bool:
        """Whether to save ``key``: not if this process is about to, or has just done so. After
        True, ``end_save`` must follow."""
        return self._repeats.begin(key.path())

    def end_save(self, key: ChunkKey) -> None:
        """The save is over, or was given up."""
        self._repeats.end(key.path())

    def take_lease(self, key: ChunkKey) -> bool:
        """Whether this process may save ``key`` now. An index that fails says yes: a duplicate is
        harmless, and bulk is the truth."""
        try:
            return self._index.lease(
                key.path(), self._settings.writer, ttl_ms=self._settings.lease_ms
            )
        except StoreError:
            self._recorder.count("lease_errors")
            return True

    def release_lease(self, key: ChunkKey) -> None:
        """Give the lease back early; if that fails, it ends by itself."""
        try:
            self._index.release(key.path(), self._settings.writer)
        except StoreError:
            self._recorder.count("lease_errors")

    def save(self, claim: Claim, payload: Buffer, header: Header) -> SaveOutcome:
        """Store ``payload``, then announce it. Call it while holding the lease. ``payload`` is not
        kept after returning.

        Raises ``StoreError`` if the bulk store did not take it; nothing is announced then.
        """
        path = claim.key.path()
        outcome = SaveOutcome.SAVED
        if self._is_suspect(path):
            self._bulk.put(path, payload)
            self._trust(path)
        elif not self._put_if_absent(path, payload):
            existing = self._existing_header(claim)
            if existing is None:
                self._bulk.put(path, payload)
            else:
                header, outcome = existing, SaveOutcome.EXISTED
        hot = outcome is SaveOutcome.SAVED and self._put_hot(path, payload)
        self._publish(claim, header, hot=hot)
        return outcome

    def note_load(
        self, claim: Claim, header: Header, *, hot: bool, seconds: float | None = None
    ) -> None:
        """A payload was loaded, verified and is in its blocks. Never waits, never raises.

        ``hot``: whether its record promised a hot copy; if not, it becomes hot when that happens
        often. ``seconds``: how long bulk took for its bytes, where that is known.
        """
        if hot:
            return
        if seconds is not None:
            self.link.gets.observe(header.nbytes, seconds)
        if self._promoter is not None:
            self._promoter.loaded(claim, header.nbytes)

    def close(self, deadline_s: float) -> bool:
        """End what runs in the background; True if it has ended within the bound. Idempotent."""
        return self._promoter is None or self._promoter.close(deadline_s)

    def reject(self, key: ChunkKey, records: Mapping[str, ShardRecord], *, corrupt: bool) -> None:
        """A record promised ``key``, and it was missing, or ``corrupt``: forget that record.

        The next save of a corrupt payload by this process replaces it. Never raises.
        """
        path = key.path()
        self._repeats.forget(path)
        expected = records.get(key.field)
        if corrupt:
            with self._lock:
                self._suspects[path] = None
                while len(self._suspects) > _SUSPECTS_MAX:
                    self._suspects.popitem(last=False)
        if expected is None:
            return
        try:
            self._index.forget(key.namespace, key.prefix_hash, key.field, expected)
        except StoreError:
            self._recorder.count("forget_errors")

    def _from_hot(self, hot: bool, get: Callable[[WriteStore], int | None]) -> int | None:
        """What the hot store gives; None where bulk has to be asked."""
        if not hot or self._hot is None:
            return None
        try:
            nbytes = get(self._hot)
        except StoreError:
            self._recorder.count("hot_errors")
            return None
        self._recorder.count("hot_misses" if nbytes is None else "hot_hits")
        return nbytes

    def _is_suspect(self, path: str) -> bool:
        with self._lock:
            return path in self._suspects

    def _trust(self, path: str) -> None:
        with self._lock:
            self._suspects.pop(path, None)

    def _put_if_absent(self, path: str, payload: Buffer) -> bool:
        started = self._clock()
        written = self._bulk.put_if_absent(path, payload)
        if written:  # else nothing, or not all of it, was sent
            self.link.puts.observe(len(payload), self._clock() - started)
        return written

    def _put_hot(self, path: str, payload: Buffer) -> bool:
        if self._hot is None:
            return False
        if not belongs_in_hot(len(payload), self._hot_limits):
            return False
        try:
            self._hot.put(path, payload)
        except StoreError:
            self._recorder.count("hot_errors")
            return False
        return True

    def _existing_header(self, claim: Claim) -> Header | None:
        """The header of the payload that another writer left, or None if it is not usable."""
        path = claim.key.path()
        try:
            start = self._bulk.get_range(path, 0, _LENGTH_BYTES)
            if start is None:
                return None
            prefix = self._bulk.get_range(path, 0, header_bytes_needed(start))
            entry = self._bulk.head(path)
            if prefix is None or entry is None:
                return None
            header = read_header(prefix)
        except PayloadError:
            return None
        if header.claim != claim or header.nbytes != entry.nbytes:
            return None
        return header

    def _publish(self, claim: Claim, header: Header, *, hot: bool) -> None:
        key = claim.key
        chunk = ChunkEntry(
            key.namespace, key.prefix_hash, claim.parent_hash, claim.token_start, claim.token_end
        )
        record = replace(shard_record(header), hot=hot)
        try:
            self._index.publish(chunk, {key.field: record}, ttl_s=self._settings.ttl_s)
        except StoreError:
            self._recorder.count("publish_errors")
        else:
            if not self._is_suspect(key.path()):  # found corrupt meanwhile: the next save mends it
                self._repeats.keep(key.path())


def shard_record(header: Header) -> ShardRecord:
    """What the index keeps of a payload, read from its header alone."""
    return ShardRecord(
        nbytes=header.nbytes,
        raw_bytes=header.raw_bytes,
        codec=header.codec,
        hot=False,
        header_checksum=header.checksum,
        created_s=header.provenance.created_s,
    )
