"""Loads: fetch threads bring payloads into slabs, verify them there, and lanes scatter them.

A block counts as loaded only when its last byte was verified. Any fault fails the move, and with
it all later chunks of the same plan; nothing here raises into the caller's thread.
"""

import logging
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from threading import Condition, Thread
from time import monotonic

import torch

from objkv.cache.tiered import ChunkCache
from objkv.codec.payload import Claim, Header, frame_pages, open_payload
from objkv.errors import ObjkvError, PayloadError, ValueTooLong
from objkv.keys.chunk import ChunkKey
from objkv.telemetry import Recorder, Trouble
from objkv.transfer.job import LoadJob
from objkv.transfer.lanes import Lane
from objkv.transfer.paging import PagedGroup
from objkv.transfer.plan import LoadMove, LoadOutcome, LoadPlan
from objkv.transfer.slabs import SlabPool

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadLimits:
    """Bounds of the loader."""

    threads: int
    queue_max: int
    """Moves waiting for a thread; a plan that would exceed it fails from there on."""
    deadline_s: float
    step_deadline_s: float
    """The same for loads within the step."""


@dataclass(frozen=True, slots=True)
class _Verified:
    """A payload in a slab whose length, header and claim are right; frames are checked later."""

    header: Header
    payload: memoryview
    scratch: memoryview | None


