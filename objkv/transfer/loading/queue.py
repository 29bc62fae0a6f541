"""The queue of the loader's threads: it decides which span is fetched next.

Loads within the step come first: the first spans of all chunks, then the second spans, and so on.
Loads between steps follow in the order of their requests. An overdue load between steps goes first,
one at a time, so that loads between steps make progress however many steps wait.

Half as many threads as CPU cores work at once. A task that takes at least twice its usual CPU time
is waiting for the store, so another thread may start. If the task that ended last was slow, all
threads may. With a store that keeps the cores busy, more threads only contend: 2 MiB from S3 on the
same two cores took 0.9 ms of CPU time with one thread and 2.5 ms with eight, each waiting for the
interpreter's lock (2026-11).
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
from objkv.transfer.loading.job import LoadJob


@dataclass(frozen=True, slots=True)
class FetchSpan:
    """Frames ``[first, end)`` of one payload, and their byte range.

    Payloads are fetched in spans, so that the first layers of all chunks arrive before the last
    layers of any chunk. The first span is requested when only the payload's layers are known. It
    contains the header, which gives the ranges of the other spans.
    """

    number: int
    """Number of the span. Span 0 begins at the payload's first byte."""
    first: int
    end: int
    start: int
    """Offset of the span's first byte in the payload."""
    nbytes: int
    last: bool
    """Whether the payload ends with this span."""

    def __post_init__(self) -> None:
        assert 0 <= self.first <= self.end
        assert self.start >= 0
        assert self.nbytes >= 0


