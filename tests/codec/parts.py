"""Payloads of which several ranks write a part each, for tests of what joins them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product
from typing import Any, NamedTuple

from objkv.codec.join import Join, PartPosition, check_moved
from objkv.codec.payload import Claim, LayerSpec, Provenance, encode, read_header
from objkv.codec.seal import Seal
from objkv.errors import PayloadError
from objkv.keys.topology import Shard, TokenPart, frame_name
from tests.codec.payloads import CLAIM, PROVENANCE, smooth

WHOLE = replace(CLAIM, key=replace(CLAIM.key, shard=None))
"""The claim of a payload that has all of its group."""


class Piece(NamedTuple):
    """What one rank writes."""

    payload: bytes
    position: PartPosition


@dataclass(frozen=True)
class Grid:
    """How the frames of a payload are dealt to ranks: a row for each layer, or part of a state, and
    a column for each rank of a stage."""

    stages: tuple[int, ...] = (1, 1)
    """Rows of each stage of pipeline parallelism."""
    heads: int = 2
    """How many TP ranks have different heads."""
    dcp: int = 1
    contents: tuple[int, ...] = (8,)
    """Size of the frames of each row, which repeats."""
    dtype: str = "BF16"
    scales: str = ""

    @property
    def rows(self) -> int:
        return sum(self.stages)

    @property
    def columns(self) -> int:
        return self.heads * self.dcp

    @property
    def parts(self) -> int:
        return len(self.stages) * self.columns

    def layer(self, row: int, column: int) -> LayerSpec:
        """The frame of a row and a column."""
        head, rank = divmod(column, self.dcp)
        name = f"model.layers.{row}.attn"
        if self.columns > 1:
            share = Shard(0, 1, head, head + 1, TokenPart(rank, self.dcp))
            name = frame_name(name, share)
        content = self.contents[row % len(self.contents)]
        return LayerSpec(name, self.dtype, (2, 1, 4, content), self.scales)

    def layers(self) -> list[LayerSpec]:
        """The frames of the whole payload."""
        return [self.layer(*at) for at in product(range(self.rows), range(self.columns))]

    def pages(self, layer: LayerSpec, seed: int = 0) -> bytes:
        """What is in a frame: in no other one the same."""
        return smooth(layer.nbytes, seed + 1 + self.layers().index(layer))

    def pieces(
        self,
        claim: Claim = WHOLE,
        provenance: Provenance = PROVENANCE,
        *,
        seed: int = 0,
        **how: Any,
    ) -> list[Piece]:
        """What each rank writes, stage after stage. ``how``: of ``encode``."""
        found = []
        sizes = [self.layer(row, 0).nbytes for row in range(self.rows)]
        for start, end in pairwise(accumulate(self.stages, initial=0)):
            for column in range(self.columns):
                layers = [self.layer(row, column) for row in range(start, end)]
                place = PartPosition(
                    self.parts,
                    self.rows * self.columns,
                    start * self.columns + column,
                    self.columns,
                    self.columns * sum(sizes[:start]),
                    self.columns * sum(sizes),
                )
                pages = [self.pages(layer, seed) for layer in layers]
                payload = part_of(claim, layers, pages, provenance, **how)
                found.append(Piece(payload, place))
        return found


def part_of(
    claim: Claim,
    layers: Sequence[LayerSpec],
    pages: Sequence[bytes],
    provenance: Provenance = PROVENANCE,
    codec: str = "none",
    seal: Seal | None = None,
) -> bytes:
    """The payload of one rank."""
    return bytes(encode(claim, layers, pages, codec=codec, provenance=provenance, seal=seal))


def joined(pieces: Sequence[Piece]) -> bytes:
    """The whole payload, as an agent makes it of parts that come in this order."""
    join = Join(read_header(pieces[0].payload), pieces[0].position)
    memory = bytearray(b"\xee" * join.nbytes)
    for payload, place in pieces:
        assert not join.is_complete
        header = read_header(payload)
        moves = join.add(header, place)
        for source, target, nbytes in moves:
            memory[target : target + nbytes] = payload[source : source + nbytes]
        check_moved(header, moves, memoryview(memory))
    assert len(memory) == join.nbytes
    header = join.finish(memoryview(memory))
    try:
        assert header == read_header(memory)
    except PayloadError as exc:
        raise AssertionError("what was not refused cannot be read") from exc
    return bytes(memory)
