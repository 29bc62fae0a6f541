"""Loads from the agent's arena: the agent fetches and verifies, this copies to the paged cache.

One thread opens payloads in the order of their chunks, sleeps until the agent has verified more of
them, and gives the frames to the lane where they are. A lease ends when the lane has read its
memory. A block is loaded only if its last byte was verified and its payload is as long as its
header states. Any fault is a miss: the move fails, and all later chunks of the same plan. Without
an agent every load is a miss until there is one again. Nothing raises into the forward thread.
"""

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from threading import Event, Lock, Thread
from time import monotonic, sleep

from objkv.agent.client import AgentConnection, ArenaLease, leases_of
from objkv.agent.memory.arena import BOARD_BYTES, CellState, Progress
from objkv.agent.messages import Claims, MissReason, Urgency
from objkv.background import Alarm, join_all, wait_for
from objkv.codec.payload import Claim, Header, frame_pages, read_claimed
from objkv.errors import ObjkvError, PayloadError, TransferError
from objkv.keys.chunk import ChunkKey
from objkv.telemetry import Recorder, Trouble
from objkv.tracing import NO_SPAN, NO_TRACING, Span, Tracing, now_ns
from objkv.transfer.lanes import HostLane, Ints, Lane, Mark
from objkv.transfer.layouts import ForeignLayoutError, PayloadLayout, PayloadLayouts, bits_of
from objkv.transfer.loading.job import LoadJob
from objkv.transfer.paging import PagedGroup
from objkv.transfer.plan import LoadOutcome, LoadPlan, Source
from objkv.transfer.registration import DeviceFrames
from objkv.transfer.slabs import Slab, SlabsExhaustedError

logger = logging.getLogger(__name__)
_LOOK_S = 3e-4
"""How often the device is polled while it reads leased memory."""
_COPIES_S = 1.0
"""How long ``close`` waits for copies to the device, which write into blocks."""
_IDLE_S = 5.0
_RETRY_S, RETRY_MAX_S = 0.1, 5.0
"""Pauses between attempts to reach an agent."""
WINDOW, _WINDOW_BYTES = 64, 512 << 20
"""Payloads open at once, so that one long prompt does not lease the whole arena."""
_WINDOW_SHARE = 2
"""Divisor: of a small arena, they take at most this fraction."""
_BATCH_BYTES = 128 << 20
"""Payloads opened at once. Their pages are copied before the thread looks for more urgent loads.
Counts those of other ranks too: if a rank of TP 8 opened as many of its own, loads of all ranks
took 1.25 times as long, although 5 % less processor time (2 cores, 2026-11)."""
_TRACED_PAYLOADS_MAX = 64
"""Payloads traced per load. A long prompt has hundreds, which all look alike."""
_KEPT: list[AgentConnection] = []
"""Connections whose memory a hung device may still read. They end with the process."""
_REFUSED = frozenset((MissReason.MISSING, MissReason.CORRUPT))
_COUNTED = {
    MissReason.NO_ROOM: "load_refused",
    MissReason.MISSING: "load_ghosts",
    MissReason.CORRUPT: "load_corrupt",
    MissReason.LATE: "",
}
"""Counters of misses. All others are errors."""


class _UnwantedError(TransferError):
    """The bytes are no longer needed: the job was closed, or an earlier chunk failed."""


class _CopyUnknownError(TransferError):
    """The device failed, and nothing shows until when it reads the frames."""


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


