"""Walks the index and the bulk store into an inventory. Nothing is changed, and no payload is read.

Records are read before payloads are listed: a payload is put before its record is published, so a
record whose payload is not listed afterwards has lost it. What was saved in between looks as if it
had no record; therefore commands that delete look each item up again.
"""

import re
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

from objkv.cache.chunks import shard_record, stored_header
from objkv.cache.pins import read_pins
from objkv.cache.switch import OPERATOR_FOLDER
from objkv.errors import ConfigError, PayloadError
from objkv.index.base import Record
from objkv.keys.chunk import ChunkKey
from objkv.ops.backends_view import (
    CHUNKS_AT_ONCE,
    QUARANTINE,
    BackendsView,
    StoredNamespace,
    read_namespace,
    stored_namespaces,
)
from objkv.ops.inventory.file import Inventory
from objkv.ops.runs import Check, Counters, Unit
from objkv.stores.base import Entry

is_fan = re.compile(r"[0-9a-f]{2}").fullmatch
"""Whether a folder of a namespace has payloads: it has the first two digits of their hashes."""
LOOKED_TWICE_MAX = 2_000
"""Findings to look at again per kind and namespace, the newest. Among more, a few do not matter."""
_DOUBTFUL = (
    "SELECT hash, field FROM payloads WHERE ns = ? AND recorded IS NOT NULL"
    " AND (nbytes IS NULL OR nbytes <> recorded) ORDER BY created_s DESC LIMIT ?",
    "SELECT hash, field FROM payloads WHERE ns = ? AND recorded IS NULL"
    " ORDER BY modified_s DESC LIMIT ?",
)


@dataclass(frozen=True, slots=True)
class WalkScope:
    """What a walk covers, by name."""

    namespaces: Mapping[str, StoredNamespace]
    """Those that have a folder in the bulk store."""
    old: frozenset[str]
    """Namespaces of an earlier format, or with a later epoch, which may be outside the walk."""
    indexed: Sequence[str]
    """Namespaces that have records in the index."""
    others: Sequence[str] = ()
    """Folders of the bulk store that objkv did not create."""
    only: str | None = None
    """The one namespace to walk; None for all."""
    totals: Mapping[str, int] = field(default_factory=dict)
    """The expected number of payloads per namespace."""

    @property
    def every(self) -> list[str]:
        """All namespaces, of the bulk store or of the index only."""
        return sorted({*self.namespaces, *self.indexed})

    def without(self, names: Collection[str]) -> "WalkScope":
        """Return the scope that leaves out these namespaces."""
        left = {name: one for name, one in self.namespaces.items() if name not in names}
        indexed = [name for name in self.indexed if name not in names]
        return replace(self, namespaces=left, indexed=indexed)


def find_scope(view: BackendsView, only: str | None = None) -> WalkScope:
    """Return the scope of all namespaces, or of the namespace ``only``."""
    # First the index: a namespace's document is put before its first record is published.
    indexed = [] if view.is_own_index else view.index.namespaces()
    usage = [] if view.is_own_index else view.index.usage()
    every = stored_namespaces(view.bulk)
    known = {name: read_namespace(view.bulk, name) for name in every}
    own = {*every, QUARANTINE, OPERATOR_FOLDER}
    return WalkScope(
        namespaces={name: one for name, one in known.items() if only in (None, name)},
        old=old_epochs(known.values()),
        indexed=[name for name in indexed if only in (None, name)],
        others=() if only else [one for one in view.bulk.folders("") if one not in own],
        only=only,
        totals={one.namespace: one.payloads for one in usage},
    )


def old_epochs(namespaces: Iterable[StoredNamespace]) -> frozenset[str]:
    """Return the namespaces of an earlier format, or that differ from another by a lower epoch."""
    alike: defaultdict[bytes, list[StoredNamespace]] = defaultdict(list)
    for namespace in namespaces:
        if namespace.is_known:
            alike[namespace.rest].append(namespace)
    return frozenset(
        one.name
        for group in alike.values()
        for one in group
        if one.is_old_format or one.weights_epoch < max(other.weights_epoch for other in group)
    )


