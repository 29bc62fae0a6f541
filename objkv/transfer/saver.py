"""Saves: the forward thread queues plans, and other threads gather chunks into slabs and hand them
over.

The forward thread records a mark of what it has launched, and goes on. One thread decides what to
save, leases slabs and submits copies to the lane. Another polls the device, and when copies have
ended it writes each payload's header before its pages, in the slab, and hands it to the agent. What
there is no slab or no room for is dropped, counted, and reported to the scheduler.
"""

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Condition
from time import monotonic, sleep, time

import numpy as np

from objkv.agent.messages import COMMITS_MAX, CommitStatus, SavedPart
from objkv.agent.outbox import AgentSaves, OutboxPayload
from objkv.background import JOIN_S, Pool
from objkv.codec.payload import encode_in_place, header_room
from objkv.codec.values import Claim, Provenance
from objkv.errors import ObjkvError, TransferError
from objkv.keys.chunk import ChunkKey
from objkv.telemetry import FailureLog, Recorder
from objkv.transfer.lanes import Lane, Mark
from objkv.transfer.paging import PagedGroup
from objkv.transfer.plan import SaveMove, SavePlan
from objkv.transfer.slabs import Slab, SlabPool, SlabsExhaustedError

logger = logging.getLogger(__name__)
COPIES_S = 1.0
"""How long ``close`` waits, after its bound, for copies from the device, which read blocks."""
FENCE_S = 0.5
"""How long ``fence`` waits for copies to be submitted, which takes a millisecond."""
_LOOK_S, _LOOK_MAX_S = 1e-3, 4e-3
"""How often the device is polled. Gathered chunks wait for the forward pass to end, often for
hundreds of milliseconds, and nothing waits for their saves."""
_PLANNED_MAX = 4096
"""Chunks whose plan may wait for the thread, most of which are usually saved already."""
_BATCH_BYTES = 64 << 20
"""How much is handed over at once. The agent copies and verifies it before it answers."""


@dataclass(frozen=True, slots=True)
class SaveLimits:
    """Bounds of the saver, and the writer of its payloads."""

    queue_max: int
    """Chunks that may wait, for the device or to be handed over."""
    deadline_s: float
    """A chunk that waited longer is dropped."""
    writer: str


@dataclass(slots=True, eq=False)
class _SavedChunk:
    """A chunk to save."""

    plan: SavePlan
    save: SaveMove
    claim: Claim
    path: str
    part: SavedPart | None
    """What the rank has of a payload that several ranks write."""
    slab: Slab = field(init=False)
    """Unset until it is leased."""


@dataclass(slots=True, eq=False)
class _Step:
    """The saves of one step."""

    plans: Sequence[SavePlan]
    """Empty once they are taken: freeing them is not for the forward thread."""
    requests: frozenset[str]
    """Whose chunks are saved."""
    after: Mark
    """What its copies follow."""
    deadline: float
    is_submitted: bool = False
    """Whether no copy will be submitted of what is handed over. ``Saver._changed`` guards it."""
    is_dropped: bool = False
    """Whether nothing is handed over, because a fence waited in vain. Then it counts as submitted:
    its blocks may change, even while its copies are."""
    mark: Mark | None = None
    """The end of the copies. None until then, if there are none, or if nothing shows it: after the
    device failed, they may still write to their slabs."""
    chunks: list[_SavedChunk] = field(default_factory=list)
    """What is handed over once ``mark`` is done."""

    def has_left(self) -> bool:
        """Whether its blocks may change."""
        is_submitted, mark = self.is_submitted, self.mark  # in this order
        return is_submitted and (mark is None or mark.done())


