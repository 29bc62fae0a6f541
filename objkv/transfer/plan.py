"""Plans: the chunks of one request's load or save. They contain names and numbers only.

Each worker executes a plan for the layers, heads and tokens that it has. The moves of a load are in
columns: a prompt of 32k tokens has 128 chunks, and as objects these take milliseconds to plan, to
pickle and, on every rank's forward thread, to unpickle.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from objkv.agent.messages import CLAIM_ROW, Claims
from objkv.keys.chunk import field_of
from objkv.keys.prefix import PREFIX_HASH_BYTES
from objkv.keys.topology import Shard

_CLAIM_ROW, _HASH = np.dtype(list(CLAIM_ROW)), np.dtype(f"V{PREFIX_HASH_BYTES}")


@dataclass(frozen=True, slots=True)
class ChunkMove:
    """One chunk of one group, and the physical blocks that it is copied to or from."""

    chunk: int
    group: int
    prefix_hash: bytes
    parent_hash: bytes
    token_start: int
    token_end: int
    first_block: int
    """Index of the first of ``block_ids`` among the payload's blocks."""
    block_ids: tuple[int, ...]
    """Physical block ids, all different, none of them the null block."""

    def __post_init__(self) -> None:
        assert self.token_start < self.token_end
        assert self.first_block >= 0
        assert self.block_ids
        assert 0 not in self.block_ids


@dataclass(frozen=True, slots=True)
class SaveMove:
    """The save of one chunk."""

    move: ChunkMove
    token_digest: str
    tokens: tuple[int, ...] | None
    """None unless ``store_tokens`` is set."""
    again: bool = False
    """Whether an earlier save of the chunk was dropped, or is not stored any more."""


class Source(NamedTuple):
    """The payloads that some moves read: one of each chunk."""

    group: int
    shard: Shard | None = None
    """None: all of the group."""


class MoveColumn(IntEnum):
    """Columns of the table of moves. Each is one row of the array, with a value for each move."""

    CHUNK = 0
    SOURCE = 1
    """Position in ``sources``."""
    HASH = 2
    """Position of the prefix hash among the plan's hashes. The parent's precedes it."""
    TOKEN_START = 3
    TOKEN_END = 4
    FIRST_BLOCK = 5
    IDS = 6
    """Position of the first block id."""
    IDS_END = 7


