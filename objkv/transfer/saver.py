"""Saves: the forward thread gathers finished chunks into slabs, another thread hands them over.

The forward thread's work is bounded and local: it leases slabs and submits copies to the lane.
Without a free slab or room in the queue a chunk is dropped: counted and reported to the scheduler,
without waiting. One thread polls the device, and when copies have ended it writes each payload's
header around its pages, in the slab, and hands the payload to the agent.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from time import monotonic, sleep, time

import numpy as np

from objkv.agent.messages import SavedPart
from objkv.agent.outbox import AgentSaves, NotTakenError
from objkv.background import JOIN_S, Pool
from objkv.cache.chunks import SaveOutcome
from objkv.codec.payload import Claim, Provenance, encode_in_place, header_room
from objkv.errors import ObjkvError, StoreBusy
from objkv.keys.chunk import ChunkKey
from objkv.telemetry import Recorder, Trouble
from objkv.transfer.lanes import Lane, Mark
from objkv.transfer.paging import PagedGroup
from objkv.transfer.plan import SaveMove, SavePlan
from objkv.transfer.slabs import Slab, SlabPool, SlabsExhaustedError

logger = logging.getLogger(__name__)
COPIES_S = 1.0
"""How long ``close`` waits, after its bound, for copies from the device, which read blocks."""
_LOOK_S, _LOOK_MAX_S = 1e-3, 4e-3
"""How often the device is polled. Gathered chunks wait for the forward pass to end, often for
hundreds of milliseconds, and nothing waits for their saves."""


_SHED_S = 0.1
"""How long saves pause after the agent's store refused one."""


@dataclass(frozen=True, slots=True)
class SaveLimits:
    """Bounds of the saver, and the writer of its payloads."""

    queue_max: int
    """Chunks that may wait, for the device or to be handed over."""
    deadline_s: float
    """A chunk that waited longer is dropped."""
    writer: str


@dataclass(frozen=True, slots=True, eq=False)
class _SavedChunk:
    """A chunk with a slab, which will have its pages."""

    request_id: str
    claim: Claim
    move: SaveMove
    slab: Slab
    part: SavedPart | None
    """What the rank has of a payload that several ranks write."""


@dataclass(frozen=True, slots=True)
class _Gathered:
    """Chunks of one step. Their pages are in their slabs once ``mark`` is done."""

    chunks: Sequence[_SavedChunk]
    mark: Mark
    deadline: float


