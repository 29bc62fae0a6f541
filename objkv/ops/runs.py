"""Many units of work by several threads: it can be stopped at any time, and go on later.

Whatever ends it, every unit is either done and told to the checkpoint, or done once more next time.
A unit whose work others may undo, or whose outcome depends on more than what it is named after, is
done in every run.
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
    """One thing that was found."""

    kind: str
    key: str
    """Where it is in the bulk store, or was to be."""
    nbytes: int
    detail: str = ""


@dataclass(slots=True)
class Counters:
    """One thread at a time."""

    counts: Counter[str] = field(default_factory=Counter)
    """By kind: of findings, and of what else is counted."""
    nbytes: Counter[str] = field(default_factory=Counter)
    """Bytes by kind, of kinds that have bytes."""
    findings: list[Finding] = field(default_factory=list)
    """The first ``FINDINGS_MAX``."""
    omitted: int = 0
    """Findings that there was no room for."""

    def count(self, kind: str, nbytes: int = 0) -> None:
        """One more of ``kind``."""
        self.counts[kind] += 1
        self.nbytes[kind] += nbytes

    def find(self, kind: str, key: str, nbytes: int, detail: str = "") -> None:
        """One more of ``kind``, which is worth naming."""
        self.count(kind, nbytes)
        self._keep(Finding(kind, key, nbytes, detail))

    def add(self, other: "Counters") -> None:
        """Count what ``other`` has counted as well."""
        self.counts += other.counts
        self.nbytes += other.nbytes
        self.omitted += other.omitted
        for finding in other.findings:
            self._keep(finding)

    def plain(self) -> dict[str, Any]:
        """As JSON values, for ``parse``."""
        findings = [[f.kind, f.key, f.nbytes, f.detail] for f in self.findings]
        return {
            "counts": dict(self.counts),
            "nbytes": dict(self.nbytes),
            "findings": findings,
            "omitted": self.omitted,
        }

    @classmethod
    def parse(cls, values: dict[str, Any]) -> "Counters":
        """What ``plain`` wrote. Raises KeyError, TypeError or ValueError for anything else."""
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
"""What was found longer ago is looked at again."""
_WRITE_EVERY_S = 1.0
_FORMAT = 1


class Checkpoint:
    """Names of the units that are done, and what they found, in a file beside the cache. One thread
    uses it.

    The file is a convenience: without it everything is done once more, which is harmless in every
    command that has one. A second run of the same command at the same time keeps none.
    """

    def __init__(self, file: Path | None, *, clock: Callable[[], float] = time.time) -> None:
        """``file``: made if there is none; None keeps nothing."""
        self._clock = clock
        self._begun_s = self._written_s = clock()
        self.done: set[str] = set()
        self.counters = Counters()
        self.resumed = False
        """Whether an earlier run is continued."""
        self._fd = -1 if file is None else _locked(file)
        if self._fd >= 0:
            self._read()

    @property
    def is_kept(self) -> bool:
        """Whether a later run can go on from here."""
        return self._fd >= 0

    def finish(self, unit: str, found: Counters) -> None:
        """``unit`` is done, and that is what it found."""
        self.done.add(unit)
        self.counters.add(found)
        if self._clock() - self._written_s >= _WRITE_EVERY_S:
            self._write()

    def close(self, *, complete: bool) -> None:
        """Keep it for the next run, or, if all is done, nothing. Idempotent."""
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
            return  # empty, cut short, or another version's
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
        # Cut short by a crash it is unreadable, and read as none.
        with suppress(OSError), open(self._fd, "r+b", closefd=False) as opened:
            opened.truncate(0)
            opened.seek(0)
            opened.write(json.dumps(kept).encode())


def checkpoint_file(folder: Path, command: str, *settings: object) -> Path:
    """Where ``command`` with these settings, which decide what it does, keeps how far it is."""
    digest = hashlib.sha256(repr(settings).encode()).hexdigest()[:16]
    return folder / "progress" / f"{command}-{digest}.json"


def _locked(file: Path) -> int:
    """The open file, or -1 where another process has it or there is no room for it."""
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
"""Told how many units are done, and of how many."""
_AHEAD = 2
"""Units under way or waiting, per thread."""


class Halted(Exception):
    """There is no time, or no allowance, for more."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Some work, whose name is the same in every run."""

    name: str
    work: Callable[[Counters, Check], None]
    """Counts what it finds; calls the check now and then, and lets what that raises pass."""
    again: bool = False
    """Never done for good: a run that continues another does it anew, and counts it anew."""


class WorkPool:
    """Runs units, as often as it is asked. Its owner's thread waits, and may be interrupted."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        workers: int,
        deadline_s: float | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """``deadline_s``: from now on; nothing is begun afterwards."""
        self._checkpoint = checkpoint
        self._workers = workers
        self._clock = clock
        self._ends = None if deadline_s is None else clock() + deadline_s
        self._stop = Event()
        self._lock = Lock()
        self.ending: Ending = "complete"
        self.partial = Counters()
        """What units found that did not finish, or never do for good: it will be found again."""

    def run(
        self, units: Iterable[Unit], on_progress: OnProgress = lambda done, total: None
    ) -> None:
        """Run those that are not done yet; nothing, if an earlier run of this crew was stopped.

        Raises the first error of a unit, after those under way have ended.
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
            for future, unit in running.items():  # what ended while this thread was interrupted
                if not future.cancelled() and future.exception() is None:
                    self._take(unit, future.result())
            if self.ending == "complete":
                self._stop.clear()

    def halt(self, why: Ending) -> None:
        """No unit begins any more; those under way end at their next check."""
        with self._lock:
            if self.ending == "complete":
                self.ending = why
        self._stop.set()

    def check(self) -> None:
        """Raises ``Halted`` if it is time to end."""
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
        """Begins as many as there is room for, each time it is asked; ends when all have begun."""
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
