"""Loads from the agent's arena: the agent fetches and verifies, this copies to the paged cache.

One thread opens payloads in batches, in the order of their chunks, sleeps until the agent has
verified more of them, and gives the lane what is new of all of them at once, from where it is. A
lease ends when the lane has read its memory. A block is loaded only if its last byte was verified,
and its payload is the chunk that was asked for. Any fault is a miss, and so is no agent: the move
fails, and all later chunks of the same plan. Nothing raises into the forward thread.
"""

import logging
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from threading import Condition, Event, Lock, Thread
from time import monotonic, sleep

import numpy as np

from objkv.agent.client import AgentConnection, ArenaLease
from objkv.agent.memory.arena import CellState, Progress
from objkv.agent.messages import MissReason, Urgency
from objkv.background import Alarm, join_all
from objkv.codec.header import identities
from objkv.codec.payload import frame_pages
from objkv.codec.values import CHUNK_AT, Claim, Header
from objkv.errors import PayloadError, TransferError
from objkv.telemetry import Recorder
from objkv.tracing import NO_SPAN, NO_TRACING, Span, Tracing
from objkv.transfer.lanes import Bools, Ints, Lane, Mark
from objkv.transfer.layouts import ForeignLayoutError, PayloadLayout, PayloadLayouts, SourceShape
from objkv.transfer.loading.connection import LOOK_S, CopyUnknownError, LoadConnection
from objkv.transfer.paging import PagedGroup
from objkv.transfer.plan import LoadOutcome, LoadPlan, MoveColumn
from objkv.transfer.registration import ArenaRegistration
from objkv.transfer.slabs import Slab, SlabsExhaustedError

logger = logging.getLogger(__name__)
_COPIES_S = 1.0
"""How long ``close`` waits for copies to the device, which write into blocks."""
_CLOSE_LOOK_S = 1e-3
_IDLE_S = 5.0
_SLICE_BYTES = 16 << 20
"""Bytes given to the lane at once if a step waits for the first layers."""
_ENDED = -1
"""Instead of a payload's next row: the lane gets nothing more of it."""
_REFUSED = frozenset((MissReason.MISSING, MissReason.CORRUPT))
_COUNTED = {
    MissReason.NO_ROOM: "load_refused",
    MissReason.MISSING: "load_ghosts",
    MissReason.CORRUPT: "load_corrupt",
    MissReason.LATE: "",
}
"""Counters of misses. All others are errors."""


@dataclass(frozen=True, slots=True)
class LoadLimits:
    """Bounds of the loader."""

    queue_max: int
    """Moves that may wait. A plan fails from the first move beyond this limit, with its chunk."""
    deadline_s: float
    """For loads between steps."""
    step_deadline_s: float
    """For loads within the step."""
    join_s: float = 5.0
    """How long ``close`` waits for threads that are still on the network."""


