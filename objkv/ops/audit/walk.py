"""Walks the index and the bulk store for an audit, and rechecks suspected faults.

The recheck is needed because replicas keep writing. Nothing is changed, and no payload is read. If
the bulk store is its own index, the walk reads the headers of payloads.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice

from objkv.cache.chunks import shard_record, stored_header
from objkv.cache.pins import read_pins
from objkv.codec.seal import Seal
from objkv.errors import ConfigError, PayloadError
from objkv.index.base import ReadIndex, Record
from objkv.keys.chunk import ChunkKey
from objkv.ops.audit.spool import AuditSpool, SeenRecord
from objkv.ops.backends_view import (
    CHUNKS_AT_ONCE,
    QUARANTINE,
    NamespacePart,
    StoredNamespace,
    looks,
    stored_entries,
)
from objkv.ops.doctor.lifecycle import ReadRules
from objkv.ops.runs import Check, Counters, Unit
from objkv.stores.base import Entry, ReadStore, Unfinished

LOOKED_TWICE_MAX = 2_000
"""Findings to recheck per kind and namespace. With more findings, a few changes do not matter."""


@dataclass(frozen=True, slots=True)
class AuditView:
    """The store and the index, as far as an audit uses them: read-only."""

    bulk: ReadStore
    index: ReadIndex
    is_own_index: bool
    seal_of: Callable[[StoredNamespace], Seal | None] = lambda namespace: None
    """See ``BackendsView.seal_of``."""
    unfinished: Callable[[], Iterable[Unfinished]] = tuple
    """Unfinished writes of killed writers in the bulk store."""
    lifecycle: ReadRules = lambda: None
    """See ``objkv.ops.doctor.lifecycle``."""


@dataclass(slots=True)
class AuditWalk:
    """The units of work that fill ``spool``. Each is done once."""

    view: AuditView
    spool: AuditSpool
    workers: int
    clock: Callable[[], float] = time.time
    problems: set[str] = field(default_factory=set)
    """Parts that this run could not read, in sentences."""

    def records(self, names: Sequence[str], totals: Mapping[str, int]) -> Iterator[Unit]:
        """Yield units that read the records of these namespaces. ``totals``: the expected number of
        payloads per namespace."""
        for name in names:
            yield self._unit(records_unit(name), self._records_work(name), totals.get(name, 0))

    def payloads(
        self, parts: Sequence[NamespacePart], namespaces: dict[str, StoredNamespace]
    ) -> Iterator[Unit]:
        """Yield units that list ``parts`` of the bulk store."""
        for part in parts:
            work = self._part_work(part, namespaces[part.namespace])
            yield self._unit(part_unit(part), work, part.payloads)

    def leftovers(self, only: str | None = None) -> Iterator[Unit]:
        """Yield a unit that lists unfinished writes and the quarantine, of one namespace or all."""
        yield self._unit("leftovers", lambda check: self._leftovers(only, check))

    def second_looks(self, names: Sequence[str]) -> Iterator[Unit]:
        """Yield units that recheck the suspected faults of walked namespaces.

        The index was read before the bulk store was listed, so they may differ by what replicas
        wrote in between.
        """
        for name in names:
            yield Unit(self._again_work(name))

    def _unit(self, name: str, work: Callable[[Check], None], items: float = 0.0) -> Unit:
        def whole(counters: Counters, check: Check) -> None:
            work(check)
            self.spool.finish(name)

        return Unit(whole, items=items)

    def _records_work(self, name: str) -> Callable[[Check], None]:
        def work(check: Check) -> None:
            records = self.view.index.scan(name)
            while batch := list(islice(records, CHUNKS_AT_ONCE)):
                check(sum(len(record.shards) for record in batch))
                self.spool.add_records(SeenRecord(name, record, True) for record in batch)

        return work

    def _part_work(
        self, part: NamespacePart, namespace: StoredNamespace
    ) -> Callable[[Check], None]:
        def work(check: Check) -> None:
            pins: dict[bytes, int] = {}
            if self.view.is_own_index:
                pins = read_pins(self.view.bulk, part.namespace)
            entries = stored_entries(self.view.bulk, part)
            while batch := list(islice(entries, CHUNKS_AT_ONCE)):
                check(0 if self.view.is_own_index else len(batch))
                found = [(key, entry) for key, entry in batch if key is not None]
                for key, entry in batch:
                    if key is None:
                        self.spool.find("leftover", entry, "not a payload", part.namespace)
                self.spool.add_payloads(found)
                if self.view.is_own_index:
                    self._read_headers(namespace, found, pins, check)

        return work

    def _read_headers(
        self,
        namespace: StoredNamespace,
        found: Sequence[tuple[ChunkKey, Entry]],
        pins: dict[bytes, int],
        check: Check,
    ) -> None:
        if namespace.is_old_format:
            return
        try:
            seal = self.view.seal_of(namespace)
        except ConfigError as exc:
            self.problems.add(f"{namespace.name}: headers were not read: {exc}")
            return
        now_s = self.clock()
        chunks: dict[bytes, Record] = {}
        for key, entry in found:
            check()
            try:
                header = stored_header(self.view.bulk, entry, seal)
            except PayloadError as exc:
                self.spool.find("corrupt", entry, str(exc), key.namespace)
                continue
            if header is None:
                continue
            claim = header.claim
            if claim.key != key:
                detail = f"claims to be {claim.key.path()}"
                self.spool.find("corrupt", entry, detail, key.namespace)
                continue
            before = chunks.get(key.prefix_hash)
            chunks[key.prefix_hash] = Record(
                prefix_hash=key.prefix_hash,
                parent_hash=claim.parent_hash,
                token_start=claim.token_start,
                token_end=claim.token_end,
                shards={**(before.shards if before else {}), key.field: shard_record(header)},
                pinned_until_s=pins.get(key.prefix_hash, 0)
                if pins.get(key.prefix_hash, 0) > now_s
                else 0,
            )
        self.spool.add_records(SeenRecord(namespace.name, one, False) for one in chunks.values())

    def _leftovers(self, only: str | None, check: Check) -> None:
        for left in self.view.unfinished():
            check()
            if only not in (None, _folder(left.key)):
                continue
            entry = Entry(f"{left.key} ({left.name})", left.nbytes, left.modified_s)
            self.spool.find("leftover", entry, "left by a killed writer")
        for entry in self.view.bulk.scan(f"{QUARANTINE}/{only}/" if only else f"{QUARANTINE}/"):
            check()
            self.spool.find("leftover", entry, "quarantined by objkv verify")

    def _again_work(self, name: str) -> Callable[[Counters, Check], None]:
        def work(counters: Counters, check: Check) -> None:
            doubtful = self._doubtful(name)
            for start in range(0, len(doubtful), CHUNKS_AT_ONCE):
                check(len(doubtful[start : start + CHUNKS_AT_ONCE]))
                self._look_again(doubtful[start : start + CHUNKS_AT_ONCE])

        return work

    def _doubtful(self, name: str) -> list[ChunkKey]:
        """Return the payloads on which the index and the bulk store disagree."""
        ns = self.spool.namespace(name)
        statements = (
            "SELECT s.hash, s.field FROM shards s LEFT JOIN payloads p USING (ns, hash, field)"
            " WHERE s.ns = ? AND (p.nbytes IS NULL OR p.nbytes <> s.nbytes) LIMIT ?",
            "SELECT p.hash, p.field FROM payloads p LEFT JOIN shards s USING (ns, hash, field)"
            " WHERE p.ns = ? AND s.nbytes IS NULL LIMIT ?",
        )
        rows = [row for one in statements for row in self.spool.some(one, (ns, LOOKED_TWICE_MAX))]
        return [ChunkKey.of(name, prefix_hash, text) for prefix_hash, text in rows]

    def _look_again(self, keys: Sequence[ChunkKey]) -> None:
        """Read the record before the payload: a payload is put before its record is published."""
        name = keys[0].namespace
        hashes = list(dict.fromkeys(key.prefix_hash for key in keys))
        records = dict(zip(hashes, self.view.index.lookup(name, hashes), strict=True))
        with ThreadPoolExecutor(self.workers, thread_name_prefix="objkv-heads") as pool:
            entries = list(looks(self.view.bulk, pool, keys, at_once=self.workers))
        self.spool.add_records(
            SeenRecord(name, one, True) for one in records.values() if one is not None
        )
        self.spool.add_payloads(
            (key, entry) for key, entry in zip(keys, entries, strict=True) if entry is not None
        )
        gone = [key for key, entry in zip(keys, entries, strict=True) if entry is None]
        self.spool.remove("payloads", gone)
        shards = {key: records[key.prefix_hash] for key in keys}
        self.spool.remove(
            "shards", [k for k, one in shards.items() if one is None or k.field not in one.shards]
        )


def records_unit(name: str) -> str:
    """Return the unit name of the walk over a namespace's records."""
    return f"records {name}"


def part_unit(part: NamespacePart) -> str:
    """Return the unit name of the walk over a part's payloads."""
    return f"payloads {part.name}"


def _folder(key: str) -> str:
    """Return the namespace of a payload, quarantined or not."""
    return key.removeprefix(f"{QUARANTINE}/").partition("/")[0]
