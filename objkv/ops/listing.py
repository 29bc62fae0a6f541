"""Lists namespaces and prefixes, finds namespaces by name, and counts payloads.

Namespaces are found in the bulk store, which every role may list.
"""

import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from objkv.cache.quota import read_tenant
from objkv.errors import ConfigError, PayloadError, StoreError, UnclearName
from objkv.index.base import ReadIndex, Record, Usage
from objkv.keys.chunk import ChunkKey
from objkv.keys.identity import NAMESPACE_HEX, Identity, identity_path
from objkv.ops.backends_view import (
    DOCUMENT_BYTES_MAX,
    read_identity,
    read_namespace,
    stored_namespaces,
)
from objkv.ops.formats import DASH, printable, size, span
from objkv.stores.base import ReadStore


@dataclass(frozen=True, slots=True)
class Branch:
    """Chunks in a row, from one fork to the next."""

    first: bytes
    """Prefix hash of its first chunk."""
    last: bytes
    """Prefix hash of its last chunk, at which it forks or ends."""
    level: int
    """Number of forks above it."""
    is_last: bool
    """Whether it is the last branch of its fork."""
    token_start: int
    """More than 0 at level 0 only if the first chunks are gone; then no reader can use it."""
    token_end: int
    chunks: int
    nbytes: int
    branches: int
    """Number of branches that continue it; 0 if it ends."""
    tree_chunks: int
    """Its own chunks and those of all branches that continue it."""
    tree_bytes: int
    leaves: int
    """Ends of chains below it; 1 if it is an end itself."""
    hits: int
    """Hits of the most used chunk."""
    newest_s: int
    pinned: bool
    """Whether every chunk is pinned."""


@dataclass(slots=True)
class _Run:
    records: list[Record]
    children: list["_Run"]
    tree_chunks: int = 0
    tree_bytes: int = 0
    leaves: int = 0


def list_tree(index: ReadIndex, namespace: str) -> list[Branch]:
    """Return all branches, each followed by those that continue it, largest first at each level.

    Keeps every record of the namespace in memory, about 1 KiB each.
    """
    roots, children = _linked(index.scan(namespace))
    runs = [_run(root, children) for root in roots]
    for run in runs:
        _add_up(run)
    return list(_flattened(runs))


def _linked(
    scanned: Iterable[Record],
) -> tuple[list[Record], defaultdict[bytes, list[Record]]]:
    """Return the records without a parent, and the children of each record."""
    records = {r.prefix_hash: r for r in scanned if r.shards}
    roots: list[Record] = []
    children: defaultdict[bytes, list[Record]] = defaultdict(list)
    for record in records.values():
        parent = records.get(record.parent_hash)
        # A child starts where its parent ends and is not empty, so a wrong record makes no loop.
        is_child = parent is not None and parent.token_end == record.token_start
        if is_child and record.token_end > record.token_start:
            children[record.parent_hash].append(record)
        else:
            roots.append(record)
    return roots, children


def _run(first: Record, children: defaultdict[bytes, list[Record]]) -> _Run:
    """Return the branches that start with ``first``.

    Not recursive, because prompts may have thousands of nested forks.
    """
    top = _Run([first], [])
    left = [top]
    while left:
        run = left.pop()
        while len(following := children[run.records[-1].prefix_hash]) == 1:
            run.records.append(following[0])
        run.children = [_Run([record], []) for record in following]
        left += run.children
    return top


def _add_up(top: _Run) -> None:
    every, left = [], [top]
    while left:
        every.append(run := left.pop())
        left += run.children
    for run in reversed(every):  # children before their parents
        run.tree_chunks = len(run.records) + sum(child.tree_chunks for child in run.children)
        own = sum(record.nbytes for record in run.records)
        run.tree_bytes = own + sum(child.tree_bytes for child in run.children)
        run.leaves = sum(child.leaves for child in run.children) or 1
        run.children.sort(key=_largest_first)