class Loader:
    """Executes load plans. ``submit``, ``take_finished`` and ``wait_layer`` are called by the
    forward thread."""

    def __init__(
        self,
        cache: ChunkCache,
        groups: Mapping[int, PagedGroup],
        slabs: SlabPool,
        *,
        lane_for_thread: Callable[[], Lane],
        limits: LoadLimits,
        recorder: Recorder,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._cache = cache
        self._groups = groups
        self._slabs = slabs
        self._limits = limits
        self._recorder = recorder
        self._clock = clock
        self._trouble = Trouble(logger, "loads")
        self._jobs: dict[str, LoadJob] = {}
        self._queue: deque[tuple[LoadJob, int]] = deque()
        self._ready = Condition()
        self._closed = False
        self._lanes = [lane_for_thread() for _ in range(limits.threads)]
        self._threads = [
            Thread(target=self._work, args=(lane,), name=f"objkv-load-{i}", daemon=True)
            for i, lane in enumerate(self._lanes)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, plan: LoadPlan) -> None:
        """Start a plan; its outcome comes from ``take_finished``. Never waits, never raises."""
        layers = {g: len(group.layers) for g, group in self._groups.items()}
        limit_s = self._limits.step_deadline_s if plan.sync else self._limits.deadline_s
        job = LoadJob(plan, layers, self._clock() + limit_s, self._clock)
        assert plan.request_id not in self._jobs
        self._jobs[plan.request_id] = job
        for lane in self._lanes:
            lane.follow_compute()  # what earlier kernels still do to these blocks comes first
        with self._ready:
            room = 0 if self._closed else max(0, self._limits.queue_max - len(self._queue))
            queued = range(min(room, len(plan.moves)))
            if plan.sync:  # the model waits for it, and for nothing else in the queue
                self._queue.extendleft((job, i) for i in reversed(queued))
            else:
                self._queue.extend((job, i) for i in queued)
            self._ready.notify_all()
        if room < len(plan.moves):
            self._recorder.count("load_refused", len(plan.moves) - room)
            for i in range(room, len(plan.moves)):
                job.fail(i, rejected=False)

    def wait_layer(self, group: int, layer: int) -> None:
        """Order computing after the arrival of one layer, for all sync plans: blocks until the
        layer was given to the lane, then the compute stream waits for the lane."""
        for job in self._jobs.values():
            if job.plan.sync:
                for mark in job.wait_layer(group, layer):
                    mark.hold_compute()

    def cancel(self, request_id: str) -> None:
        """The request was aborted: stop fetching for it; its outcome is still told."""
        if job := self._jobs.get(request_id):
            job.cancel()

    def take_finished(self, *, sync: bool) -> list[LoadOutcome]:
        """Outcomes of the plans of one kind that are over since the last call; each is told once.

        Sync plans are waited for, up to their deadlines. Plans of the other kind are left for
        another call, because the engine hears of the two in different places.
        """
        outcomes = []
        for request_id, job in list(self._jobs.items()):
            if job.plan.sync != sync:
                continue
            if sync:
                for group, paged in self._groups.items():
                    job.wait_layer(group, len(paged.layers) - 1)
            elif not job.is_over():
                continue
            outcome = job.close()
            del self._jobs[request_id]
            self._count(job, outcome)
            outcomes.append(outcome)
        return outcomes

    def close(self) -> None:
        """Stop all threads; plans that are not over never touch their blocks again."""
        with self._ready:
            self._closed = True
            self._queue.clear()
            self._ready.notify_all()
        for job in self._jobs.values():
            job.close()

    def __repr__(self) -> str:
        return f"<Loader {len(self._jobs)} plans, {len(self._queue)} moves waiting>"

    def _work(self, lane: Lane) -> None:
        lane.adopt_thread()
        while True:
            with self._ready:
                while not self._queue and not self._closed:
                    self._ready.wait()
                if self._closed:
                    return
                job, index = self._queue.popleft()
            self._run(lane, job, index)

    def _run(self, lane: Lane, job: LoadJob, index: int) -> None:
        complete = False
        try:
            if job.wanted(index):
                complete = self._load(lane, job, index)
                self._trouble.worked()
        except (PayloadError, ValueTooLong) as exc:
            logger.warning(
                "payload refused, recomputing request=%s reason=%s", job.plan.request_id, exc
            )
            self._recorder.count("load_corrupt")
            self._reject(job, index, corrupt=True)
        except ObjkvError as exc:
            self._recorder.count("load_errors")
            self._trouble.failed(exc)
        except Exception:  # A dead thread would hang every later load: fail the move, keep going.
            self._recorder.count("load_errors")
            logger.exception("load failed unexpectedly request=%s", job.plan.request_id)
        if not complete:
            job.fail(index, rejected=False)

    def _load(self, lane: Lane, job: LoadJob, index: int) -> bool:
        """Fetch, verify and write one move; True if all of it is in its blocks."""
        load = job.plan.moves[index]
        move = load.move
        group = self._groups[move.group]
        key = chunk_key(job.plan.namespace, load, group)
        hot = any(record.hot for field, record in load.records if field == key.field)
        with ExitStack() as leases:
            slab = leases.enter_context(self._slabs.lease())
            nbytes = self._cache.get_into(key, slab.view, hot=hot)
            if nbytes is None:
                self._recorder.count("load_ghosts")
                self._reject(job, index, corrupt=False)
                return False
            claim = Claim(key, move.parent_hash, move.token_start, move.token_end)
            payload = slab.view[:nbytes]
            header = open_payload(payload, claim, group.layers)
            scratch = None
            if header.codec != "none":
                scratch = leases.enter_context(self._slabs.lease()).view
            if not job.enter(index):
                return False
            self._recorder.count("load_bytes", nbytes)
            return self._write(lane, job, index, _Verified(header, payload, scratch))

    def _write(self, lane: Lane, job: LoadJob, index: int, verified: "_Verified") -> bool:
        move = job.plan.moves[index].move
        group = self._groups[move.group]
        block_ids = torch.tensor(move.block_ids, dtype=torch.int64)
        complete, offset = False, 0
        try:
            for layer, spec in enumerate(group.layers):
                scratch = verified.scratch
                room = None if scratch is None else scratch[offset : offset + spec.nbytes]
                pages = frame_pages(verified.header, layer, verified.payload, room)
                group.scatter(lane, layer, pages, move.first_block, block_ids)
                job.layer_written(index, layer, lane.mark())
                offset += spec.nbytes
            complete = True
        finally:
            # The slabs and the blocks stay ours until the copies are through, also on a fault.
            arrived = False
            try:
                lane.mark().wait()
                arrived = True
            finally:  # whoever closes the job waits for this
                job.leave(index, complete=complete and arrived)
        return complete

    def _reject(self, job: LoadJob, index: int, *, corrupt: bool) -> None:
        load = job.plan.moves[index]
        key = chunk_key(job.plan.namespace, load, self._groups[load.move.group])
        self._cache.reject(key, dict(load.records), corrupt=corrupt)
        job.fail(index, rejected=True)

    def _count(self, job: LoadJob, outcome: LoadOutcome) -> None:
        self._recorder.observe("load_seconds", self._clock() - job.started)
        self._recorder.count("loads")
        if outcome.failed:
            self._recorder.count("load_failures")
            self._recorder.count("load_failed_blocks", len(outcome.failed_blocks))


def chunk_key(namespace: str, load: LoadMove, group: PagedGroup) -> ChunkKey:
    """The payload that this rank reads for a move."""
    return ChunkKey(namespace, load.move.prefix_hash, load.move.group, group.shape.rank_shard.shard)