class LoadJob:
    """One load in progress: which moves succeeded, and the fence around its blocks. Thread-safe.

    It writes into blocks only between ``begin_write`` and ``end_write``, with no thread on the
    network, and no copy is left when ``poll`` or ``close`` has returned the outcome. Blocks may be
    reused from then on.
    """

    def __init__(
        self,
        plan: LoadPlan,
        shapes: Sequence[SourceShape],
        deadline: float,
        clock: Callable[[], float],
        after: Mark,
        span: Span = NO_SPAN,
    ) -> None:
        """``shapes``: of the plan's sources, each with rows that the rank needs. ``after``: what
        copies must follow, because earlier kernels may use these blocks."""
        self.plan, self._moves, self._shapes = plan, plan.moves, shapes
        self.after, self.started, self.span = after, clock(), span
        self.deadline = deadline
        """Time on ``clock``. Everything not loaded by then is a miss."""
        self.request_ended = False
        """Whether nothing waits for the load any more, so that it cannot fail."""
        self._clock = clock
        self._changed = Condition()
        self._needed = len(plan.moves)
        """The leading moves that are needed still. Those from the first failed chunk on are not."""
        self._marks: dict[tuple[int, int], Mark] = {}
        """The last mark of each group's layers, for a load within a step."""
        self._last_mark: Mark | None = None
        """It covers the earlier ones: all copies of a load are of one lane."""
        self._rejected: set[tuple[str, bytes]] = set()
        self._writing, self._closed = 0, False
        self._nbytes, self._last = 0, self.started
        self._first: float | None = None

    # Made at first use, by the load thread, because a step waits for the forward thread. What
    # changes is made under the lock.

    @cached_property
    def nbytes(self) -> Ints:
        """About how many bytes the payload of each move has."""
        return self._each([shape.nbytes for shape in self._shapes])

    @cached_property
    def _ended(self) -> Bools:
        """Which moves have succeeded or failed."""
        return np.zeros(len(self._moves), np.bool_)

    @cached_property
    def _columns(self) -> tuple[Ints, Ints, Ints]:
        """Of each move: the first layer that is not in its blocks yet, for they come in order,
        where its layers end, and its group."""
        filled = [shape.filled for shape in self._shapes]
        groups = [source.group for source in self._moves.sources]
        starts, stops = [one.start for one in filled], [one.stop for one in filled]
        return self._each(starts), self._each(stops), self._each(groups)

    def _each(self, of_sources: Sequence[int]) -> Ints:
        found: Ints = np.array(of_sources, np.int64)[self._moves.table[MoveColumn.SOURCE]]
        return found

    def needed(self) -> int:
        """Return how many leading moves are needed: before any failed chunk, 0 if it is closed."""
        with self._changed:
            return self._open_moves()

    def begin_write(self, first: int) -> int:
        """Request permission to write moves from ``first`` on into their blocks. Returns where
        those end that may be written. If it is beyond ``first``, ``end_write`` must follow."""
        with self._changed:
            end = self._open_moves()
            if end > first:
                self._writing += 1
                if self._first is None:
                    self._first = self._clock()
            return end

    def end_write(self, moves: Sequence[int], layers: range, mark: Mark | None) -> None:
        """End permitted writes: ``layers`` of these moves, of one group, were verified and
        submitted before ``mark``. Without a mark no layer is recorded as written."""
        with self._changed:
            self._writing -= 1
            if mark is not None:
                self._last_mark = mark
                reached, _, groups = self._columns
                before = reached[moves]
                reached[moves] = np.where(before == layers.start, layers.stop, before)
                if self.plan.sync and layers:
                    group = int(groups[moves[0]])
                    self._marks |= {(group, layer): mark for layer in layers}
            self._changed.notify_all()

    def done(self, moves: Sequence[int], nbytes: int) -> None:
        """Record that moves, ``nbytes`` as stored, are verified and were given to the lane. They
        succeed if all their layers were written."""
        with self._changed:
            self._nbytes += nbytes
            self._last = self._clock()
            reached, stops, _ = self._columns
            lacking = reached[moves] < stops[moves]
            if lacking.any():
                self._fail_from(moves[int(lacking.argmax())])
            self._ended[moves] = True
            self._changed.notify_all()

    def fail(self, move: int, *, rejected: bool) -> None:
        """Record that a move failed. All later chunks fail with it."""
        with self._changed:
            self._fail_from(move)
            if rejected:
                self._rejected.add((self.plan.namespace, self._moves.prefix_hash(move)))
            self._ended[move] = True
            self._changed.notify_all()

    def cancel(self, *, request_ended: bool = False) -> None:
        """Have what is not written by now fail. ``request_ended``: see ``Loader.cancel``."""
        with self._changed:
            self.request_ended = request_ended and not self._is_over()
            self.deadline = self._clock()
            self._changed.notify_all()

    def is_over(self) -> bool:
        """Whether each move that is needed has succeeded or failed, or the deadline has passed."""
        with self._changed:
            return self._is_over()

    def wait_over(self) -> None:
        """Block until the load is over. Moves fail as in ``wait_layer``."""
        with self._changed:
            self._changed.wait_for(self._is_over, self.deadline - self._clock())
            reached, stops, _ = self._columns
            self._fail_first(reached < stops)

    def wait_layer(self, group: int, layer: int) -> Mark | None:
        """Block until ``layer`` of ``group`` was submitted to the lane for every move that is
        still needed, or the deadline has passed. Returns the mark that computing must wait for. A
        move that lacks the layer by then has failed, even if a write in progress still completes:
        the layer is computed without it."""
        with self._changed:
            reached, stops, groups = self._columns
            waited = (groups == group) & (layer < stops)
            self._changed.wait_for(
                lambda: self._is_over() or not (waited & (reached <= layer))[: self._needed].any(),
                self.deadline - self._clock(),
            )
            self._fail_first(waited & (reached <= layer))
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

        Never waits for the network. For a load within a step the compute stream waits for the
        lane's copies, before anything else can touch these blocks, so that the forward thread need
        not. For a load between steps the thread waits for them, for at most ``seconds``.
        """
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._writing)
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
            sleep(_CLOSE_LOOK_S)
        return outcome

    def reported(self, outcome: LoadOutcome) -> None:
        """End the job's trace span with the outcome that ``close`` returned."""
        failed, error = len(outcome.failed_blocks), None
        if failed:
            error = f"{failed} blocks are computed instead"
        if failed and self.request_ended:
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
        ended, blocks = self._ended[: self._needed], frozenset[int]()
        failed = self._needed if ended.all() else int(ended.argmin())
        if failed < len(self._moves):
            blocks = self._moves.blocks_from(self._moves.chunks[failed])
        return LoadOutcome(
            self.plan.request_id,
            blocks,
            frozenset(self._rejected),
            nbytes=self._nbytes,
            seconds=self._last - self.started,
            first_s=None if self._first is None else self._first - self.started,
        )

    def _is_over(self) -> bool:
        has_ended = bool(self._ended[: self._needed].all())
        return self._closed or has_ended or self._clock() >= self.deadline

    def _open_moves(self) -> int:
        return 0 if self._closed or self._clock() >= self.deadline else self._needed

    def _fail_first(self, lacking: Bools) -> None:
        """Fail the first of the moves that are ``lacking`` something, and all later chunks."""
        if lacking.any():
            self._fail_from(int(lacking.argmax()))

    def _fail_from(self, move: int) -> None:
        chunks = self._moves.chunks
        self._needed = min(self._needed, bisect_left(chunks, chunks[move]))