def with_old_epochs(names: Collection[str], scope: WalkScope) -> frozenset[str]:
    """Return ``names`` with their earlier epochs: records show whether those are in use."""
    rests = {one.rest for name, one in scope.namespaces.items() if name in names}
    return frozenset(
        name
        for name, one in scope.namespaces.items()
        if one.is_known and one.rest in rests and (name in names or name in scope.old)
    )


@dataclass(slots=True)
class Walk:
    """The units of work that fill ``inventory``. Each is done once, in the order of the methods."""

    view: BackendsView
    inventory: Inventory
    scope: WalkScope
    workers: int = 16
    clock: Callable[[], float] = time.time
    problems: set[str] = field(default_factory=set)
    """Parts that could not be read, in sentences."""

    def records(self) -> Iterator[Unit]:
        for name in self.scope.indexed:
            yield Unit(partial(self._records, name), items=self.scope.totals.get(name, 0))

    def payloads(self, *, headers: bool = False) -> Iterator[Unit]:
        """Yield units that list payloads. ``headers`` describe chunks that have no records."""
        for name in self.scope.namespaces:
            fans = [fan for fan in self.view.bulk.folders(name) if is_fan(fan)]
            for fan in fans:
                items = self.scope.totals.get(name, 0) / len(fans)
                yield Unit(partial(self._fan, name, fan, headers), items=items)

    def leftovers(self) -> Iterator[Unit]:
        """Yield a unit that lists unfinished writes and the quarantine."""
        yield Unit(self._leftovers)

    def pins(self) -> Iterator[Unit]:
        for name in self.scope.namespaces:
            yield Unit(partial(self._pins, name))

    def second_looks(self, *, unrecorded: bool = True) -> Iterator[Unit]:
        """Yield units that look again at what seems wrong, because replicas kept writing;
        ``unrecorded``: also at payloads without a record."""
        for name in () if self.view.is_own_index else self.scope.every:
            yield Unit(partial(self._again, name, _DOUBTFUL if unrecorded else _DOUBTFUL[:1]))

    def judge(self, *, ttl_s: float) -> None:
        """Let the inventory judge its payloads, by records that live for ``ttl_s``."""
        expired_s = self.clock() - ttl_s
        for name in self.scope.every:
            known = self.scope.namespaces.get(name)
            self.inventory.run(
                "UPDATE namespaces SET has_records = ?, is_known = ?, is_old = ?, expired_s = ?"
                " WHERE id = ?",
                (
                    not self.view.is_own_index,
                    known is not None and known.is_known,
                    name in self.scope.old,
                    expired_s,
                    self.inventory.namespace(name),
                ),
            )

    def _records(self, name: str, counters: Counters, check: Check) -> None:
        records = self.view.index.scan(name)
        while batch := list(islice(records, CHUNKS_AT_ONCE)):
            check(sum(len(record.shards) for record in batch))
            self.inventory.add_records(name, batch, has_hits=not self.view.is_own_index)

    def _fan(self, name: str, fan: str, headers: bool, counters: Counters, check: Check) -> None:
        """List a folder of a namespace, which has about 1/256 of its payloads, by hash."""
        entries = self.view.bulk.scan(f"{name}/{fan}/")
        while batch := list(islice(entries, CHUNKS_AT_ONCE)):
            check(0 if headers else len(batch))
            found = list[tuple[ChunkKey, Entry]]()
            for entry in batch:
                try:
                    found.append((ChunkKey.parse(entry.key), entry))
                except ValueError:
                    self.inventory.add_other("other", entry, "not a payload", namespace=name)
            self.inventory.add_payloads(name, found)
            if headers:
                self._read_headers(name, found, check)

    def _read_headers(
        self, name: str, found: Sequence[tuple[ChunkKey, Entry]], check: Check
    ) -> None:
        namespace = self.scope.namespaces[name]
        if namespace.is_old_format:
            return
        try:
            seal = self.view.seal_of(namespace)
        except ConfigError as exc:
            self.problems.add(f"{name}: headers were not read: {exc}")
            return
        chunks: dict[bytes, Record] = {}
        for key, entry in found:
            check()
            try:
                header = stored_header(self.view.bulk, entry, seal)
            except PayloadError as exc:
                self.inventory.add_problem(key, str(exc))
                continue
            if header is None:
                continue
            claim = header.claim
            if claim.key != key:
                self.inventory.add_problem(key, f"claims to be {claim.key.path()}")
                continue
            before = chunks.get(key.prefix_hash)
            chunks[key.prefix_hash] = Record(
                prefix_hash=key.prefix_hash,
                parent_hash=claim.parent_hash,
                token_start=claim.token_start,
                token_end=claim.token_end,
                shards={**(before.shards if before else {}), key.field: shard_record(header)},
            )
        self.inventory.add_records(name, chunks.values(), has_hits=False)

    def _pins(self, name: str, counters: Counters, check: Check) -> None:
        now_s = self.clock()
        pins = read_pins(self.view.bulk, name)
        self.inventory.add_pins(name, [h for h, until_s in pins.items() if until_s > now_s])

    def _leftovers(self, counters: Counters, check: Check) -> None:
        only = self.scope.only
        for left in self.view.bulk.unfinished():
            check()
            if only in (None, left.key.removeprefix(f"{QUARANTINE}/").partition("/")[0]):
                entry = Entry(left.key, left.nbytes, left.modified_s)
                self.inventory.add_other(
                    "temporary", entry, "left by a killed writer", name=left.name
                )
        for entry in self.view.bulk.scan(f"{QUARANTINE}/{only}/" if only else f"{QUARANTINE}/"):
            check()
            self.inventory.add_other("quarantined", entry, "quarantined by objkv verify")

    def _again(self, name: str, doubtful: Sequence[str], counters: Counters, check: Check) -> None:
        ns = self.inventory.namespace(name)
        rows = [row for one in doubtful for row in self.inventory.run(one, (ns, LOOKED_TWICE_MAX))]
        keys = [ChunkKey.of(name, prefix_hash, text) for prefix_hash, text in rows]
        for start in range(0, len(keys), CHUNKS_AT_ONCE):
            some = keys[start : start + CHUNKS_AT_ONCE]
            check(len(some))
            self._look_again(name, some)

    def _look_again(self, name: str, keys: Sequence[ChunkKey]) -> None:
        """Read the record before the payload: a payload is put before its record is published."""
        hashes = list(dict.fromkeys(key.prefix_hash for key in keys))
        records = dict(zip(hashes, self.view.index.lookup(name, hashes), strict=True))
        with ThreadPoolExecutor(self.workers, thread_name_prefix="objkv-heads") as pool:
            entries = list(pool.map(lambda key: self.view.bulk.head(key.path()), keys))
        # Other payloads of these chunks may be newer than the listing.
        fields = defaultdict[bytes, set[str]](set)
        for key in keys:
            fields[key.prefix_hash].add(key.field)
        found = [
            replace(one, shards={f: s for f, s in one.shards.items() if f in fields[prefix_hash]})
            for prefix_hash, one in records.items()
            if one is not None
        ]
        self.inventory.add_records(name, found, has_hits=True)
        both = list(zip(keys, entries, strict=True))
        self.inventory.add_payloads(name, [(key, one) for key, one in both if one is not None])
        self.inventory.remove("payload", [key for key, one in both if one is None])
        gone = [
            key
            for key in keys
            if (one := records[key.prefix_hash]) is None or key.field not in one.shards
        ]
        self.inventory.remove("record", gone)
