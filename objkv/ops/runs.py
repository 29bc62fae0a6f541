"""Runs units of work on several threads; a run can be stopped at any time and resumed later.

However a run ends, every unit is either done and recorded in the checkpoint, or repeated next time.
A unit is repeated in every run (``again``) if other processes can undo its work, or if its result
depends on more than its name.
"""

import fcntl
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock
from time import monotonic
from typing import Any, Literal, Protocol

from objkv.config import make_private

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

    def plain(self) -> dict[str, Any]:
        """Return JSON values for ``parse``."""
        findings = [[f.kind, f.key, f.nbytes, f.detail] for f in self.findings]
        return {
            "counts": dict(self.counts),
            "nbytes": dict(self.nbytes),
            "findings": findings,
            "omitted": self.omitted,
        }

    @classmethod
    def parse(cls, values: dict[str, Any]) -> "Counters":
        """Read the output of ``plain``. Raises KeyError, TypeError or ValueError otherwise."""
        return cls(
            Counter({str(kind): int(n) for kind, n in values["counts"].items()}),
            Counter({str(kind): int(n) for kind, n in values["nbytes"].items()}),
            [Finding(str(k), str(key), int(n), str(d)) for k, key, n, d in values["findings"]],
            int(values["omitted"]),
        )

    def _keep(self, finding: Finding) -> None:
        if len(self.findings) < FINDINGS_MAX:
            self.findings.append(finding)
        else:
            self.omitted += 1


AGE_MAX_S = 24 * 3600.0
"""Older checkpoints are ignored."""
_WRITE_EVERY_S = 1.0
_FORMAT = 1


class Checkpoint:
    """The names and findings of finished units, in a file in the cache folder. For one thread.

    The file is optional: without it all work is repeated, which is harmless for every command that
    uses one. A second concurrent run of the same command keeps no file.
    """

    def __init__(self, file: Path | None, *, clock: Callable[[], float] = time.time) -> None:
        """``file``: created if missing; None keeps nothing."""
        self._clock = clock
        self.begun_s = self._written_s = clock()
        """When the first of the runs began."""
        self.done: set[str] = set()
        self.items = 0
        """The number of items, such as payloads, in the units that are done."""
        self.counters = Counters()
        self.resumed = False
        """Whether an earlier run is resumed."""
        self._fd = -1 if file is None else _locked(file)
        if self._fd >= 0:
            self._read()

    @property
    def is_kept(self) -> bool:
        """Whether a later run can resume this one."""
        return self._fd >= 0

    def finish(self, unit: str, found: Counters, items: int = 0) -> None:
        """Record that ``unit`` is done, with its counts, findings and number of items."""
        self.done.add(unit)
        self.counters.add(found)
        self.items += items
        if self._clock() - self._written_s >= _WRITE_EVERY_S:
            self._write()

    def close(self, *, complete: bool) -> None:
        """Keep the file for the next run, or empty it if all is done. Idempotent."""
        if self._fd < 0:
            return
        if complete:
            with suppress(OSError):
                os.ftruncate(self._fd, 0)
        else:
            self._write()
        os.close(self._fd)
        self._fd = -1

    def _read(self) -> None:
        with open(self._fd, "rb", closefd=False) as opened:
            text = opened.read()
        try:
            kept = json.loads(text)
            begun_s, done = float(kept["begun_s"]), {str(unit) for unit in kept["done"]}
            counters = Counters.parse(kept["tally"])
            known = kept["format"] == _FORMAT
            items = int(kept.get("items", 0))
        except (AttributeError, KeyError, TypeError, ValueError):
            return  # empty, truncated, or from another version
        if known and 0 <= self._clock() - begun_s < AGE_MAX_S:
            self.begun_s, self.done, self.counters = begun_s, done, counters
            self.items = items
            self.resumed = bool(done)

    def _write(self) -> None:
        if self._fd < 0:
            return
        self._written_s = self._clock()
        kept = {
            "format": _FORMAT,
            "begun_s": self.begun_s,
            "done": sorted(self.done),
            "items": self.items,
            "tally": self.counters.plain(),
        }
        # A file truncated by a crash is unreadable and is ignored.
        with suppress(OSError), open(self._fd, "r+b", closefd=False) as opened:
            opened.truncate(0)
            opened.seek(0)
            opened.write(json.dumps(kept).encode())


def checkpoint_file(folder: Path, command: str, *settings: object) -> Path:
    """Return the checkpoint file of ``command`` with the settings that select its work."""
    digest = hashlib.sha256(repr(settings).encode()).hexdigest()[:16]
    return folder / "progress" / f"{command}-{digest}.json"


