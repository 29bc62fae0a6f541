"""Namespaces and prefixes, listed from the index and from the bulk store."""

from dataclasses import replace

from objkv.index.base import ChunkEntry, ShardRecord
from objkv.keys.identity import identity_path
from objkv.keys.prefix import prefix_hashes
from objkv.ops.listing import count_bulk, list_namespaces, list_prefixes, list_tree
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


def test_a_namespace_is_described_and_summed(bulk: MemoryStore, index: MemoryIndex) -> None:
    save_identity(bulk)
    keys = save(bulk, index, shards=(LEFT, RIGHT))
    index.touch(NAMESPACE, [keys[0].prefix_hash], ttl_s=60)
    [summary] = list_namespaces(bulk, index)
    assert (summary.namespace, summary.model, summary.tenant) == (NAMESPACE, "acme/tiny", "default")
    assert (summary.kv_dtype, summary.chunk_tokens) == ("bfloat16", CHUNK)
    assert (summary.chunks, summary.payloads, summary.tokens) == (3, 6, 3 * CHUNK)
    assert summary.nbytes == sum(len(bulk.get(key.path()) or b"") for key in keys)
    assert (summary.oldest_s, summary.newest_s) == (CREATED_S, CREATED_S + 2 * CHUNK)
    assert summary.hits == 1
    assert summary.problem is None


def test_a_namespace_without_a_readable_document_is_still_listed(
    bulk: MemoryStore, index: MemoryIndex
) -> None:
    save(bulk, index)
    [summary] = list_namespaces(bulk, index)
    assert (summary.model, summary.problem) == (
        None,
        "no identity document; check that bulk_url and index_url belong together",
    )
    bulk.put(identity_path(NAMESPACE), b"{}")
    [summary] = list_namespaces(bulk, index)
    assert summary.model is None
    assert "not an identity document" in (summary.problem or "")
    assert summary.chunks == 3


def test_the_bulk_store_is_counted_without_the_index(bulk: MemoryStore) -> None:
    save_identity(bulk)
    keys = save(bulk, None, shards=(LEFT, RIGHT))
    bulk.put("somebody/elses.txt", b"12345")
    seen: list[int] = []
    count = count_bulk(bulk, progress=seen.append)
    [summary] = count.namespaces
    assert (summary.chunks, summary.payloads, summary.tokens) == (3, 6, 3 * CHUNK)
    assert summary.nbytes == sum(len(bulk.get(key.path()) or b"") for key in keys)
    assert summary.hits is None
    assert (count.other_entries, count.other_bytes) == (1, 5)
    assert seen == [8]


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
    index.publish(replace(entry, prefix_hash=two, parent_hash=one), {"0.x": SHARD}, ttl_s=60)
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
