"""Imports into a cache that replicas use at the same time."""

from collections.abc import Mapping

import pytest

from objkv.errors import StoreUnavailable
from objkv.index.base import ChunkEntry, ShardRecord
from objkv.index.memory import MemoryIndex
from objkv.keys.identity import identity_path
from objkv.ops.backends_view import (
    NamespacePart,
    read_namespace,
    stored_parts,
)
from objkv.ops.export.export import Export
from objkv.ops.export.import_ import Import, arrivals
from objkv.ops.export.manifest import ManifestLine
from objkv.ops.runs import Counters
from objkv.ops.verify_payload import Budget
from objkv.stores.base import Buffer
from objkv.stores.memory import MemoryStore
from tests.support.samples import (
    IDENTITY,
    NAMESPACE,
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
