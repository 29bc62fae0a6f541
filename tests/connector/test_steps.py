"""Which physical blocks a load fills and a save reads, from block tables alone."""

from hypothesis import given
from hypothesis import strategies as st

from objkv.connector.geometry import Geometry
from objkv.connector.steps import load_moves, save_moves
from objkv.index.base import ShardRecord, Shards
from objkv.keys.identity import GroupIdentity
from objkv.keys.prefix import PrefixChain, PromptExtras, token_digest

BLOCK, CHUNK, CHUNKS = 32, 128, 5
FULL = GroupIdentity("full", None, ("a",), heads=2, content=16, block_size=BLOCK)
WINDOW = GroupIdentity("sliding_window", 65, ("b",), heads=2, content=16, block_size=BLOCK)
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
    loads = list(
        load_moves(geometry(WINDOW), chain(), records("0.L0-1_H0-2"), [window], (0, 2 * CHUNK))
    )
    # A payload holds the last ceil(65 / 32) = 3 blocks of its chunk.
    assert [load.move.chunk for load in loads] == [1]
    assert loads[0].move.first_block == 0
    assert list(loads[0].move.block_ids) == TABLE[5:8]


def test_a_save_takes_whole_chunks_and_their_digests() -> None:
    moves = save_moves(geometry(FULL), chain(), TOKENS, [TABLE], [1, 3], keep_tokens=True)
    assert [save.move.chunk for save in moves] == [1, 3]
    assert list(moves[0].move.block_ids) == TABLE[PER_CHUNK : 2 * PER_CHUNK]
    assert moves[0].token_digest == token_digest(TOKENS[CHUNK : 2 * CHUNK])
    assert moves[0].tokens == tuple(TOKENS[CHUNK : 2 * CHUNK])


def test_a_save_leaves_out_a_group_whose_blocks_a_window_has_passed() -> None:
    window = [0] * (PER_CHUNK - 2) + TABLE[PER_CHUNK - 2 :]
    moves = save_moves(
        geometry(FULL, WINDOW), chain(), TOKENS, [TABLE, window], [0, 1], keep_tokens=False
    )
    assert [(save.move.chunk, save.move.group) for save in moves] == [(0, 0), (1, 0), (1, 1)]
    assert list(moves[2].move.block_ids) == TABLE[2 * PER_CHUNK - 3 : 2 * PER_CHUNK]
    assert all(save.tokens is None for save in moves)
