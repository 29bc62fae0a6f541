"""Imports into a cache that replicas use at the same time."""

from collections.abc import Mapping
from itertools import cycle

import pytest

from objkv.codec.payload import Claim, Header, LayerSpec, Provenance, encode, read_header
from objkv.errors import PayloadError, StoreUnavailable
from objkv.index.base import ChunkEntry, ShardRecord
from objkv.index.memory import MemoryIndex
from objkv.keys.chunk import ChunkKey
from objkv.keys.identity import Identity, identity_path
from objkv.keys.prefix import prefix_hashes, root_hash, token_digest
from objkv.keys.topology import Shard
from objkv.ops.backends_view import (
    NamespacePart,
    read_namespace,
    stored_parts,
)
from objkv.ops.export.export import Export
from objkv.ops.export.import_ import Import, arrivals, check_fits
from objkv.ops.export.manifest import ManifestLine
from objkv.ops.runs import Counters
from objkv.ops.verify_payload import Budget
from objkv.stores.base import Buffer
from objkv.stores.memory import MemoryStore
from tests.support.samples import (
    CHUNK,
    IDENTITY,
    LEFT,
    NAMESPACE,
    TOKENS,
    WHOLE,
    save,
    save_identity,
    view_of,
)


@pytest.fixture
def source() -> tuple[MemoryStore, list[ManifestLine]]:
    """Return an export of three chunks."""
    bulk, index, out = MemoryStore(), MemoryIndex(), MemoryStore()
    save_identity(bulk)
    save(bulk, index, codec="zstd")
    lines: list[ManifestLine] = []
    work = Export(view_of(bulk, index), out, lines.append, budget=Budget(1 << 20), with_tokens=True)
    work.documents([NAMESPACE])
    parts: list[NamespacePart] = stored_parts(bulk, [NAMESPACE])
    counters = Counters()
    for unit in work.parts(parts, {NAMESPACE: read_namespace(bulk, NAMESPACE)}):
        unit.work(counters, lambda: None)
    assert counters.counts["exported"] == 3
    return out, sorted(lines, key=lambda line: line.token_start)


def bring(
    source: tuple[MemoryStore, list[ManifestLine]], bulk: MemoryStore, index: MemoryIndex
) -> Counters:
    out, lines = source
    view, counters = view_of(bulk, index), Counters()
    found = arrivals(view, out, [NAMESPACE])
    work = Import(view, out, found, budget=Budget(1 << 20), codec="none")
    work.documents()
    for unit in (*work.lines(lines), *work.shapes()):
        unit.work(counters, lambda: None)
    return counters


def test_a_record_is_published_only_when_its_payload_can_be_read(
    source: tuple[MemoryStore, list[ManifestLine]],
) -> None:
    bulk = MemoryStore()
    seen: list[bool] = []

    class Watching(MemoryIndex):
        def publish(
            self, chunk: ChunkEntry, shards: Mapping[str, ShardRecord], *, ttl_s: int
        ) -> None:
            if chunk.prefix_hash.hex() in {line.key.split("/")[2] for line in source[1]}:
                [path] = [k.key for k in bulk.scan(NAMESPACE) if chunk.prefix_hash.hex() in k.key]
                seen.append(bulk.get(path) is not None)
            super().publish(chunk, shards, ttl_s=ttl_s)

    assert bring(source, bulk, Watching()).counts["added"] == 3
    assert seen == [True] * 3


def test_a_payload_that_cannot_be_stored_is_not_announced(
    source: tuple[MemoryStore, list[ManifestLine]],
) -> None:
    class Full(MemoryStore):
        def put_if_absent(self, key: str, value: Buffer) -> bool:
            if key.endswith(".safetensors"):
                raise StoreUnavailable("no room")
            return super().put_if_absent(key, value)

    index = MemoryIndex()
    with pytest.raises(StoreUnavailable, match="no room"):
        bring(source, Full(), index)
    assert list(index.scan(NAMESPACE)) == []
    assert index.lease(source[1][0].key, "a replica", ttl_ms=1_000), "the lease was given back"


def test_what_a_replica_is_saving_is_left_to_it(
    source: tuple[MemoryStore, list[ManifestLine]],
) -> None:
    bulk, index = MemoryStore(), MemoryIndex()
    index.lease(source[1][1].key, "a replica", ttl_ms=60_000)
    counts = bring(source, bulk, index).counts
    assert (counts["added"], counts["busy"]) == (2, 1)
    assert bulk.get(source[1][1].key) is None


