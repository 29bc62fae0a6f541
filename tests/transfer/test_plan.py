"""The columns of a load's moves: the same moves as in objects, also on the other side of a pipe."""

import pickle

from hypothesis import given, settings
from hypothesis import strategies as st

from objkv.codec.payload import Claim
from objkv.keys.chunk import ChunkKey
from objkv.keys.topology import Shard
from objkv.transfer.plan import ChunkMove, LoadPlan, MoveColumn, Source
from tests.support.device import ON_HOST
from tests.support.plans import LoadMove, packed, unpacked

pytestmark = ON_HOST

NAMESPACE = "0" * 32
SHARDS = (None, *[Shard(0, 1, head, head + 1) for head in range(3)])


@st.composite
def move_lists(draw: st.DrawFn) -> list[LoadMove]:
    """Moves of a load, some of which read several payloads of one chunk."""
    moves = []
    chunks = sorted(draw(st.lists(st.integers(0, 40), max_size=12)))
    for number, chunk in enumerate(chunks):
        names = draw(st.binary(min_size=20, max_size=20)), draw(st.binary(min_size=20, max_size=20))
        first = 1 + 8 * number
        move = ChunkMove(
            chunk=chunk,
            group=draw(st.integers(0, 2)),
            prefix_hash=names[0],
            parent_hash=names[1],
            token_start=chunk * 64,
            token_end=chunk * 64 + 64,
            first_block=draw(st.integers(0, 3)),
            block_ids=tuple(range(first, first + draw(st.integers(1, 8)))),
        )
        shards = draw(st.lists(st.sampled_from(SHARDS), min_size=1, unique=True))
        moves += [LoadMove(move, shard) for shard in shards]
    return moves


@settings(max_examples=20)
@given(move_lists())
def test_moves_in_columns_are_the_moves(moves: list[LoadMove]) -> None:
    columns = packed(moves)
    for one in (columns, pickle.loads(pickle.dumps(columns, protocol=5))):
        assert unpacked(one) == moves
        assert len(one) == len(moves)
        hashes = [one.prefix_hash(move) for move in range(len(one))]
        assert hashes == [load.move.prefix_hash for load in moves]


@settings(max_examples=20)
@given(move_lists(), st.integers(0, 41))
def test_columns_tell_what_the_moves_tell(moves: list[LoadMove], chunk: int) -> None:
    columns = packed(moves)
    assert columns.chunks == [load.move.chunk for load in moves]
    claims = columns.claims(NAMESPACE, range(len(moves)))
    assert [claims.claim(row) for row in claims] == [
        Claim(
            ChunkKey(NAMESPACE, load.move.prefix_hash, load.move.group, load.shard),
            load.move.parent_hash,
            load.move.token_start,
            load.move.token_end,
        )
        for load in moves
    ]
    for count in {len(load.move.block_ids) for load in moves}:
        alike = [n for n, load in enumerate(moves) if len(load.move.block_ids) == count]
        ids = [list(moves[n].move.block_ids) for n in alike]
        assert columns.block_ids(alike, count).tolist() == ids
    spans = [(load.move.token_start, load.move.token_end) for load in moves]
    assert columns.token_spans == spans
    later = [load.move.block_ids for load in moves if load.move.chunk >= chunk]
    assert columns.blocks_from(chunk) == {block for ids in later for block in ids}
    sources = [Source(load.move.group, load.shard) for load in moves]
    assert columns.sources == tuple(dict.fromkeys(sources))
    assert [columns.sources[at] for at in columns.table[MoveColumn.SOURCE]] == sources
    names = [load.move.prefix_hash for load in moves]
    assert columns.prefix_hashes() == list(dict.fromkeys(names))


@settings(max_examples=20)
@given(move_lists(), st.integers(0, 2))
def test_a_rank_keeps_the_moves_of_the_payloads_that_it_reads(
    moves: list[LoadMove], group: int
) -> None:
    columns = packed(moves)
    kept = columns.only([source.group == group for source in columns.sources])
    assert unpacked(kept) == [load for load in moves if load.move.group == group]
    assert {kept.sources[at].group for at in kept.table[MoveColumn.SOURCE]} <= {group}


def test_a_plan_of_many_moves_is_sent_as_a_few_strings() -> None:
    """Objects for all of them would take milliseconds of each worker's forward thread."""
    shards = [Shard(0, 80, head, head + 1) for head in range(8)]
    moves = [
        LoadMove(move, shard)
        for c in range(128)
        for move in (ChunkMove(c, 0, bytes([c]) * 20, bytes([c + 1]) * 20, c, c + 1, 0, (c + 1,)),)
        for shard in shards
    ]
    few, many = (
        pickle.dumps(LoadPlan("r", "n", packed(some), sync=False), protocol=5)
        for some in (moves[:16], moves)
    )
    marks = [data.count(b"\x94") for data in (few, many)]  # MEMOIZE: one per object or string
    assert marks[1] <= marks[0] + 8  # bytes that look alike
