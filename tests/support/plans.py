"""The moves of chunks, and those of a load in columns, as a scheduler plans them."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from objkv.keys.prefix import PREFIX_HASH_BYTES, root_hash
from objkv.keys.topology import Shard
from objkv.transfer.plan import ChunkMove, LoadMoves, MoveColumn, Source


@dataclass(frozen=True, slots=True)
class LoadMove:
    move: ChunkMove
    shard: Shard | None
    """What the payload has of the group. None: all of it."""


def move_of(
    chunk: int,
    hashes: Sequence[bytes],
    namespace: str,
    tokens: int,
    block_ids: Iterable[int],
    first_block: int = 0,
) -> ChunkMove:
    """Chunk ``chunk`` of a prompt with these hashes, of ``tokens`` tokens a chunk."""
    parent, start = hashes[chunk - 1] if chunk else root_hash(namespace), chunk * tokens
    ids = tuple(block_ids)
    return ChunkMove(chunk, 0, hashes[chunk], parent, start, start + tokens, first_block, ids)


def packed(moves: Iterable[LoadMove]) -> LoadMoves:
    hashes, places = list[bytes](), dict[tuple[bytes, bytes], int]()
    sources = dict[Source, int]()
    ids = array("q")
    columns: list[list[int]] = []
    last: ChunkMove | None = None
    for load in moves:
        move = load.move
        if move is not last:
            first_id = len(ids)
            ids.extend(move.block_ids)
        last = move
        source, name = Source(move.group, load.shard), (move.parent_hash, move.prefix_hash)
        if name not in places:
            if hashes[-1:] != [move.parent_hash]:
                hashes.append(move.parent_hash)
            hashes.append(move.prefix_hash)
            places[name] = len(hashes) - 1
        columns.append(
            [
                move.chunk,
                sources.setdefault(source, len(sources)),
                places[name],
                move.token_start,
                move.token_end,
                move.first_block,
                first_id,
                len(ids),
            ]
        )
    assert all(len(one) == PREFIX_HASH_BYTES for one in hashes)
    table = np.array(columns, np.int32).reshape(-1, len(MoveColumn)).T
    return LoadMoves(
        np.ascontiguousarray(table),
        b"".join(hashes),
        np.array(ids, np.int64),
        sources=tuple(sources),
    )


def unpacked(moves: LoadMoves) -> list[LoadMove]:
    found = []
    claims, columns = moves.claims("0" * 32, range(len(moves))), moves.table.T.tolist()
    for n, (claim, column) in enumerate(zip(claims, columns, strict=True)):
        prefix_hash, parent_hash, start, end, source = claim
        group, shard = moves.sources[source]
        ids = moves.block_ids([n], column[MoveColumn.IDS_END] - column[MoveColumn.IDS])[0].tolist()
        place = start, end, column[MoveColumn.FIRST_BLOCK], tuple(ids)
        move = ChunkMove(column[MoveColumn.CHUNK], group, prefix_hash, parent_hash, *place)
        found.append(LoadMove(move, shard))
    return found
