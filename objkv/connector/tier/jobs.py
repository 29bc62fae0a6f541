"""Jobs of a secondary tier, each of many chunks, which other threads load or save.

They touch vLLM's memory only inside ``JobChunk.touch``, which refuses after the job has ended. A
job can therefore be ended at once, whatever its chunks wait for. Their results are then discarded.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Condition
from time import monotonic

from objkv.telemetry import Recorder

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """The result of a job. Every submitted job has exactly one."""

    job_id: int
    done: tuple[bytes, ...]
    failed: tuple[bytes, ...]
    noted: tuple[bytes, ...]
    """Chunks that ended with a note."""
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
    deadline: float
    waiting: int
    """Chunks that have not ended."""
    done: set[bytes] = field(default_factory=set)
    noted: set[bytes] = field(default_factory=set)
    open: bool = True
    touching: int = 0
    """Number of threads that are copying from or to vLLM's memory."""


class JobChunk:
    """One chunk of a job. Thread-safe."""

    def __init__(self, jobs: "TierJobs", job: _Job, key: bytes, row: int) -> None:
        self.key, self.row, self.parts = key, row, (jobs, job, key, row)
        self._jobs, self._job = jobs, job

    @property
    def is_needed(self) -> bool:
        """Whether its job is still open."""
        return self._job.open

    @property
    def deadline(self) -> float:
        """Time until which it is of use; past, once its job has ended."""
        return self._job.deadline if self._job.open else -math.inf

    @contextmanager
    def touch(self) -> Iterator[bool]:
        """Enter a context that yields whether vLLM's memory may be touched. It must be short,
        because ending the job waits for it."""
        job, changed = self._job, self._jobs.changed
        with changed:
            if job.open:
                job.touching += 1
                allowed = True
            else:
                allowed = False
        try:
            yield allowed
        finally:
            if allowed:
                with changed:
                    job.touching -= 1
                    changed.notify_all()

    def settle(self, *, done: bool, noted: bool = False) -> None:
        """The chunk has ended. No effect after its job has."""
        self._jobs.settle(self._job, {self.key} if done else set(), {self.key} if noted else set())


class TierJobs:
    """The jobs of one direction. The scheduler's thread calls ``submit``, ``take_finished``,
    ``give_up``, ``finish`` and ``close``. Only ``close`` waits for chunks."""

    def __init__(
        self,
        name: str,
        recorder: Recorder,
        *,
        queue_max: int,
        deadline_s: float,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """
        Args:
            name: ``load`` or ``save``, which is part of the counters' names.
            queue_max: chunks that may wait. Further ones are refused and fail.
            deadline_s: the remaining chunks of a job that takes longer fail.
        """
        self._name, self._recorder, self._clock = name, recorder, clock
        self._queue_max, self._deadline_s = queue_max, deadline_s
        self.changed = Condition()
        """Guards the jobs, and is notified when a copy or a job ends."""
        self._waiting = 0
        """Chunks of open jobs that have not ended."""
        self._jobs: dict[int, _Job] = {}
        self._ended: list[JobOutcome] = []
        self._closed = False
        self._finish_by: float | None = None

    def submit(
        self, job_id: int, keys: Sequence[bytes], rows: Sequence[int], *, refuse: bool = False
    ) -> list[JobChunk]:
        """Begin a job and return its chunks. Each must be settled. Those without room
        fail, and with ``refuse`` all of them."""
        now = self._clock()
        with self.changed:
            room = 0 if self._closed or refuse else max(0, self._queue_max - self._waiting)
            count = min(room, len(keys))
            if refused := len(keys) - count:
                self._recorder.count(f"tier_{self._name}_refused", refused)
            job = _Job(job_id, tuple(keys), now, now + self._deadline_s, count)
            self._jobs[job_id] = job
            self._waiting += count
            if not count:
                self._end(job)
        return [JobChunk(self, job, *one) for one in zip(keys[:count], rows, strict=False)]

    def settle(self, job: _Job, done: set[bytes], noted: set[bytes]) -> None:
        """See ``JobChunk``."""
        with self.changed:
            if not job.open:
                return
            job.done |= done
            job.noted |= noted
            job.waiting -= 1
            self._waiting -= 1
            if not job.waiting:
                self._end(job)

    def take_finished(self) -> list[JobOutcome]:
        """Return the jobs that ended since the last call, including those past their deadline."""
        now = self._clock()
        with self.changed:
            for job in list(self._jobs.values()):  # in the order in which they began
                if job.deadline > now:
                    break
                self._recorder.count(f"tier_{self._name}_deadlines", job.waiting)
                self._end(job)
            ended, self._ended = self._ended, []
            return ended

    def give_up(self) -> None:
        """End all jobs now. Afterwards no thread touches vLLM's memory for any of them."""
        with self.changed:
            for job in list(self._jobs.values()):
                self._end(job)

    def finish(self, seconds: float) -> None:
        """End the jobs and refuse further ones when ``seconds`` have passed since the first call.
        Both calls log the remaining chunks, because the process may be killed in between."""
        if self._finish_by is None:
            self._finish_by = self._clock() + seconds
            if self._waiting:
                logger.warning(
                    "tier still busy at shutdown what=%ss chunks=%d seconds_max=%.1f",
                    self._name,
                    self._waiting,
                    seconds,
                )
        if self._clock() < self._finish_by or self._closed:
            return
        if self._waiting:
            logger.warning(
                "tier given up at shutdown what=%ss chunks=%d", self._name, self._waiting
            )
        with self.changed:
            self._closed = True
        self.give_up()

    def close(self, drain_deadline_s: float) -> None:
        """Let the jobs end within ``drain_deadline_s``, unless ``finish`` was called, and refuse
        others. Idempotent."""
        self.finish(drain_deadline_s)
        assert self._finish_by is not None
        with self.changed:
            while self._jobs and (left := self._finish_by - self._clock()) > 0:
                self.changed.wait(left)
            self._finish_by = min(self._finish_by, self._clock())
        self.finish(0.0)

    def __repr__(self) -> str:
        return f"<TierJobs {self._name} {len(self._jobs)} jobs, {self._waiting} chunks waiting>"

    def _end(self, job: _Job) -> None:
        """End a job, with the lock held. Waits for copies in progress, within memory only."""
        job.open = False
        self._waiting -= job.waiting
        job.waiting = 0
        while job.touching:
            self.changed.wait()
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
        self.changed.notify_all()
