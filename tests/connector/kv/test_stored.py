"""Replicas of other shapes find what a replica on several nodes has stored in parts."""

from dataclasses import replace

import pytest

from objkv.cache.lookup import Records
from objkv.cache.parts import PartsIndex
from objkv.connector.kv.drafts import matched_end
from objkv.connector.kv.stored import StoredPayloads
from objkv.connector.model.groups import Geometry
from objkv.index.base import ChunkEntry, ShardRecord
from objkv.keys.identity import GroupIdentity
from objkv.keys.topology import Shard
from objkv.transfer.plan import Source
from tests.contracts.memory_index import MemoryIndex
from tests.support.steps import complete

NS = "0" * 32
HASHES = [bytes([i]) * 20 for i in range(1, 4)]
CHUNK = 64
SHARD = ShardRecord(100, 80, "none", True, "0" * 32, 1)
FULL = GroupIdentity("full", None, ("a", "b", "c", "d"), heads=4, content=16, block_size=16)
WINDOW = GroupIdentity("sliding_window", 32, ("e",), heads=4, content=16, block_size=16)
LATENT = GroupIdentity("mla", None, ("f",), heads=1, content=16, block_size=16)


def geometry(*groups: GroupIdentity, tp_size: int = 1, **more: object) -> Geometry:
    return Geometry(groups, CHUNK, 16, tp_size=tp_size, canonical=True, **more)  # type: ignore[arg-type]


def found_by(reader: Geometry, *fields: str) -> tuple[StoredPayloads, Records]:
    """What a replica finds of chunks that have these payloads, all of them."""
    index, payloads = MemoryIndex(), StoredPayloads(reader)
    for number, prefix_hash in enumerate(HASHES):
        entry = ChunkEntry(NS, prefix_hash, bytes(20), number * CHUNK, (number + 1) * CHUNK)
        index.publish(entry, dict.fromkeys(fields, SHARD), ttl_s=3_600)
    parts = PartsIndex(index, payloads.is_loadable)
    return payloads, tuple(complete(parts.find(NS, HASHES, sorted(reader.all_fields()))))


@pytest.mark.parametrize("reader", [1, 2, 4])
@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW), (FULL, LATENT)])
def test_what_ranks_of_two_nodes_stored_is_loaded(
    groups: tuple[GroupIdentity, ...], reader: int
) -> None:
    writer = geometry(*groups, tp_size=2, nodes=2)
    fields = sorted(writer.all_fields() - {"0", "1"} | {"1"} & writer.fields(len(groups) - 1))
    assert {"0.L0-4_H0-2", "0.L0-4_H2-4"} <= {*fields}
    here = geometry(*groups, tp_size=reader)
    payloads, found = found_by(here, *fields)
    assert matched_end(here, payloads, found) == 3 * CHUNK
    assert found[0] is not None
    left, right = payloads.of(found[0], 0)
    assert left == (Source(0, Shard(0, 4, 0, 2)), SHARD)
    assert right == (Source(0, Shard(0, 4, 2, 4)), SHARD)
    assert payloads.size(found[0]) == (len(fields) * SHARD.nbytes, True)


def test_a_whole_payload_is_loaded_rather_than_parts() -> None:
    payloads, found = found_by(geometry(FULL), "0", "0.L0-4_H0-2", "0.L0-4_H2-4")
    assert found[0] is not None
    assert payloads.of(found[0], 0) == [(Source(0), SHARD)]


@pytest.mark.parametrize(
    ("field", "reads"),
    [
        ("0", True),
        ("0.L0-2_H0-4", True),
        ("0.L0-4_H0-4_T0of2", True),
        ("0.L0-4_H0-4_T0of3", False),
        ("0.L0-4_H0-4_T0of2i16", False),
        ("1", True),
        ("1.L0-1_H0-2", True),
        ("1.L0-1_H0-4_T0of2", False),
        ("2", False),
        ("colour", False),
    ],
)
def test_only_tokens_that_it_can_combine_are_read(field: str, reads: bool) -> None:
    assert geometry(FULL, WINDOW).reads(field) is reads


def test_a_division_of_its_own_is_all_that_some_read() -> None:
    odd = geometry(LATENT, tp_size=2, dcp_size=2, dcp_interleave=16, nodes=2)
    own = "0.L0-1_H0-1_T0of2i16"
    assert odd.reads(own)
    assert not any(map(odd.reads, ("0", "0.L0-1_H0-1", "0.L0-1_H0-1_T0of2")))
    payloads, found = found_by(odd, "0.L0-1_H0-1_T0of2", "0.L0-1_H0-1_T1of2")
    assert matched_end(odd, payloads, found) == 0
    assert replace(odd, dcp_interleave=1).reads("0.L0-1_H0-1_T0of4")