def span_count(nbytes: int, layers: int, *, spans_max: int, span_bytes_min: int) -> int:
    """Return the number of spans for a payload of about ``nbytes``. Each costs one request."""
    return max(1, min(spans_max, layers, nbytes // span_bytes_min))


def opening_bytes(layers: Sequence[LayerSpec], count: int, *, tokens: int) -> int:
    """Return the size of the first of ``count`` spans: the largest size of the header plus an equal
    share of the layers, in any codec."""
    share = -(-len(layers) // count)
    rest = sum(layer.nbytes for layer in layers[share:])
    return payload_bytes_max(layers, tokens=tokens) - rest


def remaining(header: Header, first: int, count: int) -> list[FetchSpan]:
    """Divide the frames from ``first`` on into one to ``count`` spans of equal numbers of frames.

    The last span verifies the payload's end, even if it has no frames.
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
"""Decay of the average CPU time: a task this many tasks ago has a third of the newest's weight."""
Task = tuple[LoadJob, int, FetchSpan | None]
"""One span of one move of a job. None: the payload is fetched from its beginning."""


class TaskQueue:
    """A priority queue of spans. Thread-safe."""

    def __init__(
        self, moves_max: int, *, eager: int | None = None, overdue_s: float = math.inf
    ) -> None:
        """``eager``: how many threads work at once, by default half the number of CPU cores.
        ``overdue_s``: how long a load between steps waits behind loads within the step."""
        self._moves_max = moves_max
        self._overdue_s = overdue_s
        self._overdue: set[int] = set()
        """Ids of threads whose tasks were overdue when taken."""
        self._eager = eager or max(1, _processors() // 2)
        self._usual_s = 0.0
        self._begun: dict[int, float] = {}
        """Time at which each busy thread took its task, by thread id."""
        self._progress = 0.0
        self._is_watched = False
        self._changed = Condition()
        self._within: list[tuple[int, int, _Entry]] = []
        self._between: deque[_Entry] = deque()
        self._waiting = 0
        """Tasks in both."""
        self._moves = 0
        self._number = 0
        self._closed = False

    def __len__(self) -> int:
        return self._waiting

    def hanging(self, seconds: float) -> int:
        """Return how many threads have worked on their task for longer than ``seconds``."""
        if not self._begun:
            return 0
        before = monotonic() - seconds
        with self._changed:
            return sum(begun < before for begun in self._begun.values())

    def add(self, job: LoadJob) -> int:
        """Queue as many of the job's moves as there is room for, with all their parts. Returns
        their number."""
        moves = job.plan.moves
        with self._changed:
            room = 0 if self._closed else max(0, self._moves_max - self._moves)
            taken = counts = len(moves)
            if moves.has_parts:
                counts -= sum(moves.further)
            if counts > room:
                taken = _first_of(moves.further, room)
                counts = taken - sum(moves.further[:taken])
            if not taken:
                return 0
            if not self._begun:
                self._progress = monotonic()
            self._moves += counts
            self._push(_Entry(job, 0, taken, None))
            # One thread that takes a task wakes the next, see ``take``.
            self._changed.notify(min(taken, self._eager))
            return taken

    def add_spans(self, job: LoadJob, index: int, spans: list[FetchSpan]) -> None:
        """Queue the remaining spans of a move after its first span. The limit does not apply to
        them: each taken move has at most one payload's spans."""
        with self._changed:
            if self._closed:
                return
            for span in spans:
                self._push(_Entry(job, index, index + 1, span))
            self._changed.notify(len(spans))

    def put_back(self, task: Task) -> None:
        """Queue again a task that was taken but cannot run yet. The limit does not apply."""
        job, index, span = task
        with self._changed:
            if self._closed:
                return
            if span is None:
                self._moves += not job.plan.moves.further[index]
            self._push(_Entry(job, index, index + 1, span))
            self._changed.notify()

    def take(self) -> Task | None:
        """Take the next task; call ``finish`` after it. None: the queue was closed.

        Blocks until there is a task, and while enough other threads finish theirs quickly.
        """
        with self._changed:
            while not self._closed and not (len(self) and self._may_begin()):
                self._wait()
            if self._closed:
                return None
            task = self._next()
            self._waiting -= 1
            if task[2] is None:
                self._moves -= not task[0].plan.moves.further[task[1]]
            self._begun[get_ident()] = monotonic()
            if len(self) and not self._is_watched:
                self._changed.notify()
            return task

    def _next(self) -> Task:
        if self._between and not (self._within and not self._is_overdue()):
            entry = self._between[0]
            if monotonic() - entry.queued >= self._overdue_s:
                self._overdue.add(get_ident())
            task = entry.next_task()
            if entry.is_empty:
                self._between.popleft()
            return task
        entry = self._within[0][-1]
        task = entry.next_task()
        if entry.is_empty:
            heappop(self._within)
        return task

    def _is_overdue(self) -> bool:
        """Whether the first task between steps goes before those within the step."""
        return not self._overdue and monotonic() - self._between[0].queued >= self._overdue_s

    def finish(self, busy_s: float) -> None:
        """Report that the thread has ended its task, with or without success. ``busy_s``: the CPU
        time it took."""
        with self._changed:
            now = monotonic()
            self._overdue.discard(get_ident())
            if now - self._begun.pop(get_ident()) < self._patience_s():
                self._progress = now
            self._usual_s += (busy_s - self._usual_s) / _USUAL_TASKS

    def _patience_s(self) -> float:
        return max(_PATIENCE_MIN_S, 2 * self._usual_s)

    def _may_begin(self) -> bool:
        since = monotonic() - self._patience_s()
        return self._progress <= since or self._eager > sum(
            begun > since for begun in self._begun.values()
        )

    def _wait(self) -> None:
        """Wait for a change. While tasks are queued, one thread also watches the time for all."""
        if self._is_watched or not len(self):
            self._changed.wait()
            return
        self._is_watched = True
        try:
            first = min(self._begun.values(), default=self._progress)
            late = min(first, self._progress) + self._patience_s()
            if late <= (now := monotonic()):  # already late, but there was no task to take
                late = now + self._patience_s()
            self._changed.wait(late - now)
        finally:
            self._is_watched = False
        if len(self) and self._may_begin():
            self._changed.notify_all()

    def close(self) -> None:
        """Close the queue. ``take`` returns None from now on."""
        with self._changed:
            self._closed = True
            self._within.clear()
            self._between.clear()
            self._waiting = 0
            self._changed.notify_all()

    def _push(self, entry: "_Entry") -> None:
        self._waiting += entry.end - entry.index
        if not entry.job.plan.sync:
            self._between.append(entry)
            return
        self._number += 1
        number = 0 if entry.span is None else entry.span.number
        heappush(self._within, (number, self._number, entry))


class _Entry:
    """Queued tasks: the beginnings of consecutive moves of a job, or one later span."""

    __slots__ = ("end", "index", "job", "queued", "span")

    def __init__(self, job: LoadJob, index: int, end: int, span: FetchSpan | None) -> None:
        self.job, self.index, self.end, self.span = job, index, end, span
        self.queued = monotonic()

    @property
    def is_empty(self) -> bool:
        return self.index == self.end

    def next_task(self) -> Task:
        """Take the next task. The entry must not be empty."""
        self.index += 1
        return self.job, self.index - 1, self.span


def _first_of(further: Sequence[bool], room: int) -> int:
    """Return how many leading moves count at most ``room``. Further payloads of a chunk count
    nothing."""
    for index, is_further in enumerate(further):
        room -= not is_further
        if room < 0:
            return index
    return len(further)


def _processors() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
