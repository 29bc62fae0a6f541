"""Runs units of work on several threads; a run can be stopped at any time.

Units are idempotent: the next run repeats them, and finds done what this one did.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from threading import Event, Lock
from time import time
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
    findings: list[Finding] = field(default_factory=list)
    """The first ``FINDINGS_MAX`` findings."""
    omitted: int = 0
    """The number of further findings."""

    def count(self, kind: str, nbytes: int = 0) -> None:
        self.counts[kind] += 1
        self.nbytes[kind] += nbytes

    def find(self, kind: str, key: str, nbytes: int, detail: str = "") -> None:
        """Count one item of ``kind`` and keep it as a finding."""
        self.count(kind, nbytes)
        self._keep(Finding(kind, key, nbytes, detail))

    def add(self, other: "Counters") -> None:
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


Ending = Literal["complete", "interrupted"]
OnProgress = Callable[[int, int | None], None]
"""Called with how many items were begun, and how many there are; None if unknown."""
_PROGRESS_S = 0.5
"""Time between two reports of progress."""


class Halted(Exception):
    """Raised in a unit when the run must end."""


class Check(Protocol):
    """Units call this regularly."""

    def __call__(self, items: int = 1) -> None:
        """Raise ``Halted`` if the run must end. ``items``: those that the unit begins now."""


@dataclass(slots=True)
class Unit:
    """A piece of work."""

    work: Callable[[Counters, Check], None]
    """Fills the counters, calls the check regularly, and does not catch its exceptions."""
    items: float = 0.0
    """The expected number of its items, such as payloads; 0 if unknown."""
    begun: int = 0
    """Items begun. Only the unit's thread writes it."""


class WorkPool:
    """Runs batches of units. The owner's thread waits and may be interrupted."""

    def __init__(self, *, workers: int) -> None:
        self._workers = workers
        self._stop = Event()
        self._lock = Lock()
        self.ending: Ending = "complete"
        self.counters = Counters()
        """Counts and findings of all units so far, also of unfinished ones."""

    def run(
        self, units: Iterable[Unit], on_progress: OnProgress = lambda done, total: None
    ) -> None:
        """Run the units, unless a batch was halted. Raises the first error after all ended."""
        every = list(units)
        if self.ending != "complete":
            return
        expected = round(sum(u.items for u in every)) if all(u.items for u in every) else None
        pool = ThreadPoolExecutor(self._workers, thread_name_prefix="objkv-ops")
        on_progress(0, expected)
        try:
            running = {pool.submit(self._work, unit) for unit in every}
            while running:
                ended, running = wait(running, _PROGRESS_S, FIRST_EXCEPTION)
                for future in ended:
                    future.result()
                on_progress(sum(unit.begun for unit in every), expected)
        except KeyboardInterrupt:
            self.halt()
        finally:
            self._stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            if self.ending == "complete":
                self._stop.clear()

    def halt(self) -> None:
        """Start no further unit; running units end at their next check."""
        self.ending = "interrupted"
        self._stop.set()

    def _work(self, unit: Unit) -> None:
        found = Counters()

        def check(items: int = 1) -> None:
            if self._stop.is_set():
                raise Halted
            unit.begun += items

        try:
            check(0)
            unit.work(found, check)
            unit.begun = max(1, unit.begun)
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