def _largest_first(run: _Run) -> tuple[int, bytes]:
    return -run.tree_bytes, run.records[0].prefix_hash


def _flattened(runs: list[_Run]) -> Iterator[Branch]:
    left = [(run, 0, not place) for place, run in enumerate(sorted(runs, key=_largest_first)[::-1])]
    while left:
        run, level, is_last = left.pop()
        yield _branch(run, level, is_last)
        backwards = run.children[::-1]
        left += [(child, level + 1, not place) for place, child in enumerate(backwards)]


def _branch(run: _Run, level: int, is_last: bool) -> Branch:
    records = run.records
    return Branch(
        first=records[0].prefix_hash,
        last=records[-1].prefix_hash,
        level=level,
        is_last=is_last,
        token_start=records[0].token_start,
        token_end=records[-1].token_end,
        chunks=len(records),
        nbytes=sum(record.nbytes for record in records),
        branches=len(run.children),
        tree_chunks=run.tree_chunks,
        tree_bytes=run.tree_bytes,
        leaves=run.leaves,
        hits=max(record.hits for record in records),
        newest_s=max(shard.created_s for r in records for shard in r.shards.values()),
        pinned=all(record.pinned for record in records),
    )


_PROGRESS_EVERY = 1_000
_KEPT = re.compile(r"^[0-9a-f]{32}/pins/")
"""Small documents of a namespace that are not payloads."""


@dataclass(frozen=True, slots=True)
class NamespaceSummary:
    """One namespace. Values from its identity document are None if it is unreadable."""

    namespace: str
    model: str | None
    tenant: str | None
    kv_dtype: str | None
    chunk_tokens: int | None
    chunks: int
    payloads: int
    tokens: int | None
    """Stored tokens; each chunk is counted once, however many shards it has."""
    nbytes: int
    oldest_s: int | None
    """Seconds since the epoch; None without payloads."""
    newest_s: int | None
    hits: int | None
    """None when counted in the bulk store, which has no hits."""
    problem: str | None
    """The problem with the identity document, if any."""


@dataclass(frozen=True, slots=True)
class PrefixSummary:
    """One stored chain of chunks, from its first stored chunk to a leaf."""

    leaf: bytes
    """Prefix hash of the last chunk."""
    root: bytes
    """Prefix hash of the first chunk; chains with the same root share their first chunks."""
    token_start: int
    """0 unless the first chunks are gone; then no reader can use the chain."""
    token_end: int
    chunks: int
    nbytes: int
    """Bytes of the whole chain; shared chunks are counted in each chain."""
    oldest_s: int
    newest_s: int
    hits: int
    """Hits of the most used chunk."""
    pinned: bool
    """Whether every chunk is pinned."""


@dataclass(frozen=True, slots=True)
class TenantTotals:
    """The index's totals for one tenant."""

    tenant: str | None
    """None for namespaces without an identity document."""
    namespaces: int
    nbytes: int
    payloads: int
    counted_s: int
    """When its least recently counted total was counted, in seconds since the epoch; 0 if never."""


@dataclass(frozen=True, slots=True)
class BulkCount:
    """Everything in a bulk store."""

    namespaces: tuple[NamespaceSummary, ...]
    other_entries: int
    """Entries that are neither chunks nor identity documents."""
    other_bytes: int


def list_namespaces(
    bulk: ReadStore, index: ReadIndex, names: Iterable[str] | None = None
) -> list[NamespaceSummary]:
    """Return all namespaces of the index (or ``names``), described by their identity documents."""
    names = index.namespaces() if names is None else names
    missing = "no identity document; check that bulk_url and index_url belong together"
    return [_summary(bulk, name, _of_records(index.scan(name)), missing) for name in names]


