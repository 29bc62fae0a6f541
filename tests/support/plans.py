"""The moves of a load in columns, as a scheduler plans them."""

from array import array
from collections.abc import Iterable

import numpy as np

from objkv.index.base import ShardRecord
from objkv.keys.prefix import PREFIX_HASH_BYTES
from objkv.keys.topology import Part
from objkv.transfer.plan import ChunkMove, Kind, LoadMove, LoadMoves, RecordColumns, Row


def packed(moves: Iterable[LoadMove]) -> LoadMoves:
    """Return these moves in columns."""
    hashes, kinds, parts = dict[bytes, int](), dict[Kind, int](), dict[Part, int]()
    ids, records = array("q"), list[ShardRecord]()
    columns: list[list[int]] = []
    last: ChunkMove | None = None
    for load in moves:
        move, fields = load.move, tuple(name for name, _ in load.records)
        if move is not last:
            source, first_id = len(columns), len(ids)
            ids.extend(move.block_ids)
        last = move
        kind = Kind(move.group, fields, tuple(range(len(fields))))
        columns.append(
            [
                move.chunk,
                kinds.setdefault(kind, len(kinds)),
                hashes.setdefault(move.prefix_hash, len(hashes)),
                hashes.setdefault(move.parent_hash, len(hashes)),
                move.token_start,
                move.token_end,
                move.first_block,
                first_id,
                len(ids),
                len(records),
                0 if load.part is None else parts.setdefault(load.part, len(parts)) + 1,
                source,
            ]
        )
        records += [record for _, record in load.records]
    assert all(len(one) == PREFIX_HASH_BYTES for one in hashes)
    table = np.array(columns, np.int32).reshape(-1, len(Row)).T
    return LoadMoves(
        np.ascontiguousarray(table),
        b"".join(hashes),
        np.array(ids, np.int64),
        kinds=tuple(kinds),
        records=RecordColumns.pack(records),
        parts=tuple(parts),
    )