class LoadMoves:
    """The moves of a load, in columns, in the order of their chunks. Immutable and thread-safe."""

    def __init__(
        self,
        table: npt.NDArray[np.int32] | bytes,
        hashes: bytes,
        block_ids: npt.NDArray[np.int64] | bytes,
        sources: tuple[Source, ...],
    ) -> None:
        """``table`` and ``block_ids``, ``[blocks]`` physical ids without the null block, are
        contiguous. ``hashes``: prefix hashes, each behind its parent, one after another."""
        self.table = np.frombuffer(table, np.int32).reshape(len(MoveColumn), -1)
        """``[len(MoveColumn), moves]`` int32."""
        self._hashes, self._block_ids = hashes, np.frombuffer(block_ids, np.int64)
        self.sources = sources
        """Which payloads the moves of this load read, usually one source per group."""

    def __len__(self) -> int:
        return int(self.table.shape[1])

    def __reduce__(self) -> tuple[Any, ...]:
        columns = self.table.tobytes(), self._hashes, self._block_ids.tobytes()
        return LoadMoves, (*columns, self.sources)

    @cached_property
    def chunks(self) -> list[int]:
        """The chunk of each move."""
        return list(self.table[MoveColumn.CHUNK].tolist())

    @property
    def token_spans(self) -> list[tuple[int, int]]:
        """First and last token of each move's chunk, ``[start, end)``."""
        starts, ends = self.table[MoveColumn.TOKEN_START], self.table[MoveColumn.TOKEN_END]
        return list(zip(starts.tolist(), ends.tolist(), strict=True))

    def claims(self, namespace: str, part: range) -> Claims:
        """Return what the payloads of some moves are to be. The fields are those of ``sources``."""
        table = self.table[:, part.start : part.stop]
        hashes = np.frombuffer(self._hashes, _HASH)
        rows = np.empty(len(part), _CLAIM_ROW)
        rows["prefix_hash"] = hashes[table[MoveColumn.HASH]]
        rows["parent_hash"] = hashes[table[MoveColumn.HASH] - 1]
        rows["token_start"] = table[MoveColumn.TOKEN_START]
        rows["token_end"] = table[MoveColumn.TOKEN_END]
        rows["field"] = table[MoveColumn.SOURCE]
        fields = tuple([field_of(*source) for source in self.sources])
        return Claims(namespace, fields, rows.tobytes())

    def block_ids(self, moves: Sequence[int], blocks: int) -> npt.NDArray[np.int64]:
        """Return the block ids of moves that have ``blocks`` each, ``[moves, blocks]``."""
        return self._block_ids[self.table[MoveColumn.IDS, moves][:, None] + np.arange(blocks)]

    def only(self, wanted: Sequence[bool]) -> "LoadMoves":
        """Return the moves whose source is ``wanted``."""
        if all(wanted):
            return self
        table = self.table[:, np.array(wanted)[self.table[MoveColumn.SOURCE]]]
        columns = np.ascontiguousarray(table), self._hashes, self._block_ids
        return LoadMoves(*columns, sources=self.sources)

    def prefix_hash(self, move: int) -> bytes:
        """Return the prefix hash of a move."""
        at = PREFIX_HASH_BYTES * int(self.table[MoveColumn.HASH, move])
        return self._hashes[at : at + PREFIX_HASH_BYTES]

    def prefix_hashes(self) -> list[bytes]:
        """Return the different prefix hashes of the moves, in order."""
        return list(dict.fromkeys(map(self.prefix_hash, range(len(self)))))

    def blocks_from(self, chunk: int) -> frozenset[int]:
        """Return the physical block ids of all moves of ``chunk`` and later chunks."""
        table = self.table[:, self.table[MoveColumn.CHUNK] >= chunk]
        spans = zip(table[MoveColumn.IDS].tolist(), table[MoveColumn.IDS_END].tolist(), strict=True)
        return frozenset(block for a, b in spans for block in self._block_ids[a:b].tolist())


class BlocksToZero(NamedTuple):
    """Blocks of one group that are zeroed, because nothing is stored for them."""

    group: int
    block_ids: tuple[int, ...]
    """Physical block ids, none of them the null block."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The chunks to load for one request, in the order in which they are needed."""

    request_id: str
    namespace: str
    moves: LoadMoves
    sync: bool
    """Whether this step's forward pass needs them, layer by layer. Otherwise a later step does."""
    traceparent: str | None = None
    blocks_to_zero: tuple[BlocksToZero, ...] = ()


@dataclass(frozen=True, slots=True)
class SavePlan:
    """The chunks of one request that this step completes."""

    request_id: str
    namespace: str
    moves: tuple[SaveMove, ...]
    puts: bool = False
    """Whether an agent is to save them at once, and not to hold them back."""
    number: int = 0
    """The scheduler's number of this save: an agent joins what the ranks save with one number."""


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """The result of a load. Every submitted plan has exactly one."""

    request_id: str
    failed_blocks: frozenset[int]
    """Physical blocks that were not filled. Empty if the whole load succeeded."""
    rejected: frozenset[tuple[str, bytes]]
    """(namespace, prefix hash) of chunks whose record was wrong."""
    nbytes: int = 0
    """Payload bytes received, including those of payloads that were then refused."""
    seconds: float = 0.0
    """Time from the plan's start to the last byte, 0 if none was received."""
    first_s: float | None = None
    """Time from the plan's start to the first byte, None if none was received."""

    @property
    def failed(self) -> bool:
        """Whether any block has to be recomputed."""
        return bool(self.failed_blocks)
