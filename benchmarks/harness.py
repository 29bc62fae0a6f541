"""Benchmark rounds: every round runs all sides in turn, so noise affects all of them alike."""

import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from objkv.ops.doctor.settings import DISTRIBUTIONS, installed_version
from objkv.ops.formats import size

_LIBRARIES = (
    *("blosc2", "boto3", "botocore", "lz4", "numpy", "pydantic"),
    *("redis", "safetensors", "tokenizers", "torch", "xxhash"),
)
QUICK_S3 = {
    "s3_region": "us-east-1",
    "s3_addressing": "path",
    "s3_access_key_id": "bench",
    "s3_secret_access_key": "bench",
}
"""Settings for the S3 server of the tests, besides its address."""


def machine() -> str:
    """This machine, its load, and versions: figures mean nothing without them."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    versions = {name: installed_version(name) for name in (*_LIBRARIES, *DISTRIBUTIONS)}
    return ", ".join(
        [
            f"{cores} cores of {names[0] if names else platform.machine()}",
            size(memory),
            f"{platform.system()} {platform.release()}",
            f"load {os.getloadavg()[0]:.2f} before the first round",
            f"Python {platform.python_version()}",
            *(f"{name} {version}" for name, version in versions.items() if version),
        ]
    )


# Results: rows that compare a figure with a limit, and some of them with a target.


@dataclass(frozen=True, slots=True)
class Target:
    """The value that a row should reach."""

    bound: float
    at_most: bool = False
    """Whether less is better."""
    of: Literal["ratio", "ours"] = "ratio"
    """Whether the bound applies to the ratio or to the figure in the row's unit."""

    def holds(self, value: float) -> bool:
        """Whether ``value`` reaches the target."""
        return value <= self.bound if self.at_most else value >= self.bound


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One figure, the median over all rounds. The ratio is the median of the rounds' ratios."""

    name: str
    unit: str
    """Unit of ``ours`` and ``limit``, such as ``GB/s`` (1e9 bytes) or ``µs``."""
    ours: float
    limit: float | None = None
    limit_name: str = ""
    """Name of the limit, such as ``plain recv_into``."""
    ratio: float | None = None
    """``ours`` divided by ``limit``."""
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
    """The result of one benchmark."""

    name: str
    rows: tuple[BenchRow, ...]
    servers: Mapping[str, str]
    """Servers and devices that were measured, with versions."""

    @property
    def missed(self) -> int:
        """How many rows miss their targets."""
        return sum(row.ok is False for row in self.rows)


# The arguments of every benchmark.

ReportStage = Callable[[str, str], None]
"""``(what, stage)``: called when a stage begins."""


@dataclass(frozen=True, slots=True)
class BenchSetting:
    """The setting of one run. ``folder`` is a temporary folder for logs and a directory store."""

    rounds: int
    quick: bool
    """Use small sizes, only to test that it works."""
    folder: Path
    report_stage: ReportStage
    models: Path
    """Folder in which models are created and kept."""


Work = Callable[[], float]
"""Runs one side's share of a round and returns its duration in seconds."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds by side, one per round."""

    seconds: Mapping[str, Sequence[float]]

    def median(self, side: str) -> float:
        """Return the seconds of the median round."""
        return statistics.median(self.seconds[side])

    def ratio(self, side: str, by: str) -> float:
        """Return the median of the rounds' ratios: noise in a round affects both sides."""
        pairs = zip(self.seconds[side], self.seconds[by], strict=True)
        return statistics.median(one / other for one, other in pairs)


def interleave(sides: Mapping[str, Work], rounds: int, *, warm_ups: int = 1) -> Timings:
    """Run every side once per round, in alternating order.

    The first ``warm_ups`` rounds are not counted: they open connections and touch pages.
    """
    assert rounds >= 1
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for number in range(warm_ups + rounds):
        for name in names:
            took = sides[name]()
            if number >= warm_ups:
                seconds[name].append(took)
        names.reverse()
    return Timings(seconds)


@dataclass(frozen=True, slots=True)
class Compared:
    """One side and its limit, from the timings of some rounds."""

    timings: Timings
    side: str
    limit: str
    limit_name: str

    def throughput(
        self, name: str, nbytes: int, target: Target | None = None, detail: str = ""
    ) -> BenchRow:
        """Return a row in GB/s for sides that each moved ``nbytes`` per round."""
        ours, limit = (nbytes / self.timings.median(one) / 1e9 for one in (self.side, self.limit))
        ratio = self.timings.ratio(self.limit, self.side)
        return BenchRow(name, "GB/s", ours, limit, self.limit_name, ratio, target, detail)

    def duration(
        self, name: str, unit: str, target: Target | None = None, detail: str = ""
    ) -> BenchRow:
        """Return a row in ``s``, ``ms`` or ``µs``."""
        ours, limit = (self.timings.median(one) * SCALES[unit] for one in (self.side, self.limit))
        ratio = self.timings.ratio(self.side, self.limit)
        return BenchRow(name, unit, ours, limit, self.limit_name, ratio, target, detail)


SCALES = {"s": 1.0, "ms": 1e3, "µs": 1e6}
