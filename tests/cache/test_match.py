"""Which prefix is usable, from what was found alone."""

from hypothesis import given
from hypothesis import strategies as st

from objkv.cache.match import covered, stored_blocks, usable_chunks, window_reach_chunks
from objkv.index.base import ShardRecord, Shards
from objkv.keys.identity import GroupIdentity

SHARD = ShardRecord(100, 80, "none", False, "0" * 32, 1)
FULL = GroupIdentity("full", None, ("a", "b"), heads=4, content=16, block_size=32)
WINDOW = GroupIdentity("sliding_window", 100, ("c",), heads=4, content=16, block_size=32)
CHUNK = 64


def shards(*fields: str) -> Shards:
    return dict.fromkeys(fields, SHARD)


WHOLE_FULL = "0.L0-2_H0-4"
WHOLE_WINDOW = "1.L0-1_H0-4"


def test_a_match_ends_before_the_first_chunk_that_is_missing() -> None:
    found = [shards(WHOLE_FULL), shards(WHOLE_FULL), None, shards(WHOLE_FULL)]
    assert usable_chunks(found, [FULL], CHUNK) == 2


def test_nothing_stored_is_no_match() -> None:
    assert usable_chunks([None, None], [FULL], CHUNK) == 0
    assert usable_chunks([], [FULL], CHUNK) == 0


def test_shards_of_several_ranks_cover_a_group_together() -> None:
    assert covered(shards("0.L0-2_H0-2", "0.L0-2_H2-4"), 0, FULL)
    assert covered(shards("0.L0-1_H0-4", "0.L1-2_H0-4"), 0, FULL)
    assert not covered(shards("0.L0-2_H0-2"), 0, FULL)
    assert not covered(shards("0.L0-1_H0-4"), 0, FULL)
    assert not covered(shards("1.L0-2_H0-4"), 0, FULL)


def test_a_field_of_another_form_is_ignored() -> None:
    assert not covered(shards("0.whatever", "rubbish"), 0, FULL)


def test_a_window_needs_only_the_chunks_that_it_reaches() -> None:
    both, full_only = shards(WHOLE_FULL, WHOLE_WINDOW), shards(WHOLE_FULL)
    # 99 tokens before the end are seen: two chunks of 64.
    assert usable_chunks([full_only, both, both], [FULL, WINDOW], CHUNK) == 3
    assert usable_chunks([both, both, full_only], [FULL, WINDOW], CHUNK) == 2
    assert usable_chunks([both, full_only, both], [FULL, WINDOW], CHUNK) == 1


def test_a_window_of_one_token_reaches_nothing_before_it() -> None:
    assert window_reach_chunks(1, CHUNK) == 0
    assert window_reach_chunks(2, CHUNK) == 1
    assert window_reach_chunks(65, CHUNK) == 1
    assert window_reach_chunks(66, CHUNK) == 2


def test_a_windowed_payload_holds_the_blocks_that_a_window_at_its_end_sees() -> None:
    assert stored_blocks(FULL, 256) == 8
    assert stored_blocks(WINDOW, 256) == 4
    assert stored_blocks(WINDOW, 64) == 2


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=12), st.integers(1, 200))
def test_every_chunk_a_match_needs_is_stored(stored: list[tuple[bool, bool]], window: int) -> None:
    group = GroupIdentity("sliding_window", window, ("c",), heads=4, content=16, block_size=32)
    found = [
        shards(*([WHOLE_FULL] if full else []), *([WHOLE_WINDOW] if windowed else []))
        for full, windowed in stored
    ]
    usable = usable_chunks(found, [FULL, group], CHUNK)
    assert all(full for full, _ in stored[:usable])
    for chunk in range(usable):
        seen = (chunk + 1) * CHUNK > usable * CHUNK - (window - 1)
        assert stored[chunk][1] or not seen


@given(st.lists(st.booleans(), max_size=12))
def test_no_longer_match_exists_for_full_attention(stored: list[bool]) -> None:
    found = [shards(WHOLE_FULL) if s else None for s in stored]
    usable = usable_chunks(found, [FULL], CHUNK)
    assert usable == len(stored) or not stored[usable]
