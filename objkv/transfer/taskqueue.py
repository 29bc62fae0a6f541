"""Which span the loader's threads fetch next: what a step waits for first, layer by layer.

Of loads within the step the first spans of all chunks come before the second ones of any; loads
between steps come after them, in the order in which they were asked for.

One thread begins at once. The others join when for a moment none has finished anything: then the
store is what everybody waits for. Of a store as fast as memory they would have nothing to wait for
but each other (16 MiB from a directory: 5 ms by one thread, 9 by eight, 2 cores, 2026-11).
"""

from heapq import heappop, heappush
from threading import Condition
from time import monotonic

from objkv.transfer.job import LoadJob
from objkv.transfer.spans import Span

PATIENCE_S = 1e-3

Task = tuple[LoadJob, int, Span | None]
"""One span of one move of a job; None where the payload is fetched from its beginning."""


class TaskQueue:
    """Safe from many threads."""

    def __init__(self, moves_max: int, *, patience_s: float = PATIENCE_S) -> None:
        self._moves_max = moves_max
        self._patience_s = patience_s
        self._busy = 0
        self._progress_s = 0.0
        self._is_watched = False
        self._changed = Condition()
        self._heap: list[tuple[bool, int, int, Task]] = []
        self._moves = 0
        self._number = 0
        self._closed = False

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, job: LoadJob) -> int:
        """Queue the job's moves, as many as there is room for; how many those are."""
        with self._changed:
            room = 0 if self._closed else max(0, self._moves_max - self._moves)
            taken = min(room, len(job.plan.moves))
            if not self._busy:
                self._progress_s = monotonic()
            for index in range(taken):
                self._push(job, index, None)
            self._moves += taken
            self._changed.notify(taken)
            return taken

    def add_spans(self, job: LoadJob, index: int, spans: list[Span]) -> None:
        """Queue the rest of a move whose first span has come. They need no room of their own:
        there are at most as many as a payload has spans, for each move that was taken."""
        with self._changed:
            if self._closed:
                return
            for span in spans:
                self._push(job, index, span)
            self._changed.notify(len(spans))

    def take(self) -> Task | None:
        """The next task, for ``finish``; blocks until there is one, and while others are quick to
        finish theirs. None: the queue was closed."""
        with self._changed:
            while not self._closed and not (self._heap and self._may_begin()):
                self._wait()
            if self._closed:
                return None
            task = heappop(self._heap)[-1]
            if task[2] is None:
                self._moves -= 1
            self._busy += 1
            if self._heap and not self._is_watched:
                self._changed.notify()
            return task

    def finish(self) -> None:
        """The thread is done with what it took, whatever came of it."""
        with self._changed:
            self._busy -= 1
            self._progress_s = monotonic()

    def _may_begin(self) -> bool:
        return not self._busy or monotonic() >= self._progress_s + self._patience_s

    def _wait(self) -> None:
        """Until something changes. While there are tasks, one thread looks at the time for all."""
        if self._is_watched or not self._heap:
            self._changed.wait()
            return
        self._is_watched = True
        self._changed.wait(max(0.0, self._progress_s + self._patience_s - monotonic()))
        self._is_watched = False
        if self._heap and self._may_begin():
            self._changed.notify_all()

    def close(self) -> None:
        """Nobody gets anything any more."""
        with self._changed:
            self._closed = True
            self._heap.clear()
            self._changed.notify_all()

    def _push(self, job: LoadJob, index: int, span: Span | None) -> None:
        self._number += 1
        number = 0 if span is None else span.number
        heappush(self._heap, (not job.plan.sync, number, self._number, (job, index, span)))
