"""Rounds: every round runs all sides in turn, so that a noisy machine is noisy for all of them."""

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

from objkv.config import Config
from objkv.index.base import WriteIndex
from objkv.ops.doctor.doctor import DISTRIBUTIONS, installed_version, library_versions
from objkv.stores.base import PruneStore

# The machine that figures come from: without it they mean nothing.


@dataclass(frozen=True, slots=True)
class Machine:
    """What it is, and how busy it was before the first round."""

    cpu: str
    cores: int
    """That this process may use."""
    memory_bytes: int | None
    system: str
    python: str
    load: float | None
    """Mean number of runnable threads over the minute before; near 0 on an idle machine."""
    libraries: Mapping[str, str]


def describe_machine() -> Machine:
    """The machine that this runs on."""
    versions = library_versions() | {name: installed_version(name) for name in DISTRIBUTIONS}
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


# What a benchmark found: rows that compare a figure with a limit, and perhaps with a target.

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
class BenchRow:
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
    rows: tuple[BenchRow, ...]
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
    def missed(self) -> tuple[BenchRow, ...]:
        """The rows that do not reach their targets."""
        return tuple(row for section in self.sections for row in section.rows if row.ok is False)


# What every benchmark is given: how much to do, how to open both ends, whom to tell.

Tell = Callable[[str, str], None]
"""``(what, stage)``; called whenever a stage begins."""


@dataclass(frozen=True, slots=True)
class Factories:
    """Open the ends as replicas do. Whoever calls one closes what it opened."""

    open_bulk: Callable[[Config], PruneStore]
    open_hot: Callable[[Config], PruneStore | None]
    open_index: Callable[[Config], WriteIndex]


@dataclass(frozen=True, slots=True)
class BenchSetting:
    """One run. ``folder`` is empty at first and gone afterwards: logs, a directory store."""

    rounds: int
    quick: bool
    """Small sizes: for a look at whether it works."""
    folder: Path
    factories: Factories
    tell: Tell
    models: Path
    """Folder in which models are made and kept."""


# Threads that start together, each with a slab of its own.

START_S = 300.0


class Threads:
    """``threads`` threads; a context manager. Whoever uses it is one thread."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="objkv-bench")
        self._start = Barrier(threads)

    def run(self, work: Callable[[int], None]) -> float:
        """Call ``work`` with each thread's number; seconds from the first start to the last end.

        Raises what one of them raised, once all have ended. The threads themselves look at the
        clock: on a busy machine whoever waits for them may wake up late.
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
        self._start.abort()  # whoever still waits for the others
        self._pool.shutdown(wait=False, cancel_futures=True)


def make_slab(nbytes: int) -> memoryview:
    """``nbytes`` writable bytes that begin at a page, each of which was touched."""
    memory = mmap.mmap(-1, nbytes)
    slab = memoryview(memory)
    for at in range(0, nbytes, mmap.PAGESIZE):
        slab[at] = 1
    return slab


Work = Callable[[], float]
"""Does one round's share of one side and returns how long it took, in seconds."""
ROUNDS_MIN = 1


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds by side, one per round."""

    seconds: Mapping[str, Sequence[float]]

    def median(self, side: str) -> float:
        """Seconds of the median round."""
        return statistics.median(self.seconds[side])

    def ratio(self, side: str, by: str) -> float:
        """The median of the rounds' own ratios of seconds: what slowed one round slowed both."""
        pairs = zip(self.seconds[side], self.seconds[by], strict=True)
        return statistics.median(one / other for one, other in pairs)


def interleave(sides: Mapping[str, Work], rounds: int, *, warm_ups: int = 1) -> Timings:
    """Run every side once a round, in turn, every second round in the opposite order.

    ``warm_ups`` rounds come first and are not counted: connections are made, pages are touched.
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
    """One side and its limit among the sides of some rounds."""

    timings: Timings
    side: str
    limit: str
    limit_name: str

    def throughput(
        self, name: str, nbytes: int, target: Target | None = None, detail: str = ""
    ) -> BenchRow:
        """A row in GB/s for sides that moved ``nbytes`` a round each."""
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
        """A row in ``s``, ``ms`` or ``µs``."""
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


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that ``share`` (0 to 1) of the values do not exceed."""
    assert values
    ordered = sorted(values)
    rank = -(-share * len(ordered) // 1)
    return ordered[max(0, min(len(ordered), int(rank)) - 1)]
