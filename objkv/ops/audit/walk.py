"""Walks both ends for an audit, and looks twice at what seems wrong: replicas go on meanwhile.

Nothing is changed, and no payload is read; where the bulk store is its own index, headers are.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice

from objkv.cache.chunks import shard_record
from objkv.cache.pins import read_pins
from objkv.codec.seal import Seal
from objkv.errors import ConfigError, PayloadError, StoreDenied
from objkv.index.base import ReadIndex, Record
from objkv.index.shapes import is_shapes
from objkv.keys.chunk import ChunkKey
from objkv.keys.topology import Shard
from objkv.ops.audit.spool import AuditSpool, Told
from objkv.ops.backends_view import (
    CHUNKS_AT_ONCE,
    QUARANTINE,
    NamespacePart,
    StoredNamespace,
    looks,
    stored_entries,
    stored_header,
)
from objkv.ops.runs import Check, Counters, Unit
from objkv.stores.base import Entry, ReadStore, Unfinished

LOOKED_TWICE_MAX = 2_000
"""Of each kind and namespace. Where more seems wrong, what changed meanwhile does not matter."""


@dataclass(frozen=True, slots=True)
class AuditView:
    """Both ends, of which an audit changes nothing."""

    bulk: ReadStore
    index: ReadIndex
    is_own_index: bool
    seal_of: Callable[[StoredNamespace], Seal | None] = lambda namespace: None
    """As that of ``Ends``."""
    unfinished: Callable[[], Iterable[Unfinished]] = tuple
    """What killed writers left in the bulk store."""


@dataclass(slots=True)
class AuditWalk:
    """Units that fill ``spool``; each is done once, also over several runs."""

    view: AuditView
    spool: AuditSpool
    workers: int
    clock: Callable[[], float] = time.time
    problems: set[str] = field(default_factory=set)
    """What could not be looked at, in sentences; for the run that met it."""

    def records(self, names: Sequence[str]) -> Iterator[Unit]:
        """All that the index knows of these namespaces."""
        for name in names:
            yield self._unit(records_unit(name), self._records_work(name))

    def payloads(
        self, parts: Sequence[NamespacePart], namespaces: dict[str, StoredNamespace]
    ) -> Iterator[Unit]:
        """All that the bulk store has in ``parts``."""
        for part in parts:
            yield self._unit(part_unit(part), self._part_work(part, namespaces[part.namespace]))

    def leftovers(self, only: str | None = None) -> Iterator[Unit]:
        """What killed writers left, and what lies in quarantine, of all or of one namespace."""
        yield self._unit("leftovers", lambda check: self._leftovers(only, check))

    def second_looks(self, names: Sequence[str]) -> Iterator[Unit]:
        """What seems wrong in namespaces that have been walked is looked at once more, since one
        end was seen before the other."""
        for name in names:
            yield Unit(f"again {name}", self._again_work(name), again=True)

    def _unit(self, name: str, work: Callable[[Check], None]) -> Unit:
        def whole(counters: Counters, check: Check) -> None:
            work(check)
            self.spool.finish(name)

        return Unit(name, whole)

    def _records_work(self, name: str) -> Callable[[Check], None]:
        def work(check: Check) -> None:
            records = (one for one in self.view.index.scan(name) if not is_shapes(one))
            while batch := list(islice(records, CHUNKS_AT_ONCE)):
                check()
                self.spool.add_records(Told(name, record, True) for record in batch)

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
                check()
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
                said = f"claims to be {claim.key.path()}"
                self.spool.find("corrupt", entry, said, key.namespace)
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
        self.spool.add_records(Told(namespace.name, one, False) for one in chunks.values())

    def _leftovers(self, only: str | None, check: Check) -> None:
        try:
            for left in self.view.unfinished():
                check()
                if only not in (None, _folder(left.key)):
                    continue
                entry = Entry(f"{left.key} ({left.name})", left.nbytes, left.modified_s)
                self.spool.find("leftover", entry, "left by a writer that was ended")
        except StoreDenied as exc:
            self.problems.add(f"unfinished uploads were not looked for: {exc}")
        for entry in self.view.bulk.scan(f"{QUARANTINE}/{only}/" if only else f"{QUARANTINE}/"):
            check()
            self.spool.find("leftover", entry, "taken out of use by objkv verify")

    def _again_work(self, name: str) -> Callable[[Counters, Check], None]:
        def work(counters: Counters, check: Check) -> None:
            doubtful = self._doubtful(name)
            for start in range(0, len(doubtful), CHUNKS_AT_ONCE):
                check()
                self._look_again(doubtful[start : start + CHUNKS_AT_ONCE])

        return work

    def _doubtful(self, name: str) -> list[ChunkKey]:
        """Payloads of which the two ends tell different things."""
        ns = self.spool.namespace(name)
        statements = (
            "SELECT s.hash, s.field FROM shards s LEFT JOIN payloads p USING (ns, hash, field)"
            " WHERE s.ns = ? AND (p.nbytes IS NULL OR p.nbytes <> s.nbytes) LIMIT ?",
            "SELECT p.hash, p.field FROM payloads p LEFT JOIN shards s USING (ns, hash, field)"
            " WHERE p.ns = ? AND s.nbytes IS NULL LIMIT ?",
        )
        rows = [row for one in statements for row in self.spool.some(one, (ns, LOOKED_TWICE_MAX))]
        return [_key(name, prefix_hash, text) for prefix_hash, text in rows]

    def _look_again(self, keys: Sequence[ChunkKey]) -> None:
        """The record first: what it promises was put before."""
        name = keys[0].namespace
        hashes = list(dict.fromkeys(key.prefix_hash for key in keys))
        records = dict(zip(hashes, self.view.index.lookup(name, hashes), strict=True))
        with ThreadPoolExecutor(self.workers, thread_name_prefix="objkv-heads") as pool:
            entries = list(looks(self.view.bulk, pool, keys, at_once=self.workers))
        self.spool.add_records(Told(name, one, True) for one in records.values() if one is not None)
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
    """What the walk over a namespace's records is called."""
    return f"records {name}"


def part_unit(part: NamespacePart) -> str:
    """What the walk over a part's payloads is called."""
    return f"payloads {part.name}"


def _folder(key: str) -> str:
    """The namespace that a payload is of, be it in quarantine or not."""
    return key.removeprefix(f"{QUARANTINE}/").partition("/")[0]


def _key(namespace: str, prefix_hash: bytes, text: str) -> ChunkKey:
    group, _, shard = text.partition(".")
    return ChunkKey(namespace, prefix_hash, int(group), Shard.parse(shard))
