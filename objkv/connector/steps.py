"""Moves from block tables: which physical blocks a load fills and a save reads. Pure."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from objkv.cache.match import stored_blocks
from objkv.connector.geometry import Geometry
from objkv.index.base import ShardRecord, Shards
from objkv.keys.identity import GroupIdentity
from objkv.keys.prefix import PrefixChain
from objkv.transfer.plan import ChunkMove, LoadMove, SaveMove

BlockTable = Sequence[Sequence[int]]
"""Per group the request's physical blocks, in token order; 0, the null block, where a window has
passed or no state was kept."""

_NULL_BLOCK = 0


@dataclass(frozen=True, slots=True)
class Computed:
    """What a request has in its blocks when the step is over."""

    tokens: Sequence[int]
    blocks: BlockTable
    states: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """By group and number of tokens, the block that holds the state after them."""


def load_moves(
    geometry: Geometry,
    chain: PrefixChain,
    records: Sequence[Shards | None],
    blocks: BlockTable,
    span: tuple[int, int],
) -> Iterator[LoadMove]:
    """Moves that fill the blocks of tokens ``[start, end)`` and touch no others, in chunk order.

    Blocks before ``start`` were computed or found locally and may be shared with other requests.
    vLLM gave blocks to what the tokens after ``end`` need, and null blocks to the rest.
    """
    start, end = span
    size = geometry.chunk_tokens
    held_of = [stored_blocks(identity, size) for identity in geometry.groups]
    for chunk in range(start // size, -(-end // size)):
        # A chunk of which nothing is stored is one that a window has left: no blocks either.
        shards = records[chunk] or {}
        for group, identity in enumerate(geometry.groups):
            # Block positions within the prompt: what the payload holds, cut to what is wanted.
            held_from = (chunk + 1) * size // identity.block_size - held_of[group]
            first = max(held_from, start // identity.block_size)
            last = min((chunk + 1) * size, end) // identity.block_size
            for begin, run in _runs(blocks[group][first:last], first):
                move = _move(size, chain, (chunk, group), run, begin - held_from)
                yield LoadMove(move, _of_group(shards, group))


def save_moves(
    geometry: Geometry,
    chain: PrefixChain,
    computed: Computed,
    chunks: Sequence[int],
    *,
    keep_tokens: bool,
    is_stored: Callable[[int, int], bool] = lambda chunk, group: False,
) -> list[SaveMove]:
    """Moves that take whole chunks out. A group is left out of a chunk that is not, or no longer,
    in its blocks, and where ``is_stored`` says so of (chunk, group).

    ``chain``: with ``digests``, extended up to the last of ``chunks``.
    """
    size = geometry.chunk_tokens
    moves = []
    for chunk in chunks:
        tokens = computed.tokens
        ids = tuple(tokens[chunk * size : (chunk + 1) * size]) if keep_tokens else None
        digest = chain.token_digest(chunk)
        for group, identity in enumerate(geometry.groups):
            table = _held(identity, group, computed, size, chunk)
            if not table or _NULL_BLOCK in table or is_stored(chunk, group):
                continue
            moves.append(SaveMove(_move(size, chain, (chunk, group), table, 0), digest, ids))
    return moves


def states_after(
    geometry: Geometry,
    blocks: BlockTable,
    end: int | None,
    offered: Iterable[tuple[int, int, int]],
) -> dict[tuple[int, int], int]:
    """The blocks that hold a state at a block's end when the step is over, as ``Computed`` has
    them.

    Args:
        end: tokens computed when the step is over; None where some of them may be rejected.
        offered: (group, block, tokens) of states that vLLM says are there.

    A table alone does not tell: its blocks are reused, moved and emptied while a request goes on.
    But what a step computes last, its state is in the block of; other blocks only vLLM knows.
    Source: vLLM 0.31-0.33, ``MambaManager`` in ``v1/core/single_type_kv_cache_manager.py``,
    ``preprocess_mamba`` in ``v1/worker/mamba_utils.py``.
    """
    states = {}
    for group, identity in enumerate(geometry.groups):
        if identity.kind != "mamba" or end is None or end % identity.block_size:
            continue
        place = end // identity.block_size - 1
        if 0 <= place < len(blocks[group]):
            states[group, end] = blocks[group][place]
    states |= {(group, tokens): block for group, block, tokens in offered}
    return states


def _held(
    identity: GroupIdentity, group: int, computed: Computed, size: int, chunk: int
) -> tuple[int, ...]:
    """The blocks of what a payload of the chunk holds; none if it is known not to be there."""
    if identity.kind == "mamba":
        state = computed.states.get((group, (chunk + 1) * size))
        return () if state is None else (state,)
    last = (chunk + 1) * size // identity.block_size
    return tuple(computed.blocks[group][last - stored_blocks(identity, size) : last])


def _runs(table: Sequence[int], first: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The pieces of a table without null blocks, each with its place; ``first`` is the table's."""
    begin = None
    for place, block in enumerate((*table, _NULL_BLOCK)):
        if block != _NULL_BLOCK:
            begin = place if begin is None else begin
        elif begin is not None:
            yield first + begin, tuple(table[begin:place])
            begin = None


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
