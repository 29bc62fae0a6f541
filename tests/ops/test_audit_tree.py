"""The prefix tree of an audit, compared with a simple computation from the same prompts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from objkv.index.base import ChunkEntry, ShardRecord
from objkv.keys.chunk import ChunkKey
from objkv.ops.audit.report import AuditReport
from objkv.ops.inventory import tree as audit_tree
from objkv.ops.inventory.tree import TreeNode
from tests.contracts.memory_index import MemoryIndex
from tests.contracts.memory_store import MemoryStore
from tests.support.audit import Auditor, Prompt, hash_of, prefixes, save_prompts, ways_on
from tests.support.samples import CHUNK, FIELD, NAMESPACE, save_identity

PROMPTS = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple), min_size=1, max_size=8
)


def audit_of(prompts: list[Prompt], *, roots_max: int = 50) -> AuditReport:
    bulk, index = MemoryStore(), MemoryIndex()
    save_prompts(bulk, index, prompts)
    return Auditor(bulk, index, roots_max=roots_max).all()


def node_ends(chunks: set[Prompt]) -> set[Prompt]:
    """Return the chunks that do not have exactly one continuation."""
    return {one for one in chunks if ways_on(chunks, one) != 1}


@settings(max_examples=25, deadline=None)
@given(PROMPTS)
def test_the_tree_is_that_of_the_prompts(prompts: list[Prompt]) -> None:
    chunks = prefixes(prompts)
    report = audit_of(prompts)
    ends = node_ends(chunks)
    assert {node.hash for node in report.tree} == {hash_of(one) for one in ends}
    by_hash = {node.hash: node for node in report.tree}
    for end in ends:
        node = by_hash[hash_of(end)]
        above = max((one for one in ends if end[: len(one)] == one != end), default=(), key=len)
        assert (node.depth, node.chunks) == (len(above), len(end) - len(above))
        assert (node.token_start, node.token_end) == (len(above) * CHUNK, len(end) * CHUNK)
        assert node.children == ways_on(chunks, end)
        assert node.leaves == sum(
            one[: len(end)] == end and ways_on(chunks, one) == 0 for one in chunks
        )
        parent = None if node.parent is None else report.tree[node.parent].hash
        assert parent == (hash_of(above) if above else None)


@settings(max_examples=15, deadline=None)
@given(PROMPTS)
def test_roots_are_those_of_the_prompts(prompts: list[Prompt]) -> None:
    chunks = prefixes(prompts)
    report = audit_of(prompts)
    assert len(report.roots) == report.totals.roots == len({one[0] for one in chunks})
    for root in report.roots:
        own = {one for one in chunks if hash_of(one[:1]) == root.first}
        assert root.chunks == len(own)
        assert root.leaves == sum(ways_on(chunks, one) == 0 for one in own)
        assert root.branches == sum(ways_on(chunks, one) > 1 for one in own)
        assert root.depth_max == max(map(len, own))
        assert root.token_end_max == root.depth_max * CHUNK
        trunk = next(
            node
            for node in report.tree
            if node.parent is None and own >= {one for one in chunks if hash_of(one) == node.hash}
        )
        assert (root.shared_chunks, root.shared_tokens) == (trunk.chunks, trunk.token_end)
        assert root.hash == trunk.hash


@settings(max_examples=20, deadline=None)
@given(PROMPTS, st.integers(3, 12))
def test_what_has_no_room_is_folded_and_nothing_is_lost(prompts: list[Prompt], most: int) -> None:
    whole = audit_of(prompts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audit_tree, "NODES_MAX", most)
        small = audit_of(prompts)
    assert len(small.tree) <= most
    for values in ("chunks", "nbytes"):
        assert sum(getattr(one, values) for one in small.tree) == sum(
            getattr(one, values) for one in whole.tree
        )
    check_links(small.tree)
    assert sum(one.leaves for one in small.tree if one.parent is None) == sum(
        one.leaves for one in whole.tree if one.parent is None
    )
    for one in small.tree:
        if one.kind == "chunks" and one.children:
            below = [node for node in small.tree if node.parent == one.id]
            assert sum(node.folded or 1 for node in below) == one.children


def check_links(tree: tuple[TreeNode, ...]) -> None:
    assert [one.id for one in tree] == list(range(len(tree)))
    for one in tree:
        assert one.parent is None or one.parent < one.id
        assert one.parent is None or tree[one.parent].token_end == one.token_start


def test_the_largest_roots_come_first_and_the_others_are_counted() -> None:
    report = audit_of([(0,), (1, 0), (1, 1), (2, 2)], roots_max=2)
    assert [root.first for root in report.roots] == [hash_of((1,)), hash_of((2,))]
    assert report.roots_omitted == 1


def test_a_prefix_without_its_beginning_is_a_root_that_says_so() -> None:
    bulk, index = MemoryStore(), MemoryIndex()
    save_prompts(bulk, index, [(0, 1, 2)])
    first = bytes.fromhex(hash_of((0,)))
    bulk.delete(ChunkKey(NAMESPACE, first, 0).path())
    index.drop(NAMESPACE, first)
    report = Auditor(bulk, index).all()
    [root] = report.roots
    assert (root.first, root.token_start) == (hash_of((0, 1)), CHUNK)
    assert any("has lost its first chunks" in problem for problem in report.problems)


def test_records_that_lie_about_their_parents_make_no_loop() -> None:
    bulk, index = MemoryStore(), MemoryIndex()
    save_identity(bulk)
    one, other = b"\1" * 20, b"\2" * 20
    claims = {one: (other, 16, 32), other: (one, 16, 32), b"\3" * 20: (b"\3" * 20, 0, 16)}
    claims[b"\4" * 20] = (b"\3" * 20, 32, 16)  # ends before it starts
    for prefix_hash, (parent, start, end) in claims.items():
        bulk.put(ChunkKey(NAMESPACE, prefix_hash, 0).path(), bytes(5_000))
        shard = ShardRecord(5_000, 4_000, True, False, "0" * 32, 0)
        entry = ChunkEntry(NAMESPACE, prefix_hash, parent, start, end)
        index.publish(entry, {FIELD: shard}, ttl_s=100)
    report = Auditor(bulk, index).all()
    assert report.totals.chunks == 4
    assert {root.hash for root in report.roots} == {h.hex() for h in (one, other, b"\3" * 20)}
    check_links(report.tree)


def test_hits_make_the_reuse_of_a_root_and_the_newest_use_is_told() -> None:
    bulk, index = MemoryStore(), MemoryIndex(clock=lambda: 5_000.0)
    save_prompts(bulk, index, [(0, 1)])
    hashes = [bytes.fromhex(hash_of(one)) for one in ((0,), (0, 1))]
    index.touch(NAMESPACE, hashes, ttl_s=100)
    index.touch(NAMESPACE, hashes[:1], ttl_s=100)
    [root] = Auditor(bulk, index).all().roots
    assert (root.hits, root.hits_max, root.used_chunks) == (3, 2, 2)
    assert root.reuse == 1.5
    assert root.last_used_s == 5_000