class _Batch:
    """Payloads of one load that were opened together, in columns. Belongs to the load thread."""

    def __init__(self, job: LoadJob, part: range) -> None:
        """``part``: the moves that read the payloads, by whose numbers the columns go."""
        self.job, self.part, moves = job, part, job.plan.moves
        rows = [MoveColumn.SOURCE, MoveColumn.FIRST_BLOCK, MoveColumn.IDS, MoveColumn.IDS_END]
        source, first, ids, ids_end = moves.table[rows, part.start : part.stop]
        forms = zip(source.tolist(), first.tolist(), (ids_end - ids).tolist(), strict=True)
        self.forms: dict[int, tuple[int, int, int]] = dict(zip(part, forms, strict=True))
        """Of each payload the position of its source, the first block that is read, and how many.
        """
        self.claims = moves.claims(job.plan.namespace, part)
        texts = identities(job.plan.namespace, self.claims.fields, self.claims)
        self.identities = dict(zip(part, texts, strict=True))
        self.leases: dict[int, ArenaLease] = {}
        self.progress: dict[int, Progress] = {}
        """What the agent has verified of each payload."""
        self.layouts: dict[int, PayloadLayout] = {}
        """Those of payloads that are the chunks that were asked for."""
        self.headers: dict[int, Header] = {}
        """Of payloads that are verified again."""
        self.rows = dict.fromkeys(part, 0)
        """The next row of each payload to be given to the lane, or ``_ENDED``."""
        self.left = list(part)
        """The payloads that are still being read."""
        self.is_stalled = False
        """Whether rows wait for a slab that the device is reading."""
        self.mark: Mark | None = None
        """After what the lane was given last, None if it was given nothing."""

    def claim(self, n: int) -> Claim:
        """Return what a payload is to be."""
        return self.claims.claim(list(self.claims)[n - self.part.start])

    def payload(self, n: int, arena: memoryview) -> memoryview:
        """Return the memory of a payload."""
        progress = self.progress[n]
        return arena[progress.offset : progress.offset + progress.nbytes]

    def pieces(self) -> list[tuple[range, list[int]]]:
        """Return rows that are verified and not given to the lane yet, with all payloads that have
        them in one layout, for equally many blocks: the first layers of all payloads first."""
        alike: dict[tuple[PayloadLayout, int, int, tuple[int, int, int]], list[int]] = {}
        for n in self.left:
            if (layout := self.layouts.get(n)) is not None:
                until = min(self.progress[n].frames // layout.columns, layout.rows.stop)
                alike.setdefault((layout, self.rows[n], until, self.forms[n]), []).append(n)
        pieces: list[tuple[range, list[int]]] = []
        for (layout, start, until, _), some in alike.items():
            step = max(1, until - start)
            if self.job.plan.sync:
                row_bytes = int(layout.sizes[layout.rows.start])
                step = max(1, _SLICE_BYTES // (row_bytes * len(some)))
            pieces += [(range(at, min(at + step, until)), some) for at in range(start, until, step)]
        return sorted(pieces, key=lambda piece: piece[0].start)


class Loader:
    """Executes load plans by leases of the agent's payloads. The forward thread, which calls all
    methods, waits for the network only if it needs a layer now, or has nothing to compute."""

    def __init__(
        self,
        groups: Mapping[int, PagedGroup],
        lane: Lane,
        connect: Callable[[], AgentConnection],
        *,
        verify: bool = False,
        limits: LoadLimits,
        recorder: Recorder,
        clock: Callable[[], float] = monotonic,
        tracing: Tracing = NO_TRACING,
        on_device: ArenaRegistration | None = None,
    ) -> None:
        """``connect``: returns a new connection with an arena, or raises ``ObjkvError``. It is
        called again when the connection is lost. ``verify``: whether this worker verifies frames
        again, see the setting ``agent_verify``. ``on_device``: see the attribute."""
        self._layouts = PayloadLayouts(groups)
        self._lane, self._limits, self._recorder = lane, limits, recorder
        self._clock, self._tracing, self._verify = clock, tracing, verify
        self.on_device = on_device
        """How the device reads the arena, None if the cache is in host memory."""
        self._jobs: dict[str, LoadJob] = {}
        self._over = Event()
        """Set when a load may be over."""
        self.link = LoadConnection(connect, on_device, limits.deadline_s)
        self._lock = Lock()
        self._waiting: deque[tuple[LoadJob, range]] = deque()
        """Moves that are not opened yet. Guarded by the lock, with ``_closed``."""
        self._closed = False
        self._batches: list[_Batch] = []
        """Those of which a payload is still being read."""
        self._alarm = Alarm()
        self.link.connect()
        self._thread = Thread(target=self._work, name="objkv-load", daemon=True)
        self._thread.start()

    @property
    def in_flight(self) -> int:
        """Number of loads that are not over. Their copies to a device may take longer."""
        return sum(not job.is_over() for job in self._jobs.values())

    def mark_compute(self) -> Mark:
        """Return a mark after all work submitted so far to the current compute stream."""
        return self._lane.mark_compute()

    def submit(self, plan: LoadPlan, after: Mark | None = None) -> None:
        """Start a plan. ``take_finished`` returns its outcome. Never waits, never raises.
        ``after``: a mark from before the forward pass of this step. By default copies follow
        everything submitted so far, and so the whole forward pass if it has begun."""
        shapes = [self._layouts.of(source) for source in plan.moves.sources]
        plan = replace(plan, moves=plan.moves.only([bool(shape.filled) for shape in shapes]))
        limit_s = self._limits.step_deadline_s if plan.sync else self._limits.deadline_s
        deadline = self._clock() + limit_s
        after = after or self._lane.mark_compute()  # earlier kernels may still use these blocks
        span = self._tracing.begin("objkv.load", plan.traceparent, request_id=plan.request_id)
        job = LoadJob(plan, shapes, deadline, self._clock, after, span)
        assert plan.request_id not in self._jobs
        self._jobs[plan.request_id] = job  # nothing raises from here on: one outcome per plan
        taken, count = 0, len(plan.moves)
        with self._lock:
            if serves := not self._closed and self.link.is_open:
                waiting = sum(len(moves) for _, moves in self._waiting)
                taken = min(count, max(0, self._limits.queue_max - waiting))
                put = self._waiting.appendleft if plan.sync else self._waiting.append
                put((job, range(taken)))
                self._alarm.set()
        if taken < count:
            self._recorder.count("load_refused" if serves else "load_errors", count - taken)
            job.fail(taken, rejected=False)  # and with it all later chunks

    def wait_layer(self, group: int, layer: int) -> None:
        """Make computing wait for one layer of all sync plans: block until the layer was submitted
        to the lane, then make the compute stream wait for its mark."""
        for job in self._jobs.values():
            if job.plan.sync and (mark := job.wait_layer(group, layer)) is not None:
                mark.hold_compute()

    def cancel(self, request_id: str, *, request_ended: bool = False) -> None:
        """Stop fetching for a request. Its outcome is still reported. ``request_ended``: what did
        not fail before is no failure then, because nothing is recomputed."""
        if job := self._jobs.get(request_id):
            job.cancel(request_ended=request_ended)
        self._alarm.set()

    def wait_over(self, seconds: float) -> None:
        """Block until a load between steps is over, for at most ``seconds``. Returns at once if
        there is none. For a thread with nothing to compute."""
        end = monotonic() + seconds
        while (left_s := end - monotonic()) > 0:
            self._over.clear()
            jobs = [job for job in self._jobs.values() if not job.plan.sync]
            if not jobs or any(job.poll() for job in jobs):
                return
            # Copies to a device end without a call, so they are polled.
            self._over.wait(min(left_s, LOOK_S) if any(j.is_over() for j in jobs) else left_s)

    def take_finished(self, *, sync: bool) -> list[LoadOutcome]:
        """Return the outcomes of plans that ended since the last call, each once. ``sync``: of
        loads within the step, for which this waits up to their deadlines. Otherwise of loads
        between steps, for which it never waits."""
        outcomes: list[LoadOutcome] = []
        for request_id, job in list(self._jobs.items()):
            if job.plan.sync != sync:
                continue
            if sync:
                job.wait_over()
            if (outcome := job.close() if sync else job.poll()) is not None:
                del self._jobs[request_id]
                outcomes.append(outcome)
                try:
                    self._count(job, outcome)
                except Exception:  # vLLM waits for ever for a load that is never reported
                    logger.exception("load not counted request=%s", request_id)
        return outcomes

    def close(self) -> None:
        """Stop the thread. Unfinished plans never touch their blocks again. Idempotent."""
        with self._lock:
            self._closed = True
        end = monotonic() + _COPIES_S  # for all loads: a device that hangs ends none of them
        for job in self._jobs.values():
            job.reported(job.close(max(0.0, end - monotonic())))
        self._alarm.set()
        if join_all([self._thread], self._limits.join_s):
            logger.warning("copies of loads did not finish on the device, going on")
            return
        if self.on_device is not None and not self.on_device.join(self._limits.join_s):
            logger.warning("memory of the agent is still being unlocked, going on")

    def _count(self, job: LoadJob, outcome: LoadOutcome) -> None:
        self._recorder.observe("load_seconds", self._clock() - job.started)
        self._recorder.count("loads")
        if job.span.is_on:
            job.reported(outcome)
        if outcome.failed and not job.request_ended:
            self._recorder.count("load_failures")
            self._recorder.count("load_failed_blocks", len(outcome.failed_blocks))

    def _work(self) -> None:
        try:
            self._lane.adopt_thread()
        except Exception:  # a dead thread would have every load wait for its deadline
            logger.exception("load thread not prepared")
        try:
            while not self._closed:
                try:
                    self._step()
                except Exception:  # a dead thread would hang every later load
                    self._recorder.count("load_errors")
                    logger.exception("loads failed unexpectedly")
                    self._disconnect()
        finally:
            try:
                self._disconnect()
            finally:
                self._alarm.close()

    def _step(self) -> None:
        """Do what can be done now, then sleep until there is more."""
        link = self.link
        if link.agent is None and not link.connect():
            link.await_retry(self._alarm)
            return
        try:
            self._open()
            # Those that a step waits for get slabs first.
            for batch in sorted(self._batches, key=lambda batch: not batch.job.plan.sync):
                self._read(batch)
            self._batches = [batch for batch in self._batches if batch.left]
            link.release_ended()
            goes_on = link.wait(self._idle_s(), self._alarm)
        except TransferError as exc:
            link.failure_log.failed(exc)
            self._disconnect(keep=isinstance(exc, CopyUnknownError))
            return
        if not goes_on and not link.connect():
            self._disconnect()

    def _idle_s(self) -> float:
        """Return how long nothing is due, unless something wakes the thread."""
        if self._waiting and min(self._room()) > 0:
            return 0.0
        if self.link.ended or any(batch.is_stalled for batch in self._batches):
            return LOOK_S
        left = [batch.job.deadline - self._clock() for batch in self._batches]
        return max(0.0, min(left, default=_IDLE_S))

    def _open(self) -> None:
        """Open the next payloads of one job, as many as there is room for."""
        part = range(0)
        with self._lock:
            while self._waiting and not part and min(room := self._room()) > 0:
                job, moves = self._waiting[0]  # until nothing can fail any more
                sizes = job.nbytes[moves.start : min(moves.stop, job.needed())]
                count = min(room[0], int(np.searchsorted(np.cumsum(sizes) - sizes, room[1])))
                self._waiting.popleft()
                part, rest = moves[:count], moves[count:]
                if part and rest:
                    self._waiting.appendleft((job, rest))
        if not part:
            return
        leases = None
        try:
            batch = _Batch(job, part)
            leases = self.link.open(
                batch.claims,
                int(sizes[:count].sum()),
                deadline_s=job.deadline - self._clock(),
                urgency=Urgency.IN_STEP if job.plan.sync else Urgency.BETWEEN_STEPS,
            )
        finally:
            if leases is None:  # the agent is replaced, or they fail with all others
                with self._lock:
                    self._waiting.appendleft((job, part))
        if leases is not None:
            batch.leases = dict(zip(part, leases, strict=True))
            batch.progress = {n: lease.progress for n, lease in batch.leases.items()}
            self._batches.append(batch)

    def _room(self) -> tuple[int, int]:
        """Return the room for the next job in the queue, from which only this thread takes."""
        return self.link.room(in_step=self._waiting[0][0].plan.sync)

    def _read(self, batch: _Batch) -> None:
        """Give the lane what the agent has verified of a batch since the last call."""
        board = self.link.present.arena.board
        # A device has one copy for a whole payload, unless a step waits for single layers.
        streams = batch.job.plan.sync or not self._lane.per_span
        batch.is_stalled = False
        self._drop_unneeded(batch)
        for n in batch.left:
            progress = batch.progress[n]
            if batch.rows[n] == _ENDED:  # another one has failed
                break
            if progress.state is CellState.FILLING:
                progress = batch.progress[n] = board.read(batch.leases[n].cell)
            if progress.state is CellState.FAILED:
                reason = MissReason(progress.reason)
                if name := _COUNTED.get(reason, "load_errors"):
                    self._recorder.count(name)
                self._fail(batch, n, rejected=reason in _REFUSED)
            elif n not in batch.layouts and (
                progress.state is CellState.READY or (streams and progress.frames)
            ):
                self._identify(batch, n)
        try:
            while pieces := batch.pieces():
                for rows, some in pieces:
                    self._scatter(batch, rows, some)
        except SlabsExhaustedError:
            batch.is_stalled = True
        ready = [n for n in batch.left if batch.progress[n].state is CellState.READY]
        if given := [n for n in ready if batch.rows[n] == batch.layouts[n].rows.stop]:
            nbytes = sum([batch.progress[n].nbytes for n in given])
            self._recorder.count("load_bytes", nbytes)
            self._end(batch, given)
            batch.job.done(given, nbytes)
            self._over.set()

    def _identify(self, batch: _Batch, n: int) -> None:
        """Find out whether a payload is the chunk that was asked for, and its layout. This is the
        last check: at an offset that the agent mixes up is another chunk's payload."""
        arena, known = self.link.present.arena.view, self.link.layouts
        progress, text = batch.progress[n], batch.identities[n]
        at = progress.offset + CHUNK_AT
        key = progress.layout, batch.job.plan.moves.sources[batch.forms[n][0]]
        layout = known.get(key)
        if (
            layout is None
            or bytes(arena[at : at + len(text)]) != text
            or progress.nbytes != layout.nbytes
            or self._verify
        ):
            try:
                payload = batch.payload(n, arena)
                batch.headers[n], layout = self._layouts.read(payload, batch.claim(n))
            except Exception as exc:
                self._refuse(batch, n, exc)
                return
            if progress.layout:
                known[key] = layout
        batch.layouts[n], batch.rows[n] = layout, layout.rows.start

    def _scatter(self, batch: _Batch, rows: range, some: Sequence[int]) -> None:
        """Give the lane rows of payloads that are alike, as many as it can read and the job allows.
        Raises ``SlabsExhaustedError`` if it can read none, and ``CopyUnknownError`` if the memory
        of the frames may never be reused."""
        some = [n for n in some if batch.rows[n] == rows.start]
        if not some:
            return
        n, layout, slab = some[0], batch.layouts[some[0]], None
        memory = arena = self.link.present.arena.view
        try:
            starts = np.array([[batch.progress[n].offset] for n in some], np.int64)
            starts = starts + layout.starts[rows.start : rows.stop]
            if self.on_device is not None:
                sizes = layout.sizes[rows.start : rows.stop]
                which, memory, starts, slab = self.on_device.readable(starts, sizes)
                some, rows = [some[at] for at in which], rows[: starts.shape[1]]
            for n in some if self._verify else ():  # not those that come in a later slab
                for frame in layout.frames(rows):
                    frame_pages(batch.headers[n], frame, batch.payload(n, arena), None)
            n, given, slab = some[0], slab, None
            self._submit(batch, layout, rows, some, memory, starts, given)
        except TransferError:
            raise
        except Exception as exc:
            self._refuse(batch, n, exc)
        finally:
            if slab is not None:
                slab.release()

    def _submit(
        self,
        batch: _Batch,
        layout: PayloadLayout,
        rows: range,
        some: Sequence[int],
        memory: memoryview,
        starts: Ints,
        slab: Slab | None,
    ) -> None:
        """Submit rows of payloads, which start in ``memory`` at ``starts``, ``[payloads, rows]``.
        ``slab`` has that memory, if any does, and goes back when it is copied."""
        job, lane = batch.job, self._lane
        _, first_block, blocks = batch.forms[some[0]]
        some = some[: bisect_left(some, job.begin_write(some[0]))]
        if not some:
            if slab is not None:
                slab.release()
            self._drop_unneeded(batch)
            return
        mark, filled = None, range(0)
        try:
            lane.follow(job.after)
            ids = job.plan.moves.block_ids(some, blocks)
            layout.scatter(lane, rows, memory, starts[: len(some)], ids, first_block)
            first = layout.filled.start + rows.start - layout.rows.start
            filled = range(first, first + len(rows))
            batch.rows.update(dict.fromkeys(some, rows.stop))
        finally:
            try:
                mark = lane.mark()  # also after a fault: work may be submitted
                self.link.mark = batch.mark = mark
                if slab is not None:
                    slab.release(mark)
            except Exception as exc:
                if slab is not None:
                    slab.abandon()
                raise CopyUnknownError(f"the device failed: {exc}") from exc
            finally:  # closing the job waits for this call
                job.end_write(some, filled, mark)

    def _refuse(self, batch: _Batch, n: int, reason: Exception) -> None:
        """End a payload that cannot be loaded. It is a miss, like all later chunks."""
        request, is_corrupt = batch.job.plan.request_id, isinstance(reason, PayloadError)
        self._recorder.count("load_corrupt" if is_corrupt else "load_errors")
        if is_corrupt or isinstance(reason, ForeignLayoutError):
            logger.warning("payload refused request=%s reason=%s", request, reason)
        else:  # of this payload, such as too little memory of a device
            logger.error("load failed unexpectedly request=%s", request, exc_info=reason)
        if is_corrupt:  # before it fails: it may be made and saved again at once
            self.link.present.reject(batch.claim(n))
        self._fail(batch, n, rejected=is_corrupt)

    def _fail(self, batch: _Batch, n: int, *, rejected: bool) -> None:
        self._end(batch, [n])
        batch.job.fail(n, rejected=rejected)
        self._over.set()
        self._drop_unneeded(batch)

    def _drop_unneeded(self, batch: _Batch) -> None:
        if unneeded := batch.left[bisect_left(batch.left, batch.job.needed()) :]:
            self._recorder.count("load_given_up", len(unneeded))
            self._end(batch, unneeded)

    def _end(self, batch: _Batch, some: Sequence[int]) -> None:
        """Give the lane nothing more of some payloads."""
        batch.rows.update(dict.fromkeys(some, _ENDED))
        batch.left = [n for n in batch.left if batch.rows[n] != _ENDED]
        numbers = [batch.leases[n].number for n in some]
        self.link.end(numbers, int(batch.job.nbytes[some].sum()), batch.mark)

    def _disconnect(self, *, keep: bool = False) -> None:
        """Give up the connection. What the lane was not given fails. ``keep``: see ``retire``."""
        with self._lock:
            agent, self.link.agent = self.link.agent, None
            waiting, self._waiting = self._waiting, deque()
        lost = [(job, moves) for job, moves in waiting if moves]
        lost += [(batch.job, range(n, n + 1)) for batch in self._batches for n in batch.left]
        self._batches.clear()
        count = sum([max(0, min(moves.stop, job.needed()) - moves.start) for job, moves in lost])
        self._recorder.count("load_errors", count)
        for job, moves in lost:
            job.fail(moves.start, rejected=False)
        self._over.set()
        self.link.retire(agent, keep=keep)  # with all its leases