class Saver:
    """Executes save plans. Only the forward thread calls ``gather``, ``fence``, ``left_device`` and
    ``forget``."""

    def __init__(
        self,
        target: AgentSaves,
        groups: Mapping[int, PagedGroup],
        slabs: SlabPool,
        *,
        lane: Lane,
        limits: SaveLimits,
        recorder: Recorder,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._target, self._groups, self._slabs, self._lane = target, groups, slabs, lane
        self._limits, self._recorder, self._clock = limits, recorder, clock
        self._trouble = Trouble(logger, "saves")
        self._marks: dict[str, Mark] = {}
        """Mark of the last gather of each request. Only the forward thread uses it."""
        self._open: deque[Mark] = deque()
        """Marks of gathers that are not known to be done, in their order."""
        self._lock = Lock()
        """Guards ``_waiting``."""
        self._waiting = 0
        """Chunks that wait for the device, or to be handed over."""
        self._shed_until = -math.inf
        self._gives_up = False
        self._pool: Pool[_Gathered] = Pool(
            "objkv-save", 1, self._save_all, failed=self._not_copied, begin=lane.adopt_thread
        )

    def gather(self, plans: tuple[SavePlan, ...]) -> set[tuple[str, int]]:
        """Copy the chunks of this step's plans out of their blocks, after the forward pass.

        Returns (request id, chunk) of each dropped chunk. The blocks must not change until
        ``left_device`` returns True for their request, or ``fence`` was called. Without anything to
        copy, nothing is submitted to the device.
        """
        dropped: set[tuple[str, int]] = set()
        if not plans:
            return dropped
        taken: dict[int, list[_SavedChunk]] = {}
        room = self._limits.queue_max - self._waiting
        is_full = not self._target.has_room()
        for plan in plans:
            for save in plan.moves:
                group = self._groups.get(save.move.group)
                if group is None or not group.shape.rank_shard.writes(save.move.prefix_hash):
                    continue
                payload = group.shape.payload
                key = ChunkKey(plan.namespace, save.move.prefix_hash, save.move.group, payload)
                part = None if group.place is None else SavedPart(plan.number, group.place)
                if is_full:  # not a drop, which the scheduler would plan again for the next step
                    self._skip(key, part, "save_over_quota")
                elif self.is_shedding:  # not a drop either, for the same reason
                    self._skip(key, part, "saves_shed")
                elif not self._target.begin_save(key, puts=plan.puts, again=save.again):
                    self._recorder.count("save_repeats")
                elif room > 0 and (chunk := self._take(plan, save, key, part)) is not None:
                    taken.setdefault(key.group, []).append(chunk)
                    room -= 1
                else:
                    dropped.add(self._drop(plan.request_id, save, key, part))
        return dropped | self._gather(taken) if taken else dropped

    def fence(self, request_ids: Collection[str] | None = None) -> None:
        """Make computing wait until the chunks gathered for these requests have left their blocks,
        which may then be reused. None: all chunks."""
        self._poll()
        if request_ids is None:
            marks = list(self._open)
        else:
            marks = [self._marks[name] for name in request_ids if self._is_copying(name)]
        if marks:
            last = max(marks, key=lambda mark: mark.number)  # covers the others
            last.hold_compute()

    def left_device(self, request_id: str) -> bool:
        """Whether every chunk gathered for the request has left its blocks."""
        if self._is_copying(request_id):
            self._poll()
            if self._is_copying(request_id):
                return False
        self._marks.pop(request_id, None)
        return True

    def forget(self, request_id: str) -> None:
        """Forget the request's mark; ``left_device`` is not called for it again. Gathered chunks
        are still saved."""
        self._marks.pop(request_id, None)

    def drain(self, deadline_s: float) -> bool:
        """Wait for all saves, for at most ``deadline_s``. Returns whether all have ended."""
        return self._pool.drain(deadline_s)

    def close(self, drain_deadline_s: float) -> None:
        """Drain within the bound, then stop. Remaining chunks are dropped.

        No block is read afterwards, unless the device still copies a second after the bound. The
        slabs of those copies are never reused.
        """
        end = self._clock() + drain_deadline_s
        if not self._copies_end(end + COPIES_S):
            logger.error("copies of saves did not finish on the device, shutting down without them")
            self._gives_up = True
        # One look at the device takes a moment, also after the bound.
        if not self._pool.drain(max(COPIES_S, end - self._clock())):
            logger.warning("saves dropped at shutdown count=%d", self._waiting)
        self._gives_up = True
        if self._pool.close(JOIN_S, give_up=self._give_up_gathered):
            logger.warning("a save is still being handed over at shutdown")

    @property
    def is_shedding(self) -> bool:
        """Whether saves pause because the agent's store has just refused one."""
        return self._clock() < self._shed_until

    def _copies_end(self, until: float) -> bool:
        """Poll until all copies are done. Returns False if the time ``until`` comes first, or if
        the device fails.

        Blocks and slabs may be unmapped next, so no copy may run later. CUDA has no wait with a
        timeout, so this polls.
        """
        while True:
            try:
                self._poll()
            except Exception:
                logger.exception("copies of saves failed on the device")
                return False
            if not self._open:
                return True
            if self._clock() >= until:
                return False
            sleep(_LOOK_S)

    def _poll(self) -> None:
        """Forget marks that are done. They are all of one lane, so they end in order."""
        while self._open and self._open[0].done():
            self._open.popleft()

    def _is_copying(self, request_id: str) -> bool:
        """Whether the request's last mark was not done when the device was last polled."""
        mark = self._marks.get(request_id)
        return mark is not None and bool(self._open) and mark.number >= self._open[0].number

    def _skip(self, key: ChunkKey, part: SavedPart | None, counter: str) -> None:
        """Save nothing of a chunk, and do not plan it again."""
        self._recorder.count(counter)
        if part is not None:
            self._target.drop(key, part)

    def _take(
        self, plan: SavePlan, save: SaveMove, key: ChunkKey, part: SavedPart | None
    ) -> _SavedChunk | None:
        move = save.move
        assert move.first_block == 0
        group = self._groups[key.group]
        assert len(move.block_ids) * group.split == group.shape.blocks
        if self._pool.is_closed:
            return None
        try:
            slab = self._slabs.lease()
        except SlabsExhaustedError:
            return None
        claim = Claim(key, move.parent_hash, move.token_start, move.token_end)
        return _SavedChunk(plan.request_id, claim, save, slab, part)

    def _gather(self, taken: Mapping[int, list[_SavedChunk]]) -> set[tuple[str, int]]:
        """Submit the copies of the chunks of each group. Returns the dropped ones."""
        chunks = [chunk for group in taken.values() for chunk in group]
        try:
            failed = self._submit(taken)
            mark = self._lane.mark()
            is_done = mark.done()
        except Exception:
            logger.exception("chunks not gathered, their slabs are lost count=%d", len(chunks))
            return self._give_up(chunks, None)
        self._poll()
        self._marks = {r: one for r, one in self._marks.items() if self._is_copying(r)}
        if not is_done:
            self._open.append(mark)
            self._marks |= {chunk.request_id: mark for chunk in chunks}
        dropped = self._give_up(failed, mark)
        ready = [chunk for chunk in chunks if chunk not in failed]
        if not ready:
            return dropped
        gathered = _Gathered(ready, mark, self._clock() + self._limits.deadline_s)
        with self._lock:
            self._waiting += len(ready)
        if not self._pool.put([gathered]):
            self._end_waiting(gathered)
            dropped |= self._give_up(ready, mark)
        return dropped

    def _submit(self, taken: Mapping[int, list[_SavedChunk]]) -> list[_SavedChunk]:
        """Submit copies after what computes now. Returns the chunks of groups that failed, some of
        whose copies may have been submitted."""
        failed: list[_SavedChunk] = []
        self._lane.follow(self._lane.mark_compute())
        for number, chunks in taken.items():
            group = self._groups[number]
            ids = np.array([c.move.move.block_ids for c in chunks], np.int64)
            rooms = [header_room(group.layers, tokens=len(c.move.tokens or ())) for c in chunks]
            starts = np.array([c.slab.start for c in chunks], np.int64) + rooms
            try:
                group.gather(self._lane, ids, self._slabs.memory.numpy().data, starts)
            except Exception:  # such as no memory for staging: a drop, as without a slab
                logger.exception("chunks not gathered requests=%s", {c.request_id for c in chunks})
                failed += chunks
        return failed

    def _end_waiting(self, gathered: _Gathered) -> None:
        with self._lock:
            self._waiting -= len(gathered.chunks)

    def _save_all(self, gathered: _Gathered) -> None:
        """Hand chunks over when their copies have ended.

        The thread polls for all. It does not wait in the driver, where a device that hangs would
        keep it for ever.
        """
        self._target.send_drops()
        pause_s = _LOOK_S
        while not gathered.mark.done():
            if self._gives_up or self._clock() >= gathered.deadline:
                self._give_up_gathered([gathered])
                return
            sleep(pause_s)
            pause_s = min(2 * pause_s, _LOOK_MAX_S)
        for chunk in gathered.chunks:
            try:
                if self._gives_up or self._clock() >= gathered.deadline:
                    self._count_drop(chunk.claim.key, chunk.part)
                else:
                    self._save(chunk)
            finally:
                chunk.slab.release()
                self._target.end_save(chunk.claim.key)
        self._target.send_drops()
        self._end_waiting(gathered)

    def _save(self, chunk: _SavedChunk) -> None:
        """Hand one chunk over. Every failure is a drop."""
        if self.is_shedding:
            self._skip(chunk.claim.key, chunk.part, "saves_shed")
            return
        started, move = self._clock(), chunk.move
        layers, writer = self._groups[chunk.claim.key.group].layers, self._limits.writer
        try:
            provenance = Provenance(move.token_digest, writer, int(time()), move.tokens)
            payload, header = encode_in_place(
                chunk.claim, layers, chunk.slab.view, codec="none", provenance=provenance
            )
            outcome = self._target.save(chunk.claim, payload, header, chunk.part)
        except StoreBusy:
            self._recorder.count("saves_shed")
            self._shed_until = self._clock() + _SHED_S
            return
        except Exception as exc:
            is_known = isinstance(exc, NotTakenError)
            self._skip(chunk.claim.key, None if is_known else chunk.part, "save_errors")
            if isinstance(exc, ObjkvError):
                self._trouble.failed(exc)
            else:
                logger.exception("save failed unexpectedly key=%s", chunk.claim.key.path())
            return
        self._trouble.worked()
        self._recorder.observe("save_seconds", self._clock() - started)
        if outcome is SaveOutcome.EXISTED:
            self._recorder.count("save_existed")
        elif outcome is SaveOutcome.DROPPED:
            self._count_drop(chunk.claim.key)
        elif outcome is not SaveOutcome.PART:
            self._recorder.count("saves_accepted")
            self._recorder.count("save_accepted_bytes", header.nbytes)

    def _not_copied(self, gathered: _Gathered, error: Exception) -> None:
        """The device failed, and what it still copies is unknown."""
        logger.error("saves dropped, the device failed", exc_info=error)
        self._end_waiting(gathered)
        self._give_up(gathered.chunks, None)

    def _give_up_gathered(self, waiting: Iterable[_Gathered]) -> None:
        for gathered in waiting:
            self._end_waiting(gathered)
            self._give_up(gathered.chunks, gathered.mark)

    def _give_up(self, chunks: Iterable[_SavedChunk], mark: Mark | None) -> set[tuple[str, int]]:
        """Drop chunks. ``mark``: the end of their copies, None if nothing shows it."""
        dropped = set()
        for c in chunks:
            if mark is None:
                c.slab.strand()
            else:
                c.slab.release_after(mark)
            dropped.add(self._drop(c.request_id, c.move, c.claim.key, c.part))
        return dropped

    def _drop(
        self, request_id: str, save: SaveMove, key: ChunkKey, part: SavedPart | None
    ) -> tuple[str, int]:
        self._target.end_save(key)
        self._count_drop(key, part)
        return request_id, save.move.chunk

    def _count_drop(self, key: ChunkKey, part: SavedPart | None = None) -> None:
        """``part``: what the agent waits for, if other ranks have the rest of the payload."""
        if part is not None:
            self._target.drop(key, part)
        self._recorder.count("save_drops")
        self._recorder.count("save_drop_bytes", self._groups[key.group].raw_bytes)