class _Reading:
    """One open payload, for one move. Belongs to the load thread."""

    def __init__(self, job: LoadJob, index: int, layouts: PayloadLayouts, lane: Lane) -> None:
        load = job.plan.moves[index]
        move = load.move
        key = ChunkKey(job.plan.namespace, move.prefix_hash, move.group, load.shard)
        self.claim = Claim(key, move.parent_hash, move.token_start, move.token_end)
        self.job, self.index = job, index
        self._source, self._layouts = Source(move.group, load.shard), layouts
        self.nbytes = layouts.nbytes(self._source)
        """Bytes of the payload in the arena, or about as many until it is there."""
        self._layout: PayloadLayout | None = None
        self._lane, self._first_block = lane, move.first_block
        self._ids: Ints = job.plan.moves.block_ids(index)[None]
        self.lease: ArenaLease | None = None
        self._header: Header | None = None
        self.frames = 0
        """Leading frames that were looked at."""
        self._rows = 0
        """Leading rows of the payload that were given to the lane, or are not needed."""
        self.mark: Mark | None = None
        """A mark after all copies so far. The frames must stay as they are until it is done."""
        self.is_copied = False
        """Whether nothing more will be given to the lane."""
        self.is_stalled = False
        """Whether frames wait for a slab that the device is reading."""
        self._span: Span = NO_SPAN
        self._came_ns = 0
        if job.span.is_on and index < _TRACED_PAYLOADS_MAX:
            self._span = job.span.child("objkv.get", chunk=move.chunk)

    def end(self, error: str | None = None) -> None:
        """End the trace of it: everything was given to the lane, or it is a miss."""
        self.is_copied = True
        span, self._span = self._span, NO_SPAN
        if not span.is_on:
            return
        if self._came_ns:
            span.part("objkv.copy", self._came_ns, now_ns())
        span.end(error, bytes=self.nbytes)

    def read(
        self,
        progress: Progress,
        arena: memoryview,
        on_device: DeviceFrames | None = None,
        *,
        verify: bool,
    ) -> None:
        """Give the lane the frames that are new. Raises ``PayloadError`` if the payload is not what
        this rank expects or, with ``verify``, a frame is not what its checksum promises, and
        ``SlabsExhaustedError`` if the device cannot read more for now."""
        self.nbytes = progress.nbytes
        payload = arena[progress.offset : progress.offset + progress.nbytes]
        header = self._header or self._read_header(payload)
        layout = self._layout
        assert layout is not None
        frames = min(progress.frames, len(header.frames.layers))
        until = min(frames // layout.columns, layout.rows.stop)
        while self._rows < until:
            rows = range(max(self._rows, layout.rows.start), until)
            if verify:
                for n in layout.frames(rows):
                    frame_pages(header, n, payload, None)
            memory, slab = arena, None
            starts = layout.starts[None, rows.start : rows.stop] + (
                progress.offset + header.data_start
            )
            if on_device is not None and rows:
                sizes = layout.sizes[rows.start : rows.stop]
                _, memory, starts, slab = on_device.take(starts, sizes)
                rows = rows[: starts.shape[1]]
            self._write(layout, rows, memory, starts, slab)
            self._rows = rows.stop if rows else until
        self.frames = frames  # not before: without a slab they are looked at again

    def _read_header(self, payload: memoryview) -> Header:
        """Read what every payload has in front of its frames. Raises ``PayloadError``."""
        source, nbytes = self._source, len(payload)
        expected = self._layouts.expected(source, nbytes)
        header = read_claimed(payload, self.claim, expected)
        found = header.frames
        if found.ends[-1] != nbytes or set(found.codecs) != {"none"}:
            raise PayloadError(f"{nbytes} bytes in the arena, not {header.nbytes}")
        self._layout = self._layouts.of(source, nbytes, found.layers)
        self._header = header
        self._came_ns = now_ns() if self._span.is_on else 0
        self.job.began()
        return header

    def _write(
        self,
        layout: PayloadLayout,
        rows: range,
        memory: memoryview,
        starts: Ints,
        slab: Slab | None,
    ) -> None:
        """Submit rows that the rank needs, if any.

        Raises ``_UnwantedError`` if the job allows no more writes, and ``_CopyUnknownError`` if the
        memory of the frames may never be reused.

        Args:
            memory: has the raw bytes of the rows, each from its place in ``starts`` on, ``[1,
                rows]``.
            slab: has that memory, if any slab does, and goes back when it is copied.
        """
        job, lane = self.job, self._lane
        if not job.enter(self.index):
            if slab is not None:
                slab.release()
            raise _UnwantedError("the load was given up")
        mark, filled = None, range(0)
        try:
            if rows:
                if job.after is not None:
                    lane.follow(job.after)
                layout.scatter(lane, rows, memory, starts, self._ids, self._first_block)
                first = layout.filled.start + rows.start - layout.rows.start
                filled = range(first, first + len(rows))
        finally:
            try:
                if rows:
                    self.mark = mark = lane.mark()  # also after a fault: work may be submitted
                    if slab is not None:
                        slab.release_after(mark)
            except Exception as exc:
                if slab is not None:
                    slab.strand()
                raise _CopyUnknownError(f"the device failed: {exc}") from exc
            finally:  # closing the job waits for this call
                job.leave(self.index, filled, mark)


class Loader:
    """Executes load plans by leases of the agent's payloads.

    The forward thread calls ``submit``, ``take_finished`` and ``wait_layer``. It waits for the
    network only if it needs a layer now. ``wait_over`` is for steps with nothing to compute.
    """

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
        on_device: DeviceFrames | None = None,
    ) -> None:
        """``connect``: returns a new connection with an arena, or raises ``ObjkvError``. It is
        called again when the connection is lost. ``verify``: whether this worker verifies frames
        again, see the setting ``agent_verify``. ``on_device``: how the device reads the arena, if
        the cache is on one."""
        self._last_layers = {g: len(group.layers) - 1 for g, group in groups.items()}
        self._layouts = PayloadLayouts(groups)
        self._lane, self._limits, self._recorder = lane, limits, recorder
        self._clock, self._tracing = clock, tracing
        self._connect, self._verify = connect, verify
        self.on_device = on_device
        """How the device reads the arena, None if the cache is in host memory."""
        self._jobs: dict[str, LoadJob] = {}
        self._over = Event()
        self._window_bytes = _WINDOW_BYTES
        self._trouble = Trouble(logger, "loads from the agent")
        self.agent: AgentConnection | None = None
        """The present connection, None without one."""
        self._is_moving = False
        """Whether the agent opens no more, because it is replaced."""
        self._retry_at, self._retry_s = 0.0, _RETRY_S
        self._lock = Lock()
        self._came: deque[tuple[LoadJob, int]] = deque()
        self._moves = 0
        """Moves that wait for the thread. Guarded by the lock, with ``_came`` and ``_closed``."""
        self._closed = False
        self._waiting, self._reading = deque[tuple[LoadJob, int]](), list[_Reading]()
        self._alarm = Alarm()
        self._reach()
        self._thread = Thread(target=self._work, name="objkv-load", daemon=True)
        self._thread.start()

    @property
    def leased(self) -> int:
        """Number of payloads that this worker reads now."""
        return len(self._reading)

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
        everything that was submitted so far, and so the whole forward pass if it has begun.
        """
        filled = [self._layouts.filled(source) for source in plan.moves.sources]
        plan = replace(plan, moves=plan.moves.only([bool(rows) for rows in filled]))
        limit_s = self._limits.step_deadline_s if plan.sync else self._limits.deadline_s
        deadline = self._clock() + limit_s
        after = after or self.mark_compute()  # earlier kernels may still use these blocks
        span = self._tracing.begin("objkv.load", plan.traceparent, request_id=plan.request_id)
        missing = plan.moves.each([bits_of(rows) for rows in filled])
        job = LoadJob(plan, missing, deadline, self._clock, after, span)
        assert plan.request_id not in self._jobs
        self._jobs[plan.request_id] = job  # nothing raises from here on: one outcome per plan
        self._begin(job)

    def _begin(self, job: LoadJob) -> None:
        """Queue the moves of a job, from the first on, as many as the queue takes."""
        count = len(job.plan.moves)
        with self._lock:
            serves = not self._closed and self.agent is not None and self.agent.is_open
            if serves:
                taken = min(count, max(0, self._limits.queue_max - self._moves))
                self._moves += taken
                self._came.append((job, taken))
                self._alarm.ring()
        if not serves:
            self._recorder.count("load_errors", count)
            if count:  # none on a rank without layers of the plan
                job.fail(0, rejected=False)
        elif taken < count:
            self._recorder.count("load_refused", count - taken)
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
            job.request_ended = request_ended and not job.is_over()
            job.cancel()
        with self._lock:
            if not self._closed:
                self._alarm.ring()

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
            self._over.wait(min(left_s, _LOOK_S) if any(j.is_over() for j in jobs) else left_s)

    def take_finished(self, *, sync: bool) -> list[LoadOutcome]:
        """Return the outcomes of plans that ended since the last call, each once.

        ``sync`` selects loads within the step, for which this waits up to their deadlines, or loads
        between steps, for which it never waits. The engine takes the two in different places.
        """
        outcomes: list[LoadOutcome] = []
        for request_id, job in list(self._jobs.items()):
            if job.plan.sync != sync:
                continue
            if sync:
                for group, last in self._last_layers.items():
                    job.wait_layer(group, last)
                job.wait_over()
            outcome = job.close() if sync else job.poll()
            if outcome is None:
                continue
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
            was_closed, self._closed = self._closed, True
        end = monotonic() + _COPIES_S  # for all loads: a device that hangs ends none of them
        for job in self._jobs.values():
            job.ended(job.close(max(0.0, end - monotonic())))
        if was_closed:
            return
        self._alarm.ring()
        if join_all([self._thread], self._limits.join_s):
            logger.warning("copies of loads did not finish on the device, going on")
            return
        if self.on_device is not None and not self.on_device.join(self._limits.join_s):
            logger.warning("memory of the agent is still being unlocked, going on")

    def _count(self, job: LoadJob, outcome: LoadOutcome) -> None:
        self._recorder.observe("load_seconds", self._clock() - job.started)
        self._recorder.count("loads")
        job.ended(outcome)
        if outcome.failed and not job.request_ended:
            self._recorder.count("load_failures")
            self._recorder.count("load_failed_blocks", len(outcome.failed_blocks))

    def _work(self) -> None:
        self._lane.adopt_thread()
        try:
            while not self._closed:
                try:
                    self._step()
                except Exception:  # a dead thread would hang every later load
                    self._recorder.count("load_errors")
                    logger.exception("loads failed unexpectedly")
                    self._lose()
        finally:
            try:
                self._lose()
            finally:
                self._alarm.close()

    def _step(self) -> None:
        """Do what can be done now, then sleep until there is more."""
        agent = self.agent or self._reach()
        if agent is None:
            wait_for([self._alarm], self._retry_at - monotonic())
            return
        try:
            self._take_jobs()
            self._open(agent)
            self._advance(agent)
            if self._is_moving and not self._reading:
                self._move()
                return
        except _CopyUnknownError as exc:
            self._trouble.failed(exc)
            self._lose(keep=True)
            return
        except TransferError as exc:
            self._trouble.failed(exc)
            self._lose()
            return
        if agent.wait(self._idle_s(), self._alarm):
            return
        if self._reading:
            self._trouble.failed(TransferError("the agent ended the connection"))
            self._lose()
        else:
            self._move()

    def _move(self) -> None:
        """Go on with the agent that has replaced this one, if there is one already."""
        if self._reach() is None:
            self._lose()

    def _reach(self) -> AgentConnection | None:
        if monotonic() < self._retry_at:
            return None
        self._retry_at = monotonic() + self._retry_s  # whatever fails now
        self._retry_s = min(2 * self._retry_s, RETRY_MAX_S)
        try:
            before, self.agent = self.agent, self._connect()
        except ObjkvError as exc:
            self._trouble.failed(exc)
            return None
        if before is not None:
            self._leave(before)
        if isinstance(self._lane, HostLane):
            self._lane.attach(self.agent.arena)
        if self.on_device is not None:
            self.on_device.attach(self.agent.arena)
        self._window_bytes = (self.agent.arena.nbytes - BOARD_BYTES) // _WINDOW_SHARE
        self._trouble.worked()
        self._retry_at, self._retry_s, self._is_moving = 0.0, _RETRY_S, False
        return self.agent

    def _idle_s(self) -> float:
        """Return how long nothing is due, unless something wakes the thread."""
        if self._waiting and not self._is_moving and (not self._reading or min(self._room()) > 0):
            return 0.0
        if any(one.is_copied or one.is_stalled for one in self._reading):
            return _LOOK_S
        left = [one.job.deadline - self._clock() for one in self._reading]
        return max(0.0, min(left, default=_IDLE_S))

    def _take_jobs(self) -> None:
        """Queue the moves of new jobs: those within the step go first."""
        with self._lock:
            came, self._came = self._came, deque()
        for job, taken in came:
            moves = [(job, index) for index in range(taken)]
            if job.plan.sync:
                self._waiting.extendleft(reversed(moves))
            else:
                self._waiting.extend(moves)

    def _room(self) -> tuple[int, int]:
        """Return how many payloads, and how many bytes, may be opened besides those that are."""
        nbytes = sum([one.nbytes for one in self._reading])
        limit = min(_WINDOW_BYTES, self._window_bytes)
        return WINDOW - len(self._reading), limit - nbytes

    def _open(self, agent: AgentConnection) -> None:
        """Open the next payloads of one job, as many as there is room for."""
        if self._is_moving or not (batch := self._next()):
            return
        job = batch[0].job
        self._reading += batch
        opened = agent.open(
            Claims.of([one.claim for one in batch]),
            deadline_s=job.deadline - self._clock(),
            urgency=Urgency.IN_STEP if job.plan.sync else Urgency.BETWEEN_STEPS,
        )
        if opened.reasons[0] == MissReason.CLOSED:
            self._is_moving = True
            self._reading = self._reading[: -len(batch)]
            self._waiting.extendleft((job, one.index) for one in reversed(batch))
            with self._lock:
                self._moves += len(batch)
            return
        for one, lease in zip(batch, leases_of(opened, agent.arena.board), strict=True):
            one.lease = lease

    def _next(self) -> list[_Reading]:
        """Take the next payloads of one job from the queue, as many as there is room for."""
        count, room = self._room()
        room, taken = min(room, _BATCH_BYTES), 0
        batch: list[_Reading] = []
        while self._waiting and len(batch) < count:
            job, index = self._waiting[0]
            if batch and job is not batch[0].job:
                break
            if room <= 0 and (batch or self._reading):
                break
            self._waiting.popleft()
            taken += 1
            if not job.wanted(index):
                continue
            batch.append(_Reading(job, index, self._layouts, self._lane))
            room -= batch[-1].nbytes
        with self._lock:
            self._moves -= taken
        return batch

    def _advance(self, agent: AgentConnection) -> None:
        """Read new frames, and end the leases that are not needed any more."""
        ended, kept = [], []
        # Those that a step waits for get slabs first.
        for one in sorted(self._reading, key=attrgetter("job.plan.sync"), reverse=True):
            if not one.is_copied:
                self._read(agent, one)
            if one.is_copied and _is_past(one.mark):
                ended.append(one)
            else:
                kept.append(one)
        self._reading = kept
        agent.release([one.lease.number for one in ended if one.lease and one.lease.number])

    def _read(self, agent: AgentConnection, one: _Reading) -> None:
        """Read the verified frames of one payload. Every fault is a miss."""
        assert one.lease is not None
        job, progress = one.job, one.lease.progress
        is_filling = progress.state is CellState.FILLING
        if (is_filling or one.is_stalled) and not job.wanted(one.index):
            self._given_up(one)
            return
        one.is_stalled = False
        if is_filling:
            progress = agent.arena.board.read(one.lease.cell)
        is_ready = progress.state is CellState.READY
        try:
            # A device has one copy for a whole payload, unless a step waits for single layers.
            streams = is_ready or job.plan.sync or not self._lane.per_span
            if streams and progress.frames > one.frames:
                one.read(progress, agent.arena.view, self.on_device, verify=self._verify)
            if is_ready:
                one.end()
                self._recorder.count("load_bytes", one.nbytes)
                if job.done(one.index, one.nbytes):
                    self._over.set()
            elif progress.state is CellState.FAILED:
                reason = MissReason(progress.reason)
                if name := _COUNTED.get(reason, "load_errors"):
                    self._recorder.count(name)
                self._fail(one, reason.name.lower(), rejected=reason in _REFUSED)
        except SlabsExhaustedError:
            one.is_stalled = True
        except _UnwantedError:
            self._given_up(one)
        except PayloadError as exc:
            logger.warning("payload refused request=%s reason=%s", job.plan.request_id, exc)
            self._recorder.count("load_corrupt")
            agent.reject(one.claim)  # before it fails: it may be made and saved again at once
            self._fail(one, "corrupt", rejected=True)
        except TransferError:
            raise
        except ForeignLayoutError as exc:
            self._recorder.count("load_errors")
            logger.warning("payload not readable request=%s reason=%s", job.plan.request_id, exc)
            self._fail(one, "foreign", rejected=False)
        except Exception:  # of this payload, such as too little memory of a device
            self._recorder.count("load_errors")
            logger.exception("load failed unexpectedly request=%s", job.plan.request_id)
            self._fail(one, "failed", rejected=False)

    def _given_up(self, one: _Reading) -> None:
        self._recorder.count("load_given_up")
        one.end("given up")

    def _fail(self, one: _Reading, reason: str, *, rejected: bool) -> None:
        one.end(reason)
        self._settle(one.job.fail(one.index, rejected=rejected))

    def _settle(self, is_over: bool) -> None:
        if is_over:
            self._over.set()

    def _lose(self, *, keep: bool = False) -> None:
        """Give up the connection, once no lane reads the arena any more. The rest fails.

        ``keep``: leave it open for ever, because it is unknown when the device has read its memory.
        """
        with self._lock:
            agent, self.agent, self._moves = self.agent, None, 0
        self._take_jobs()
        unread = [(one.job, one.index) for one in self._reading if not one.is_copied]
        lost = sum(job.wanted(index) for job, index in (*self._waiting, *unread))
        self._recorder.count("load_errors", lost)
        first: dict[LoadJob, int] = {}
        for job, index in self._waiting:
            first[job] = min(index, first.get(job, index))
        for job, index in first.items():  # and with it all later chunks
            self._settle(job.fail(index, rejected=False))
        for one in self._reading:  # also what was given to the lane, which may still read it
            self._fail(one, "lost", rejected=False)
        self._waiting.clear()
        marks = [one.mark for one in self._reading]
        self._reading = []
        keep = keep or not self._await(marks)
        if agent is None:
            return
        if keep:
            logger.error("copies of loads did not finish on the device, keeping their memory")
            _KEPT.append(agent)
            if self.on_device is not None:
                self.on_device.abandon()
        else:
            self._leave(agent)

    def _leave(self, agent: AgentConnection) -> None:
        """Close a connection whose arena nothing reads, once a device has unlocked it."""
        if self.on_device is None:
            agent.close()
        else:
            self.on_device.detach(agent.close)

    def _await(self, marks: list[Mark | None]) -> bool:
        """Wait until all marks have passed. Returns False if they do not, or nothing shows it."""
        end = monotonic() + self._limits.deadline_s
        try:
            while not all(map(_is_past, marks)):
                if monotonic() >= end:
                    return False
                sleep(_LOOK_S)
        except _CopyUnknownError:
            return False
        return True


def _is_past(mark: Mark | None) -> bool:
    """Whether a device has read everything before ``mark``. Raises ``_CopyUnknownError``."""
    try:
        return mark is None or mark.done()
    except Exception as exc:
        raise _CopyUnknownError(f"the device failed: {exc}") from exc
