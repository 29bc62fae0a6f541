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
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock
from time import monotonic
from typing import Any, Literal

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
        self._begun_s = self._written_s = clock()
        self.done: set[str] = set()
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

    def finish(self, unit: str, found: Counters) -> None:
        """Record that ``unit`` is done, with its counts and findings."""
        self.done.add(unit)
        self.counters.add(found)
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
        except (AttributeError, KeyError, TypeError, ValueError):
            return  # empty, truncated, or from another version
        if known and 0 <= self._clock() - begun_s < AGE_MAX_S:
            self._begun_s, self.done, self.counters = begun_s, done, counters
            self.resumed = bool(done)

    def _write(self) -> None:
        if self._fd < 0:
            return
        self._written_s = self._clock()
        kept = {
            "format": _FORMAT,
            "begun_s": self._begun_s,
            "done": sorted(self.done),
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
Check = Callable[[], None]
OnProgress = Callable[[int, int], None]
"""Called with the number of finished units and of all units."""
_AHEAD = 2
"""Running and queued units per thread."""


class Halted(Exception):
    """Raised in a unit when the run must end."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A piece of work with the same name in every run."""

    name: str
    work: Callable[[Counters, Check], None]
    """Fills the counters, calls the check regularly, and does not catch its exceptions."""
    again: bool = False
    """Repeat the unit, and its counts, in a run that resumes another."""


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
        running: dict[Future[Counters | None], Unit] = {}
        try:
            begun = self._begin(pool, left, running)
            self._wait_for(
                begun, running, lambda n: on_progress(len(every) - len(left) + n, len(every))
            )
        except KeyboardInterrupt:
            self.halt("interrupted")
        finally:
            self._stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            for future, unit in running.items():  # units that ended during an interrupt
                if not future.cancelled() and future.exception() is None:
                    self._take(unit, future.result())
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
        running: dict[Future[Counters | None], Unit],
    ) -> Iterator[None]:
        """Submit as many units as fit at each step; end when all are submitted."""
        for unit in left:
            while len(running) >= _AHEAD * self._workers:
                yield
            running[pool.submit(self._work, unit)] = unit

    def _wait_for(
        self,
        begun: Iterator[None],
        running: dict[Future[Counters | None], Unit],
        on_progress: Callable[[int], None],
    ) -> None:
        done = 0
        on_progress(done)
        while next(begun, None) or running:
            ended, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                done += self._take(running[future], future.result())
                del running[future]
            on_progress(done)

    def _take(self, unit: Unit, found: Counters | None) -> bool:
        if found is None:
            return False
        if unit.again:
            with self._lock:
                self.partial.add(found)
        else:
            self._checkpoint.finish(unit.name, found)
        return True

    def _work(self, unit: Unit) -> Counters | None:
        found = Counters()
        try:
            self.check()
            unit.work(found, self.check)
        except BaseException as exc:
            with self._lock:
                self.partial.add(found)
            if isinstance(exc, Halted):
                return None
            self._stop.set()
            raise
        return found
