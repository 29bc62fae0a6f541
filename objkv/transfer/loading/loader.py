"""Loads from the agent's arena: the agent fetches and verifies, this copies to the paged cache.

One thread opens payloads in the order of their chunks, sleeps until the agent has verified more of
them, and gives the frames to the lane where they are. A lease ends when the lane has read its
memory. Any fault is a miss. Without an agent every load is a miss until there is one again.
"""

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from threading import Lock, Thread
from time import monotonic, sleep

from objkv.agent.client import AgentConnection, ArenaLease
from objkv.agent.memory.arena import BOARD_BYTES, CellState, Progress
from objkv.agent.messages import MissReason, PayloadRequest, Urgency
from objkv.background import Alarm, join_all, wait_for
from objkv.codec.payload import Header, frame_pages, header_bytes_needed, read_claimed
from objkv.errors import ObjkvError, PayloadError, TransferError
from objkv.telemetry import Recorder, Trouble
from objkv.tracing import NO_SPAN, NO_TRACING, Span, Tracing, now_ns
from objkv.transfer.lanes import Lane, Mark
from objkv.transfer.loading.arena_lane import ArenaLane
from objkv.transfer.loading.job import (
    BlockWriter,
    CopyUnknownError,
    LoadJob,
    UnwantedError,
    claim_of,
)
from objkv.transfer.loading.loads import LoadLimits, Loads
from objkv.transfer.paging import PagedGroup
from objkv.transfer.registration import DeviceFrames
from objkv.transfer.slabs import Slab, SlabsExhaustedError
from objkv.transfer.sources import PayloadLayouts

logger = logging.getLogger(__name__)
_LENGTH_BYTES = 8
_NOTHING = memoryview(b"")
_LOOK_S = 3e-4
"""How often the device is polled while it reads leased memory."""
_IDLE_S = 5.0
_RETRY_S, RETRY_MAX_S = 0.1, 5.0
"""Pauses between attempts to reach an agent."""
WINDOW, _WINDOW_BYTES = 64, 512 << 20
"""Payloads open at once, so that one long prompt does not lease the whole arena."""
_WINDOW_SHARE = 2
"""Divisor: of a small arena, they take at most this fraction."""
_BATCH_BYTES = 128 << 20
"""Pages copied before the thread looks for more urgent loads."""
_TRACED_PAYLOADS_MAX = 64
"""Payloads traced per load. A long prompt has hundreds, which all look alike."""
_KEPT: list[AgentConnection] = []
"""Connections whose memory a hung device may still read. They end with the process."""
_REFUSED = frozenset((MissReason.MISSING, MissReason.CORRUPT))


