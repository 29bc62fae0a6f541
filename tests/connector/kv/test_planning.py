"""Which physical blocks a load fills and a save reads."""

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
from objkv.keys.prefix import PrefixChain, PromptExtras
from objkv.transfer.plan import SaveMove
from tests.support.plans import LoadMove, unpacked

BLOCK, CHUNK, CHUNKS = 32, 128, 5
FULL = GroupIdentity("full", None, ("a",), heads=2, content=16, block_size=BLOCK)
WINDOW = GroupIdentity("sliding_window", 65, ("b",), heads=2, content=16, block_size=BLOCK)
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
    shape = geometry(*groups)
    moves, _ = load_moves(shape, StoredPayloads(shape), chain(), known, tables, (span[0], span[1]))
    return unpacked(moves)


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


def test_a_state_is_loaded_into_the_one_block_that_vllm_gave_it() -> None:
    state = [0] * (3 * PER_CHUNK - 1) + [77]
    known = records("0", "1")
    loads = loads_of((FULL, STATE), known, [TABLE, state], 0, 3 * CHUNK)
    assert [load.move.chunk for load in loads if load.move.group == 0] == [0, 1, 2]
    (move,) = [load.move for load in loads if load.move.group == 1]
    assert (move.chunk, move.first_block, move.block_ids) == (2, 0, (77,))


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


def test_a_save_leaves_out_a_group_whose_blocks_a_window_has_passed() -> None:
    window = [0] * (PER_CHUNK - 2) + TABLE[PER_CHUNK - 2 :]
    moves = saved((FULL, WINDOW), Computed(TOKENS, [TABLE, window]), [0, 1])
    assert [(save.move.chunk, save.move.group) for save in moves] == [(0, 0), (1, 0), (1, 1)]
    assert list(moves[2].move.block_ids) == TABLE[2 * PER_CHUNK - 3 : 2 * PER_CHUNK]
    assert all(save.tokens is None for save in moves)


def test_a_group_that_is_stored_is_not_saved_again_because_another_lacks() -> None:
    stored = (1, 0)
    moves = saved(
        (FULL, WINDOW),
        Computed(TOKENS, [TABLE, TABLE]),
        [0, 1],
        is_stored=lambda *place: place == stored,
    )
    assert [(m.move.chunk, m.move.group) for m in moves] == [(0, 0), (0, 1), (1, 1)]