def count_bulk(
    bulk: ReadStore, *, namespace: str = "", progress: Callable[[int], None] = lambda entries: None
) -> BulkCount:
    """Count the payloads of the bulk store, or of one namespace.

    Takes about one request per 1,000 entries, and about 100 bytes of memory per chunk.
    ``progress`` receives the number of entries so far.
    """
    totals: defaultdict[str, _Totals] = defaultdict(_Totals)
    other_entries = other_bytes = seen = 0
    for entry in bulk.scan(f"{namespace}/" if namespace else ""):
        seen += 1
        if seen % _PROGRESS_EVERY == 0:
            progress(seen)
        try:
            key = ChunkKey.parse(entry.key)
        except ValueError:
            if entry.key.endswith("/identity.json") or _KEPT.search(entry.key):
                totals.setdefault(entry.key.partition("/")[0], _Totals())
            else:
                other_entries, other_bytes = other_entries + 1, other_bytes + entry.nbytes
            continue
        totals[key.namespace].add_payload(key.prefix_hash, entry.nbytes, int(entry.modified_s))
    progress(seen)
    summaries = tuple(_summary(bulk, name, totals[name]) for name in sorted(totals))
    return BulkCount(summaries, other_entries, other_bytes)


def list_tenants(bulk: ReadStore, index: ReadIndex) -> list[TenantTotals]:
    """Return the running totals of the index by tenant."""
    found: defaultdict[str | None, list[Usage]] = defaultdict(list)
    for usage in index.usage():
        found[read_tenant(bulk, usage.namespace)].append(usage)
    return [
        TenantTotals(
            tenant,
            len(usages),
            sum(one.nbytes for one in usages),
            sum(one.payloads for one in usages),
            min(one.counted_s for one in usages),
        )
        for tenant, usages in sorted(found.items(), key=lambda item: item[0] or "")
    ]


def list_prefixes(index: ReadIndex, namespace: str) -> list[PrefixSummary]:
    """Return all chains of chunks in the index, largest root first, longest first within a root.

    Keeps every record of the namespace in memory, about 1 KiB each.
    """
    records = {record.prefix_hash: record for record in index.scan(namespace) if _is_chunk(record)}
    chains: dict[bytes, PrefixSummary] = {}
    inner: set[bytes] = set()
    # Parents come first and end where their children start, so a wrong record makes no loop.
    for record in sorted(records.values(), key=lambda record: record.token_start):
        parent = chains.get(record.parent_hash)
        if parent is not None and parent.token_end == record.token_start:
            inner.add(record.parent_hash)
        else:
            parent = None
        chains[record.prefix_hash] = _extend(parent, record)
    leaves = [chain for leaf, chain in chains.items() if leaf not in inner]
    size: defaultdict[bytes, int] = defaultdict(int)
    for chain in leaves:
        size[chain.root] = max(size[chain.root], chain.nbytes)
    return sorted(leaves, key=lambda c: (-size[c.root], c.root, -c.token_end, c.leaf))


def _is_chunk(record: Record) -> bool:
    return bool(record.shards)


@dataclass(slots=True)
class _Totals:
    hashes: set[bytes] = field(default_factory=set)
    payloads: int = 0
    tokens: int | None = None
    nbytes: int = 0
    oldest_s: int | None = None
    newest_s: int | None = None
    hits: int | None = None

    def add_payload(self, prefix_hash: bytes, nbytes: int, created_s: int) -> None:
        self.hashes.add(prefix_hash)
        self.payloads += 1
        self.nbytes += nbytes
        self.oldest_s = created_s if self.oldest_s is None else min(self.oldest_s, created_s)
        self.newest_s = created_s if self.newest_s is None else max(self.newest_s, created_s)


def _of_records(records: Iterator[Record]) -> _Totals:
    totals = _Totals(tokens=0, hits=0)
    for record in records:
        if record.prefix_hash in totals.hashes:  # a scan may repeat
            continue
        totals.tokens = (totals.tokens or 0) + record.token_end - record.token_start
        totals.hits = (totals.hits or 0) + record.hits
        for shard in record.shards.values():
            totals.add_payload(record.prefix_hash, shard.nbytes, shard.created_s)
    return totals


