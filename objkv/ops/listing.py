"""What is stored: namespaces and prefixes as the index knows them, or counted in the bulk store."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from objkv.cache.quota import read_tenant
from objkv.errors import PayloadError
from objkv.index.base import ReadIndex, Record, Usage
from objkv.index.shapes import is_shapes
from objkv.keys.chunk import ChunkKey
from objkv.ops.identities import read_identity
from objkv.stores.base import ReadStore

_PROGRESS_EVERY = 1_000
_KEPT = re.compile(r"^[0-9a-f]{32}/(shapes|pins)/")
"""Small documents of a namespace that are no payloads."""


@dataclass(frozen=True, slots=True)
class NamespaceSummary:
    """One namespace. What its identity document would say is None where that cannot be read."""

    namespace: str
    model: str | None
    tenant: str | None
    kv_dtype: str | None
    chunk_tokens: int | None
    chunks: int
    payloads: int
    tokens: int | None
    """Tokens stored, each chunk counted once however many shards it has."""
    nbytes: int
    oldest_s: int | None
    """Seconds since the epoch; None where there are no payloads."""
    newest_s: int | None
    hits: int | None
    """None when counted in the bulk store, which knows of no hits."""
    problem: str | None
    """What is wrong with the identity document, if anything."""


@dataclass(frozen=True, slots=True)
class PrefixSummary:
    """One stored chain of chunks, from the first that is stored to a leaf."""

    leaf: bytes
    """Prefix hash of the last chunk."""
    root: bytes
    """Prefix hash of the first chunk: chains with the same root share a beginning."""
    token_start: int
    """0 unless the beginning is gone, in which case no reader can use the chain."""
    token_end: int
    chunks: int
    nbytes: int
    """Of the whole chain; what chains share is counted in each."""
    oldest_s: int
    newest_s: int
    hits: int
    """Of the chunk that was hit most."""
    pinned: bool
    """Whether every chunk is pinned."""


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """What one tenant has, by the index's totals."""

    tenant: str | None
    """None: of namespaces without an identity document."""
    namespaces: int
    nbytes: int
    payloads: int
    counted_s: int
    """Seconds since the epoch when the first of its totals was last counted; 0 if one never was."""


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
    """All namespaces that the index knows (or these), described by the bulk store's documents."""
    names = index.namespaces() if names is None else names
    missing = "no identity document: do bulk_url and index_url belong together?"
    return [_summary(bulk, name, _of_records(index.scan(name)), missing) for name in names]


def count_bulk(
    bulk: ReadStore, *, namespace: str = "", progress: Callable[[int], None] = lambda entries: None
) -> BulkCount:
    """Count the bulk store itself, or one namespace of it. Takes a request per 1,000 entries or
    so, and about 100 bytes of memory per chunk. ``progress`` hears the entries seen so far."""
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


def list_tenants(bulk: ReadStore, index: ReadIndex) -> list[TenantUsage]:
    """What each tenant has, by the running totals of the index."""
    found: defaultdict[str | None, list[Usage]] = defaultdict(list)
    for usage in index.usage():
        found[read_tenant(bulk, usage.namespace)].append(usage)
    return [
        TenantUsage(
            tenant,
            len(usages),
            sum(one.nbytes for one in usages),
            sum(one.payloads for one in usages),
            min(one.counted_s for one in usages),
        )
        for tenant, usages in sorted(found.items(), key=lambda item: item[0] or "")
    ]


def list_prefixes(index: ReadIndex, namespace: str) -> list[PrefixSummary]:
    """All chains of chunks that the index knows, longest first within a root, biggest root first.

    Holds every record of the namespace in memory, about 1 KiB each.
    """
    records = {record.prefix_hash: record for record in index.scan(namespace) if _is_chunk(record)}
    chains: dict[bytes, PrefixSummary] = {}
    inner: set[bytes] = set()
    # Parents come first, and end where their children start: a record that lies cannot make a loop.
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
    return bool(record.shards) and not is_shapes(record)


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
        if record.prefix_hash in totals.hashes or is_shapes(record):  # a scan may repeat
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
