"""Which span the loader's threads fetch next: what a step waits for first, layer by layer.

Of loads within the step the first spans of all chunks come before the second ones of any; loads
between steps come after them, in the order in which they were asked for. One that is overdue comes
first, though one at a time: however many steps wait for loads, those between steps go on.

Half as many threads as there are processors work at once. A task that takes twice the processor's
time it usually does, or more, waits for the store: another thread may work meanwhile, and when a
slow task was the last to end, all may. Of a store that keeps the processors busy they would only
get in each other's way: 2 MiB from S3 on the same two cores took 0.9 ms of processor with one
thread, 2.5 with eight, each waiting for the interpreter's lock (2026-11).
"""

import math
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from threading import Condition, get_ident
from time import monotonic

from objkv.codec.payload import Header, LayerSpec, payload_bytes_max
from objkv.transfer.job import LoadJob


@dataclass(frozen=True, slots=True)
class FetchSpan:
    """Frames ``[first, end)`` of one payload, and the bytes in which they lie: payloads are fetched
    in pieces, so that the first layers of all chunks can come before the last layers of any.

    The first span is requested before anything is known of the payload but its layers; where the
    others lie is read from the header that it brings.
    """

    number: int
    """0 is the one that begins with the payload's first byte."""
    first: int
    end: int
    start: int
    """Its first byte in the payload."""
    nbytes: int
    last: bool
    """Whether nothing may come behind it."""

    def __post_init__(self) -> None:
        assert 0 <= self.first <= self.end
        assert self.start >= 0
        assert self.nbytes >= 0