def _locked(file: Path) -> int:
    """Open and lock the file. Return -1 if another process holds it or it cannot be created."""
    try:
        make_private(file.parent)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(file, flags, 0o600)
    except OSError:
        return -1
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return -1
    return fd


Ending = Literal["complete", "interrupted", "deadline", "limit"]
OnProgress = Callable[[int, int | None], None]
"""Called with the number of items that were begun, and an estimate of all of them: None while there
is none. Items that an earlier run finished count in neither."""
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
    """A piece of work with the same name in every run."""

    name: str
    work: Callable[[Counters, Check], None]
    """Fills the counters, calls the check regularly, and does not catch its exceptions."""
    again: bool = False
    """Repeat the unit, and its counts, in a run that resumes another."""
    items: float = 0.0
    """The expected number of its items, such as payloads; 0 if unknown."""


@dataclass(slots=True)
class _Task:
    """A unit that runs or waits for a thread."""

    unit: Unit
    items: int = 0
    """Items begun. Only the unit's thread writes it."""


class Forecast:
    """Estimates the number of items of a batch from the units that have ended. For one thread."""

    def __init__(self, units: Sequence[Unit], *, workers: int) -> None:
        self._is_expected = all(unit.items for unit in units)
        self._left = sum(map(self._weight, units))
        self._ended = 0
        self._ended_weight = 0.0
        self._items = 0
        # The first units to end are small ones: fewer than this say little about the others.
        self._enough = min(workers, max(1, len(units) // 4))

    def end(self, unit: Unit, items: int) -> None:
        """Add a unit that has ended, with the number of its items."""
        self._left -= self._weight(unit)
        self._ended_weight += self._weight(unit)
        self._ended += 1
        self._items += max(1, items)

    def progress(self, running: int) -> tuple[int, int | None]:
        """Return the items begun and the estimate of all, given those of running units."""
        begun = self._items + running
        if self._ended >= self._enough:
            scale = self._items / self._ended_weight
        elif self._is_expected:
            scale = 1.0
        else:
            return begun, None
        return begun, self._items + max(running, round(self._left * scale))

    def _weight(self, unit: Unit) -> float:
        return unit.items if self._is_expected else 1.0


class WorkPool:
    """Runs batches of units. The owner's thread waits and may be interrupted."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        workers: int,
        deadline_s: float | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """``deadline_s``: after this time from now no new work starts."""
        self._checkpoint = checkpoint
        self._workers = workers
        self._clock = clock
        self._ends = None if deadline_s is None else clock() + deadline_s
        self._stop = Event()
        self._lock = Lock()
        self.ending: Ending = "complete"
        self.partial = Counters()
        """Counts of unfinished units and of ``again`` units; a later run counts them again."""

    def run(
        self, units: Iterable[Unit], on_progress: OnProgress = lambda done, total: None
    ) -> None:
        """Run the units that are not done yet; none if an earlier batch was halted.

        Raises the first error of a unit, after all running units have ended.
        """
        every = list(units)
        left = [unit for unit in every if unit.again or unit.name not in self._checkpoint.done]
        if self.ending != "complete":
            return
        pool = ThreadPoolExecutor(self._workers, thread_name_prefix="objkv-ops")
        running: dict[Future[Counters | None], _Task] = {}
        forecast = Forecast(left, workers=self._workers)
        try:
            self._wait_for(self._begin(pool, left, running), running, forecast, on_progress)
        except KeyboardInterrupt:
            self.halt("interrupted")
        finally:
            self._stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            for future, task in running.items():  # units that ended during an interrupt
                if not future.cancelled() and future.exception() is None:
                    self._take(task, future.result())
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
        running: dict[Future[Counters | None], _Task],
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
        running: dict[Future[Counters | None], _Task],
        forecast: Forecast,
        on_progress: OnProgress,
    ) -> None:
        on_progress(*forecast.progress(0))
        while next(begun, None) or running:
            ended, _ = wait(running, timeout=_PROGRESS_S, return_when=FIRST_COMPLETED)
            for future in ended:
                task = running[future]
                self._take(task, future.result())
                del running[future]
                forecast.end(task.unit, task.items)
            on_progress(*forecast.progress(sum(task.items for task in running.values())))

    def _take(self, task: _Task, found: Counters | None) -> None:
        if found is None:
            return
        if task.unit.again:
            with self._lock:
                self.partial.add(found)
        else:
            self._checkpoint.finish(task.unit.name, found, max(1, task.items))

    def _work(self, task: _Task) -> Counters | None:
        found = Counters()

        def check(items: int = 1) -> None:
            self.check()
            task.items += items

        try:
            self.check()
            task.unit.work(found, check)
        except BaseException as exc:
            with self._lock:
                self.partial.add(found)
            if isinstance(exc, Halted):
                return None
            self._stop.set()
            raise
        return found
