"""The prefixes of a namespace as a tree."""

from dataclasses import replace

from objkv.index.base import ChunkEntry, Record, ShardRecord
from objkv.index.memory import MemoryIndex
from objkv.keys.prefix import prefix_hashes
from objkv.ops.listing import Branch, list_tree
from objkv.stores.memory import MemoryStore
from tests.ops.world import CHUNK, NAMESPACE, save

SHARED = list(range(100, 100 + 2 * CHUNK))
LONG = [*SHARED, *range(500, 500 + 3 * CHUNK)]
SHORT = [*SHARED, *range(900, 900 + CHUNK)]


def tree(index: MemoryIndex) -> list[Branch]:
    return list_tree(index, NAMESPACE)


def test_what_prompts_share_is_one_branch_that_forks(bulk: MemoryStore, index: MemoryIndex) -> None:
    for tokens in (SHORT, LONG):
        save(bulk, index, tokens)
    shared, long, short = tree(index)
    hashes = prefix_hashes(NAMESPACE, LONG, CHUNK)
    assert (shared.first, shared.last) == (hashes[0], hashes[1])
    assert (shared.level, shared.chunks, shared.branches, shared.leaves) == (0, 2, 2, 2)
    assert (shared.tree_chunks, shared.token_start, shared.token_end) == (6, 0, 2 * CHUNK)
    assert shared.tree_bytes == shared.nbytes + long.nbytes + short.nbytes
    assert (long.last, long.level, long.chunks, long.is_last) == (hashes[-1], 1, 3, False)
    assert (short.level, short.chunks, short.leaves, short.is_last) == (1, 1, 1, True)


def test_a_prefix_without_its_beginning_is_a_tree_of_its_own(
    bulk: MemoryStore, index: MemoryIndex
) -> None:
    save(bulk, index, LONG)
    index.drop(NAMESPACE, prefix_hashes(NAMESPACE, LONG, CHUNK)[1])
    first, second = tree(index)
    assert [first.level, second.level] == [0, 0]
    assert (first.token_start, second.token_end) == (2 * CHUNK, CHUNK)


def test_a_record_that_names_itself_as_its_parent_makes_no_loop(index: MemoryIndex) -> None:
    shard = ShardRecord(1, 1, "none", False, "0" * 32, 1)
    for name, parent in ((b"a", b"b"), (b"b", b"a"), (b"c", b"c")):
        chunk = ChunkEntry(NAMESPACE, name * 20, parent * 20, CHUNK, CHUNK)
        index.publish(chunk, {"0.L0-1_H0-1": shard}, ttl_s=60)
    assert len(tree(index)) == 3


def test_thousands_of_forks_below_each_other_are_no_recursion(index: MemoryIndex) -> None:
    shard = ShardRecord(1, 1, "none", False, "0" * 32, 1)
    parent = b"\0" * 20
    for number in range(3_000):
        for side in (0, 1):
            own = number.to_bytes(19, "little") + bytes([side + 1])
            chunk = ChunkEntry(NAMESPACE, own, parent, number, number + 1)
            index.publish(chunk, {"0.L0-1_H0-1": shard}, ttl_s=60)
        parent = own
    found = tree(index)
    assert max(branch.level for branch in found) == 2_999
    assert found[0].tree_chunks + found[-1].tree_chunks >= 3_000
    assert {replace(b, level=0).leaves for b in found if not b.branches} == {1}


def test_a_scan_that_repeats_a_record_counts_it_once(bulk: MemoryStore, index: MemoryIndex) -> None:
    class Repeating(MemoryIndex):
        def scan(self, namespace: str) -> "list[Record]":  # type: ignore[override]
            return [*index.scan(namespace)] * 2

    save(bulk, index, SHORT)
    [branch] = list_tree(Repeating(), NAMESPACE)
    assert branch.tree_chunks == 3