def test_half_a_payload_that_lies_there_is_replaced(
    source: tuple[MemoryStore, list[ManifestLine]],
) -> None:
    bulk, index = MemoryStore(), MemoryIndex()
    path = source[1][0].key
    bulk.put(path, (source[0].get(path) or b"")[:-1])
    assert bring(source, bulk, index).counts["added"] == 3
    assert bulk.get(path) == source[0].get(path)


def test_the_identity_is_written_before_any_payload(
    source: tuple[MemoryStore, list[ManifestLine]],
) -> None:
    bulk = MemoryStore()
    out, _ = source
    found = arrivals(view_of(bulk, MemoryIndex()), out, [NAMESPACE])
    assert [one.document for one in found] == [IDENTITY.canonical()]
    assert list(bulk.scan("")) == []
    work = Import(view_of(bulk, MemoryIndex()), out, found, budget=Budget(1 << 20), codec="none")
    assert work.documents() == 1
    assert [entry.key for entry in bulk.scan("")] == [identity_path(NAMESPACE)]


def payload(
    identity: Identity,
    shape: tuple[int, int, int, int],
    *,
    dtype: str = "BF16",
    shard: Shard = WHOLE,
    names: tuple[str, ...] = ("l.0", "l.1"),
    start: int = 0,
    parent: bytes | None = None,
    scales: str = "",
    group: int = 0,
    further: tuple[tuple[int, int, int, int], ...] = (),
) -> Header:
    """Return the header of a payload of the first chunk, or of the second if ``start`` is not 0."""
    name = identity.namespace()
    digest = prefix_hashes(name, TOKENS, CHUNK)[0]
    claim = Claim(
        ChunkKey(name, digest, group, shard), parent or root_hash(name), start, start + CHUNK
    )
    shapes = cycle((shape, *further))
    layers = [LayerSpec(layer, dtype, next(shapes), scales) for layer in names]
    pages = [bytes(layer.nbytes) for layer in layers]
    told = Provenance(token_digest(TOKENS[:CHUNK]), "w", 1)
    return read_header(encode(claim, layers, pages, codec="none", provenance=told))


def test_a_right_payload_fits() -> None:
    check_fits(payload(IDENTITY, (2, 2, 8, 8)), IDENTITY)
    check_fits(payload(IDENTITY, (2, 1, 8, 8), shard=LEFT), IDENTITY)
    one_layer = payload(IDENTITY, (2, 2, 8, 8), shard=Shard(1, 2, 0, 2), names=("l.1",))
    check_fits(one_layer, IDENTITY)
    later = payload(IDENTITY, (2, 2, 8, 8), start=CHUNK, parent=bytes(20))
    check_fits(later, IDENTITY)


@pytest.mark.parametrize(
    "header",
    [
        payload(IDENTITY, (2, 2, 8, 8), dtype="F16"),
        payload(IDENTITY, (2, 2, 8, 8), dtype="F32"),
        payload(IDENTITY, (2, 1, 8, 8)),
        payload(IDENTITY, (2, 2, 8, 4)),
        payload(IDENTITY, (1, 2, 8, 8)),
        payload(IDENTITY, (1, 2, 16, 8)),
        payload(IDENTITY, (2, 2, 8, 8), shard=Shard(0, 64, 0, 2)),
        payload(IDENTITY, (2, 4, 8, 8), shard=Shard(0, 2, 0, 4)),
        payload(IDENTITY, (2, 2, 8, 8), names=("l.1", "l.0")),
        payload(IDENTITY, (2, 2, 8, 8), group=1),
        payload(IDENTITY, (2, 2, 8, 8), start=8, parent=bytes(20)),
        payload(IDENTITY, (2, 2, 8, 8), start=CHUNK),
        payload(IDENTITY, (2, 2, 8, 8), parent=bytes(20)),
    ],
    ids=[
        "of float16",
        "of float32",
        "half of the heads",
        "another content",
        "one block",
        "blocks that cannot be split",
        "missing layers",
        "missing heads",
        "layers in another order",
        "another group",
        "no whole chunk",
        "a later chunk without one before it",
        "a first chunk with one before it",
    ],
)
def test_what_no_replica_would_accept_is_refused(header: Header) -> None:
    with pytest.raises(PayloadError):
        check_fits(header, IDENTITY)
