"""Benchmark rounds: every round runs all sides in turn, so noise affects all of them alike."""

import mmap
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Barrier
from typing import Literal, Self

from objkv.assembly.backends import open_bulk
from objkv.config import Config, load_config
from objkv.ops.doctor.settings import DISTRIBUTIONS, installed_version
from objkv.stores.base import PruneStore
from objkv.telemetry import NullRecorder

# The machine: figures mean nothing without it.

_LIBRARIES = (
    "blosc2",
    "boto3",
    "botocore",
    "lz4",
    "numpy",
    "pydantic",
    "redis",
    "safetensors",
    "tokenizers",
    "torch",
    "xxhash",
)


@dataclass(frozen=True, slots=True)
class Machine:
    """The hardware, and its load before the first round."""

    cpu: str
    cores: int
    """Cores that this process may use."""
    memory_bytes: int | None
    system: str
    python: str
    load: float | None
    """Mean number of runnable threads over the minute before; near 0 on an idle machine."""
    libraries: Mapping[str, str]


def describe_machine() -> Machine:
    """Describe this machine."""
    versions = {name: installed_version(name) for name in (*_LIBRARIES, *DISTRIBUTIONS)}
    return Machine(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else _cores(),
        memory_bytes=_memory_bytes(),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        load=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        libraries={name: version for name, version in versions.items() if version},
    )


def _cores() -> int:
    return os.cpu_count() or 1


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


# Results: rows that compare a figure with a limit, and some of them with a target.

Judged = Literal["ratio", "ours"]


@dataclass(frozen=True, slots=True)
class Target:
    """The value that a row should reach."""

    bound: float
    at_most: bool = False
    """Whether less is better."""
    of: Judged = "ratio"
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
    """``store``, ``lookup``, ``codec``, ``engine`` or ``gpu``."""
    rows: tuple[BenchRow, ...]
    servers: Mapping[str, str]
    """Servers and devices that were measured, with versions."""
    notes: tuple[str, ...] = ()
    skipped: bool = False
    """Whether the benchmark cannot run here; the notes give the reason."""


@dataclass(frozen=True, slots=True)
class BenchReport:
    """The result of one run."""

    objkv: str
    machine: Machine
    rounds: int
    quick: bool
    """Whether sizes were small: then the figures show only that it works."""
    sections: tuple[Section, ...]

    @property
    def missed(self) -> tuple[BenchRow, ...]:
        """The rows that miss their targets."""
        return tuple(row for section in self.sections for row in section.rows if row.ok is False)


# The arguments of every benchmark.

Tell = Callable[[str, str], None]
"""``(what, stage)``: called when a stage begins."""


@dataclass(frozen=True, slots=True)
class BenchSetting:
    """The setting of one run. ``folder`` is a temporary folder for logs and a directory store."""

    rounds: int
    quick: bool
    """Use small sizes, only to test that it works."""
    folder: Path
    tell: Tell
    models: Path
    """Folder in which models are created and kept."""


# Threads that start together, each with its own slab.

START_S = 300.0


class Threads:
    """A context manager with ``threads`` threads. For one calling thread."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="objkv-bench")
        self._start = Barrier(threads)

    def run(self, work: Callable[[int], None]) -> float:
        """Call ``work`` with each thread's number. Return the seconds from the first start to the
        last end.

        Raises an error of a thread after all have ended. The threads read the clock themselves,
        because on a busy machine the waiting thread may wake up late.
        """

        def started(number: int) -> tuple[float, float]:
            self._start.wait(START_S)
            begun = time.perf_counter()
            work(number)
            return begun, time.perf_counter()

        futures = [self._pool.submit(started, number) for number in range(self.threads)]
        errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None:
                raise error
        times = [future.result() for future in futures]
        return max(ended for _, ended in times) - min(begun for begun, _ in times)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._start.abort()  # release threads that wait for the others
        self._pool.shutdown(wait=False, cancel_futures=True)


def make_slab(nbytes: int) -> memoryview:
    """Return ``nbytes`` writable bytes, page-aligned, with every page touched."""
    memory = mmap.mmap(-1, nbytes)
    slab = memoryview(memory)
    for at in range(0, nbytes, mmap.PAGESIZE):
        slab[at] = 1
    return slab


Work = Callable[[], float]
"""Runs one side's share of a round and returns its duration in seconds."""
ROUNDS_MIN = 1


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
    assert rounds >= ROUNDS_MIN
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
        return BenchRow(
            name,
            "GB/s",
            ours=nbytes / self.timings.median(self.side) / 1e9,
            limit=nbytes / self.timings.median(self.limit) / 1e9,
            limit_name=self.limit_name,
            ratio=self.timings.ratio(self.limit, self.side),
            target=target,
            detail=detail,
        )

    def duration(
        self, name: str, unit: str, target: Target | None = None, detail: str = ""
    ) -> BenchRow:
        """Return a row in ``s``, ``ms`` or ``µs``."""
        scale = SCALES[unit]
        return BenchRow(
            name,
            unit,
            ours=self.timings.median(self.side) * scale,
            limit=self.timings.median(self.limit) * scale,
            limit_name=self.limit_name,
            ratio=self.timings.ratio(self.side, self.limit),
            target=target,
            detail=detail,
        )


SCALES = {"s": 1.0, "ms": 1e3, "µs": 1e6}


def open_store(config: Config) -> PruneStore:
    """Open the bulk store of ``config`` as replicas do. The caller closes it."""
    return open_bulk(config, NullRecorder())


def local_config(**settings: str) -> Config:
    """Return settings with these values, defaults otherwise, independent of the environment."""
    ends = {"bulk_url": "file:///nowhere"}
    return load_config(ends | settings, environ={})