class _Reading:
    """One payload that is open, or about to be, for one move."""

    __slots__ = (
        "_came_ns",
        "_load",
        "_span",
        "_wanted",
        "header",
        "index",
        "is_copied",
        "is_stalled",
        "job",
        "layers",
        "lease",
        "nbytes",
        "source",
        "writer",
    )

    def __init__(self, job: LoadJob, index: int, layouts: PayloadLayouts, lane: Lane) -> None:
        load = job.plan.moves[index]
        self.job, self.index, self._load = job, index, load
        self.source = layouts.of(load)
        self.writer = BlockWriter(job, index, load, lane)
        self._wanted: PayloadRequest | None = None
        self.lease: ArenaLease | None = None
        self.header: Header | None = None
        self.layers = 0
        """Leading frames that were given to the lane."""
        self.is_copied = False
        """Whether nothing more will be."""
        self.is_stalled = False
        """Whether frames wait for a slab that the device is reading."""
        self.nbytes = 0
        """Its pages, once it is open."""
        self._span: Span = NO_SPAN
        self._came_ns = 0

    @property
    def is_further(self) -> bool:
        """Whether it is one more payload of a chunk, which takes no place in the queue."""
        return self.job.plan.moves.further[self.index]

    def begin(self, wanted: PayloadRequest) -> None:
        """Begin to read it."""
        self.nbytes = wanted.record.raw_bytes
        if self.job.span.is_on and self.index < _TRACED_PAYLOADS_MAX:
            self._span = self.job.span.child("objkv.get", chunk=self._load.move.chunk)

    def end(self, error: str | None = None) -> None:
        """End the trace of it: everything was given to the lane, or it is a miss."""
        self.is_copied = True
        span, self._span = self._span, NO_SPAN
        if not span.is_on:
            return
        if self._came_ns:
            span.part("objkv.copy", self._came_ns, now_ns())
        span.end(error, bytes=self.wanted().record.nbytes)

    def wanted(self) -> PayloadRequest:
        """Return what to ask the agent for. Raises ``KeyError`` if the plan has no record of it."""
        if self._wanted is None:
            claim = claim_of(self.job.plan.namespace, self._load, self.source)
            self._wanted = PayloadRequest(claim, dict(self._load.records)[claim.key.field])
        return self._wanted

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
        start = progress.offset
        payload = arena[start : start + progress.nbytes]
        if self.header is None:
            needed = header_bytes_needed(payload[:_LENGTH_BYTES])
            layers = self.source.layers
            header = read_claimed(payload[:needed], self.wanted().claim, layers)
            if header.nbytes != progress.nbytes or header.codec != "none":
                raise PayloadError(f"{progress.nbytes} bytes in the arena, not {header.nbytes}")
            self.source = self.source.reading(header.frames.layers)
            self.header = header
            self._came_ns = now_ns() if self._span.is_on else 0
            self.job.began()
        frames, ours = self.header.frames, self.source.frames
        span = range(self.layers, min(progress.frames, len(frames)))
        own = range(max(span.start, ours.start), min(span.stop, ours.stop))
        if verify:
            for n in own:
                frame_pages(self.header, n, payload, None)
        memory = payload[frames.starts[own.start] : frames.ends[own.stop - 1]] if own else _NOTHING
        while on_device is not None and own:
            sizes = [frames.ends[n] - frames.starts[n] for n in own]
            count, given, slab = on_device.take(memory, sizes)
            own, memory = own[count:], memory[len(given) :]
            end = own.start if own else span.stop
            self._write(range(self.layers, end), given, slab)
            self.layers = end
            if not own:
                return
        self.layers = span.stop
        self.writer.write(self.source, span, memory)

    def _write(self, span: range, memory: memoryview, slab: Slab | None) -> None:
        """Give the lane frames that may be in a slab, which goes back when they are copied."""
        try:
            self.writer.write(self.source, span, memory)
        except CopyUnknownError:
            if slab is not None:
                slab.strand()
                slab = None
            raise
        finally:
            mark = self.writer.mark
            if slab is not None and mark is not None:
                slab.release_after(mark)
            elif slab is not None:
                slab.release()


