"""An index without its own storage: a chunk is stored if its payload's file exists in the folder.

For shared folders, including network file systems, where SQLite must not be used. It costs more
than others: a lookup checks every payload's file, and operators' queries read every header. Nothing
expires and no hits are counted. Pins are in the documents of ``objkv.cache.pins``.

Also an index that lists the bulk store where its server refuses to scan keys.
"""

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import Final

import xxhash

from objkv.cache.chunks import shard_record, stored_header, stored_payloads
from objkv.cache.pins import read_pins
from objkv.codec.values import Header
from objkv.errors import SCAN_DENIED, PayloadError, StoreDenied
from objkv.index.base import (
    ChunkEntry,
    Lease,
    Record,
    Savings,
    ShardRecord,
    ShardRecords,
    Usage,
    WriteIndex,
)
from objkv.index.guarded import GuardedIndex
from objkv.keys.chunk import payload_path
from objkv.keys.identity import NAMESPACE_HEX
from objkv.net.guard import CallPolicy
from objkv.stores.base import Entry, PruneStore, ReadStore

logger = logging.getLogger(__name__)
_NAMESPACE = re.compile(rf"[0-9a-f]{{{NAMESPACE_HEX}}}")
_CHUNKS_AT_ONCE = 500
MISSING_UNSEEN: Final = (
    "records whose payloads are missing are not seen, because this user may not list the "
    "keys of the index: to see them, use the role sweeper"
)


