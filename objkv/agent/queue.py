"""The order in which the core fetches payloads, and the number of threads at once.

Half as many threads as CPU cores begin at once. A payload that takes at least twice its usual CPU
time is waiting for the store, so another thread may begin. If the one that ended last was slow, all
threads may. With a store that keeps the cores busy, more threads only contend: 2 MiB from S3 on the
same two cores took 0.9 ms of CPU time with one thread and 2.5 ms with eight, each waiting for the
interpreter's lock (2026-11).
"""

import os
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from heapq import heappop, heappush
from itertools import count
from threading import get_ident
from time import monotonic
from typing import NamedTuple

from objkv.agent.fill import Fill, Wanted
from objkv.agent.residents import Resident

_OVERDUE_SHARE = 1 / 4
"""A load between steps is overdue after this share of its time."""
_LATE_S = 0.2
"""A thread hangs if it goes on for this time after its payload's deadline."""
_PATIENCE_MIN_S = 3e-4
_USUAL_TASKS = 8
"""Decay of the average CPU time: a task this many tasks ago has a third of the newest's weight."""


class Urgency(IntEnum):
    """Which fetches go first."""

    IN_STEP = 0
    """A forward pass waits."""
    BETWEEN_STEPS = 1
    PREFETCH = 2


class Due(NamedTuple):
    """When a payload will be fetched."""

    urgency: Urgency
    priority: int
    """Among payloads of one urgency lower values go first."""
    deadline: float
    """By ``monotonic``."""


class FetchJob(NamedTuple):
    """A payload, or the rest of one, that waits to be fetched."""

    urgency: Urgency
    priority: int
    turn: int
    """The client's bytes so far, on a clock that all clients share."""
    number: int
    one: Resident
    wanted: Wanted
    deadline: float
    overdue: float
    """When it goes first, if no forward pass waits for it."""
    fill: Fill | None = None
    """The fill that this job continues; None at the beginning."""


class Turns:
    """A queue by urgency and priority, and among clients in turn by bytes. Not thread-safe."""

    def __init__(self) -> None:
        self._heap: list[FetchJob] = []
        self._jobs: dict[Resident, FetchJob] = {}
        """The valid job of each payload: one that was hastened leaves its old one in the heap."""
        self._numbers = count()
        self._between: deque[FetchJob] = deque()
        """Loads between steps, in the order in which they came."""
        self._was_overdue = False
        self._clock = 0
        self._due: dict[object, int] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, client: object, one: Resident, wanted: Wanted, due: Due) -> None:
        """Queue a payload."""
        turn = max(self._due.get(client, 0), self._clock)
        self._due[client] = turn + wanted.record.nbytes
        now = monotonic()
        overdue = now + _OVERDUE_SHARE * (due.deadline - now)
        self._push(
            FetchJob(*due[:2], turn, next(self._numbers), one, wanted, due.deadline, overdue)
        )

    def add_rest(self, job: FetchJob) -> None:
        """Queue the rest of a payload, behind the beginnings of others of its urgency."""
        self._push(job._replace(priority=job.priority + 1, number=next(self._numbers)))

    def hasten(self, one: Resident, due: Due) -> None:
        """Another client waits for a payload too: if it is queued, the more urgent of both
        urgencies and the later of both deadlines apply."""
        job = self._jobs.get(one)
        if job is None:
            return
        sooner = due[:2] if due[:2] < job[:2] else job[:2]
        if sooner != job[:2] or due.deadline > job.deadline:
            number, deadline = next(self._numbers), max(job.deadline, due.deadline)
            urgency, priority = sooner
            self._push(
                job._replace(urgency=urgency, priority=priority, number=number, deadline=deadline)
            )

    def discard(self, given_up: Callable[[Resident], bool]) -> None:
        """Remove the payloads that are ``given_up``."""
        for one in [one for one in self._jobs if given_up(one)]:
            del self._jobs[one]

    def next_urgency(self) -> Urgency | None:
        """Return the urgency of the next one; None if there is none."""
        while self._heap and self._jobs.get(self._heap[0].one) is not self._heap[0]:
            heappop(self._heap)
        return self._heap[0].urgency if self._heap else None

    def take(self) -> FetchJob:
        """Take the next one."""
        assert self.next_urgency() is not None
        job = self._take_overdue() or heappop(self._heap)
        del self._jobs[job.one]
        self._clock = max(self._clock, job.turn)
        return job

    def _push(self, job: FetchJob) -> None:
        self._jobs[job.one] = job
        heappush(self._heap, job)
        if job.urgency is Urgency.BETWEEN_STEPS:
            self._between.append(job)

    def _take_overdue(self) -> FetchJob | None:
        """Take a load between steps that is overdue, so that forward passes do not starve them. At
        most every second one, so that they do not starve forward passes."""
        between = self._between
        while between and self._jobs.get(between[0].one) is not between[0]:
            between.popleft()
        self._was_overdue = (
            not self._was_overdue and bool(between) and monotonic() >= between[0].overdue
        )
        return between.popleft() if self._was_overdue else None

    def forget(self, client: object) -> None:
        """The client has gone."""
        self._due.pop(client, None)


class Pace:
    """Not thread-safe: its owner's lock guards it."""

    def __init__(self, eager: int | None = None) -> None:
        """``eager``: how many threads work at once, by default half the number of CPU cores."""
        self._eager = eager or max(1, _processors() // 2)
        self._usual_s = 0.0
        self._begun: dict[int, tuple[float, float]] = {}
        """When each busy thread began, and its payload's deadline, by thread id."""
        self._progress = 0.0

    @property
    def busy(self) -> int:
        """Number of threads that fetch a payload."""
        return len(self._begun)

    def all_late(self, threads: int) -> bool:
        """Whether all ``threads`` work well beyond their payloads' deadlines, because a file system
        hangs whose calls cannot be cancelled. To queue more is pointless then."""
        if len(self._begun) < threads:
            return False
        now = monotonic()
        return all(deadline + _LATE_S < now for _, deadline in self._begun.values())

    def may_begin(self) -> bool:
        """Whether another thread may begin."""
        since = monotonic() - self._patience_s()
        return self._progress <= since or self._eager > sum(
            begun > since for begun, _ in self._begun.values()
        )

    def wait_s(self) -> float:
        """Return when to ask again, if nothing ends before."""
        first = min((begun for begun, _ in self._begun.values()), default=self._progress)
        late = min(first, self._progress) + self._patience_s()
        left = late - monotonic()
        return left if left > 0 else self._patience_s()

    def begin(self, deadline: float) -> None:
        """The calling thread begins to fetch a payload."""
        now = monotonic()
        if not self._begun:
            self._progress = now
        self._begun[get_ident()] = now, deadline

    def end(self, busy_s: float) -> None:
        """The calling thread has ended, with or without success. ``busy_s``: its CPU time."""
        now = monotonic()
        begun, _ = self._begun.pop(get_ident())
        if now - begun < self._patience_s():
            self._progress = now
        self._usual_s += (busy_s - self._usual_s) / _USUAL_TASKS

    def _patience_s(self) -> float:
        return max(_PATIENCE_MIN_S, 2 * self._usual_s)


def _processors() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