class Loader(Loads):
    """Loads by leases of the agent's payloads."""

    _is_moving = False
    """Whether the agent opens no more, because it is replaced."""

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
        super().__init__(groups, lane, limits, recorder, clock=clock, tracing=tracing)
        self._on_device, self._connect, self._verify = on_device, connect, verify
        self._window_bytes = _WINDOW_BYTES
        self._trouble = Trouble(logger, "loads from the agent")
        self._agent: AgentConnection | None = None
        self._retry_at, self._retry_s = 0.0, _RETRY_S
        self._lock = Lock()
        self._came: deque[tuple[LoadJob, int]] = deque()
        self._moves = 0
        """Moves that wait for the thread. Guarded by the lock, with ``_came`` and ``_closed``."""
        self._closed = False
        self._waiting, self._reading = deque[_Reading](), list[_Reading]()
        self._alarm = Alarm()
        self._reach()
        self._thread = Thread(target=self._work, name="objkv-load", daemon=True)
        self._thread.start()

    @property
    def agent(self) -> AgentConnection | None:
        """The present connection, None without one."""
        return self._agent

    @property
    def leased(self) -> int:
        """Number of payloads that this worker reads now."""
        return len(self._reading)

    @property
    def is_registering(self) -> bool:
        """Whether a device registers memory of the agent that was read already."""
        return self._on_device is not None and self._on_device.is_registering

    @property
    def threads(self) -> int:
        """Threads that have not ended."""
        return int(self._thread.is_alive())

    def close(self) -> None:
        """Stop the thread. Unfinished plans never touch their blocks again. Idempotent."""
        with self._lock:
            was_closed, self._closed = self._closed, True
        self._close_jobs()
        if was_closed:
            return
        self._alarm.ring()
        if join_all([self._thread], self._limits.join_s):
            logger.warning("copies of loads did not finish on the device, going on")
            return
        if self._on_device is not None and not self._on_device.join(self._limits.join_s):
            logger.warning("memory of the agent is still being unlocked, going on")

    def __repr__(self) -> str:
        return f"<Loader {len(self._jobs)} plans, {self.leased} payloads open>"

    def _begin(self, job: LoadJob) -> int:
        count, further = len(job.plan.moves), job.plan.moves.further
        with self._lock:
            if self._closed:
                return 0
            if self._agent is not None and self._agent.is_open:
                taken = _first_of(further, self._limits.queue_max - self._moves)
                self._moves += taken - sum(further[:taken])
                self._came.append((job, taken))
                self._alarm.ring()
                return taken
        self._recorder.count("load_errors", count)
        job.fail_all()
        self._settle(job)
        return count

    def cancel(self, request_id: str, *, request_ended: bool = False) -> None:
        """See ``Loads.cancel``."""
        super().cancel(request_id, request_ended=request_ended)
        with self._lock:
            if not self._closed:
                self._alarm.ring()

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
        agent = self._agent or self._reach()
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
        except CopyUnknownError as exc:
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
            before, self._agent = self._agent, self._connect()
        except ObjkvError as exc:
            self._trouble.failed(exc)
            return None
        if before is not None:
            self._leave(before)
        if isinstance(self._lane, ArenaLane):
            self._lane.attach(self._agent.arena)
        if self._on_device is not None:
            self._on_device.attach(self._agent.arena)
        self._window_bytes = (self._agent.arena.nbytes - BOARD_BYTES) // _WINDOW_SHARE
        self._trouble.worked()
        self._retry_at, self._retry_s, self._is_moving = 0.0, _RETRY_S, False
        return self._agent

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
            moves = [_Reading(job, n, self._layouts, self._lane) for n in range(taken)]
            if job.plan.sync:
                self._waiting.extendleft(reversed(moves))
            else:
                self._waiting.extend(moves)

    def _room(self) -> tuple[int, int]:
        """Return how many payloads, and how many bytes, may be opened besides those that are."""
        nbytes = sum(one.nbytes for one in self._reading)
        limit = min(_WINDOW_BYTES, self._window_bytes)
        return WINDOW - len(self._reading), limit - nbytes

    def _open(self, agent: AgentConnection) -> None:
        """Open the next payloads of one job, as many as there is room for."""
        if self._is_moving:
            return
        count, nbytes = self._room()
        nbytes = min(nbytes, _BATCH_BYTES)
        batch: list[tuple[_Reading, PayloadRequest]] = []
        while self._waiting and len(batch) < count:
            one = self._waiting[0]
            if batch and one.job is not batch[0][0].job:
                break
            if nbytes <= 0 and (batch or self._reading):
                break
            self._waiting.popleft()
            with self._lock:
                self._moves -= not one.is_further
            wanted = self._wanted(one) if one.job.wanted(one.index) else None
            if wanted is not None:
                batch.append((one, wanted))
                one.begin(wanted)
                nbytes -= one.nbytes
        if not batch:
            return
        job = batch[0][0].job
        self._reading += [one for one, _ in batch]
        leases = agent.open(
            [wanted for _, wanted in batch],
            deadline_s=job.deadline - self._clock(),
            urgency=Urgency.IN_STEP if job.plan.sync else Urgency.BETWEEN_STEPS,
        )
        if leases[0].progress.reason == MissReason.CLOSED:
            self._is_moving = True
            self._reading = self._reading[: -len(batch)]
            self._waiting.extendleft(one for one, _ in reversed(batch))
            with self._lock:
                self._moves += sum(not one.is_further for one, _ in batch)
            return
        for (one, _), lease in zip(batch, leases, strict=True):
            one.lease = lease

    def _wanted(self, one: _Reading) -> PayloadRequest | None:
        """Return what to open. None if the plan has no record of it, as for a ghost."""
        try:
            return one.wanted()
        except KeyError:
            self._fail(one, "no record", rejected=True)
            return None

    def _advance(self, agent: AgentConnection) -> None:
        """Read new frames, and end the leases that are not needed any more."""
        ended, kept = [], []
        # Those that a step waits for get slabs first.
        for one in sorted(self._reading, key=lambda one: not one.job.plan.sync):
            if not one.is_copied:
                self._read(agent, one)
            if one.is_copied and _is_past(one.writer.mark):
                ended.append(one)
            else:
                kept.append(one)
        self._reading = kept
        agent.release([one.lease.number for one in ended if one.lease and one.lease.number])

    def _read(self, agent: AgentConnection, one: _Reading) -> None:
        """Read the verified frames of one payload. Every fault is a miss."""
        assert one.lease is not None
        job = one.job
        if not job.wanted(one.index):
            self._recorder.count("load_given_up")
            one.end("given up")
            return
        one.is_stalled = False
        progress = one.lease.progress
        if progress.state is CellState.FILLING:
            progress = agent.arena.board.read(one.lease.cell)
        is_ready = progress.state is CellState.READY
        try:
            if progress.frames > one.layers and (is_ready or self._streams(one)):
                one.read(progress, agent.arena.view, self._on_device, verify=self._verify)
            if is_ready:
                self._done(one)
            elif progress.state is CellState.FAILED:
                self._missed(one, MissReason(progress.reason))
        except SlabsExhaustedError:
            one.is_stalled = True
        except UnwantedError:
            self._recorder.count("load_given_up")
            one.end("given up")
        except PayloadError as exc:
            logger.warning("payload refused request=%s reason=%s", job.plan.request_id, exc)
            self._recorder.count("load_corrupt")
            self._fail(one, "corrupt", rejected=True)
            agent.reject(one.wanted())
        except TransferError:
            raise
        except Exception:  # of this payload, such as too little memory of a device
            self._recorder.count("load_errors")
            logger.exception("load failed unexpectedly request=%s", job.plan.request_id)
            self._fail(one, "failed", rejected=False)

    def _streams(self, one: _Reading) -> bool:
        """Whether frames are copied as they arrive: a device has one copy for a whole payload,
        unless a forward pass waits for single layers."""
        return one.job.plan.sync or not self._lane.per_span

    def _done(self, one: _Reading) -> None:
        nbytes = one.wanted().record.nbytes
        one.end()
        one.job.came(nbytes)
        self._recorder.count("load_bytes", nbytes)
        one.job.done(one.index)
        self._settle(one.job)

    def _missed(self, one: _Reading, reason: MissReason) -> None:
        if reason is MissReason.NO_ROOM:
            self._recorder.count("load_refused")
        elif reason is MissReason.MISSING:
            self._recorder.count("load_ghosts")
        elif reason is MissReason.CORRUPT:
            self._recorder.count("load_corrupt")
        elif reason is not MissReason.LATE:
            self._recorder.count("load_errors")
        self._fail(one, reason.name.lower(), rejected=reason in _REFUSED)

    def _fail(self, one: _Reading, reason: str, *, rejected: bool) -> None:
        one.end(reason)
        one.job.fail(one.index, rejected=rejected)
        self._settle(one.job)

    def _settle(self, job: LoadJob) -> None:
        if job.is_over():
            self._over.set()

    def _lose(self, *, keep: bool = False) -> None:
        """Give up the connection, once no lane reads the arena any more. The rest fails.

        ``keep``: leave it open for ever, because it is unknown when the device has read its memory.
        """
        agent = self._agent
        with self._lock:
            self._agent = None
            came = list(self._came)
            self._came.clear()
            self._moves = 0
        left = (*self._waiting, *self._reading)
        lost = sum(not one.is_copied and one.job.wanted(one.index) for one in left)
        lost += sum(taken for job, taken in came if taken and job.wanted(0))
        self._recorder.count("load_errors", lost)
        for job, _ in came:
            job.fail_all()
            self._settle(job)
        for one in left:
            self._fail(one, "lost", rejected=False)
        self._waiting.clear()
        marks = [one.writer.mark for one in self._reading if one.writer.mark is not None]
        self._reading = []
        keep = keep or not self._await(marks)
        if agent is None:
            return
        if keep:
            logger.error("copies of loads did not finish on the device, keeping their memory")
            _KEPT.append(agent)
            if self._on_device is not None:
                self._on_device.abandon()
        else:
            self._leave(agent)

    def _leave(self, agent: AgentConnection) -> None:
        """Close a connection whose arena nothing reads, once a device has unlocked it."""
        if self._on_device is None:
            agent.close()
        else:
            self._on_device.detach(agent.close)

    def _await(self, marks: list[Mark]) -> bool:
        """Wait until all marks have passed. Returns False if they do not, or nothing shows it."""
        end = monotonic() + self._limits.deadline_s
        try:
            while not all(map(_is_past, marks)):
                if monotonic() >= end:
                    return False
                sleep(_LOOK_S)
        except CopyUnknownError:
            return False
        return True


def _first_of(further: Sequence[bool], room: int) -> int:
    """Return how many leading moves take at most ``room`` places. Further payloads of a chunk take
    none."""
    if len(further) <= room:
        return len(further)
    for index, is_further in enumerate(further):
        room -= not is_further
        if room < 0:
            return index
    return len(further)


def _is_past(mark: Mark | None) -> bool:
    """Whether a device has read everything before ``mark``. Raises ``CopyUnknownError``."""
    try:
        return mark is None or mark.done()
    except Exception as exc:
        raise CopyUnknownError(f"the device failed: {exc}") from exc
