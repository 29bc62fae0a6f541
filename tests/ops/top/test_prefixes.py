"""``objkv.ops.top.prefixes``: which prefixes a fleet uses most."""

from objkv.index.base import ChunkEntry, ShardRecord
from objkv.index.memory import MemoryIndex
from objkv.index.shapes import SHAPES_HASH
from objkv.keys.prefix import prefix_hashes
from objkv.ops.top.prefixes import look
from objkv.stores.memory import MemoryStore
from tests.support.samples import CHUNK, NAMESPACE, TOKENS, save

OTHER = tuple(range(500, 500 + 2 * CHUNK))
BRANCH = (*TOKENS[: 2 * CHUNK], *OTHER[:CHUNK])


def touched(index: MemoryIndex, tokens: tuple[int, ...], times: int) -> None:
    for _ in range(times):
        index.touch(NAMESPACE, prefix_hashes(NAMESPACE, tokens, CHUNK), ttl_s=3600)


def world() -> MemoryIndex:
    """A prefix of two chunks that branches, and one that nobody else shares."""
    bulk, index = MemoryStore(), MemoryIndex()
    for tokens in (TOKENS, BRANCH, OTHER):
        save(bulk, index, tokens)
    return index


def test_the_most_used_comes_first_and_as_far_as_most_uses_go() -> None:
    index = world()
    touched(index, TOKENS, 3)
    touched(index, BRANCH, 4)
    touched(index, OTHER, 2)
    found = look(index, 10, None)
    first, second = found.prefixes
    assert (first.root, first.hits) == (prefix_hashes(NAMESPACE, TOKENS, CHUNK)[0], 7)
    assert first.shared_tokens == 3 * CHUNK, "four of seven uses go on into one branch"
    assert first.tokens == 4 * CHUNK, "each chunk once"
    assert (second.hits, second.shared_tokens, second.hits_per_s) == (2, 2 * CHUNK, None)
    assert (found.records, found.whole) == (6, True)


def test_a_prefix_ends_where_its_uses_part() -> None:
    index = world()
    touched(index, TOKENS, 3)
    touched(index, BRANCH, 3)
    touched(index, TOKENS[: 2 * CHUNK], 1)
    assert look(index, 10, None).prefixes[0].shared_tokens == 2 * CHUNK


def test_unused_prefixes_share_no_more_than_their_first_chunk() -> None:
    prefixes = look(world(), 10, None).prefixes
    assert [(prefix.hits, prefix.shared_tokens) for prefix in prefixes] == [(0, CHUNK)] * 2


def test_hits_become_rates_at_the_second_look() -> None:
    index = world()
    before = look(index, 10, None)
    touched(index, OTHER, 8)
    first, second = look(index, 14, before).prefixes
    assert (first.hits_per_s, second.hits_per_s) == (2, 0)


def test_a_large_index_is_read_in_part_and_said_to_be() -> None:
    found = look(world(), 10, None, records_max=2)
    assert (found.records, found.whole) == (2, False)
    assert look(world(), 10, None, records_max=6).whole


def test_an_empty_index_has_no_prefixes() -> None:
    found = look(MemoryIndex(), 10, None)
    assert (found.prefixes, found.whole, found.records) == ((), True, 0)


def test_records_of_shapes_are_no_chunks() -> None:
    index = world()
    shapes = ChunkEntry(NAMESPACE, SHAPES_HASH, bytes(20), 0, 1)
    index.publish(shapes, {"0.L0-2_H0-2": ShardRecord(0, 0, "none", False, "", 0)}, ttl_s=3600)
    found = look(index, 10, None)
    assert (found.records, len(found.prefixes)) == (6, 2)
