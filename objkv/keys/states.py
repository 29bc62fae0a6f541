"""States that are split over TP ranks: which bytes of a state belong to which unit.

A state consists of tensors of rows. A row is several parts side by side, such as the q, k and v of
a convolution. Each rank has one n-th of each part, in the order of the ranks, or all of it. So a
state can be divided into units, each with an equal share of each part, and a rank has consecutive
units, as it has consecutive heads of attention.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

_TENSOR = re.compile(r"([a-z0-9_]+):([1-9][0-9]*)x([0-9+*]+)")
_SPLIT = "split"
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_UNITS_MAX = 720
"""Multiple of all common TP sizes. Fewer units mean fewer copies of what all ranks have."""


@dataclass(frozen=True, slots=True)
class StatePart:
    """One part of the rows of a tensor, which is one frame of a payload."""

    width: int
    """Elements of one row, over all ranks."""
    everywhere: bool = False
    """Whether each rank has all of it. Then each unit of a payload has a copy."""

    def __str__(self) -> str:
        return f"{self.width}{'*' * self.everywhere}"


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of a state: rows of parts."""

    dtype: str
    rows: int
    parts: tuple[StatePart, ...]

    def __str__(self) -> str:
        return f"{self.dtype}:{self.rows}x{'+'.join(map(str, self.parts))}"


@dataclass(frozen=True, slots=True)
class PartView:
    """The position of one part in a rank's page: ``[heads, rows, nbytes]``, counted in bytes."""

    offset: int
    heads: int
    rows: int
    nbytes: int
    """Bytes of one row of one unit."""
    head_stride: int
    """0 if all units share the bytes."""
    row_stride: int

    @property
    def end(self) -> int:
        """Position after the last byte."""
        last = (self.heads - 1) * self.head_stride + (self.rows - 1) * self.row_stride
        return self.offset + last + self.nbytes


@dataclass(frozen=True, slots=True)
class SplitState:
    """A state over all ranks, and its division into units."""

    kind: str
    tensors: tuple[StateTensor, ...]

    def __str__(self) -> str:
        return " ".join((self.kind, _SPLIT, *map(str, self.tensors)))

    @classmethod
    def parse(cls, text: str | None) -> "SplitState | None":
        """Return the state that prints as ``text``, None if that is the state of one rank."""
        kind, split, *rest = [*(text or "").split(" "), ""]
        if split != _SPLIT:
            return None
        return cls(kind, tuple(_parsed(tensor) for tensor in rest if tensor))

    @property
    def units(self) -> int:
        """Number of units, whatever the TP size."""
        widths = [p.width for tensor in self.tensors for p in tensor.parts if not p.everywhere]
        return gcd(_UNITS_MAX, *widths)

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit in a payload."""
        return sum(view.rows * view.nbytes for view in self.views(1))

    def views(self, tp_size: int) -> tuple[PartView, ...]:
        """Return the parts of one rank's page, in the order of a payload's frames."""
        assert self.units % tp_size == 0
        offset, heads, views = 0, self.units // tp_size, list[PartView]()
        for tensor in self.tensors:
            item, at = ITEM_BYTES[tensor.dtype], offset
            row = sum(p.width if p.everywhere else p.width // tp_size for p in tensor.parts) * item
            for part in tensor.parts:
                total = part.width * item
                each = total if part.everywhere else total // self.units
                stride = 0 if part.everywhere else each
                views.append(PartView(at, heads, tensor.rows, each, stride, row))
                at += each if part.everywhere else each * heads
            offset += row * tensor.rows
        return tuple(views)


def part_names(layers: Sequence[str], parts: int) -> list[str]:
    """Return the names of the layers' frames: their own, unless each has several parts."""
    return [f"{layer}#{part}" for layer in layers for part in range(parts)] if parts else [*layers]


def _parsed(text: str) -> StateTensor:
    match = _TENSOR.fullmatch(text)
    if match is None or match[1] not in ITEM_BYTES:
        raise ValueError(f"invalid tensor of a state: {text!r}")
    parts = (StatePart(int(p.removesuffix("*")), p.endswith("*")) for p in match[3].split("+"))
    return StateTensor(match[1], int(match[2]), tuple(parts))