class Saver:
    """Executes save plans. ``gather``, ``fence``, ``left_device`` and ``take_dropped`` are for the
    forward thread."""

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
        self._failure_log = FailureLog(logger, "saves")
        self._steps: deque[_Step] = deque()
        """Those that are not known to have left their blocks, in order. For the forward thread."""
        self._changed = Condition()
        """Guards ``_waiting``, ``_is_stuck``, and how far steps are."""
        self._waiting = 0
        """Chunks that wait for the device, or to be handed over."""
        self._is_stuck = False
        """Whether a fence has waited in vain, and the thread has not gone on since."""
        self._dropped: deque[tuple[str, int]] = deque()
        self._gives_up = False
        self._batch = max(1, min(COMMITS_MAX, _BATCH_BYTES // slabs.slab_bytes))
        begin = lane.adopt_thread
        self._saves = Pool("objkv-save", 1, self._save_all, failed=self._not_copied, begin=begin)
        self._gathers = Pool("objkv-gather", 1, self._gather, begin=begin)

    def gather(self, plans: Sequence[SavePlan]) -> None:
        """Queue this step's plans, after the forward pass was launched. Never waits. The blocks
        must not change until ``left_device`` is True for their request, or ``fence`` was called."""
        if not plans:
            return
        try:
            self._poll()
            after = self._lane.mark_compute()
        except Exception:
            logger.exception("forward pass not marked, saving nothing of the step")
            self._drop(self._named(plans))
            return
        requests = frozenset(one.request_id for one in plans)
        step = _Step(plans, requests, after, self._clock() + self._limits.deadline_s)
        planned = sum(len(plan.moves) for one in (*self._steps, step) for plan in one.plans)
        is_full = planned > _PLANNED_MAX or self._is_stuck
        if is_full or not self._gathers.put([step]):
            self._drop(self._named(plans))
        else:
            self._steps.append(step)

    def fence(self, request_ids: Collection[str] | None = None) -> None:
        """Make computing wait until what is saved of these requests has left its blocks, which may
        then be reused. None: of all requests. Copies that are not submitted yet are waited for
        here. What takes too long is dropped."""
        of_all = request_ids is None
        steps = [s for s in self._steps if of_all or not s.requests.isdisjoint(request_ids or ())]
        if not steps:
            return
        with self._changed:
            if not self._changed.wait_for(lambda: all(s.is_submitted for s in steps), FENCE_S):
                logger.warning("saves dropped, their copies were not submitted in time")
                self._is_stuck = True
                for step in steps:
                    if not step.is_submitted:
                        step.is_submitted = step.is_dropped = True
        marks = [mark for step in steps if (mark := step.mark) is not None]
        if marks and not marks[-1].done():
            marks[-1].hold_compute()  # it covers the others

    def left_device(self, request_id: str) -> bool:
        """Whether everything that is saved of the request has left its blocks."""
        self._poll()
        return not any(request_id in step.requests for step in self._steps)

    def take_dropped(self) -> set[tuple[str, int]]:
        """Return (request id, chunk) of what was not gathered since the last call."""
        return {self._dropped.popleft() for _ in range(len(self._dropped))}

    def drain(self, deadline_s: float) -> bool:
        """Wait for all saves, for at most ``deadline_s``. Returns whether all have ended."""
        end = monotonic() + deadline_s
        return self._gathers.drain(deadline_s) and self._saves.drain(max(0.0, end - monotonic()))

    def close(self, drain_deadline_s: float) -> None:
        """Drain within the bound, then stop. What remains is dropped. No block is read afterwards,
        unless the device still copies a second later; those slabs are never reused."""
        end = self._clock() + drain_deadline_s
        self._gathers.drain(drain_deadline_s)
        join_s = max(0.0, end - self._clock()) + COPIES_S
        is_stuck = self._gathers.close(join_s, give_up=self._drop_steps)
        if is_stuck or not self._copies_end(end + COPIES_S):
            logger.error("copies of saves did not finish on the device, shutting down without them")
            self._gives_up = True
        # One look at the device takes a moment, also after the bound.
        if not self._saves.drain(max(COPIES_S, end - self._clock())):
            logger.warning("saves dropped at shutdown count=%d", self._waiting)
        self._gives_up = True
        if self._saves.close(JOIN_S, give_up=self._give_up_steps):
            logger.warning("a save is still being handed over at shutdown")

    def _copies_end(self, until: float) -> bool:
        """Poll until all submitted copies are done: blocks and slabs may be unmapped next, and CUDA
        has no wait with a timeout. Returns False at the time ``until``, or if the device fails."""
        try:
            mark = self._lane.mark()
            while not mark.done():
                if self._clock() >= until:
                    return False
                sleep(_LOOK_S)
        except Exception:
            logger.exception("copies of saves failed on the device")
            return False
        return True

    def _poll(self) -> None:
        """Forget steps that have left their blocks. They do so in order."""
        while self._steps and self._steps[0].has_left():
            self._steps.popleft()

    def _gather(self, step: _Step) -> None:
        """Submit a step's copies, in a thread that does nothing else: a fence waits for it."""
        plans, step.plans = step.plans, ()
        chunks, failed, mark = list[_SavedChunk](), list[_SavedChunk](), None
        try:
            named = self._named(plans)
            if step.is_dropped:
                self._drop(named)
            elif chunks := self._lease_slabs(named):
                failed = self._submit(chunks, step.after)
                mark = self._lane.mark()
        except Exception:  # the step must end: otherwise its requests keep their blocks for ever
            logger.exception("chunks not gathered, their slabs are lost count=%d", len(chunks))
            failed = chunks
        if not self._end_submitting(step, mark):
            failed = chunks
        self._give_up(failed, mark)
        self._drop(failed)
        step.chunks = [one for one in chunks if one not in failed]
        with self._changed:
            self._waiting += len(step.chunks)
        if not self._saves.put([step]):
            self._give_up_steps([step])

    def _end_submitting(self, step: _Step, mark: Mark | None) -> bool:
        """Note that a step's copies are submitted. Returns False if it was dropped meanwhile."""
        with self._changed:
            self._is_stuck = False
            if step.is_dropped:
                return False
            step.mark = mark  # first: ``has_left`` takes no lock
            step.is_submitted = True
            self._changed.notify_all()
            return True

    def _named(self, plans: Iterable[SavePlan]) -> list[_SavedChunk]:
        """What this rank has of the chunks."""
        named = list[_SavedChunk]()
        for plan in plans:
            for save in plan.moves:
                move, group = save.move, self._groups.get(save.move.group)
                if group is None or not group.shape.rank_shard.writes(move.prefix_hash):
                    continue
                assert move.first_block == 0
                assert len(move.block_ids) * group.split == group.shape.blocks
                payload = group.shape.payload
                key = ChunkKey(plan.namespace, move.prefix_hash, move.group, payload)
                claim = Claim(key, move.parent_hash, move.token_start, move.token_end)
                part = None if group.position is None else SavedPart(plan.number, group.position)
                named.append(_SavedChunk(plan, save, claim, key.path(), part))
        return named

    def _lease_slabs(self, named: Sequence[_SavedChunk]) -> list[_SavedChunk]:
        """Decide what to save. Returns the chunks that have a slab now."""
        wanted, chunks = list[_SavedChunk](), list[_SavedChunk]()
        try:
            if not self._target.has_room():
                self._skip(named, "save_over_quota")  # the scheduler would plan a drop again
                return []
            for one in named:
                if self._target.begin_save(one.path, puts=one.plan.puts, again=one.save.again):
                    wanted.append(one)
            if len(wanted) < len(named):
                self._recorder.count("save_repeats", len(named) - len(wanted))
            with suppress(SlabsExhaustedError):
                for one in wanted[: max(0, self._limits.queue_max - self._waiting)]:
                    one.slab = self._slabs.lease()
                    chunks.append(one)
            dropped = wanted[len(chunks) :]
        except Exception:
            logger.exception("saves failed unexpectedly count=%d", len(named))
            for one in chunks:
                one.slab.release()
            chunks, dropped = [], [*named]
        for one in wanted[len(chunks) :]:
            self._target.end_save(one.path)
        self._drop(dropped)
        return chunks

    def _submit(self, chunks: Sequence[_SavedChunk], after: Mark) -> list[_SavedChunk]:
        """Submit copies that follow ``after``. Returns the chunks of groups that failed, some of
        whose copies may have been submitted."""
        failed = list[_SavedChunk]()
        self._lane.follow(after)
        for number in {one.claim.key.group for one in chunks}:
            group, some = self._groups[number], [c for c in chunks if c.claim.key.group == number]
            ids = np.array([one.save.move.block_ids for one in some], np.int64)
            rooms = [header_room(group.layers, tokens=len(one.save.tokens or ())) for one in some]
            starts = np.array([one.slab.start for one in some], np.int64) + rooms
            try:
                memory = self._slabs.memory.numpy().data
                self._lane.gather(group.pages, group.blocks(ids), memory, starts)
            except Exception:  # such as no memory for staging: a drop, as without a slab
                logger.exception("chunks of a group not gathered count=%d", len(some))
                failed += some
        return failed

    def _save_all(self, step: _Step) -> None:
        """Hand chunks over after their copies. Polls: the driver would wait for a hung device."""
        self._target.send_drops()
        pause_s = _LOOK_S
        while step.mark is not None and not step.mark.done():
            if self._gives_up or self._clock() >= step.deadline:
                self._give_up_steps([step])
                return
            sleep(pause_s)
            pause_s = min(2 * pause_s, _LOOK_MAX_S)
        while step.chunks:
            some = step.chunks[: self._batch]
            try:
                self._save(some, is_late=self._gives_up or self._clock() >= step.deadline)
            finally:
                for one in some:
                    one.slab.release()
                    self._target.end_save(one.path)
                self._end_waiting(step, len(some))
        self._target.send_drops()

    def _save(self, chunks: Sequence[_SavedChunk], *, is_late: bool) -> None:
        """Hand chunks over. Every failure is a drop."""
        if is_late:
            self._skip(chunks, "save_drops")
            return
        started = self._clock()
        try:
            statuses = self._target.save([self._outbox_payload(one) for one in chunks])
        except Exception as exc:
            self._skip(chunks, "save_errors")
            if isinstance(exc, ObjkvError):
                self._failure_log.failed(exc)
            else:
                logger.exception("saves failed unexpectedly key=%s", chunks[0].path)
            return
        self._recorder.observe("save_seconds", (self._clock() - started) / len(chunks))
        for status in set(statuses):
            some = [one for one, own in zip(chunks, statuses, strict=True) if own is status]
            if counter := _COUNTERS.get(status, "save_errors"):
                self._count(some, counter)
            if status in _COUNTERS:
                self._failure_log.worked()
            else:
                reason = TransferError(f"the agent takes no payload: {status.name}")
                self._failure_log.failed(reason)

    def _outbox_payload(self, chunk: _SavedChunk) -> OutboxPayload:
        """Write a chunk's header in front of its pages."""
        save, layers = chunk.save, self._groups[chunk.claim.key.group].layers
        origin = Provenance(save.token_digest, self._limits.writer, int(time()), save.tokens)
        memory = chunk.slab.view
        payload, _ = encode_in_place(chunk.claim, layers, memory, codec="none", provenance=origin)
        return OutboxPayload(chunk.claim.key, chunk.path, payload, chunk.part)

    def _not_copied(self, step: _Step, error: Exception) -> None:
        """The device failed, and what it still copies is unknown."""
        logger.error("saves dropped, the device failed", exc_info=error)
        step.mark = None
        self._give_up_steps([step])

    def _give_up_steps(self, steps: Iterable[_Step]) -> None:
        for step in steps:
            chunks = step.chunks[:]
            self._end_waiting(step, len(chunks))
            self._give_up(chunks, step.mark)
            self._skip(chunks, "save_drops")

    def _end_waiting(self, step: _Step, count: int) -> None:
        """The first chunks of a step are done with. Freeing them is not for the forward thread."""
        del step.chunks[:count]
        with self._changed:
            self._waiting -= count

    def _give_up(self, chunks: Iterable[_SavedChunk], mark: Mark | None) -> None:
        """End saves. ``mark``: the end of their copies, None if nothing shows it."""
        for one in chunks:
            if mark is None:
                one.slab.abandon()
            else:
                one.slab.release(mark)
            self._target.end_save(one.path)

    def _drop_steps(self, steps: Iterable[_Step]) -> None:
        """Drop steps of which nothing was read."""
        for step in steps:
            self._end_submitting(step, None)
            self._drop(self._named(step.plans))

    def _drop(self, chunks: Sequence[_SavedChunk]) -> None:
        """Save nothing of chunks, and have the scheduler plan them again."""
        self._skip(chunks, "save_drops")
        self._dropped.extend((one.plan.request_id, one.save.move.chunk) for one in chunks)

    def _skip(self, chunks: Sequence[_SavedChunk], counter: str) -> None:
        """Save nothing of chunks, and have the agent not wait for them with other ranks' parts."""
        self._count(chunks, counter)
        for chunk in chunks:
            if chunk.part is not None:
                self._target.drop(chunk.path, chunk.part)

    def _count(self, chunks: Sequence[_SavedChunk], counter: str) -> None:
        if not chunks:
            return
        self._recorder.count(counter, len(chunks))
        if counter in _BYTES:
            nbytes = sum([self._groups[one.claim.key.group].raw_bytes for one in chunks])
            self._recorder.count(_BYTES[counter], nbytes)


_COUNTERS = {
    CommitStatus.ACCEPTED: "saves_accepted",
    CommitStatus.HELD_BACK: "saves_accepted",
    CommitStatus.PART: "",
    CommitStatus.REPEATED: "save_existed",
    CommitStatus.DROPPED: "save_drops",
    CommitStatus.SHED: "saves_shed",
}
"""Of what the agent answers. The rest are errors."""
_BYTES = {"saves_accepted": "save_accepted_bytes", "save_drops": "save_drop_bytes"}
