"""One load under way: which moves are done, which failed, and the fence around its blocks.

The fence is the whole point: bytes are written into blocks only between ``enter`` and ``leave``,
and after ``close`` returns nothing is, or ever will be, written by this job. So blocks may change
hands as soon as a job is closed. No thread is on the network between ``enter`` and ``leave``.
"""

from collections.abc import Callable, Iterable, Sequence
from threading import Condition

from objkv.codec.payload import Header
from objkv.tracing import NO_SPAN, Span
from objkv.transfer.lanes import Lane, Mark
from objkv.transfer.plan import LoadMove, LoadOutcome, LoadPlan


class LoadJob:
    """State of one plan on one worker. Safe from many threads."""

    def __init__(
        self,
        plan: LoadPlan,
        filled: Sequence[range],
        deadline: float,
        clock: Callable[[], float],
    ) -> None:
        """``filled``: which of the rank's layers each move fills."""
        self.plan = plan
        self.deadline = deadline
        """On ``clock``; what is not loaded by then is a miss."""
        self.started = clock()
        self.span: Span = NO_SPAN
        self._clock = clock
        self._changed = Condition()
        self._awaited: list[Callable[[], bool]] = []
        self._unfinished = set(range(len(plan.moves)))
        self._spans_left = [1] * len(plan.moves)
        self._headers: dict[int, Header] = {}
        self._filled = [(1 << r.stop) - (1 << r.start) for r in filled]
        self._written = [0] * len(plan.moves)  # one bit a layer
        # Of the marks of one lane a later one stands for all before it.
        self._marks: dict[tuple[int, int], dict[Lane, Mark]] = {}
        self._last_marks: dict[Lane, Mark] = {}
        self._failed_chunk: int | None = None
        self._rejected: set[tuple[str, bytes]] = set()
        self._writing = 0
        self._closed = False
        self._nbytes = 0
        self._first: float | None = None
        self._last = self.started

    def wanted(self, index: int) -> bool:
        """Whether move ``index`` is still worth fetching: no earlier chunk failed, not closed."""
        with self._changed:
            return self._wanted(self.plan.moves[index])

    def began(self) -> None:
        """Bytes of some payload have come."""
        if self._first is None:
            with self._changed:
                if self._first is None:
                    self._first = self._clock()

    def came(self, nbytes: int) -> None:
        """So many bytes of some payload have come, and no more are asked for in that call."""
        with self._changed:
            self._nbytes += nbytes
            self._last = self._clock()

    def enter(self, index: int) -> bool:
        """Ask to write move ``index`` into its blocks; after True, ``leave`` must follow."""
        with self._changed:
            if not self._wanted(self.plan.moves[index]):
                return False
            self._writing += 1
            return True

    def leave(self, index: int, layers: Iterable[int], lane: Lane, mark: Mark | None) -> None:
        """The writes that ``enter`` allowed are over: ``layers`` of move ``index`` were verified
        and given to ``lane``, up to ``mark``. Without a mark, nothing counts as written."""
        group = self.plan.moves[index].move.group
        with self._changed:
            self._writing -= 1
            if mark is not None:
                self._last_marks[lane] = mark
                for layer in layers:
                    self._written[index] |= 1 << layer
                    self._marks.setdefault((group, layer), {})[lane] = mark
            self._tell()

    def opened(self, index: int, header: Header, spans_left: int) -> None:
        """The header of move ``index`` was verified; besides the span that brought it, so many
        more are to come."""
        with self._changed:
            self._headers[index] = header
            self._spans_left[index] += spans_left

    def header(self, index: int) -> Header:
        """The header that ``opened`` took."""
        with self._changed:
            return self._headers[index]

    def span_done(self, index: int) -> bool:
        """One span of move ``index`` was verified to its end. The move has succeeded when all
        spans were, and all layers are in its blocks; there is no other way. True if it just has."""
        with self._changed:
            self._spans_left[index] -= 1
            if self._spans_left[index] or index not in self._unfinished:
                return False
            complete = self._written[index] == self._filled[index]
            if not complete:
                self._fail_from(self.plan.moves[index].move.chunk)
            self._unfinished.discard(index)
            self._tell()
            return complete

    def fail(self, index: int, *, rejected: bool) -> None:
        """Move ``index`` was not, and will not be, loaded; later chunks are useless without it."""
        with self._changed:
            move = self.plan.moves[index].move
            self._fail_from(move.chunk)
            if rejected:
                self._rejected.add((self.plan.namespace, move.prefix_hash))
            self._unfinished.discard(index)
            self._tell()

    def cancel(self) -> None:
        """The load is no longer needed: what is not written by now counts as failed."""
        with self._changed:
            self.deadline = self._clock()
            self._changed.notify_all()

    def is_over(self) -> bool:
        """Whether every move that is still wanted has succeeded or failed, or the deadline has
        passed."""
        with self._changed:
            return not any(self._wanted(self.plan.moves[i]) for i in self._unfinished)

    def wait_over(self) -> None:
        """Block until every move that is still wanted has succeeded or failed, or the deadline
        has passed."""
        with self._changed:
            self._wait_while(lambda i: True)

    def wait_layer(self, group: int, layer: int) -> list[Mark]:
        """Block until layer ``layer`` of ``group`` was given to the lanes for every move that is
        still wanted, or the deadline has passed; the marks to order computing after.

        A move that lacks the layer then has failed: the layer is computed without it, whatever a
        write under way still brings.
        """
        moves = [i for i, load in enumerate(self.plan.moves) if load.move.group == group]
        with self._changed:
            self._wait_while(lambda i: self._lacks(i, group, layer))
            for i in moves:
                if self._lacks(i, group, layer):
                    self._fail_from(self.plan.moves[i].move.chunk)
            return list(self._marks.get((group, layer), {}).values())

    def close(self) -> LoadOutcome:
        """Forbid further writes, wait for those under way (copies, not the network), report.

        Between steps it also waits until the lanes' copies are finished. Within a step it makes the
        compute stream wait for them instead, ahead of all that may touch these blocks next: the
        forward thread does not wait for the device.
        """
        with self._changed:
            self._closed = True
            self._wait_for(lambda: not self._writing)
            self._changed.notify_all()
            marks, self._last_marks = self._last_marks, {}
            outcome = self._outcome()
        for mark in marks.values():
            if mark.done():
                continue
            if self.plan.sync:
                mark.hold_compute()
            else:
                mark.wait()
        return outcome

    def ended(self, outcome: LoadOutcome) -> None:
        """Report what ``close`` returned in the job's span."""
        if not self.span.is_on:
            return
        failed = len(outcome.failed_blocks)
        error = f"{failed} blocks are computed instead" if failed else None
        chunks = len({load.move.prefix_hash for load in self.plan.moves})
        span, self.span = self.span, NO_SPAN
        span.end(
            error,
            namespace=self.plan.namespace,
            chunks=chunks,
            bytes=outcome.nbytes,
            failed_blocks=failed,
            within_step=self.plan.sync,
        )

    def _outcome(self) -> LoadOutcome:
        return LoadOutcome(
            self.plan.request_id,
            self._failed_blocks(),
            frozenset(self._rejected),
            nbytes=self._nbytes,
            seconds=self._last - self.started,
            first_s=None if self._first is None else self._first - self.started,
        )

    def _wait_while(self, lacking: Callable[[int], bool]) -> None:
        """Wait until no move that is wanted and under way is ``lacking``, or for the deadline.

        One after the other: what a move no longer lacks, or is no longer wanted, stays so. Asking
        all of them again whenever something was written would take the time of their square.
        """
        for i in sorted(
            self._unfinished, reverse=True
        ):  # usually the last is written last: one wake-up

            def is_there(i: int = i) -> bool:
                if i not in self._unfinished or not self._wanted(self.plan.moves[i]):
                    return True
                return not lacking(i)

            if not is_there() and not self._wait_for(is_there, until=lambda: self.deadline):
                return

    def _wait_for(
        self, holds: Callable[[], bool], until: Callable[[], float] | None = None
    ) -> bool:
        """Wait until ``holds()``, or the time that ``until`` says; False if that came first. Only
        what makes it hold wakes this thread, which on a busy machine costs as much as a frame."""
        self._awaited.append(holds)
        try:
            while not holds():
                left_s = None if until is None else until() - self._clock()
                if not self._changed.wait(left_s):
                    return False
            return True
        finally:
            self._awaited.remove(holds)

    def _tell(self) -> None:
        """Something changed: wake the threads that wait for it."""
        if any(holds() for holds in self._awaited):
            self._changed.notify_all()

    def _lacks(self, index: int, group: int, layer: int) -> bool:
        in_group = self.plan.moves[index].move.group == group
        return in_group and bool((self._filled[index] & ~self._written[index]) >> layer & 1)

    def _fail_from(self, chunk: int) -> None:
        if self._failed_chunk is None or chunk < self._failed_chunk:
            self._failed_chunk = chunk

    def _wanted(self, load: LoadMove) -> bool:
        if self._closed or self._clock() >= self.deadline:
            return False
        return self._failed_chunk is None or load.move.chunk < self._failed_chunk

    def _failed_blocks(self) -> frozenset[int]:
        first = self._failed_chunk
        for i in self._unfinished:
            chunk = self.plan.moves[i].move.chunk
            first = chunk if first is None else min(first, chunk)
        if first is None:
            return frozenset()
        return frozenset(
            block
            for load in self.plan.moves
            if load.move.chunk >= first
            for block in load.move.block_ids
        )
