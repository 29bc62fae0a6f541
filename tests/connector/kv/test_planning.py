"""Which physical blocks a load fills and a save reads."""

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from objkv.connector.kv.planning import (
    Computed,
    StoredPayloads,
    load_moves,
    save_moves,
    states_after,
)
from objkv.connector.model.groups import Geometry
from objkv.index.base import ShardRecord, ShardRecords
from objkv.keys.identity import GroupIdentity
from objkv.keys.prefix import PrefixChain, PromptExtras, token_digest
from objkv.keys.topology import Shard
from objkv.transfer.plan import SaveMove
from tests.support.plans import LoadMove, unpacked

BLOCK, CHUNK, CHUNKS = 32, 128, 5
FULL = GroupIdentity("full", None, ("a",), heads=2, content=16, block_size=BLOCK)
WINDOW = GroupIdentity("sliding_window", 65, ("b",), heads=2, content=16, block_size=BLOCK)
LOCAL = GroupIdentity("chunked_local", 192, ("c",), heads=2, content=16, block_size=BLOCK)
STATE = GroupIdentity("mamba", None, ("d",), heads=1, content=16, block_size=BLOCK, state="s")
SHARD = ShardRecord(100, 80, True, False, "0" * 32, 1)
TOKENS = list(range(CHUNKS * CHUNK))
PER_CHUNK = CHUNK // BLOCK


def geometry(*groups: GroupIdentity) -> Geometry:
    return Geometry(groups, CHUNK, BLOCK, tp_size=1)


def chain() -> PrefixChain:
    chain = PrefixChain("0" * 32, CHUNK, PromptExtras(), digests=True)
    chain.extend(TOKENS, len(TOKENS))
    return chain


def records(*fields: str) -> list[ShardRecords | None]:
    return [dict.fromkeys(fields, SHARD) for _ in range(CHUNKS)]


TABLE = [100 + i for i in range(CHUNKS * PER_CHUNK)]


def loads_of(
    groups: tuple[GroupIdentity, ...], known: list[Any], tables: list[list[int]], *span: int
) -> list[LoadMove]:
    return planned(groups, known, tables, *span)[0]


def planned(
    groups: tuple[GroupIdentity, ...], known: list[Any], tables: list[list[int]], *span: int
) -> tuple[list[LoadMove], list[ShardRecord]]:
    shape = geometry(*groups)
    stored = StoredPayloads(shape)
    moves, records = load_moves(shape, stored, chain(), known, tables, (span[0], span[1]))
    return unpacked(moves), records


def saved(
    groups: tuple[GroupIdentity, ...], computed: Computed, chunks: list[int], **more: Any
) -> list[SaveMove]:
    settings = {"keep_tokens": False} | more
    return list(save_moves(geometry(*groups), chain(), computed, chunks, **settings))


