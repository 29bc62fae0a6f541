"""One load in progress: which moves succeeded or failed, and the fence around its blocks.

The fence guarantees that this job writes into blocks only between ``enter`` and ``leave``, and that
no copy is left when ``poll`` or ``close`` has returned the outcome. Blocks may be reused from then
on. No thread is on the network between ``enter`` and ``leave``.
"""

import logging
import math
from collections.abc import Callable, Sequence
from threading import Condition
from time import monotonic, sleep

from objkv.tracing import NO_SPAN, Span
from objkv.transfer.lanes import Mark
from objkv.transfer.layouts import bits_of
from objkv.transfer.plan import LoadOutcome, LoadPlan

logger = logging.getLogger(__name__)
_LOOK_S = 1e-3


class LoadJob:
    """State of one plan on one worker. Thread-safe."""

    def __init__(
        self,
        plan: LoadPlan,
        filled: Sequence[int],
        deadline: float,
        clock: Callable[[], float],
        after: Mark | None = None,
        span: Span = NO_SPAN,
    ) -> None:
        """``filled``: the rank's layers that each move fills, one bit a layer. ``after``: a mark of
        the compute stream that copies must follow, because earlier kernels may use these blocks."""
        self.plan, self._moves = plan, plan.moves
        self.after = after
        self.deadline = deadline
        """Time on ``clock``. Everything not loaded by then is a miss."""
        self.started = clock()
        self.span = span
        self.request_ended = False
        """Whether nothing waits for the load any more, so that it cannot fail."""
        self._clock = clock
        self._changed = Condition()
        self._awaited: list[Callable[[], bool]] = []
        self._unfinished = set(range(len(plan.moves)))
        self._missing = list(filled)
        """The layers of each move that are not in their blocks yet."""
        self._marks: dict[tuple[int, int], Mark] = {}
        """The last mark of each group's layers, for a load within a step."""
        self._last_mark: Mark | None = None
        """It covers the earlier ones: all copies of a load are of one lane."""
        self._rejected: set[tuple[str, bytes]] = set()
        self._failed_chunk: int | None = None
        self._writing, self._closed = 0, False
        self._nbytes, self._last = 0, self.started
        self._first: float | None = None

    def wanted(self, index: int) -> bool:
        """Whether move ``index`` is still needed: no earlier chunk failed, and the job is open."""
        with self._changed:
            return self._wanted(index)

    def began(self) -> None:
        """Record that the first bytes of a payload have arrived. For the thread that reads all."""
        if self._first is None:
            self._first = self._clock()

    def enter(self, index: int) -> bool:
        """Request permission to write move ``index`` into its blocks. After True the caller must
        call ``leave``."""
        with self._changed:
            if not self._wanted(index):
                return False
            self._writing += 1
            return True

    def leave(self, index: int, layers: range, mark: Mark | None) -> None:
        """End the writes that ``enter`` allowed: ``layers`` of move ``index`` were verified and
        submitted to the lane before ``mark``. Without a mark no layer is recorded as written."""
        with self._changed:
            self._writing -= 1
            if mark is not None:
                self._last_mark = mark
                self._missing[index] &= ~bits_of(layers)
                if self.plan.sync:
                    group = self._moves.groups[index]
                    self._marks |= {(group, layer): mark for layer in layers}
            if self._awaited:
                self._wake()

    def done(self, index: int, nbytes: int) -> bool:
        """Record that move ``index``, ``nbytes`` as stored, is verified and was given to the lane.
        It has succeeded if all its layers are in their blocks. Returns whether the load is over."""
        with self._changed:
            self._nbytes += nbytes
            self._last = self._clock()
            if self._missing[index]:
                self._fail_from(self._moves.chunks[index])
            return self._end(index)

    def fail(self, index: int, *, rejected: bool) -> bool:
        """Record that move ``index`` failed. All later chunks fail with it. Returns whether the
        load is over."""
        with self._changed:
            self._fail_from(self._moves.chunks[index])
            if rejected:
                prefix_hash = self.plan.moves[index].move.prefix_hash
                self._rejected.add((self.plan.namespace, prefix_hash))
            return self._end(index)

    def cancel(self) -> None:
        """Cancel the load. Everything not written by now fails."""
        with self._changed:
            self.deadline = self._clock()
            self._changed.notify_all()

    def is_over(self) -> bool:
        """Whether every move that is still needed has succeeded or failed, or the deadline has
        passed."""
        with self._changed:
            return self._is_over()

    def wait_over(self) -> None:
        """Block until every move that is still needed has succeeded or failed, or the deadline
        has passed."""
        with self._changed:
            self._wait_while(lambda i: True)

    def wait_layer(self, group: int, layer: int) -> Mark | None:
        """Block until ``layer`` of ``group`` was submitted to the lane for every move that is
        still needed, or the deadline has passed. Returns the mark that computing must wait for.

        A move that lacks the layer by then has failed, because the layer is computed without it,
        even if a write in progress still completes.
        """
        with self._changed:
            self._wait_while(lambda i: self._lacks(i, group, layer))
            for i in range(len(self._moves.groups)):
                if self._lacks(i, group, layer):
                    self._fail_from(self._moves.chunks[i])
            return self._marks.get((group, layer))

    def poll(self) -> LoadOutcome | None:
        """Return the outcome if the load is over and none of its copies is left. Never waits. After
        the first call on a load that is over, nothing more is written."""
        with self._changed:
            if not self._is_over():
                return None
            self._closed = True
            if self._writing:
                return None
            mark = self._last_mark
            return self._outcome() if mark is None or mark.done() else None

    def close(self, seconds: float = math.inf) -> LoadOutcome:
        """Forbid further writes, wait for writes in progress and return the outcome.

        It never waits for the network. For a load within a step it makes the compute stream wait
        for the lane's copies, before anything else can touch these blocks, so the forward thread
        does not wait for the device. For a load between steps it waits for them, for at most
        ``seconds``.
        """
        with self._changed:
            self._closed = True
            self._wait_for(lambda: not self._writing)
            self._changed.notify_all()
            mark, self._last_mark = self._last_mark, None
            outcome = self._outcome()
        end = monotonic() + seconds
        while mark is not None and not mark.done():
            if self.plan.sync:
                mark.hold_compute()
                break
            if monotonic() >= end:
                logger.error("copies of loads did not finish on the device, going on")
                break
            sleep(_LOOK_S)
        return outcome

    def ended(self, outcome: LoadOutcome) -> None:
        """End the job's trace span with the outcome that ``close`` returned."""
        if not self.span.is_on:
            return
        failed, error = len(outcome.failed_blocks), None
        if failed:
            error = f"{failed} blocks are computed instead"
            if self.request_ended:
                error = "the request ended first"
        span, self.span = self.span, NO_SPAN
        span.end(
            error,
            namespace=self.plan.namespace,
            chunks=len(set(self._moves.chunks)),
            bytes=outcome.nbytes,
            failed_blocks=failed,
            within_step=self.plan.sync,
        )

    def _outcome(self) -> LoadOutcome:
        chunks = [self._moves.chunks[i] for i in self._unfinished]
        if self._failed_chunk is not None:
            chunks.append(self._failed_chunk)
        return LoadOutcome(
            self.plan.request_id,
            self.plan.moves.blocks_from(min(chunks)) if chunks else frozenset(),
            frozenset(self._rejected),
            nbytes=self._nbytes,
            seconds=self._last - self.started,
            first_s=None if self._first is None else self._first - self.started,
        )

    def _wait_while(self, lacking: Callable[[int], bool]) -> None:
        """Wait until no needed, unfinished move is ``lacking``, or until the deadline.

        Checks the moves one after another, because a move that is no longer lacking or no longer
        needed stays so. Checking all of them after each write would take quadratic time.
        """
        # Usually the last is written last: one wake-up.
        for i in sorted(self._unfinished, reverse=True):

            def is_settled(i: int = i) -> bool:
                return i not in self._unfinished or not self._wanted(i) or not lacking(i)

            if not self._wait_for(is_settled, until=lambda: self.deadline):
                return

    def _wait_for(
        self, holds: Callable[[], bool], until: Callable[[], float] | None = None
    ) -> bool:
        """Wait for ``holds()``. Returns False if the time ``until()`` comes first.

        This thread is woken only when its condition holds, because on a busy machine a wake-up
        costs as much as decoding a frame.
        """
        self._awaited.append(holds)
        try:
            while not holds():
                left_s = None if until is None else until() - self._clock()
                if not self._changed.wait(left_s):
                    return False
            return True
        finally:
            self._awaited.remove(holds)

    def _end(self, index: int) -> bool:
        self._unfinished.discard(index)
        if self._awaited:
            self._wake()
        if self._unfinished and self._failed_chunk is None:
            return False
        return self._is_over()

    def _wake(self) -> None:
        """Wake the waiting threads if the condition of one of them holds."""
        if any(holds() for holds in self._awaited):
            self._changed.notify_all()

    def _lacks(self, index: int, group: int, layer: int) -> bool:
        return self._moves.groups[index] == group and bool(self._missing[index] >> layer & 1)

    def _fail_from(self, chunk: int) -> None:
        if self._failed_chunk is None or chunk < self._failed_chunk:
            self._failed_chunk = chunk

    def _is_over(self) -> bool:
        if not self._unfinished or self._closed or self._clock() >= self.deadline:
            return True
        first = self._failed_chunk
        # The columns of a load that succeeds are never read: there is no time for them.
        return first is not None and all(self._moves.chunks[i] >= first for i in self._unfinished)

    def _wanted(self, index: int) -> bool:
        if self._closed or self._clock() >= self.deadline:
            return False
        return self._failed_chunk is None or self._moves.chunks[index] < self._failed_chunk
