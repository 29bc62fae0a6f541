"""What an import does to a cache that others use meanwhile."""

from collections.abc import Mapping

import pytest

from objkv.errors import ConfigError, StoreUnavailable
from objkv.index.base import ChunkEntry, ShardRecord
from objkv.index.memory import MemoryIndex
from objkv.keys.identity import identity_path
from objkv.ops.bring_in import BringIn, arrivals
from objkv.ops.ends import Ends, Part, read_namespace, stored_parts
from objkv.ops.export import Export
from objkv.ops.manifest import Line
from objkv.ops.tally import Tally
from objkv.ops.verify_payload import Budget
from objkv.stores.base import Buffer
from objkv.stores.memory import MemoryStore
from tests.ops.world import IDENTITY, NAMESPACE, save, save_identity


def ends_of(bulk: MemoryStore, index: MemoryIndex) -> Ends:
    return Ends(bulk, None, index, False, ttl_s=3_600, lease_ms=60_000, owner="import-test")


@pytest.fixture
def source() -> tuple[MemoryStore, list[Line]]:
    """An export of three chunks."""
    bulk, index, out = MemoryStore(), MemoryIndex(), MemoryStore()
    save_identity(bulk)
    save(bulk, index, codec="zstd")
    lines: list[Line] = []
    work = Export(ends_of(bulk, index), out, lines.append, budget=Budget(1 << 20), with_tokens=True)
    work.documents([NAMESPACE])
    parts: list[Part] = stored_parts(bulk, [NAMESPACE])
    tally = Tally()
    for unit in work.parts(parts, {NAMESPACE: read_namespace(bulk, NAMESPACE)}):
        unit.work(tally, lambda: None)
    assert tally.counts["exported"] == 3
    return out, sorted(lines, key=lambda line: line.token_start)


def bring(source: tuple[MemoryStore, list[Line]], bulk: MemoryStore, index: MemoryIndex) -> Tally:
    out, lines = source
    ends, tally = ends_of(bulk, index), Tally()
    found = arrivals(ends, out, [NAMESPACE])
    work = BringIn(ends, out, found, budget=Budget(1 << 20), codec="none")
    work.documents()
    for unit in (*work.lines(lines), *work.shapes(lines)):
        unit.work(tally, lambda: None)
    return tally


def test_a_record_is_published_only_when_its_payload_can_be_read(
    source: tuple[MemoryStore, list[Line]],
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
    source: tuple[MemoryStore, list[Line]],
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


def test_what_a_replica_is_saving_is_left_to_it(source: tuple[MemoryStore, list[Line]]) -> None:
    bulk, index = MemoryStore(), MemoryIndex()
    index.lease(source[1][1].key, "a replica", ttl_ms=60_000)
    counts = bring(source, bulk, index).counts
    assert (counts["added"], counts["busy"]) == (2, 1)
    assert bulk.get(source[1][1].key) is None


def test_half_a_payload_that_lies_there_is_replaced(
    source: tuple[MemoryStore, list[Line]],
) -> None:
    bulk, index = MemoryStore(), MemoryIndex()
    path = source[1][0].key
    bulk.put(path, (source[0].get(path) or b"")[:-1])
    assert bring(source, bulk, index).counts["added"] == 3
    assert bulk.get(path) == source[0].get(path)


def test_a_payload_of_another_codec_that_is_right_stays_and_is_announced(
    source: tuple[MemoryStore, list[Line]],
) -> None:
    bulk, index = MemoryStore(), MemoryIndex()
    [*keys] = save(bulk, None, codec="zstd")
    before = {key.path(): bulk.get(key.path()) for key in keys}
    assert bring(source, bulk, index).counts["indexed"] == 3
    assert {path: bulk.get(path) for path in before} == before
    records = [r for r in index.scan(NAMESPACE) if r.nbytes]
    assert {shard.codec for record in records for shard in record.shards.values()} == {"zstd"}


def test_the_identity_is_written_before_any_payload(
    source: tuple[MemoryStore, list[Line]],
) -> None:
    bulk = MemoryStore()
    out, _ = source
    found = arrivals(ends_of(bulk, MemoryIndex()), out, [NAMESPACE])
    assert [one.document for one in found] == [IDENTITY.canonical()]
    assert list(bulk.scan("")) == []
    work = BringIn(ends_of(bulk, MemoryIndex()), out, found, budget=Budget(1 << 20), codec="none")
    assert work.documents() == 1
    assert [entry.key for entry in bulk.scan("")] == [identity_path(NAMESPACE)]


def test_a_document_of_another_namespace_is_none(
    source: tuple[MemoryStore, list[Line]],
) -> None:
    out, _ = source
    with pytest.raises(ConfigError, match="a foreign namespace"):
        arrivals(ends_of(MemoryStore(), MemoryIndex()), out, ["0" * 32])