@given(st.data())
def test_a_load_fills_exactly_the_blocks_of_its_tokens(data: st.DataObject) -> None:
    start = data.draw(st.integers(0, CHUNKS * PER_CHUNK - 1)) * BLOCK
    end = data.draw(st.integers(start // BLOCK + 1, CHUNKS * PER_CHUNK)) * BLOCK
    moves = [load.move for load in loads_of((FULL,), records("0"), [TABLE], start, end)]
    filled = [block for move in moves for block in move.block_ids]
    assert filled == TABLE[start // BLOCK : end // BLOCK]
    for move in moves:
        first = TABLE.index(move.block_ids[0])
        assert first == move.chunk * PER_CHUNK + move.first_block
        assert move.prefix_hash == chain().hash(move.chunk)
        assert move.token_end - move.token_start == CHUNK


def test_a_load_carries_what_the_index_promised_of_its_group_only() -> None:
    names = ("0.L0-1_H0-1", "0.L0-1_H1-2", "1", "2")
    known: list[ShardRecords] = [
        {name: replace(SHARD, nbytes=10 * chunk + n) for n, name in enumerate(names)}
        for chunk in range(CHUNKS)
    ]
    loads, found = planned((FULL, WINDOW), known, [TABLE, TABLE], CHUNK, 3 * CHUNK)
    halves = Shard(0, 1, 0, 1), Shard(0, 1, 1, 2)
    both = zip(loads, found, strict=True)
    assert [(one.move.chunk, one.move.group, one.shard, record) for one, record in both] == [
        (chunk, group, shard, known[chunk][name])
        for chunk in (1, 2)
        for group, shard, name in zip((0, 0, 1), (*halves, None), names, strict=False)
    ]


def test_a_window_is_loaded_only_where_vllm_kept_blocks() -> None:
    window = [0] * (2 * PER_CHUNK - 3) + TABLE[2 * PER_CHUNK - 3 : 2 * PER_CHUNK]
    known = [None, *records("0")[1:]]
    loads = loads_of((WINDOW,), known, [window], 0, 2 * CHUNK)
    # A payload holds the last ceil(65 / 32) = 3 blocks of its chunk.
    assert [load.move.chunk for load in loads] == [1]
    assert loads[0].move.first_block == 0
    assert list(loads[0].move.block_ids) == TABLE[5:8]


def test_a_state_is_loaded_into_the_one_block_that_vllm_gave_it() -> None:
    state = [0] * (3 * PER_CHUNK - 1) + [77]
    known = records("0", "1")
    loads = loads_of((FULL, STATE), known, [TABLE, state], 0, 3 * CHUNK)
    assert [load.move.chunk for load in loads if load.move.group == 0] == [0, 1, 2]
    (move,) = [load.move for load in loads if load.move.group == 1]
    assert (move.chunk, move.first_block, move.block_ids) == (2, 0, (77,))


def test_null_blocks_are_never_filled_wherever_they_are() -> None:
    holes = [0, 100, 0, 0, 101, 102, 0, 103]
    loads = loads_of((FULL,), records("0"), [holes], 0, 2 * CHUNK)
    moves = [(load.move.chunk, load.move.first_block, load.move.block_ids) for load in loads]
    assert moves == [(0, 1, (100,)), (1, 0, (101, 102)), (1, 3, (103,))]


def test_local_attention_whose_chunks_end_with_ours_is_neither_saved_nor_loaded() -> None:
    local = replace(LOCAL, window=CHUNK)
    table = [TABLE, [0] * len(TABLE)]
    loads = loads_of((FULL, local), records("0"), table, 0, 2 * CHUNK)
    assert {load.move.group for load in loads} == {0}
    moves = saved((FULL, local), Computed(TOKENS, [TABLE, TABLE]), [0, 1])
    assert {save.move.group for save in moves} == {0}
    assert geometry(FULL, local).all_fields() == {"0"}


def test_a_state_is_saved_from_where_it_is_known_to_be() -> None:
    """The table has blocks at other places too: of states that are not at a chunk's end."""
    where = {(1, 2 * CHUNK): 55}
    moves = saved((FULL, STATE), Computed(TOKENS, [TABLE, TABLE], where), [0, 1, 2])
    states = [(m.move.chunk, m.move.block_ids) for m in moves if m.move.group == 1]
    assert states == [(1, (55,))]


def test_the_state_of_a_step_that_ends_within_a_block_is_nobodys() -> None:
    layout = geometry(FULL, STATE)
    tables = [TABLE, TABLE]
    assert states_after(layout, tables, CHUNK, ()) == {(1, CHUNK): TABLE[PER_CHUNK - 1]}
    assert states_after(layout, tables, CHUNK + 1, ()) == {}
    assert states_after(layout, tables, None, ()) == {}
    assert states_after(layout, [TABLE, [0, 5]], CHUNK, ()) == {}
    offered = [(1, 91, CHUNK), (1, 92, BLOCK)]  # counts more than the table
    assert states_after(layout, tables, CHUNK, offered) == {(1, CHUNK): 91, (1, BLOCK): 92}


def test_a_group_that_is_stored_is_not_saved_again_because_another_lacks() -> None:
    stored = (1, 0)
    moves = saved(
        (FULL, WINDOW),
        Computed(TOKENS, [TABLE, TABLE]),
        [0, 1],
        is_stored=lambda *place: place == stored,
    )
    assert [(m.move.chunk, m.move.group) for m in moves] == [(0, 0), (0, 1), (1, 1)]


def test_a_save_takes_whole_chunks_and_their_digests() -> None:
    moves = saved((FULL,), Computed(TOKENS, [TABLE]), [1, 3], keep_tokens=True)
    assert [save.move.chunk for save in moves] == [1, 3]
    assert list(moves[0].move.block_ids) == TABLE[PER_CHUNK : 2 * PER_CHUNK]
    assert moves[0].token_digest == token_digest(TOKENS[CHUNK : 2 * CHUNK])
    assert moves[0].tokens == tuple(TOKENS[CHUNK : 2 * CHUNK])


def test_a_save_leaves_out_a_group_whose_blocks_a_window_has_passed() -> None:
    window = [0] * (PER_CHUNK - 2) + TABLE[PER_CHUNK - 2 :]
    moves = saved((FULL, WINDOW), Computed(TOKENS, [TABLE, window]), [0, 1])
    assert [(save.move.chunk, save.move.group) for save in moves] == [(0, 0), (1, 0), (1, 1)]
    assert list(moves[2].move.block_ids) == TABLE[2 * PER_CHUNK - 3 : 2 * PER_CHUNK]
    assert all(save.tokens is None for save in moves)