def _summary(
    bulk: ReadStore, namespace: str, totals: _Totals, missing: str = "no identity document"
) -> NamespaceSummary:
    identity, problem = None, None
    try:
        identity = read_identity(bulk, namespace)
        problem = None if identity else missing
    except PayloadError as exc:
        problem = str(exc)
    tokens = totals.tokens
    if tokens is None and identity is not None:
        tokens = identity.chunk_tokens * len(totals.hashes)
    return NamespaceSummary(
        namespace=namespace,
        model=identity.model if identity else None,
        tenant=identity.tenant if identity else None,
        kv_dtype=identity.kv_dtype if identity else None,
        chunk_tokens=identity.chunk_tokens if identity else None,
        chunks=len(totals.hashes),
        payloads=totals.payloads,
        tokens=tokens,
        nbytes=totals.nbytes,
        oldest_s=totals.oldest_s,
        newest_s=totals.newest_s,
        hits=totals.hits,
        problem=problem,
    )


def _extend(parent: PrefixSummary | None, record: Record) -> PrefixSummary:
    created: Sequence[int] = [shard.created_s for shard in record.shards.values()]
    nbytes = sum(shard.nbytes for shard in record.shards.values())
    if parent is None:
        return PrefixSummary(
            leaf=record.prefix_hash,
            root=record.prefix_hash,
            token_start=record.token_start,
            token_end=record.token_end,
            chunks=1,
            nbytes=nbytes,
            oldest_s=min(created),
            newest_s=max(created),
            hits=record.hits,
            pinned=record.pinned,
        )
    return PrefixSummary(
        leaf=record.prefix_hash,
        root=parent.root,
        token_start=parent.token_start,
        token_end=record.token_end,
        chunks=parent.chunks + 1,
        nbytes=parent.nbytes + nbytes,
        oldest_s=min(parent.oldest_s, *created),
        newest_s=max(parent.newest_s, *created),
        hits=max(parent.hits, record.hits),
        pinned=parent.pinned and record.pinned,
    )


_HEX: Final = re.compile(rf"[0-9a-f]{{1,{NAMESPACE_HEX}}}")
_CERTAIN: Final = 6
"""Hex digits that are taken for the start of a hash before any model is compared with them."""
_SHOWN: Final = 20
"""Namespaces that an error lists."""
_NOTHING: Final = (
    "the bulk store has no namespaces; either no replica has saved yet, or bulk_url is wrong"
)


@dataclass(frozen=True, slots=True)
class NamedNamespace:
    """One namespace of the bulk store, with the names that people know it by."""

    name: str
    """32 hex digits."""
    model: str | None
    """None if its identity document is missing or unreadable."""
    tenant: str | None

    def is_called(self, text: str) -> bool:
        """Whether ``text`` is its model, the last part of that, or either after its tenant."""
        return text in self._names()

    def is_abbreviated(self, text: str) -> bool:
        """Whether its name in hex digits or one of its other names starts with ``text``."""
        return any(name.startswith(text) for name in (self.name, *self._names()))

    def _names(self) -> tuple[str, ...]:
        if self.model is None:
            return ()
        short = self.model.rstrip("/").rpartition("/")[2]
        return (self.model, short, f"{self.tenant}/{self.model}", f"{self.tenant}/{short}")


def find_identity(bulk: ReadStore, index: ReadIndex, wanted: str | None) -> Identity:
    """Return the identity of the namespace called ``wanted``; for None, of the only one with KV.

    Raises ``ConfigError``, ``PayloadError`` and ``StoreError``.
    """
    name = find_namespace(bulk, index, wanted)
    identity = read_identity(bulk, name)
    if identity is None:
        raise ConfigError(
            f"the bulk store has no {name}/identity.json; either no replica has saved there, or "
            "bulk_url and index_url do not belong together"
        )
    return identity


