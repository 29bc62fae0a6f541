"""Runs units of work on several threads; a run can be stopped at any time.

Units are idempotent: the next run repeats them, and finds done what this one did.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from threading import Event, Lock
from time import monotonic, time
from typing import Literal, Protocol

from objkv.index.base import Usage
from objkv.index.guarded import for_operators
from objkv.ops.backends_view import BackendsView

FINDINGS_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding."""

    kind: str
    key: str
    """Its path in the bulk store, or the expected path."""
    nbytes: int
    detail: str = ""


@dataclass(slots=True)
class Counters:
    """Counts and findings of a run or a unit. For one thread at a time."""

    counts: Counter[str] = field(default_factory=Counter)
    """Counts by kind, of findings and others."""
    nbytes: Counter[str] = field(default_factory=Counter)
    """Bytes by kind."""
    findings: list[Finding] = field(default_factory=list)
    """The first ``FINDINGS_MAX`` findings."""
    omitted: int = 0
    """The number of further findings."""

    def count(self, kind: str, nbytes: int = 0) -> None:
        """Count one item of ``kind``."""
        self.counts[kind] += 1
        self.nbytes[kind] += nbytes

    def find(self, kind: str, key: str, nbytes: int, detail: str = "") -> None:
        """Count one item of ``kind`` and keep it as a finding."""
        self.count(kind, nbytes)
        self._keep(Finding(kind, key, nbytes, detail))

    def add(self, other: "Counters") -> None:
        """Add the counts and findings of ``other``."""
        self.counts += other.counts
        self.nbytes += other.nbytes
        self.omitted += other.omitted
        for finding in other.findings:
            self._keep(finding)

    def _keep(self, finding: Finding) -> None:
        if len(self.findings) < FINDINGS_MAX:
            self.findings.append(finding)
        else:
            self.omitted += 1


Ending = Literal["complete", "interrupted", "deadline", "limit"]
OnProgress = Callable[[int, int | None], None]
"""Called with the number of items that were begun, and the expected number of all, None if it is
unknown."""
_AHEAD = 2
"""Running and queued units per thread."""
_PROGRESS_S = 0.5
"""Time between two reports of progress."""


class Halted(Exception):
    """Raised in a unit when the run must end."""


class UnitCheck(Protocol):
    """Units call this regularly."""

    def __call__(self, items: int = 1) -> None:
        """Raise ``Halted`` if the run must end. ``items``: those that the unit begins now."""


Check = UnitCheck


@dataclass(frozen=True, slots=True)
class Unit:
    """A piece of work."""

    work: Callable[[Counters, Check], None]
    """Fills the counters, calls the check regularly, and does not catch its exceptions."""
    items: float = 0.0
    """The expected number of its items, such as payloads; 0 if unknown."""


@dataclass(slots=True)
class _Task:
    """A unit that runs or waits for a thread."""

    unit: Unit
    items: int = 0
    """Items begun. Only the unit's thread writes it."""


class WorkPool:
    """Runs batches of units. The owner's thread waits and may be interrupted."""

    def __init__(
        self,
        *,
        workers: int,
        deadline_s: float | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """``deadline_s``: after this time from now no new work starts."""
        self._workers = workers
        self._clock = clock
        self._ends = None if deadline_s is None else clock() + deadline_s
        self._stop = Event()
        self._lock = Lock()
        self.ending: Ending = "complete"
        self.counters = Counters()
        """Counts and findings of all units so far, also of unfinished ones."""

    def run(
        self, units: Iterable[Unit], on_progress: OnProgress = lambda done, total: None
    ) -> None:
        """Run the units; none if an earlier batch was halted.

        Raises the first error of a unit, after all running units have ended.
        """
        left = list(units)
        if self.ending != "complete":
            return
        pool = ThreadPoolExecutor(self._workers, thread_name_prefix="objkv-ops")
        running: dict[Future[None], _Task] = {}
        expected = round(sum(unit.items for unit in left)) if all(u.items for u in left) else None
        try:
            self._wait_for(self._begin(pool, left, running), running, expected, on_progress)
        except KeyboardInterrupt:
            self.halt("interrupted")
        finally:
            self._stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            if self.ending == "complete":
                self._stop.clear()

    def halt(self, why: Ending) -> None:
        """Start no further unit; running units end at their next check."""
        with self._lock:
            if self.ending == "complete":
                self.ending = why
        self._stop.set()

    def check(self) -> None:
        """Raise ``Halted`` if the run is halted or its deadline has passed."""
        if self._ends is not None and self._clock() >= self._ends:
            self.halt("deadline")
        if self._stop.is_set():
            raise Halted

    def _begin(
        self,
        pool: ThreadPoolExecutor,
        left: list[Unit],
        running: dict[Future[None], _Task],
    ) -> Iterator[None]:
        """Submit as many units as fit at each step; end when all are submitted."""
        for unit in left:
            while len(running) >= _AHEAD * self._workers:
                yield
            task = _Task(unit)
            running[pool.submit(self._work, task)] = task

    def _wait_for(
        self,
        begun: Iterator[None],
        running: dict[Future[None], _Task],
        expected: int | None,
        on_progress: OnProgress,
    ) -> None:
        items = 0
        on_progress(0, expected)
        while next(begun, None) or running:
            ended, _ = wait(running, timeout=_PROGRESS_S, return_when=FIRST_COMPLETED)
            for future in ended:
                future.result()
                items += max(1, running.pop(future).items)
            on_progress(items + sum(task.items for task in running.values()), expected)

    def _work(self, task: _Task) -> None:
        found = Counters()

        def check(items: int = 1) -> None:
            self.check()
            task.items += items

        try:
            self.check()
            task.unit.work(found, check)
        except Halted:
            pass
        except BaseException:
            self._stop.set()
            raise
        finally:
            with self._lock:
                self.counters.add(found)


def count_exactly(view: BackendsView, name: str, clock: Callable[[], float] = time) -> Unit:
    """Return the unit that counts the records of a namespace and sets its totals."""

    def work(counters: Counters, check: Check) -> None:
        nbytes = payloads = 0
        for record in view.index.scan(name):
            check()
            nbytes, payloads = nbytes + record.nbytes, payloads + len(record.shards)
        for_operators(view.admin).set_usage(Usage(name, nbytes, payloads, int(clock())))

    return Unit(work)
