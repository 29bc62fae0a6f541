"""Plans: the chunks of one request's load or save. They contain names and numbers only.

The scheduler makes the whole plan and sends it to the workers once. Each worker executes it
unchanged for its own shard. The moves of a load are kept in columns: a prompt of 32k tokens has
128 chunks with one record per rank, and as objects these take milliseconds to plan, to pickle and,
on every rank's forward thread, to unpickle.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from objkv.index.base import ShardRecord
from objkv.keys.prefix import PREFIX_HASH_BYTES
from objkv.keys.topology import Part


@dataclass(frozen=True, slots=True)
class ChunkMove:
    """One chunk of one group, and the physical blocks that it is copied to or from."""

    chunk: int
    """Number of the chunk in the prompt."""
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
class LoadMove:
    """The load of one chunk."""

    move: ChunkMove
    records: tuple[tuple[str, ShardRecord], ...]
    """Index records by shard field. They give sizes, and identify the record if it is wrong."""
    part: Part | None = None
    """The payload to read and the part of it that is needed. None: all of the payload of the rank's
    own shard. Each worker sets it, see ``LoadMoves.spread``."""


@dataclass(frozen=True, slots=True)
class SaveMove:
    """The save of one chunk."""

    move: ChunkMove
    token_digest: str
    tokens: tuple[int, ...] | None
    """None unless ``store_tokens`` is set."""


class RecordColumns:
    """Shard records in columns. A record is made when it is read. Thread-safe."""

    __slots__ = ("_checksums", "_codecs", "_numbers")

    def __init__(
        self, numbers: npt.NDArray[Any] | bytes, codecs: Sequence[str], checksums: str
    ) -> None:
        """
        Args:
            numbers: ``[records]`` of ``NUMBERS``, contiguous.
            codecs: the names to which ``codec`` refers.
            checksums: all header checksums, divided by spaces.
        """
        self._numbers, self._codecs = np.frombuffer(numbers, self.NUMBERS), codecs
        self._checksums: str | list[str] = checksums

    NUMBERS = np.dtype(
        [
            ("nbytes", "<i8"),
            ("raw_bytes", "<i8"),
            ("created_s", "<i8"),
            ("codec", "<i2"),
            ("hot", "?"),
        ]
    )

    @classmethod
    def pack(cls, records: Sequence[ShardRecord]) -> "RecordColumns":
        """Return these records in columns."""
        numbers = np.empty(len(records), cls.NUMBERS)
        # Comprehensions: half the time of attrgetter, and this is most of planning a load.
        numbers["nbytes"] = array("q", [record.nbytes for record in records])
        numbers["raw_bytes"] = array("q", [record.raw_bytes for record in records])
        numbers["created_s"] = array("q", [record.created_s for record in records])
        numbers["hot"] = np.frombuffer(bytes([record.hot for record in records]), np.bool_)
        names = [record.codec for record in records]
        codecs = tuple(dict.fromkeys(names))
        numbers["codec"] = 0 if len(codecs) == 1 else [codecs.index(name) for name in names]
        return cls(numbers, codecs, " ".join([record.header_checksum for record in records]))

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, at: int) -> ShardRecord:
        if isinstance(checksums := self._checksums, str):
            self._checksums = checksums = checksums.split(" ")
        nbytes, raw_bytes, created_s, codec, hot = self._numbers[at].item()
        return ShardRecord(nbytes, raw_bytes, self._codecs[codec], hot, checksums[at], created_s)

    def __reduce__(self) -> tuple[Any, ...]:
        text = self._checksums if isinstance(self._checksums, str) else " ".join(self._checksums)
        return RecordColumns, (self._numbers.tobytes(), self._codecs, text)

    @property
    def nbytes(self) -> npt.NDArray[np.int64]:
        """Sizes of the payloads, ``[records]`` int64."""
        return self._numbers["nbytes"]

    @property
    def hot(self) -> npt.NDArray[np.bool_]:
        """Whether the hot store received a copy, ``[records]`` bool."""
        return self._numbers["hot"]


class Kind(NamedTuple):
    """The common properties of moves of one group with the same stored shards."""

    group: int
    fields: tuple[str, ...]
    """Fields of the stored shards."""
    places: tuple[int, ...]
    """Position of each field's record among the records of its chunk."""


