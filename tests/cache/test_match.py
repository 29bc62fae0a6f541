"""Which prefix is usable, given the found shards."""

from dataclasses import replace
from math import lcm

from hypothesis import given
from hypothesis import strategies as st

from objkv.cache.match import covered, stored_blocks, usable_chunks
from objkv.index.base import ShardRecord, ShardRecords
from objkv.keys.identity import GroupIdentity

SHARD = ShardRecord(100, 80, True, False, "0" * 32, 1)
FULL = GroupIdentity("full", None, ("a", "b"), heads=4, content=16, block_size=32)
WINDOW = GroupIdentity("sliding_window", 100, ("c",), heads=4, content=16, block_size=32)
LOCAL = GroupIdentity("chunked_local", 96, ("d",), heads=4, content=16, block_size=32)
LATENT = GroupIdentity("mla", None, ("e",), heads=1, content=16, block_size=32)
STATE = GroupIdentity("mamba", None, ("f",), heads=1, content=16, block_size=32, state="s")


def shards(*fields: str) -> ShardRecords:
    return dict.fromkeys(fields, SHARD)


def test_shards_of_several_ranks_cover_a_group_together() -> None:
    assert covered(shards("0.L0-2_H0-2", "0.L0-2_H2-4"), 0, FULL)
    assert covered(shards("0.L0-1_H0-4", "0.L1-2_H0-4"), 0, FULL)
    assert not covered(shards("0.L0-2_H0-2"), 0, FULL)
    assert not covered(shards("0.L0-1_H0-4"), 0, FULL)
    assert not covered(shards("1", "1.L0-2_H0-4"), 0, FULL)
    assert covered(shards("0"), 0, FULL)


def test_with_dcp_all_tokens_are_needed() -> None:
    parts = [f"0.L0-2_H0-4_T{rank}of4" for rank in range(4)]
    assert covered(shards(*parts), 0, FULL)
    assert not covered(shards(*parts[:3]), 0, FULL)
    assert not covered(shards(*parts[:3], "0.L0-2_H0-4_T0of2"), 0, FULL)
    assert not covered(shards(*parts[:3], "0.L0-2_H0-4_T1of2"), 0, FULL), "of another division"
    assert not covered(shards(*parts[:3], "0.L0-2_H0-4_T3of4i2"), 0, FULL)
    assert covered(shards("0.L0-2_H0-4", *parts[:3]), 0, FULL)


def test_a_field_of_another_form_is_ignored() -> None:
    assert not covered(shards("0.whatever", "rubbish"), 0, FULL)


def test_a_division_of_the_tokens_that_no_replica_has_takes_no_time() -> None:
    """Any process that may write to the index can name one."""
    assert not covered(shards(f"0.L0-2_H0-4_T0of{10**15}"), 0, FULL)


def test_a_payload_holds_the_blocks_that_some_end_needs() -> None:
    assert stored_blocks(FULL, 256) == stored_blocks(LATENT, 256) == 8
    assert stored_blocks(WINDOW, 256) == 4
    assert stored_blocks(WINDOW, 64) == 2
    assert stored_blocks(LOCAL, 64) == 2
    assert stored_blocks(LOCAL, 192) == 0
    assert stored_blocks(STATE, 256) == 1


@st.composite
def mixes(draw: st.DrawFn) -> tuple[list[GroupIdentity], int]:
    """Groups of every kind with block sizes of their own, and tokens of a chunk."""
    groups = []
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from([FULL, LATENT, WINDOW, LOCAL, STATE]))
        size = draw(st.sampled_from([2, 4, 6]))
        window = None if kind.window is None else draw(st.integers(1, 40))
        groups.append(replace(kind, block_size=size, window=window))
    chunk = lcm(*(group.block_size for group in groups)) * draw(st.integers(1, 3))
    return groups, chunk


def reads(group: GroupIdentity, reader: int, token: int) -> bool:
    """Whether computing token ``reader`` reads the kept values of ``token``, one by one."""
    match group.kind:
        case "sliding_window":
            assert group.window is not None
            return reader - token < group.window
        case "chunked_local":
            assert group.window is not None
            return reader // group.window == token // group.window
        case "mamba":
            return token == reader - 1
    return True


@given(mixes(), st.data())
def test_the_match_is_the_longest_whose_every_read_is_stored(
    mix: tuple[list[GroupIdentity], int], data: st.DataObject
) -> None:
    groups, chunk = mix
    held = data.draw(st.lists(st.sets(st.integers(0, len(groups) - 1)), max_size=9))
    found = [shards(*map(str, here)) if here else None for here in held]

    def is_stored(g: int, token: int) -> bool:
        group, number = groups[g], token // chunk
        first = (number + 1) * chunk - stored_blocks(group, chunk) * group.block_size
        return g in held[number] and token >= first

    def serves(end: int) -> bool:
        """Whether all tokens from ``end`` on find what they read of those before it."""
        return all(
            is_stored(g, token)
            for g, group in enumerate(groups)
            for token in range(end)
            if reads(group, end, token)  # later ones read less of it
        )

    # A payload is either complete or missing, so full groups need all of their payloads.
    best = max(end for end in range(len(held) + 1) if serves(end * chunk))
    assert usable_chunks(found, groups, chunk) == best
