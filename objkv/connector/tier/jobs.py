"""Bounded background jobs of a secondary tier, each of many chunks.

Threads touch vLLM's memory only inside ``JobPart.touch``, which refuses access after the job has
ended. A job can therefore be ended at once, even while its threads wait for a store. Their results
are then discarded.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Condition
from time import monotonic
from typing import NamedTuple

from objkv.background import Pool
from objkv.errors import ObjkvError
from objkv.index.base import ShardRecord
from objkv.telemetry import Recorder, Trouble

logger = logging.getLogger(__name__)


class TierChunk(NamedTuple):
    """One chunk of a job."""

    key: bytes
    row: int
    """Row in vLLM's memory."""
    record: ShardRecord | None = None
    """Index record of a chunk to load."""


@dataclass(frozen=True, slots=True)
class JobLimits:
    """Bounds of the jobs of one direction."""

    threads: int
    queue_max: int
    """Chunks that may wait. Further ones are refused and fail."""
    deadline_s: float
    """The remaining chunks of a job that takes longer fail."""
    part_max: int = 1
    """Chunks of a job that one thread takes at once while no thread is idle."""


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """The result of a job. Every submitted job has exactly one."""

    job_id: int
    done: tuple[bytes, ...]
    failed: tuple[bytes, ...]
    noted: tuple[bytes, ...]
    """Chunks passed to ``JobPart.note``."""
    seconds: float

    @property
    def success(self) -> bool:
        """Whether no chunk failed."""
        return not self.failed


@dataclass(slots=True, eq=False)
class _Job:
    job_id: int
    keys: tuple[bytes, ...]
    started: float
    waiting: int
    """Chunks that no thread has finished."""
    done: set[bytes] = field(default_factory=set)
    noted: set[bytes] = field(default_factory=set)
    open: bool = True
    touching: int = 0
    """Number of threads that are copying from or to vLLM's memory."""


class JobPart:
    """Chunks of a job for one thread."""

    __slots__ = ("_changed", "_job", "entries", "namespace")

    def __init__(
        self, job: _Job, namespace: str, entries: Sequence[TierChunk], changed: Condition
    ) -> None:
        self._job = job
        self._changed = changed
        self.namespace = namespace
        self.entries = tuple(entries)

    @contextmanager
    def touch(self) -> Iterator[bool]:
        """Enter a context that yields whether vLLM's memory may be touched. It must be short,
        because ending the job waits for it."""
        with self._changed:
            if self._job.open:
                self._job.touching += 1
                allowed = True
            else:
                allowed = False
        try:
            yield allowed
        finally:
            if allowed:
                with self._changed:
                    self._job.touching -= 1
                    self._changed.notify_all()

    def finish(self, key: bytes) -> None:
        """Record that the chunk is done. No effect after the job has ended."""
        with self._changed:
            if self._job.open:
                self._job.done.add(key)

    def note(self, key: bytes) -> None:
        """Add the chunk to the outcome's ``noted``. No effect after the job has ended."""
        with self._changed:
            if self._job.open:
                self._job.noted.add(key)

    @property
    def is_wanted(self) -> bool:
        """Whether its job is still open."""
        return self._job.open


