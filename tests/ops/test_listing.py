"""Namespaces and prefixes, listed from the index and from the bulk store."""

from dataclasses import replace

import pytest

from objkv.index.base import ChunkEntry, ShardRecord
from objkv.keys.identity import identity_path
from objkv.keys.prefix import prefix_hashes
from objkv.ops.inventory.file import Inventory
from objkv.ops.inventory.tree import Branch, PrefixSummary, branches, make_tree, prefixes
from objkv.ops.inventory.walk import ReadView, Walk, find_places
from objkv.ops.listing import counted_namespaces, list_namespaces
from objkv.ops.runs import WorkPool
from tests.contracts.memory_index import MemoryIndex
from tests.contracts.memory_store import MemoryStore
from tests.support.samples import (
    CHUNK,
    CREATED_S,
    LEFT,
    NAMESPACE,
    RIGHT,
    TOKENS,
    save,
    save_identity,
)

SHARD = ShardRecord(10, 20, True, False, "0" * 32, 5)


def tree_of(index: MemoryIndex) -> Inventory:
    inventory = Inventory()
    inventory.add_records(NAMESPACE, index.scan(NAMESPACE), has_hits=True)
    make_tree(inventory, "recorded")
    return inventory


def list_tree(index: MemoryIndex, namespace: str) -> list[Branch]:
    return list(branches(tree_of(index), namespace))


def list_prefixes(index: MemoryIndex, namespace: str) -> list[PrefixSummary]:
    return list(prefixes(tree_of(index), namespace))


def test_a_namespace_is_described_by_its_totals_and_no_record_is_read(
    bulk: MemoryStore, index: MemoryIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_identity(bulk)
    keys = save(bulk, index, shards=(LEFT, RIGHT))
    usage = index.usage()
    monkeypatch.setattr(index, "scan", lambda _: pytest.fail("read the records"))
    monkeypatch.setattr(index, "usage", lambda: usage)
    [summary] = list_namespaces(bulk, index)
    assert (summary.namespace, summary.model, summary.tenant) == (NAMESPACE, "acme/tiny", "default")
    assert (summary.kv_dtype, summary.chunk_tokens) == ("bfloat16", CHUNK)
    assert summary.payloads == 6
    assert summary.nbytes == sum(len(bulk.get(key.path()) or b"") for key in keys)
    assert (summary.chunks, summary.tokens, summary.problem) == (None, None, None)


def test_a_namespace_without_a_readable_document_is_still_listed(
    bulk: MemoryStore, index: MemoryIndex
) -> None:
    save(bulk, index)
    [summary] = list_namespaces(bulk, index)
    assert (summary.model, summary.problem) == (None, "no identity document")
    bulk.put(identity_path(NAMESPACE), b"{}")
    [summary] = list_namespaces(bulk, index)
    assert summary.model is None
    assert "damaged" in (summary.problem or "")
    assert summary.payloads == 3


def test_the_bulk_store_is_counted_without_the_index(bulk: MemoryStore) -> None:
    save_identity(bulk)
    keys = save(bulk, None, shards=(LEFT, RIGHT))
    view = ReadView(bulk, MemoryIndex(), is_own_index=True)
    inventory = Inventory()
    walk = Walk(view, inventory, find_places(view))
    WorkPool(workers=2).run(walk.payloads())
    [summary] = counted_namespaces(inventory, walk.places)
    assert (summary.chunks, summary.payloads, summary.tokens) == (3, 6, 3 * CHUNK)
    assert summary.nbytes == sum(len(bulk.get(key.path()) or b"") for key in keys)
    assert summary.newest_s is not None


def test_prefixes_are_chains_from_root_to_leaf(bulk: MemoryStore, index: MemoryIndex) -> None:
    long = save(bulk, index, TOKENS)
    branch = save(bulk, index, (*TOKENS[:CHUNK], *([7] * CHUNK)))
    other = save(bulk, index, [1] * CHUNK)
    index.touch(NAMESPACE, [long[0].prefix_hash], ttl_s=60)
    first, second, third = list_prefixes(index, NAMESPACE)
    assert [p.leaf for p in (first, second, third)] == [
        long[2].prefix_hash,
        branch[1].prefix_hash,
        other[0].prefix_hash,
    ]
    assert first.root == second.root == long[0].prefix_hash
    assert third.root == third.leaf
    assert [p.chunks for p in (first, second, third)] == [3, 2, 1]
    assert (first.token_start, first.token_end) == (0, 3 * CHUNK)
    assert first.nbytes == sum(len(bulk.get(key.path()) or b"") for key in long)
    assert (first.hits, second.hits, third.hits) == (1, 1, 0)
    assert (first.oldest_s, first.newest_s) == (CREATED_S, CREATED_S + 2 * CHUNK)


def test_a_chain_whose_beginning_is_gone_says_where_it_starts(
    bulk: MemoryStore, index: MemoryIndex
) -> None:
    keys = save(bulk, index)
    index.drop(NAMESPACE, keys[0].prefix_hash)
    [prefix] = list_prefixes(index, NAMESPACE)
    assert (prefix.token_start, prefix.token_end, prefix.chunks) == (CHUNK, 3 * CHUNK, 2)


def test_records_that_name_each_other_as_parents_end(index: MemoryIndex) -> None:
    one, two = b"1" * 20, b"2" * 20
    entry = ChunkEntry(NAMESPACE, one, two, 0, CHUNK)
    index.publish(entry, {"0.L0-1_H0-1": SHARD}, ttl_s=60)
    index.publish(replace(entry, prefix_hash=two, parent_hash=one), {"0": SHARD}, ttl_s=60)
    assert [p.chunks for p in list_prefixes(index, NAMESPACE)] == [1, 1]


SHARED = list(range(100, 100 + 2 * CHUNK))
LONG = [*SHARED, *range(500, 500 + 3 * CHUNK)]
SHORT = [*SHARED, *range(900, 900 + CHUNK)]


def test_what_prompts_share_is_one_branch_that_forks(bulk: MemoryStore, index: MemoryIndex) -> None:
    for tokens in (SHORT, LONG):
        save(bulk, index, tokens)
    shared, long, short = list_tree(index, NAMESPACE)
    hashes = prefix_hashes(NAMESPACE, LONG, CHUNK)
    assert (shared.first, shared.last) == (hashes[0], hashes[1])
    assert (shared.level, shared.chunks, shared.branches, shared.leaves) == (0, 2, 2, 2)
    assert (shared.tree_chunks, shared.token_start, shared.token_end) == (6, 0, 2 * CHUNK)
    assert shared.tree_bytes == shared.nbytes + long.nbytes + short.nbytes
    assert (long.last, long.level, long.chunks, long.is_last) == (hashes[-1], 1, 3, False)
    assert (short.level, short.chunks, short.leaves, short.is_last) == (1, 1, 1, True)
