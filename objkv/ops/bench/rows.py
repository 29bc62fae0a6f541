"""What a benchmark found: rows that compare a figure with a limit, and perhaps with a target."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from objkv.ops.bench.machine import Machine

Judged = Literal["ratio", "ours"]


@dataclass(frozen=True, slots=True)
class Target:
    """What a row should reach."""

    bound: float
    at_most: bool = False
    """Whether less is better."""
    of: Judged = "ratio"
    """Whether the bound is on the ratio, or on the figure in the row's own unit."""

    def holds(self, value: float) -> bool:
        """Whether ``value`` reaches it."""
        return value <= self.bound if self.at_most else value >= self.bound


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. Medians over rounds; the ratio is the median of the rounds' own ratios."""

    name: str
    unit: str
    """Of ``ours`` and ``limit``, e.g. ``GB/s`` (1e9 bytes) or ``µs``."""
    ours: float
    limit: float | None = None
    limit_name: str = ""
    """What the limit is, e.g. ``plain recv_into``."""
    ratio: float | None = None
    """Ours by the limit."""
    target: Target | None = None
    detail: str = ""

    def __post_init__(self) -> None:
        assert (self.limit is None) == (self.ratio is None)
        assert self.target is None or self.target.of == "ours" or self.ratio is not None

    @property
    def ok(self) -> bool | None:
        """Whether the target is reached; None without one."""
        if self.target is None:
            return None
        value = self.ours if self.target.of == "ours" else self.ratio
        assert value is not None
        return self.target.holds(value)


@dataclass(frozen=True, slots=True)
class Section:
    """What one benchmark found."""

    name: str
    """``store``, ``lookup``, ``codec``, ``engine`` or ``gpu``."""
    rows: tuple[Row, ...]
    servers: Mapping[str, str]
    """What was measured against, with versions."""
    notes: tuple[str, ...] = ()
    skipped: bool = False
    """Whether there is nothing to measure here; the notes say why."""


@dataclass(frozen=True, slots=True)
class BenchReport:
    """Everything that one run found."""

    objkv: str
    machine: Machine
    rounds: int
    quick: bool
    """Sizes were small: the figures show that it works, not how fast."""
    sections: tuple[Section, ...]

    @property
    def missed(self) -> tuple[Row, ...]:
        """The rows that do not reach their targets."""
        return tuple(row for section in self.sections for row in section.rows if row.ok is False)