class BulkIndex:
    """Implements ``PruneIndex`` over the payloads of ``store``, which it closes.

    ``find`` returns only what a payload's file shows: ``raw_bytes`` is its length, and
    ``header_checksum`` a digest of its length and age.
    """

    def __init__(self, store: PruneStore, *, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock

    def lookup(self, namespace: str, prefix_hashes: Sequence[bytes]) -> list[Record | None]:
        """Reads the header of every payload of these chunks."""
        pins = read_pins(self._store, namespace)
        return [next(self._records(_folder(namespace, one), pins), None) for one in prefix_hashes]

    def find(
        self, namespace: str, prefix_hashes: Sequence[bytes], fields: Sequence[str]
    ) -> list[ShardRecords | None]:
        """Checks each payload's file up to the first missing chunk, as later ones match nothing."""
        found: list[ShardRecords | None] = [None] * len(prefix_hashes)
        for place, prefix_hash in enumerate(prefix_hashes):
            shards = {
                field: _of_file(entry)
                for field in fields
                if (entry := self._store.head(payload_path(namespace, prefix_hash, field)))
            }
            if not shards:
                break
            found[place] = shards
        return found

    def scan(self, namespace: str) -> Iterator[Record]:
        """Reads the header of every payload."""
        yield from self._records(f"{namespace}/", read_pins(self._store, namespace))

    def namespaces(self) -> list[str]:
        """Walks the whole store."""
        return sorted({key.namespace for key, _ in stored_payloads(self._store, "")})

    def usage(self) -> list[Usage]:
        """Walks the whole store, and counts exactly."""
        nbytes, payloads = Counter[str](), Counter[str]()
        for key, entry in stored_payloads(self._store, ""):
            nbytes[key.namespace] += entry.nbytes
            payloads[key.namespace] += 1
        now_s = int(self._clock())
        return [Usage(name, nbytes[name], payloads[name], now_s) for name in sorted(payloads)]

    def savings(self) -> list[Savings]:
        """Return nothing: a folder has no place where many processes could add up."""
        return []

    def check(self) -> None:
        self._store.check()

    def close(self) -> None:
        self._store.close()

    def publish(
        self, chunk: ChunkEntry, shards: ShardRecords, *, ttl_s: int, lease: Lease | None = None
    ) -> None:
        """Does nothing: payloads are found by their files."""

    def touch(self, namespace: str, prefix_hashes: Sequence[bytes], *, ttl_s: int) -> None:
        """Does nothing: hits are not counted."""

    def credit(self, savings: Savings) -> None:
        """Does nothing, see ``savings``."""

    def forget(self, namespace: str, prefix_hash: bytes, field: str, expected: ShardRecord) -> bool:
        """Delete the payload that ``expected`` describes, which is the only way to keep other
        readers from finding it. One that was rewritten before this call stays."""
        path = payload_path(namespace, prefix_hash, field)
        entry = self._store.head(path)
        if entry is None:
            return False
        if _of_file(entry) != expected:
            header = _header(self._store, entry)
            if header is None or shard_record(header) != expected:
                return False
        return self._store.delete(path)

    def lease(self, name: str, owner: str, *, ttl_ms: int) -> bool:
        """Return True: two savers write the same, and the store keeps the first."""
        return True

    def release(self, name: str, owner: str) -> None:
        """Does nothing: leases exclude no other process."""

    def flush(self) -> None:
        """Does nothing: ``usage`` counts."""

    def record_sightings(self, names: Sequence[str], *, ttl_s: int) -> list[bool]:
        """Return False for all: a folder keeps no sightings."""
        return [False] * len(names)

    def pin(self, namespace: str, prefix_hash: bytes, *, until_s: int, ttl_s: int) -> bool:
        """Return whether the chunk exists. Its caller writes the only record, the document."""
        return any(stored_payloads(self._store, _folder(namespace, prefix_hash)))

    def drop(self, namespace: str, prefix_hash: bytes) -> bool:
        payloads = list(stored_payloads(self._store, _folder(namespace, prefix_hash)))
        deleted = [self._store.delete(entry.key) for _, entry in payloads]
        return any(deleted)

    def set_usage(self, usage: Usage) -> None:
        """Does nothing: ``usage`` counts exactly."""

    def _records(self, prefix: str, pins: Mapping[bytes, int]) -> Iterator[Record]:
        payloads = stored_payloads(self._store, prefix)
        for prefix_hash, chunk in groupby(payloads, lambda found: found[0].prefix_hash):
            shards, claim = {}, None
            for key, entry in chunk:
                header = _header(self._store, entry)
                if header is not None and header.claim.key == key:
                    shards[key.field], claim = shard_record(header), header.claim
            if claim is not None:
                until_s = pins.get(prefix_hash, 0)
                yield Record(
                    prefix_hash,
                    claim.parent_hash,
                    claim.token_start,
                    claim.token_end,
                    shards,
                    pinned_until_s=until_s if until_s > self._clock() else 0,
                )


def _folder(namespace: str, prefix_hash: bytes) -> str:
    digest = prefix_hash.hex()
    return f"{namespace}/{digest[:2]}/{digest}/"


def _of_file(entry: Entry) -> ShardRecord:
    return ShardRecord(
        nbytes=entry.nbytes,
        raw_bytes=entry.nbytes,
        is_plain=True,  # as far as is known: the header has not been read
        hot=False,
        header_checksum=xxhash.xxh3_64_hexdigest(f"{entry.nbytes} {entry.modified_s!r}".encode()),
        created_s=int(entry.modified_s),
    )


def _header(store: ReadStore, entry: Entry) -> Header | None:
    try:
        return stored_header(store, entry, None)
    except PayloadError:
        return None


def is_listed(index: object) -> bool:
    """Whether ``index`` lists the bulk store, because its server has refused a scan."""
    return isinstance(index, ListedIndex) and index.is_denied


class ListedIndex(GuardedIndex):
    """A guarded index that lists ``bulk``, which stays open, once the server has refused a scan.

    Only the role sweeper may scan a Redis, because that shows the keys of other tenants. Every role
    may list its own prefix of the bulk store and look chunks up, so commands that read work with a
    reader's rights. They do not see records whose payloads are gone, and log that once.
    """

    def __init__(self, inner: WriteIndex, guard: CallPolicy, bulk: ReadStore) -> None:
        super().__init__(inner, guard)
        self._bulk = bulk
        self.is_denied = False

    def scan(self, namespace: str) -> Iterator[Record]:
        """From a listing, yields each chunk that has a payload and a record."""
        if not self.is_denied:
            try:
                yield from super().scan(namespace)
                return
            except StoreDenied as exc:  # at the first record: rights rarely end within a scan
                self._note(exc)
        payloads = stored_payloads(self._bulk, f"{namespace}/")
        hashes = (found for found, _ in groupby(payloads, lambda found: found[0].prefix_hash))
        while batch := list(islice(hashes, _CHUNKS_AT_ONCE)):
            yield from filter(None, self.lookup(namespace, batch))

    def namespaces(self) -> list[str]:
        if not self.is_denied:
            try:
                return list(super().namespaces())
            except StoreDenied as exc:
                self._note(exc)
        return sorted(name for name in self._bulk.folders("") if _NAMESPACE.fullmatch(name))

    def _note(self, denied: StoreDenied) -> None:
        """Remember a refused scan. Raises ``denied`` if something else was refused."""
        if SCAN_DENIED not in str(denied):
            raise denied
        self.is_denied = True
        logger.warning("index keys not scanned, bulk store listed instead: %s", MISSING_UNSEEN)
