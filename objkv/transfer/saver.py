"""Saves: gather finished chunks into slabs on the forward thread, do the rest in the background.

What the forward thread does is bounded and local: lease a slab, give copies to the lane. No slab,
or a full queue, is a drop: counted, told to the scheduler, never waited for.
"""

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Condition, Thread
from time import monotonic, time

import torch

from objkv.cache.tiered import ChunkCache, SaveOutcome
from objkv.codec.payload import Claim, Provenance, encode, read_header
from objkv.errors import ObjkvError
from objkv.keys.chunk import ChunkKey
from objkv.telemetry import Recorder, Trouble
from objkv.transfer.lanes import Lane, Mark
from objkv.transfer.paging import PagedGroup
from objkv.transfer.plan import SaveMove, SavePlan
from objkv.transfer.slabs import Slab, SlabPool, SlabsExhaustedError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SaveLimits:
    """Bounds of the saver, and what it writes into payloads."""

    threads: int
    queue_max: int
    deadline_s: float
    """A chunk that waited longer is dropped."""
    codec: str
    writer: str


@dataclass(frozen=True, slots=True)
class _Gathered:
    request_id: str
    claim: Claim
    save: SaveMove
    slab: Slab
    pages: list[memoryview]
    mark: Mark
    deadline: float


class Saver:
    """Executes save plans. ``gather``, ``fence``, ``left_device`` and ``forget`` belong to the
    forward thread."""

    def __init__(
        self,
        cache: ChunkCache,
        groups: Mapping[int, PagedGroup],
        slabs: SlabPool,
        *,
        lane: Lane,
        limits: SaveLimits,
        recorder: Recorder,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._cache = cache
        self._groups = groups
        self._slabs = slabs
        self._lane = lane
        self._limits = limits
        self._recorder = recorder
        self._clock = clock
        self._queue: deque[_Gathered] = deque()
        self._busy = 0
        self._changed = Condition()
        self._closed = False
        self._trouble = Trouble(logger, "saves")
        self._marks: dict[str, Mark] = {}
        self._last_mark: Mark | None = None
        self._threads = [
            Thread(target=self._work, name=f"objkv-save-{i}", daemon=True)
            for i in range(limits.threads)
        ]
        for thread in self._threads:
            thread.start()

    def gather(self, plans: tuple[SavePlan, ...]) -> set[tuple[str, int]]:
        """Copy the chunks of this step's plans out of their blocks, after the forward pass.

        Returns (request id, chunk) of those dropped. The blocks must not change until
        ``left_device`` says so for their request, or ``fence`` was called.
        """
        self._lane.follow_compute()
        dropped: set[tuple[str, int]] = set()
        for plan in plans:
            for save in plan.moves:
                group = self._groups[save.move.group]
                if not group.shape.rank_shard.writes(save.move.prefix_hash):
                    continue
                key = _key(plan, save, group)
                if not self._cache.begin_save(key):
                    self._recorder.count("save_repeats")
                elif not self._gather_one(plan, save, key):
                    self._cache.end_save(key)
                    self._recorder.count("save_drops")
                    dropped.add((plan.request_id, save.move.chunk))
        return dropped

    def fence(self) -> None:
        """Make computing wait for all gathers so far: blocks may change hands after this call."""
        if self._last_mark is not None:
            self._last_mark.hold_compute()

    def left_device(self, request_id: str) -> bool:
        """Whether every chunk gathered for the request has left its blocks."""
        mark = self._marks.get(request_id)
        if mark is None:
            return True
        if not mark.done():
            return False
        del self._marks[request_id]
        return True

    def forget(self, request_id: str) -> None:
        """Nobody will ask for the request again; what was gathered for it is saved all the same."""
        self._marks.pop(request_id, None)

    def drain(self, deadline_s: float) -> bool:
        """Wait until all saves are through, at most so long; True if they are."""
        end = self._clock() + deadline_s
        with self._changed:
            while self._queue or self._busy:
                left = end - self._clock()
                if left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def close(self, drain_deadline_s: float) -> None:
        """Drain within the bound, then stop; what is left is dropped."""
        if not self.drain(drain_deadline_s):
            logger.warning("saves dropped at shutdown chunks=%d", len(self._queue) + self._busy)
        with self._changed:
            self._closed = True
            while self._queue:
                self._queue.popleft().slab.release()
            self._changed.notify_all()

    def __repr__(self) -> str:
        return f"<Saver {len(self._queue)} chunks waiting, {self._busy} under way>"

    def _gather_one(self, plan: SavePlan, save: SaveMove, key: ChunkKey) -> bool:
        group = self._groups[key.group]
        with self._changed:
            if self._closed or len(self._queue) >= self._limits.queue_max:
                return False
        try:
            slab = self._slabs.lease()
        except SlabsExhaustedError:
            return False
        move = save.move
        assert move.first_block == 0
        assert len(move.block_ids) == group.shape.blocks
        claim = Claim(key, move.parent_hash, move.token_start, move.token_end)
        block_ids = torch.tensor(move.block_ids, dtype=torch.int64)
        try:
            pages = group.gather(self._lane, block_ids, slab.tensor)
            mark = self._lane.mark()
        except Exception:  # e.g. no room for staging: a drop, as without a slab
            logger.exception("chunk not taken out request=%s", plan.request_id)
            self._lane.mark().wait()  # copies already given must not land in a slab of others
            slab.release()
            return False
        if not mark.done():
            self._marks[plan.request_id] = self._last_mark = mark
        deadline = self._clock() + self._limits.deadline_s
        item = _Gathered(plan.request_id, claim, save, slab, pages, mark, deadline)
        with self._changed:
            self._queue.append(item)
            self._changed.notify()
        return True

    def _work(self) -> None:
        self._lane.adopt_thread()
        while True:
            with self._changed:
                while not self._queue and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                item = self._queue.popleft()
                self._busy += 1
            try:
                self._save(item)
                self._trouble.worked()
            except ObjkvError as exc:
                self._recorder.count("save_errors")
                self._trouble.failed(exc)
            except Exception:  # a dead thread would keep slabs for ever
                self._recorder.count("save_errors")
                logger.exception("save failed unexpectedly key=%s", item.claim.key.path())
            finally:
                item.mark.wait()
                item.slab.release()
                self._cache.end_save(item.claim.key)
                with self._changed:
                    self._busy -= 1
                    self._changed.notify_all()

    def _save(self, item: _Gathered) -> None:
        if self._clock() >= item.deadline:
            self._recorder.count("save_drops")
            return
        key = item.claim.key
        if not self._cache.take_lease(key):
            self._recorder.count("save_leased_elsewhere")
            return
        started = self._clock()
        try:
            item.mark.wait()
            provenance = Provenance(
                token_digest=item.save.token_digest,
                writer=self._limits.writer,
                created_s=int(time()),
                tokens=item.save.tokens,
            )
            layers = self._groups[key.group].layers
            payload = encode(
                item.claim, layers, item.pages, codec=self._limits.codec, provenance=provenance
            )
            outcome = self._cache.save(item.claim, payload, read_header(payload))
        finally:
            self._cache.release_lease(key)
        self._recorder.observe("save_seconds", self._clock() - started)
        if outcome is SaveOutcome.SAVED:
            self._recorder.count("saves")
            self._recorder.count("save_bytes", len(payload))
        else:
            self._recorder.count("save_existed")


def _key(plan: SavePlan, save: SaveMove, group: PagedGroup) -> ChunkKey:
    move = save.move
    return ChunkKey(plan.namespace, move.prefix_hash, move.group, group.shape.rank_shard.shard)
