"""Reads and writes over bulk, hot and index, in the one right order.

Save: bulk first, then hot, the index record last. Forget: the index record first. So a crash
leaves orphans, never a record of something unreadable. The bulk store is the truth: a hot copy is
a shortcut, and an index that does not answer costs sharing, not correctness.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from threading import Lock

from objkv.cache.placement import belongs_in_hot
from objkv.cache.repeats import Repeats
from objkv.codec.payload import Claim, Header, header_bytes_needed, read_header
from objkv.errors import PayloadError, StoreError
from objkv.index.base import ChunkEntry, ShardRecord, WriteIndex
from objkv.keys.chunk import ChunkKey
from objkv.stores.base import Buffer, WriteStore
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


class ChunkCache:
    """Payloads by key. Safe from many threads; raises ``StoreError`` from the bulk store only."""

    def __init__(
        self,
        bulk: WriteStore,
        hot: WriteStore | None,
        index: WriteIndex,
        settings: CacheSettings,
        recorder: Recorder,
    ) -> None:
        self._bulk = bulk
        self._hot = hot
        self._index = index
        self._settings = settings
        self._recorder = recorder
        self._lock = Lock()
        self._suspects: OrderedDict[str, None] = OrderedDict()
        self._repeats = Repeats()

    def get_into(self, key: ChunkKey, buffer: memoryview, *, hot: bool) -> int | None:
        """The payload into ``buffer``; its length, or None. Unverified: the caller opens it.

        ``hot``: whether the record promised a copy in the hot store, which is then asked first.
        """
        path = key.path()
        if hot and self._hot is not None:
            try:
                nbytes = self._hot.get_into(path, buffer)
            except StoreError:
                self._recorder.count("hot_errors")
            else:
                if nbytes is not None:
                    self._recorder.count("hot_hits")
                    return nbytes
                self._recorder.count("hot_misses")
        return self._bulk.get_into(path, buffer)

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
        """Store ``payload``, then announce it. Call it while holding the lease.

        Raises ``StoreError`` if the bulk store did not take it; nothing is announced then.
        """
        path = claim.key.path()
        outcome = SaveOutcome.SAVED
        if self._is_suspect(path):
            self._bulk.put(path, payload)
            self._trust(path)
        elif not self._bulk.put_if_absent(path, payload):
            existing = self._existing_header(claim)
            if existing is None:
                self._bulk.put(path, payload)
            else:
                header, outcome = existing, SaveOutcome.EXISTED
        hot = outcome is SaveOutcome.SAVED and self._put_hot(path, payload)
        self._publish(claim, header, hot=hot)
        return outcome

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

    def _is_suspect(self, path: str) -> bool:
        with self._lock:
            return path in self._suspects

    def _trust(self, path: str) -> None:
        with self._lock:
            self._suspects.pop(path, None)

    def _put_hot(self, path: str, payload: Buffer) -> bool:
        if self._hot is None:
            return False
        if not belongs_in_hot(len(payload), self._settings.hot_payload_bytes_max):
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
