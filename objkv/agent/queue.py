"""The order in which the agent fetches payloads."""

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from time import monotonic
from typing import NamedTuple

from objkv.agent.arena_cache import CachedPayload
from objkv.agent.fill import Fill
from objkv.agent.messages import Urgency
from objkv.codec.payload import Claim
from objkv.index.base import ShardRecord

_OVERDUE_SHARE = 1 / 4
"""A load between steps is overdue after this share of its time."""
_TYPICAL_BYTES = 1 << 20
"""Of a payload whose record has to be looked up."""


class Priority(NamedTuple):
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
    one: CachedPayload
    claim: Claim
    record: ShardRecord | None
    """The payload's record; None if no lookup of this node has found it lately."""
    deadline: float
    overdue: float
    """When it goes first, if no forward pass waits for it."""
    fill: Fill | None = None
    """The fill that this job continues; None at the beginning."""


class FetchQueue:
    """A queue by urgency and priority, and among clients in turn by bytes. Not thread-safe."""

    def __init__(self) -> None:
        self._heap: list[FetchJob] = []
        self._jobs: dict[CachedPayload, FetchJob] = {}
        """The valid job of each payload: one that was hastened leaves its old one in the heap."""
        self._numbers = count()
        self._between: deque[FetchJob] = deque()
        """Loads between steps, in the order in which they came."""
        self._was_overdue = False
        self._clock = 0
        self._due: dict[object, int] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def add(
        self,
        client: object,
        one: CachedPayload,
        claim: Claim,
        record: ShardRecord | None,
        due: Priority,
    ) -> None:
        """Queue a payload."""
        turn = max(self._due.get(client, 0), self._clock)
        self._due[client] = turn + (_TYPICAL_BYTES if record is None else record.nbytes)
        now = monotonic()
        overdue = now + _OVERDUE_SHARE * (due.deadline - now)
        number, deadline = next(self._numbers), due.deadline
        self._push(FetchJob(*due[:2], turn, number, one, claim, record, deadline, overdue))

    def add_rest(self, job: FetchJob) -> None:
        """Queue the rest of a payload, behind the beginnings of others of its urgency."""
        self._push(job._replace(priority=job.priority + 1, number=next(self._numbers)))

    def hasten(self, one: CachedPayload, due: Priority) -> bool:
        """Another client waits for a payload too: if it is queued, the more urgent of both
        urgencies and the later of both deadlines apply. Returns whether it is queued."""
        job = self._jobs.get(one)
        if job is None:
            return False
        sooner = due[:2] if due[:2] < job[:2] else job[:2]
        if sooner != job[:2] or due.deadline > job.deadline:
            number, deadline = next(self._numbers), max(job.deadline, due.deadline)
            urgency, priority = sooner
            self._push(
                job._replace(urgency=urgency, priority=priority, number=number, deadline=deadline)
            )
        return True

    def discard(self, given_up: Callable[[CachedPayload], bool]) -> None:
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