def span_count(nbytes: int, layers: int, *, spans_max: int, span_bytes_min: int) -> int:
    """In how many spans to fetch a payload of about ``nbytes``: each costs a request."""
    return max(1, min(spans_max, layers, nbytes // span_bytes_min))


def opening_bytes(layers: Sequence[LayerSpec], count: int, *, tokens: int) -> int:
    """What the first of ``count`` spans has to bring: as many bytes as the header and the first
    equal share of the layers take at most, in any codec."""
    share = -(-len(layers) // count)
    rest = sum(layer.nbytes for layer in layers[share:])
    return payload_bytes_max(layers, tokens=tokens) - rest


def remaining(header: Header, first: int, count: int) -> list[FetchSpan]:
    """At most ``count`` spans, at least one, of equal numbers of frames from ``first`` on.

    The last one proves the payload's end, even if no frames are left for it.
    """
    left = len(header.frames) - first
    pieces = max(1, min(count, left))
    cuts = [first + left * i // pieces for i in range(pieces + 1)]
    offsets = [*header.frames.starts, header.nbytes]
    return [
        FetchSpan(i + 1, a, b, offsets[a], offsets[b] - offsets[a], last=i + 1 == pieces)
        for i, (a, b) in enumerate(pairwise(cuts))
    ]


_PATIENCE_MIN_S = 3e-4
_USUAL_TASKS = 8
"""A task that was so many tasks ago counts a third."""
Task = tuple[LoadJob, int, FetchSpan | None]
"""One span of one move of a job; None where the payload is fetched from its beginning."""


class TaskQueue:
    """Safe from many threads."""

    def __init__(
        self, moves_max: int, *, eager: int | None = None, overdue_s: float = math.inf
    ) -> None:
        """``eager``: how many threads begin at once; by default half as many as processors.
        ``overdue_s``: how long loads between steps wait behind those within."""
        self._moves_max = moves_max
        self._overdue_s = overdue_s
        self._overdue: set[int] = set()
        """Threads at work on tasks that were overdue when taken."""
        self._eager = eager or max(1, _processors() // 2)
        self._usual_s = 0.0
        self._begun: dict[int, float] = {}
        """When each thread that has a task took it."""
        self._progress_s = 0.0
        self._is_watched = False
        self._changed = Condition()
        self._within: list[tuple[int, int, Task]] = []
        self._between: deque[tuple[float, Task]] = deque()
        """Each with the time at which it was queued."""
        self._moves = 0
        self._number = 0
        self._closed = False

    def __len__(self) -> int:
        return len(self._within) + len(self._between)

    def hanging(self, seconds: float) -> int:
        """How many threads have been at their task for longer than that."""
        before = monotonic() - seconds
        with self._changed:
            return sum(begun < before for begun in self._begun.values())

    def add(self, job: LoadJob) -> int:
        """Queue the job's moves, as many as there is room for; how many those are, with all their
        parts."""
        with self._changed:
            room = 0 if self._closed else max(0, self._moves_max - self._moves)
            if not self._begun:
                self._progress_s = monotonic()
            taken = 0
            for index in range(len(job.plan.moves)):
                if (counts := _counts(job, index)) and not room:
                    break
                room -= counts
                self._moves += counts
                self._push(job, index, None)
                taken += 1
            self._changed.notify(taken)
            return taken

    def add_spans(self, job: LoadJob, index: int, spans: list[FetchSpan]) -> None:
        """Queue the rest of a move whose first span has come. They need no room of their own:
        there are at most as many as a payload has spans, for each move that was taken."""
        with self._changed:
            if self._closed:
                return
            for span in spans:
                self._push(job, index, span)
            self._changed.notify(len(spans))

    def put_back(self, task: Task) -> None:
        """Queue again what was taken and could not be done yet. It needs no room of its own."""
        job, index, span = task
        with self._changed:
            if self._closed:
                return
            if span is None:
                self._moves += _counts(job, index)
            self._push(job, index, span)
            self._changed.notify()

    def take(self) -> Task | None:
        """The next task, for ``finish``; blocks until there is one, and while others are quick to
        finish theirs. None: the queue was closed."""
        with self._changed:
            while not self._closed and not (len(self) and self._may_begin()):
                self._wait()
            if self._closed:
                return None
            task = self._next()
            if task[2] is None:
                self._moves -= _counts(task[0], task[1])
            self._begun[get_ident()] = monotonic()
            if len(self) and not self._is_watched:
                self._changed.notify()
            return task

    def _next(self) -> Task:
        if self._between and not (self._within and not self._is_overdue()):
            since_s, task = self._between.popleft()
            if monotonic() - since_s >= self._overdue_s:
                self._overdue.add(get_ident())
            return task
        return heappop(self._within)[-1]

    def _is_overdue(self) -> bool:
        """Whether the first of those between steps goes before those within."""
        return not self._overdue and monotonic() - self._between[0][0] >= self._overdue_s

    def finish(self, busy_s: float) -> None:
        """The thread is done with what it took, whatever came of it, after so much time on a
        processor."""
        with self._changed:
            now = monotonic()
            self._overdue.discard(get_ident())
            if now - self._begun.pop(get_ident()) < self._patience_s():
                self._progress_s = now
            self._usual_s += (busy_s - self._usual_s) / _USUAL_TASKS

    def _patience_s(self) -> float:
        return max(_PATIENCE_MIN_S, 2 * self._usual_s)

    def _may_begin(self) -> bool:
        since = monotonic() - self._patience_s()
        return self._progress_s <= since or self._eager > sum(
            begun > since for begun in self._begun.values()
        )

    def _wait(self) -> None:
        """Until something changes. While there are tasks, one thread looks at the time for all."""
        if self._is_watched or not len(self):
            self._changed.wait()
            return
        self._is_watched = True
        try:
            first = min(self._begun.values(), default=self._progress_s)
            late_s = min(first, self._progress_s) + self._patience_s()
            if late_s <= (now := monotonic()):  # of one that is late already there was none to take
                late_s = now + self._patience_s()
            self._changed.wait(late_s - now)
        finally:
            self._is_watched = False
        if len(self) and self._may_begin():
            self._changed.notify_all()

    def close(self) -> None:
        """Hand out nothing any more; ``take`` returns None."""
        with self._changed:
            self._closed = True
            self._within.clear()
            self._between.clear()
            self._changed.notify_all()

    def _push(self, job: LoadJob, index: int, span: FetchSpan | None) -> None:
        if not job.plan.sync:
            self._between.append((monotonic(), (job, index, span)))
            return
        self._number += 1
        number = 0 if span is None else span.number
        heappush(self._within, (number, self._number, (job, index, span)))


def _counts(job: LoadJob, index: int) -> int:
    """What a task counts against ``moves_max``: 1, or 0 for a further payload of one chunk."""
    moves = job.plan.moves
    return int(not index or moves[index].move is not moves[index - 1].move)


def _processors() -> int:
    """That this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
