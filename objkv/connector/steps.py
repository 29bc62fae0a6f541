"""Moves from block tables: which physical blocks a load fills and a save reads. Pure."""

from collections.abc import Iterator, Sequence

from objkv.cache.match import stored_blocks
from objkv.connector.geometry import Geometry
from objkv.index.base import ShardRecord, Shards
from objkv.keys.prefix import PrefixChain
from objkv.transfer.plan import ChunkMove, LoadMove, SaveMove

BlockTable = Sequence[Sequence[int]]
"""Per group the request's physical blocks, in token order; 0 where a window has passed."""

_NULL_BLOCK = 0


def load_moves(
    geometry: Geometry,
    chain: PrefixChain,
    records: Sequence[Shards | None],
    blocks: BlockTable,
    span: tuple[int, int],
) -> Iterator[LoadMove]:
    """Moves that fill the blocks of tokens ``[start, end)`` and touch no others, in chunk order.

    Blocks before ``start`` were computed or found locally and may be shared with other requests.
    """
    start, end = span
    size = geometry.chunk_tokens
    held_of = [stored_blocks(identity, size) for identity in geometry.groups]
    for chunk in range(start // size, -(-end // size)):
        shards = records[chunk]
        assert shards is not None
        for group, identity in enumerate(geometry.groups):
            # Block positions within the prompt: what the payload holds, cut to what is wanted.
            held_from = (chunk + 1) * size // identity.block_size - held_of[group]
            first = max(held_from, start // identity.block_size)
            last = min((chunk + 1) * size, end) // identity.block_size
            while first < last and blocks[group][first] == _NULL_BLOCK:
                first += 1
            if first >= last:
                continue
            table = tuple(blocks[group][first:last])
            move = _move(size, chain, (chunk, group), table, first - held_from)
            yield LoadMove(move, _of_group(shards, group))


def save_moves(
    geometry: Geometry,
    chain: PrefixChain,
    tokens: Sequence[int],
    blocks: BlockTable,
    chunks: Sequence[int],
    *,
    keep_tokens: bool,
) -> list[SaveMove]:
    """Moves that take whole chunks out. A group whose blocks a window has passed is left out.

    ``chain``: with ``digests``, extended up to the last of ``chunks``.
    """
    size = geometry.chunk_tokens
    held_of = [stored_blocks(identity, size) for identity in geometry.groups]
    moves = []
    for chunk in chunks:
        ids = tuple(tokens[chunk * size : (chunk + 1) * size]) if keep_tokens else None
        digest = chain.token_digest(chunk)
        for group, identity in enumerate(geometry.groups):
            last = (chunk + 1) * size // identity.block_size
            table = tuple(blocks[group][last - held_of[group] : last])
            if _NULL_BLOCK in table:
                continue
            moves.append(SaveMove(_move(size, chain, (chunk, group), table, 0), digest, ids))
    return moves


def _move(
    size: int,
    chain: PrefixChain,
    place: tuple[int, int],
    blocks: tuple[int, ...],
    first_block: int,
) -> ChunkMove:
    chunk, group = place
    return ChunkMove(
        chunk=chunk,
        group=group,
        prefix_hash=chain.hash(chunk),
        parent_hash=chain.parent(chunk),
        token_start=chunk * size,
        token_end=(chunk + 1) * size,
        first_block=first_block,
        block_ids=blocks,
    )


def _of_group(shards: Shards, group: int) -> tuple[tuple[str, ShardRecord], ...]:
    prefix = f"{group}."
    return tuple((name, shards[name]) for name in shards if name.startswith(prefix))
