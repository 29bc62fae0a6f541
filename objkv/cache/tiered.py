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

from objkv.cache.existing import existing_header
from objkv.cache.hot import HotCopies
from objkv.cache.placement import HotLimits
from objkv.cache.promotion import Promoter
from objkv.cache.quota import Room, Unlimited
from objkv.cache.repeats import Repeats
from objkv.cache.speed import LinkSpeed
from objkv.codec.payload import Claim, Header
from objkv.codec.seal import Seal
from objkv.errors import StoreError
from objkv.index.base import ChunkEntry, ShardRecord, WriteIndex
from objkv.keys.chunk import ChunkKey
from objkv.stores.base import Arrived, Buffer, WriteStore
from objkv.telemetry import Recorder

_SUSPECTS_MAX = 65_536


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
        room: Room | None = None,
        seal: Seal | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.seal = seal
        """What payloads are sealed with, and without which none is usable; None: they are not."""
        self._bulk = bulk
        self._room = room or Unlimited()
        self._hot = HotCopies(hot, settings.hot_limits, recorder)
        self._index = index
        self._settings = settings
        self._recorder = recorder
        self._lock = Lock()
        self._suspects: OrderedDict[str, None] = OrderedDict()
        self._repeats = Repeats()
        self._clock = clock
        self._promoter: Promoter | None = None
        if hot is not None and settings.hot_promote_bytes_max > 0:
            self._promoter = Promoter(
                bulk,
                hot,
                index,
                settings.hot_limits,
                ttl_s=settings.ttl_s,
                lease_ms=settings.lease_ms,
                recorder=recorder,
                seal=seal,
            )
        self.link = LinkSpeed()
        """How fast puts and gets of the bulk store were lately."""

    def get_into(
        self,
        key: ChunkKey,
        buffer: memoryview,
        *,
        hot: bool,
        arrived: Arrived | None = None,
        on_hot: Callable[[], None] = lambda: None,
    ) -> int | None:
        """The payload into ``buffer``; its length, or None. Unverified: the caller opens it.

        ``hot``: whether the record promised a copy in the hot store, which is then asked first. Of
        that copy ``arrived`` is told when all is there, and before that only that something comes:
        if that store fails halfway bulk writes over it, and of what ``arrived`` was told of a lane
        may still be copying. ``on_hot`` is called if that copy is what was read.
        """
        path = key.path()
        told, nbytes = _told_at_the_end(arrived), None
        if hot:
            nbytes = self._hot.get(path, lambda store: store.get_into(path, buffer, told))
        if nbytes is None:
            return self._bulk.get_into(path, buffer, arrived)
        on_hot()
        if arrived is not None:
            arrived(nbytes)
        return nbytes

    def get_range_into(
        self,
        key: ChunkKey,
        start: int,
        buffer: memoryview,
        *,
        hot: bool,
        arrived: Arrived | None = None,
        on_hot: Callable[[], None] = lambda: None,
    ) -> int | None:
        """Bytes ``[start, start + len(buffer))`` of the payload into ``buffer``, fewer where it
        ends before; how many, or None. Else as ``get_into``."""
        path = key.path()
        told, nbytes = _told_at_the_end(arrived), None
        if hot:
            nbytes = self._hot.get(
                path, lambda store: store.get_range_into(path, start, buffer, told)
            )
        if nbytes is None:
            return self._bulk.get_range_into(path, start, buffer, arrived)
        on_hot()
        if arrived is not None:
            arrived(nbytes)
        return nbytes

    def has_room(self) -> bool:
        """Whether to save anything at all: not while the place is above its quota."""
        return self._room.has_room()

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
        suspect = self._is_suspect(path)
        if suspect:
            self._bulk.put(path, payload)
            self._trust(path)
        elif not self._put_if_absent(path, payload):
            existing = existing_header(self._bulk, claim, self.seal)
            if existing is None:
                self._bulk.put(path, payload)
            else:
                self._publish(claim, existing, hot=self._hot.has(path, existing.nbytes))
                return SaveOutcome.EXISTED
        self._room.add(header.nbytes)
        self._publish(claim, header, hot=self._hot.put(path, payload, suspect=suspect))
        return SaveOutcome.SAVED

    def note_load(
        self, claim: Claim, header: Header, *, hot: bool, seconds: float | None = None
    ) -> None:
        """A payload was loaded, verified and is in its blocks. Never waits, never raises.

        ``hot``: whether its record promised a hot copy; if not, or if that copy is gone, it becomes
        hot when that happens often. ``seconds``: how long bulk took for its bytes, where that is
        known.
        """
        if hot and not self._hot.is_lost(claim.key.path()):
            return
        if seconds is not None and not hot:
            self.link.gets.observe(header.nbytes, seconds)
        if self._promoter is not None:
            self._promoter.loaded(claim, header.nbytes)

    def close(self, deadline_s: float) -> bool:
        """End what runs in the background; True if it has ended within the bound. Idempotent."""
        self._room.close()
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
        if corrupt and expected.hot:
            self._hot.distrust(path)
        try:
            self._index.forget(key.namespace, key.prefix_hash, key.field, expected)
        except StoreError:
            self._recorder.count("forget_errors")

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


def _told_at_the_end(arrived: Arrived | None) -> Arrived | None:
    return None if arrived is None else lambda _: arrived(0)


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
