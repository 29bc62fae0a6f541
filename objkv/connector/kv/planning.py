"""Which stored payloads a replica loads, where a match ends, and the physical blocks that a load
fills and a save reads. One payload has all of a group, unless the replica that wrote it runs on
several nodes, which have one each, or divides the tokens in a way of its own."""

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

import numpy as np
import numpy.typing as npt

from objkv.cache.match import payloads_of, stored_blocks, usable_chunks
from objkv.connector.model.groups import Geometry
from objkv.index.base import ShardRecord, ShardRecords
from objkv.keys.chunk import field_of
from objkv.keys.identity import GroupIdentity
from objkv.keys.prefix import PrefixChain
from objkv.keys.topology import ALL_TOKENS
from objkv.transfer.plan import BlocksToZero, ChunkMove, LoadMoves, MoveColumn, SaveMove, Source

BlockTable = Sequence[Sequence[int]]
"""The request's physical blocks per group, in token order. 0, the null block, stands for a block
that a window has passed, or for a state that was not kept."""
NULL_BLOCK = 0
Ints = npt.NDArray[np.int64]
_CHOICES_KEPT = 4096
"""Bound of remembered choices. A fleet has few shapes, but an index may contain anything."""


class StoredPayloads:
    """Chooses payloads, and what a load moves. Thread-safe: two threads may compute one choice."""

    def __init__(self, geometry: Geometry) -> None:
        groups = range(len(geometry.groups))
        self.geometry, self._target_count = geometry, geometry.target_count
        self._numbers = [geometry.number(group) for group in groups]
        self._has_payloads = [bool(geometry.fields(group)) for group in groups]
        # A replica that divides the tokens in a way of its own reads only that.
        self._whole = [
            ((Source(number), str(number)),) if geometry.reads(group, ALL_TOKENS) else ()
            for group, number in enumerate(self._numbers)
        ]
        self._chosen = lru_cache(_CHOICES_KEPT)(self._choose)

    def is_readable(self, shards: ShardRecords, group: int) -> bool:
        """Whether every rank of this replica finds what it needs of a group."""
        return not self._has_payloads[group] or bool(self._payloads(shards, group))

    def is_loadable(self, shards: ShardRecords) -> bool:
        """Whether every rank finds what it needs of every group of the target."""
        return all(self.is_readable(shards, group) for group in range(self._target_count))

    def is_complete(self, shards: ShardRecords) -> bool:
        """Whether every rank finds what it needs of every group, so nothing remains to save."""
        return all(self.is_readable(shards, group) for group in range(len(self._numbers)))

    def of(self, shards: ShardRecords | None, group: int) -> list[tuple[Source, ShardRecord]]:
        """Return the payloads of a whole group, and their records. Raises ``LookupError``."""
        shards = shards or {}
        payloads = self._payloads(shards, group)
        if not payloads:
            raise LookupError(f"no payloads with all of group {self._numbers[group]}")
        return [(source, shards[field]) for source, field in payloads]

    def size(self, shards: ShardRecords) -> tuple[int, bool]:
        """Return how many bytes a load of the chunk fetches, and whether all of them are hot."""
        groups = [group for group, has_payloads in enumerate(self._has_payloads) if has_payloads]
        records = [shards[name] for group in groups for _, name in self._payloads(shards, group)]
        return sum(record.nbytes for record in records), all(record.hot for record in records)

    def matched_end(self, records: Sequence[ShardRecords | None]) -> int:
        """Return how many leading tokens can be loaded, with or without the draft's KV. A draft
        that needs the next token has none for a match's last block, so the match ends before it, as
        in vLLM's prefix cache, or a chunk earlier if a window's payloads do not reach so far."""

        def is_readable(shards: ShardRecords, group: int, _identity: GroupIdentity) -> bool:
            return self.is_readable(shards, group)

        geometry = self.geometry
        size, lag = geometry.chunk_tokens, geometry.draft_lag_tokens
        groups = geometry.groups[: geometry.target_count]
        end = usable_chunks(records, groups, size, is_readable, lag) * size - lag
        if lag and geometry.windowed:
            whole = usable_chunks(records, groups, size, is_readable)
            before = usable_chunks(records[: max(0, whole - 1)], groups, size, is_readable)
            end = max(end, before * size)
        return max(0, end)

    def stored_draft_end(
        self, records: Sequence[ShardRecords | None], span: tuple[int, int]
    ) -> int:
        """Return the end of those of these tokens whose draft KV is stored without a gap."""
        geometry = self.geometry
        drafts = range(geometry.target_count, len(geometry.groups))
        if not drafts:
            return span[1]
        size, lag = geometry.chunk_tokens, geometry.draft_lag_tokens
        first = (span[0] + lag) // size
        end = first * size
        for shards in records[first : -(-(span[1] + lag) // size)]:
            if shards is None or not all(self.is_readable(shards, g) for g in drafts):
                break
            end += size
        return min(span[1], max(span[0], end - lag))

    def draft_blocks_to_zero(
        self, blocks: BlockTable, span: tuple[int, int]
    ) -> tuple[BlocksToZero, ...]:
        """Return the draft's blocks of these tokens, which must be zeroed."""
        geometry, found = self.geometry, []
        for group in range(geometry.target_count, len(geometry.groups)):
            size = geometry.groups[group].block_size
            ids = blocks[geometry.table(group)][span[0] // size : span[1] // size]
            if held := tuple(block for block in ids if block):
                found.append(BlocksToZero(geometry.number(group), held))
        return tuple(found)

    def load_moves(
        self,
        chain: PrefixChain,
        records: Sequence[ShardRecords | None],
        blocks: BlockTable,
        span: tuple[int, int],
        draft_end: int,
    ) -> tuple[LoadMoves, list[ShardRecord]]:
        """Return the moves that fill exactly the blocks of tokens ``[start, end)``, in chunk order,
        and their payloads' index records. ``draft_end``: the end of the tokens whose draft is
        stored. Blocks before ``start`` may be shared with other requests. vLLM allocated the blocks
        that tokens after ``end`` need, and null blocks for the others."""
        (start, end), geometry = span, self.geometry
        size = geometry.chunk_tokens
        # A draft's blocks before the end may be in the payload of one more chunk.
        chunks_end = -(-(end + geometry.draft_lag_tokens) // size)
        first, last = start // size, min(chunks_end, len(records))
        chunks = np.arange(first, last)
        tables, ids, ids_before = [], [], 0
        sources, found = dict[Source, int](), list[ShardRecord]()
        for group, identity in enumerate(geometry.groups):
            until = draft_end if geometry.is_draft(group) else end
            form = identity, size, geometry.draft_lag_blocks(group)
            part, table_blocks = (start, max(start, until)), blocks[geometry.table(group)]
            of_chunk, first_blocks, starts, own = _runs(form, table_blocks, chunks, part)
            table = np.zeros((len(MoveColumn), len(starts)), np.int32)
            table[MoveColumn.CHUNK] = first + of_chunk
            table[MoveColumn.HASH] = of_chunk + 1  # the first one's parent precedes it
            table[MoveColumn.FIRST_BLOCK] = first_blocks
            table[MoveColumn.IDS] = ids_before + starts
            table[MoveColumn.IDS_END] = ids_before + np.append(starts, len(own))[1:]
            # Nearly always one payload has all of the group.
            payloads = [self.of(records[first + chunk], group) for chunk in of_chunk.tolist()]
            table = np.repeat(table, [len(some) for some in payloads], axis=1)
            flat = [one for some in payloads for one in some]
            table[MoveColumn.SOURCE] = [sources.setdefault(one, len(sources)) for one, _ in flat]
            found += [record for _, record in flat]
            tables.append(table)
            ids.append(own)
            ids_before += len(own)
        table = np.concatenate(tables, axis=1)
        if len(tables) > 1:
            order = np.argsort(table[MoveColumn.CHUNK], kind="stable")
            table, found = table.take(order, axis=1), [found[n] for n in order.tolist()]
        table[MoveColumn.TOKEN_START] = table[MoveColumn.CHUNK] * size
        table[MoveColumn.TOKEN_END] = table[MoveColumn.TOKEN_START] + size
        hashes = b"".join((chain.parent(first), *chain.hashes(first, last)))
        return LoadMoves(table, hashes, np.concatenate(ids), sources=tuple(sources)), found

    def _payloads(self, shards: ShardRecords, group: int) -> tuple[tuple[Source, str], ...]:
        """Return the payloads that together have a whole group, and their fields, or none."""
        whole = self._whole[group]
        return whole if whole and whole[0][1] in shards else self._chosen(group, frozenset(shards))

    def _choose(self, group: int, fields: frozenset[str]) -> tuple[tuple[Source, str], ...]:
        number, geometry = self._numbers[group], self.geometry
        reads = partial(geometry.reads, group)
        shards = payloads_of(fields, number, geometry.groups[group], reads)
        return tuple((Source(number, shard), field_of(number, shard)) for shard in shards)


@dataclass(frozen=True, slots=True)
class Computed:
    """The contents of a request's blocks after the step."""

    tokens: Sequence[int]
    blocks: BlockTable
    states: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """Block that contains the state after a number of tokens, by group and number."""


def _runs(
    form: tuple[GroupIdentity, int, int], blocks: Sequence[int], chunks: Ints, span: tuple[int, int]
) -> tuple[Ints, Ints, Ints, Ints]:
    """Return the blocks of one group that a load fills, in runs without a null block: the chunk of
    each run, counted from the first loaded one, the index of its first block among those of its
    payload, and that block's position among the physical ids of all runs, which are the last.
    ``form``: group, tokens per chunk, blocks between a payload's and its chunk's end."""
    identity, size, lag = form
    block_size = identity.block_size
    tokens = (chunks + 1) * size - lag * block_size
    # Positions of blocks within the prompt: those of each chunk's payload, cut to the needed ones.
    held_from = tokens // block_size - stored_blocks(identity, size)
    first = np.maximum(held_from, span[0] // block_size)
    last = np.minimum(np.minimum(tokens, span[1]) // block_size, len(blocks))
    counts = np.maximum(last - first, 0)
    of_chunk = np.repeat(np.arange(len(chunks)), counts)
    place = np.arange(len(of_chunk)) + np.repeat(first - (np.cumsum(counts) - counts), counts)
    table = np.frombuffer(array("q", blocks[first[0] : last[-1]]), np.int64)
    ids = table[place - first[0]]
    if not ids.all():
        held = np.flatnonzero(ids != NULL_BLOCK)
        of_chunk, place, ids = of_chunk[held], place[held], ids[held]
    begins = np.ones(len(ids), np.bool_)
    begins[1:] = (np.diff(of_chunk) != 0) | (np.diff(place) != 1)
    starts = np.flatnonzero(begins)
    of_chunk = of_chunk[starts]
    return of_chunk, place[starts] - held_from[of_chunk], starts, ids


def save_moves(
    geometry: Geometry,
    chain: PrefixChain,
    computed: Computed,
    chunks: Sequence[int],
    *,
    keep_tokens: bool,
    is_stored: Callable[[int, int], bool] = lambda chunk, group: False,
    again: frozenset[int] = frozenset(),
) -> list[SaveMove]:
    """Return moves that save whole chunks, except groups that their blocks do not contain, or for
    which ``is_stored(chunk, group)``. ``again``: see ``SaveMove.again``. ``chain`` must have
    ``digests`` and reach the last of ``chunks``."""
    size = geometry.chunk_tokens
    moves = []
    for chunk in chunks:
        tokens = computed.tokens[chunk * size : (chunk + 1) * size] if keep_tokens else None
        ids = None if tokens is None else tuple(tokens)
        digest = chain.token_digest(chunk)
        for group in range(len(geometry.groups)):
            table = _held(geometry, group, computed, chunk)
            if not table or NULL_BLOCK in table or is_stored(chunk, group):
                continue
            move = ChunkMove(
                chunk=chunk,
                group=geometry.number(group),
                prefix_hash=chain.hash(chunk),
                parent_hash=chain.parent(chunk),
                token_start=chunk * size,
                token_end=(chunk + 1) * size,
                first_block=0,
                block_ids=table,
            )
            moves.append(SaveMove(move, digest, ids, chunk in again))
    return moves


def states_after(
    geometry: Geometry, blocks: BlockTable, end: int | None, offered: Iterable[tuple[int, int, int]]
) -> dict[tuple[int, int], int]:
    """Return the blocks that contain a state at a block's end after the step, as in ``Computed``.
    ``end``: tokens computed after it, None if some may be rejected. ``offered``: (group, block,
    tokens) of states that vLLM reports. The block table alone is not enough: its blocks are reused,
    moved and emptied while a request runs. Only the state after a step's last token is certainly in
    that token's block. Source: vLLM 0.31-0.33, ``MambaManager``, ``preprocess_mamba``."""
    states = {}
    for group, identity in enumerate(geometry.groups):
        if identity.kind != "mamba" or end is None or end % identity.block_size:
            continue
        place, table = end // identity.block_size - 1, blocks[geometry.table(group)]
        if 0 <= place < len(table):
            states[group, end] = table[place]
    of_table = {geometry.table(group): group for group in range(len(geometry.groups))}
    states |= {(of_table[g], n): block for g, block, n in offered if g in of_table}
    return states


def _held(geometry: Geometry, group: int, computed: Computed, chunk: int) -> tuple[int, ...]:
    """Return the blocks of the chunk's payload, or none if the state was not kept."""
    identity, size = geometry.groups[group], geometry.chunk_tokens
    if identity.kind == "mamba":
        state = computed.states.get((group, (chunk + 1) * size))
        return () if state is None else (state,)
    table = tuple(computed.blocks[geometry.table(group)])
    last = (chunk + 1) * size // identity.block_size - geometry.draft_lag_blocks(group)
    first = last - stored_blocks(identity, size)
    # Before the first chunk is nothing: its payload repeats a block, which is never loaded.
    return (*table[:1] * max(0, -first), *table[max(0, first) : max(0, last)])
