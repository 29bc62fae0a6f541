"""Which physical blocks a load fills and a save reads."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from objkv.connector.kv.planning import Computed, load_moves, save_moves, states_after
from objkv.connector.model.groups import Geometry
from objkv.index.base import ShardRecord, Shards
from objkv.keys.identity import GroupIdentity
from objkv.keys.prefix import PrefixChain, PromptExtras, token_digest

BLOCK, CHUNK, CHUNKS = 32, 128, 5
FULL = GroupIdentity("full", None, ("a",), heads=2, content=16, block_size=BLOCK)
WINDOW = GroupIdentity("sliding_window", 65, ("b",), heads=2, content=16, block_size=BLOCK)
LOCAL = GroupIdentity("chunked_local", 192, ("c",), heads=2, content=16, block_size=BLOCK)
STATE = GroupIdentity("mamba", None, ("d",), heads=1, content=16, block_size=BLOCK, state="s")
SHARD = ShardRecord(100, 80, "none", False, "0" * 32, 1)
TOKENS = list(range(CHUNKS * CHUNK))
PER_CHUNK = CHUNK // BLOCK


def geometry(*groups: GroupIdentity) -> Geometry:
    return Geometry(groups, CHUNK, BLOCK, tp_size=1)


def chain() -> PrefixChain:
    chain = PrefixChain("0" * 32, CHUNK, PromptExtras(), digests=True)
    chain.extend(TOKENS, len(TOKENS))
    return chain


def records(*fields: str) -> list[Shards | None]:
    return [dict.fromkeys(fields, SHARD) for _ in range(CHUNKS)]


TABLE = [100 + i for i in range(CHUNKS * PER_CHUNK)]


@given(st.data())
def test_a_load_fills_exactly_the_blocks_of_its_tokens(data: st.DataObject) -> None:
    start = data.draw(st.integers(0, CHUNKS * PER_CHUNK - 1)) * BLOCK
    end = data.draw(st.integers(start // BLOCK + 1, CHUNKS * PER_CHUNK)) * BLOCK
    moves = [
        load.move
        for load in load_moves(
            geometry(FULL), chain(), records("0.L0-1_H0-2"), [TABLE], (start, end)
        )
    ]
    filled = [block for move in moves for block in move.block_ids]
    assert filled == TABLE[start // BLOCK : end // BLOCK]
    for move in moves:
        first = TABLE.index(move.block_ids[0])
        assert first == move.chunk * PER_CHUNK + move.first_block
        assert move.prefix_hash == chain().hash(move.chunk)
        assert move.token_end - move.token_start == CHUNK


def test_a_load_carries_what_the_index_promised_of_its_group_only() -> None:
    known = records("0.L0-1_H0-1", "0.L0-1_H1-2", "1.L0-1_H0-2")
    table = [TABLE, TABLE]
    loads = list(load_moves(geometry(FULL, WINDOW), chain(), known, table, (0, CHUNK)))
    assert [[name for name, _ in load.records] for load in loads] == [
        ["0.L0-1_H0-1", "0.L0-1_H1-2"],
        ["1.L0-1_H0-2"],
    ]


def test_a_window_is_loaded_only_where_vllm_kept_blocks() -> None:
    window = [0] * (2 * PER_CHUNK - 3) + TABLE[2 * PER_CHUNK - 3 : 2 * PER_CHUNK]
    known = [None, *records("0.L0-1_H0-2")[1:]]
    loads = list(load_moves(geometry(WINDOW), chain(), known, [window], (0, 2 * CHUNK)))
    # A payload holds the last ceil(65 / 32) = 3 blocks of its chunk.
    assert [load.move.chunk for load in loads] == [1]
    assert loads[0].move.first_block == 0
    assert list(loads[0].move.block_ids) == TABLE[5:8]


def test_a_state_is_loaded_into_the_one_block_that_vllm_gave_it() -> None:
    state = [0] * (3 * PER_CHUNK - 1) + [77]
    known = records("0.L0-1_H0-2", "1.L0-1_H0-1")
    loads = list(load_moves(geometry(FULL, STATE), chain(), known, [TABLE, state], (0, 3 * CHUNK)))
    assert [load.move.chunk for load in loads if load.move.group == 0] == [0, 1, 2]
    (move,) = [load.move for load in loads if load.move.group == 1]
    assert (move.chunk, move.first_block, move.block_ids) == (2, 0, (77,))


def test_null_blocks_are_never_filled_wherever_they_are() -> None:
    holes = [0, 100, 0, 0, 101, 102, 0, 103]
    loads = list(
        load_moves(geometry(FULL), chain(), records("0.L0-1_H0-2"), [holes], (0, 2 * CHUNK))
    )
    moves = [(load.move.chunk, load.move.first_block, load.move.block_ids) for load in loads]
    assert moves == [(0, 1, (100,)), (1, 0, (101, 102)), (1, 3, (103,))]


def test_local_attention_whose_chunks_end_with_ours_is_neither_saved_nor_loaded() -> None:
    local = replace(LOCAL, window=CHUNK)
    table = [TABLE, [0] * len(TABLE)]
    known = records("0.L0-1_H0-2")
    loads = load_moves(geometry(FULL, local), chain(), known, table, (0, 2 * CHUNK))
    assert {load.move.group for load in loads} == {0}
    computed = Computed(TOKENS, [TABLE, TABLE])
    moves = save_moves(geometry(FULL, local), chain(), computed, [0, 1], keep_tokens=False)
    assert {save.move.group for save in moves} == {0}
    assert geometry(FULL, local).all_fields() == {"0.L0-1_H0-2"}


def test_a_state_is_saved_from_where_it_is_known_to_be() -> None:
    """The table has blocks at other places too: of states that are not at a chunk's end."""
    where = {(1, 2 * CHUNK): 55}
    computed = Computed(TOKENS, [TABLE, TABLE], where)
    moves = save_moves(geometry(FULL, STATE), chain(), computed, [0, 1, 2], keep_tokens=False)
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
    computed = Computed(TOKENS, [TABLE, TABLE])
    moves = save_moves(
        geometry(FULL, WINDOW),
        chain(),
        computed,
        [0, 1],
        keep_tokens=False,
        is_stored=lambda chunk, group: (chunk, group) == (1, 0),
    )
    assert [(m.move.chunk, m.move.group) for m in moves] == [(0, 0), (0, 1), (1, 1)]


def test_a_save_takes_whole_chunks_and_their_digests() -> None:
    computed = Computed(TOKENS, [TABLE])
    moves = save_moves(geometry(FULL), chain(), computed, [1, 3], keep_tokens=True)
    assert [save.move.chunk for save in moves] == [1, 3]
    assert list(moves[0].move.block_ids) == TABLE[PER_CHUNK : 2 * PER_CHUNK]
    assert moves[0].token_digest == token_digest(TOKENS[CHUNK : 2 * CHUNK])
    assert moves[0].tokens == tuple(TOKENS[CHUNK : 2 * CHUNK])


def test_a_save_leaves_out_a_group_whose_blocks_a_window_has_passed() -> None:
    window = [0] * (PER_CHUNK - 2) + TABLE[PER_CHUNK - 2 :]
    computed = Computed(TOKENS, [TABLE, window])
    moves = save_moves(geometry(FULL, WINDOW), chain(), computed, [0, 1], keep_tokens=False)
    assert [(save.move.chunk, save.move.group) for save in moves] == [(0, 0), (1, 0), (1, 1)]
    assert list(moves[2].move.block_ids) == TABLE[2 * PER_CHUNK - 3 : 2 * PER_CHUNK]
    assert all(save.tokens is None for save in moves)