def find_namespace(
    bulk: ReadStore, index: ReadIndex, wanted: str | None, *, must_exist: bool = False
) -> str:
    """Return the one namespace called ``wanted``; for None, the only one with KV chunks.

    ``wanted`` is the name's hex digits, ``MODEL`` or ``TENANT/MODEL``, or any unambiguous beginning
    of one. A complete name of 32 hex digits is returned without a request, unless it
    ``must_exist``. Hex digits also find a namespace that is only in the index. Raises
    ``UnclearName`` with the choices and ``StoreError``.
    """
    if wanted is None:
        return _only_namespace(bulk, index)
    is_hex = _HEX.fullmatch(wanted) is not None
    if is_hex and len(wanted) == NAMESPACE_HEX and not must_exist:
        return wanted
    if not wanted:
        raise UnclearName("the name of the namespace is empty")
    names = stored_namespaces(bulk)
    if is_hex:
        names = sorted({*names, *index.namespaces()})
    if not names:
        raise UnclearName(_NOTHING)
    if is_hex and len(wanted) >= _CERTAIN:
        # Most names are given this way, and listing is cheaper than reading every document.
        found = [name for name in names if name.startswith(wanted)]
        if len(found) == 1:
            return found[0]
    known = [_named_namespace(bulk, name) for name in names]
    tests: tuple[Callable[[NamedNamespace], bool], ...] = (
        lambda one: one.is_called(wanted),
        lambda one: one.is_abbreviated(wanted),
    )
    for test in tests:
        matching = [one.name for one in known if test(one)]
        if len(matching) == 1:
            return matching[0]
        if matching:
            what = f"{len(matching)} namespaces match {wanted}; choose one"
            raise _choose(what, bulk, index, matching)
    raise _choose(f"no namespace matches {wanted}; choose one of", bulk, index, names)


def _only_namespace(bulk: ReadStore, index: ReadIndex) -> str:
    names = index.namespaces() or stored_namespaces(bulk)
    if len(names) > 1:
        names = [name for name in names if _may_hold_chunks(bulk, name)]
    if not names:
        raise UnclearName(_NOTHING)
    if len(names) == 1:
        return names[0]
    raise _choose(f"{len(names)} namespaces; choose one", bulk, index, names)


def _may_hold_chunks(bulk: ReadStore, name: str) -> bool:
    """Return False for encoder outputs and hand-offs, which no prompt can match."""
    namespace = read_namespace(bulk, name)
    return namespace.has_chunks or not namespace.is_known


def _choose(what: str, bulk: ReadStore, index: ReadIndex, names: Sequence[str]) -> UnclearName:
    """Return an error that lists model, tenant, age and size of the choices."""
    nbytes: dict[str, int] = {}
    with suppress(StoreError):  # sizes are only a help
        nbytes = {usage.namespace: usage.nbytes for usage in index.usage()}
    lines = []
    for name in names[:_SHOWN]:
        one, document = _named_namespace(bulk, name), bulk.head(identity_path(name))
        age = DASH if document is None else f"{span(time.time() - document.modified_s)} old"
        model = printable(one.model) if one.model else "unknown model"
        tenant = printable(one.tenant) if one.tenant else DASH
        lines.append(f"{name}  {model}  tenant {tenant}  {age}  {size(nbytes.get(name))}")
    if len(names) > _SHOWN:
        lines.append(f"and {len(names) - _SHOWN:,} more: objkv ls")
    return UnclearName(what, lines)


def _named_namespace(bulk: ReadStore, name: str) -> NamedNamespace:
    document = bulk.get_range(identity_path(name), 0, DOCUMENT_BYTES_MAX)
    try:
        values = json.loads(document or b"")
        model, tenant = values["model"], values["tenant"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return NamedNamespace(name, None, None)
    if not isinstance(model, str) or not isinstance(tenant, str):
        return NamedNamespace(name, None, None)
    return NamedNamespace(name, model, tenant)