class Row(IntEnum):
    """Rows of the table of moves, which has one column per move."""

    CHUNK = 0
    KIND = 1
    """Position in ``kinds``."""
    HASH = 2
    """Position of the prefix hash among the plan's hashes."""
    PARENT = 3
    """Position of the parent's hash among them."""
    TOKEN_START = 4
    TOKEN_END = 5
    FIRST_BLOCK = 6
    IDS = 7
    """Position of the first block id."""
    IDS_END = 8
    RECORDS = 9
    """Position of the chunk's first record."""
    PART = 10
    """Position in ``parts`` plus 1; 0 if there is none."""
    SOURCE = 11
    """The same for all moves that fill the same blocks from several payloads."""


class LoadMoves:
    """The moves of a load, in columns. Immutable and thread-safe.

    A ``LoadMove`` is made each time one is read, which takes microseconds: it is for the threads
    that fetch. The forward thread reads columns. Pickled, the columns are a few byte strings.
    """

    def __init__(
        self,
        table: npt.NDArray[np.int32] | bytes,
        hashes: bytes,
        block_ids: npt.NDArray[np.int64] | bytes,
        kinds: tuple[Kind, ...],
        records: RecordColumns,
        parts: tuple[Part, ...] = (),
    ) -> None:
        """
        Args:
            table: ``[len(Row), moves]`` int32, contiguous.
            hashes: prefix hashes, one after another.
            block_ids: ``[blocks]`` int64, contiguous: physical block ids, none of them the null
                block.
            parts: see ``LoadMove.part``.
        """
        self._table = np.frombuffer(table, np.int32).reshape(len(Row), -1)
        self._hashes, self._block_ids = hashes, np.frombuffer(block_ids, np.int64)
        self._records, self._parts = records, parts
        self.kinds = kinds
        """All kinds of moves in this load, usually one per group."""
        self._made: dict[int, ChunkMove] = {}

    def __len__(self) -> int:
        return int(self._table.shape[1])

    def __iter__(self) -> Iterator[LoadMove]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> LoadMove:
        column = self._table[:, index].tolist()
        kind, first, part = self.kinds[column[Row.KIND]], column[Row.RECORDS], column[Row.PART]
        fields = zip(kind.fields, kind.places, strict=True)
        records = tuple([(field, self._records[first + place]) for field, place in fields])
        return LoadMove(self._move(column), records, self._parts[part - 1] if part else None)

    def __reduce__(self) -> tuple[Any, ...]:
        columns = self._table.tobytes(), self._hashes, self._block_ids.tobytes()
        return LoadMoves, (*columns, self.kinds, self._records, self._parts)

    @cached_property
    def chunks(self) -> list[int]:
        """The chunk of each move."""
        return list(self._table[Row.CHUNK].tolist())

    @cached_property
    def groups(self) -> list[int]:
        """The group of each move."""
        groups = np.array([kind.group for kind in self.kinds], np.int32)
        return list(groups[self._table[Row.KIND]].tolist())

    @property
    def token_spans(self) -> list[tuple[int, int]]:
        """First and last token of each move's chunk, ``[start, end)``."""
        starts, ends = self._table[Row.TOKEN_START], self._table[Row.TOKEN_END]
        return list(zip(starts.tolist(), ends.tolist(), strict=True))

    @property
    def has_parts(self) -> bool:
        """Whether any move has a part, see ``LoadMove.part``."""
        return bool(self._parts)

    @cached_property
    def further(self) -> list[bool]:
        """Whether each move only adds a further payload to the blocks of the move before it."""
        if not self._parts:
            return [False] * len(self)
        source = self._table[Row.SOURCE]
        return [False, *(source[1:] == source[:-1]).tolist()][: len(self)]

    @cached_property
    def hot(self) -> list[bool]:
        """Whether all records of each move list a copy in the hot store."""
        hot = np.ones(len(self), np.bool_)
        for number, kind in enumerate(self.kinds):
            of_kind, at = self._places(number, kind.places)
            hot[of_kind] = self._records.hot[at].all(axis=1)
        return hot.tolist()

    def nbytes(self, choose: Callable[[tuple[str, ...]], Iterable[str]]) -> tuple[int, int]:
        """Return the bytes of the records that are listed as hot, and of the others.

        ``choose``: returns those of a kind's fields whose records are counted.
        """
        hot = total = 0
        for number, kind in enumerate(self.kinds):
            place_of = dict(zip(kind.fields, kind.places, strict=True))
            _, at = self._places(number, [place_of[field] for field in choose(kind.fields)])
            nbytes = self._records.nbytes[at]
            total += int(nbytes.sum())
            hot += int(nbytes[self._records.hot[at]].sum())
        return hot, total - hot

    def prefix_hashes(self) -> list[bytes]:
        """Return the different prefix hashes of the moves, in order."""
        return [self._hash(at) for at in dict.fromkeys(self._table[Row.HASH].tolist())]

    def blocks_from(self, chunk: int) -> frozenset[int]:
        """Return the physical block ids of all moves of ``chunk`` and later chunks."""
        table = self._table[:, self._table[Row.CHUNK] >= chunk]
        spans = zip(table[Row.IDS].tolist(), table[Row.IDS_END].tolist(), strict=True)
        return frozenset(block for a, b in spans for block in self._block_ids[a:b].tolist())

    def spread(self, parts_of: Callable[[Kind], Sequence[Part | None]]) -> "LoadMoves":
        """Return one move for each part that ``parts_of`` returns for a move's kind, and none if it
        returns nothing."""
        numbers = dict[Part, int]()
        chosen = [
            [0 if part is None else numbers.setdefault(part, len(numbers)) + 1 for part in parts]
            for parts in map(parts_of, self.kinds)
        ]
        counts = np.array([len(parts) for parts in chosen], np.int32)
        firsts = np.cumsum(counts) - counts
        flat = np.array([part for parts in chosen for part in parts], np.int32)
        times = counts[self._table[Row.KIND]]
        table = np.repeat(self._table, times, axis=1)
        number = np.arange(table.shape[1]) - np.repeat(np.cumsum(times) - times, times)
        table[Row.PART] = flat[firsts[table[Row.KIND]] + number]
        return LoadMoves(
            table,
            self._hashes,
            self._block_ids,
            kinds=self.kinds,
            records=self._records,
            parts=tuple(numbers),
        )

    def _move(self, column: list[int]) -> ChunkMove:
        # One object for all payloads of the same blocks.
        if (move := self._made.get(column[Row.SOURCE])) is None:
            move = ChunkMove(
                chunk=column[Row.CHUNK],
                group=self.kinds[column[Row.KIND]].group,
                prefix_hash=self._hash(column[Row.HASH]),
                parent_hash=self._hash(column[Row.PARENT]),
                token_start=column[Row.TOKEN_START],
                token_end=column[Row.TOKEN_END],
                first_block=column[Row.FIRST_BLOCK],
                block_ids=tuple(self._block_ids[column[Row.IDS] : column[Row.IDS_END]].tolist()),
            )
            move = self._made.setdefault(column[Row.SOURCE], move)
        return move

    def _hash(self, at: int) -> bytes:
        return self._hashes[at * PREFIX_HASH_BYTES : (at + 1) * PREFIX_HASH_BYTES]

    def _places(self, kind: int, places: Sequence[int]) -> tuple[Any, npt.NDArray[np.int64]]:
        """Return the columns of a kind's moves, and the positions of these records of each of them,
        ``[moves, len(places)]``."""
        of_kind = np.flatnonzero(self._table[Row.KIND] == kind)
        first = self._table[Row.RECORDS, of_kind]
        return of_kind, first[:, None] + np.array(places, np.int64)[None, :]


class Blank(NamedTuple):
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
    """Trace context of the request."""
    blanks: tuple[Blank, ...] = ()


@dataclass(frozen=True, slots=True)
class SavePlan:
    """The chunks of one request that this step completes."""

    request_id: str
    namespace: str
    moves: tuple[SaveMove, ...]
    puts: bool = False
    """Whether an agent is to save them at once, and not to hold them back."""


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