class TierJobs:
    """Runs the jobs of one direction. The scheduler's thread calls ``submit``, ``take_finished``,
    ``give_up``, ``finish`` and ``close``. Only ``close`` waits for a store."""

    def __init__(
        self,
        name: str,
        work: Callable[[JobPart], None],
        limits: JobLimits,
        recorder: Recorder,
        *,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """
        Args:
            name: ``load`` or ``save``, which is part of the counters' names.
            work: executes a part, on one of this object's threads. If it raises, the chunks that it
                has not finished fail.
        """
        self._name = name
        self._work = work
        self._limits = limits
        self._recorder = recorder
        self._clock = clock
        self._changed = Condition()
        self._queued = 0
        """Number of chunks in parts that no thread has taken."""
        self._jobs: dict[int, _Job] = {}
        self._ended: list[JobOutcome] = []
        self._closed = False
        self._finish_by: float | None = None
        self._trouble = Trouble(logger, f"tier {name}s")
        self._pool: Pool[JobPart] = Pool(f"objkv-tier-{name}", limits.threads, self._run)

    def submit(self, job_id: int, namespace: str | None, entries: Sequence[TierChunk]) -> None:
        """Queue a job. Chunks without room in the queue fail, and without a namespace all of them.
        Never raises."""
        job = _Job(job_id, tuple(entry.key for entry in entries), self._clock(), 0)
        with self._changed:
            room = 0 if self._closed or namespace is None else self._room()
            taken = entries[:room]
            if refused := len(entries) - len(taken):
                self._recorder.count(f"tier_{self._name}_refused", refused)
            job.waiting = len(taken)
            self._jobs[job_id] = job
            if namespace is None or not taken:
                self._end(job)
                return
            self._queued += len(taken)
            size = self._part_size(len(taken))
            self._pool.put(
                JobPart(job, namespace, taken[start : start + size], self._changed)
                for start in range(0, len(taken), size)
            )

    def take_finished(self) -> list[JobOutcome]:
        """Return the jobs that ended since the last call, including those past their deadline."""
        with self._changed:
            late = self._clock() - self._limits.deadline_s
            for job in list(self._jobs.values()):  # in the order in which they began
                if job.started > late:
                    break
                self._recorder.count(f"tier_{self._name}_deadlines")
                self._end(job)
            self._take_back()
            ended, self._ended = self._ended, []
            return ended

    def give_up(self) -> None:
        """End all jobs now. Afterwards no thread touches vLLM's memory for any of them."""
        with self._changed:
            for job in list(self._jobs.values()):
                self._end(job)
            self._take_back()

    def finish(self, seconds: float) -> None:
        """End the jobs and refuse further ones when ``seconds`` have passed since the first call.
        Both calls log the remaining chunks, because the process may be killed in between."""
        if self._finish_by is None:
            self._finish_by = self._clock() + seconds
            if count := self._unfinished():
                logger.warning(
                    "tier still busy at shutdown what=%ss chunks=%d seconds_max=%.1f",
                    self._name,
                    count,
                    seconds,
                )
        if self._clock() < self._finish_by or self._closed:
            return
        if count := self._unfinished():
            logger.warning("tier given up at shutdown what=%ss chunks=%d", self._name, count)
        with self._changed:
            self._closed = True
        self.give_up()

    def close(self, drain_deadline_s: float) -> None:
        """Finish the jobs within ``drain_deadline_s``, unless ``finish`` was called, and stop.
        Idempotent."""
        self.finish(drain_deadline_s)
        assert self._finish_by is not None
        with self._changed:
            while self._jobs and (left := self._finish_by - self._clock()) > 0:
                self._changed.wait(left)
            self._finish_by = min(self._finish_by, self._clock())
        self.finish(0.0)
        self._pool.close()

    def __repr__(self) -> str:
        return f"<TierJobs {self._name} {len(self._jobs)} jobs, {self._queued} chunks waiting>"

    def _room(self) -> int:
        return max(0, self._limits.queue_max - self._queued)

    def _part_size(self, count: int) -> int:
        """Return how many of a job's ``count`` chunks one thread takes: fewer if others idle."""
        idle = self._limits.threads - self._pool.busy - self._pool.waiting
        return min(self._limits.part_max, math.ceil(count / max(1, idle)))

    def _unfinished(self) -> int:
        with self._changed:
            return sum(len(job.keys) - len(job.done) for job in self._jobs.values())

    def _end(self, job: _Job) -> None:
        """End a job, with the lock held. Waits for copies in progress, within memory only."""
        job.open = False
        while job.touching:
            self._changed.wait()
        if self._jobs.pop(job.job_id, None) is None:  # another thread ended it meanwhile
            return
        self._ended.append(
            JobOutcome(
                job.job_id,
                done=tuple(key for key in job.keys if key in job.done),
                failed=tuple(key for key in job.keys if key not in job.done),
                noted=tuple(key for key in job.keys if key in job.noted),
                seconds=self._clock() - job.started,
            )
        )
        self._changed.notify_all()

    def _take_back(self) -> None:
        """Remove parts of ended jobs from the queue, with the lock held."""
        for part in self._pool.take_back(lambda part: not part.is_wanted):
            self._queued -= len(part.entries)

    def _run(self, part: JobPart) -> None:
        with self._changed:
            self._queued -= len(part.entries)
        try:
            if part.is_wanted:
                self._work(part)
                self._trouble.worked()
        except Exception as exc:  # count it before the job ends
            self._recorder.count(f"tier_{self._name}_errors")
            if isinstance(exc, ObjkvError):
                self._trouble.failed(exc)
            else:
                logger.exception("tier failed unexpectedly what=%s", self._name)
        finally:
            self._settle(part)

    def _settle(self, part: JobPart) -> None:
        with self._changed:
            job = part._job
            job.waiting -= len(part.entries)
            if job.open and not job.waiting:
                self._end(job)
