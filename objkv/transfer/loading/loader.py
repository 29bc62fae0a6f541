"""Loads: threads fetch payloads into slabs and verify them there, and lanes scatter them to blocks.

A block is loaded only if its last byte was verified and its payload is as long as its header
states. Any fault fails the move and all later chunks of the same plan. Nothing here raises into the
caller's thread. No thread sleeps until a device has finished: the slabs and the outcomes of loads
between steps are released by polling.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import Event, Thread
from time import monotonic, thread_time

from objkv.background import join_all
from objkv.cache.chunks import ChunkCache
from objkv.errors import ObjkvError, PayloadError, ValueTooLong
from objkv.net.deadline import EndsBy
from objkv.telemetry import Recorder, Trouble
from objkv.tracing import NO_TRACING, Tracing
from objkv.transfer.lanes import Lane, Mark
from objkv.transfer.loading.fetch import Cuts, Decoder
from objkv.transfer.loading.job import LoadJob
from objkv.transfer.loading.queue import Task, TaskQueue
from objkv.transfer.loading.writing import UnwantedError, claim_of
from objkv.transfer.paging import PagedGroup
from objkv.transfer.plan import LoadOutcome, LoadPlan
from objkv.transfer.slabs import SlabPool, WideSlabs
from objkv.transfer.sources import PayloadLayouts

logger = logging.getLogger(__name__)

_COPIES_S = 1.0
"""How long ``close`` waits for copies to the device, which write into blocks."""
_LOOK_S = 2e-4
_OVERDUE_SHARE = 1 / 4
"""A load between steps is overdue after this share of its deadline: it then goes before others."""


@dataclass(frozen=True, slots=True)
class LoadLimits:
    """Bounds of the loader."""

    threads: int
    queue_max: int
    """Moves that may wait for a thread. A plan fails from the first move beyond this limit."""
    deadline_s: float
    """For loads between steps."""
    step_deadline_s: float
    """For loads within the step."""
    cuts: Cuts = field(default_factory=Cuts)
    join_s: float = 5.0
    """How long ``close`` waits for threads that are still on the network."""


class Loader:
    """Executes load plans.

    The forward thread calls ``submit``, ``take_finished`` and ``wait_layer``. It waits for the
    network only if it needs a layer now. ``wait_over`` is for steps with nothing to compute.
    """

    def __init__(
        self,
        cache: ChunkCache,
        groups: Mapping[int, PagedGroup],
        slabs: SlabPool,
        *,
        wide: WideSlabs[Task] | None = None,
        lane_for_thread: Callable[[], Lane],
        limits: LoadLimits,
        recorder: Recorder,
        clock: Callable[[], float] = monotonic,
        tracing: Tracing = NO_TRACING,
    ) -> None:
        """``wide``: slabs for payloads of other shapes that do not fit into ``slabs``. Without it
        such payloads are misses. ``lane_for_thread``: returns the lane of one more thread, which
        may be that of others, too."""
        self._cache = cache
        self._last_layers = {g: len(group.layers) - 1 for g, group in groups.items()}
        self._layouts = PayloadLayouts(groups)
        self._slabs = slabs
        self._wide = wide
        self._limits = limits
        self._recorder = recorder
        self._clock = clock
        self._tracing = tracing
        self._trouble = Trouble(logger, "loads")
        self._jobs: dict[str, LoadJob] = {}
        self._over = Event()
        self._queue = TaskQueue(limits.queue_max, overdue_s=limits.deadline_s * _OVERDUE_SHARE)
        lanes = [lane_for_thread() for _ in range(limits.threads)]
        self._lane = lanes[0]
        self._threads = [self._start_thread(i, lane) for i, lane in enumerate(lanes)]

    def mark_compute(self) -> Mark:
        """Return a mark after all work submitted so far to the current compute stream."""
        return self._lane.mark_compute()

    def submit(self, plan: LoadPlan, after: Mark | None = None) -> None:
        """Start a plan. ``take_finished`` returns its outcome. Never waits, never raises.

        ``after``: a mark from before the forward pass of this step. By default copies follow
        everything that was submitted so far, and so the whole forward pass if it has begun.
        """
        plan = self._layouts.spread(plan)
        limit_s = self._limits.step_deadline_s if plan.sync else self._limits.deadline_s
        deadline = self._clock() + limit_s
        filled = self._layouts.filled(plan)
        after = after or self.mark_compute()  # earlier kernels may still use these blocks
        job = LoadJob(plan, filled, deadline, self._clock, after)
        job.span = self._tracing.begin("objkv.load", plan.traceparent, request_id=plan.request_id)
        assert plan.request_id not in self._jobs
        self._jobs[plan.request_id] = job  # nothing raises from here on: one outcome per plan
        taken = 0 if self._is_stuck() else self._queue.add(job)
        if taken < len(plan.moves):
            self._recorder.count("load_refused", len(plan.moves) - taken)
            for i in range(taken, len(plan.moves)):
                job.fail(i, rejected=False)

    def wait_layer(self, group: int, layer: int) -> None:
        """Make computing wait for one layer of all sync plans: block until the layer was submitted
        to the lanes, then make the compute stream wait for their marks."""
        for job in self._jobs.values():
            if job.plan.sync:
                for mark in job.wait_layer(group, layer):
                    mark.hold_compute()

    def cancel(self, request_id: str) -> None:
        """Stop fetching for an aborted request. Its outcome is still reported."""
        if job := self._jobs.get(request_id):
            job.cancel()

    def wait_over(self, seconds: float) -> None:
        """Block until a load between steps is over, for at most ``seconds``. For a thread with
        nothing to compute."""
        end = monotonic() + seconds
        while (left_s := end - monotonic()) > 0:
            self._over.clear()
            jobs = [job for job in self._jobs.values() if not job.plan.sync]
            if any(job.poll() for job in jobs):
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
        """Stop all threads. Unfinished plans never touch their blocks again.

        A thread that is on the network ends with its call, possibly after this returns, and its
        payload is discarded. Idempotent.
        """
        self._queue.close()
        end = monotonic() + _COPIES_S  # for all loads: a device that hangs ends none of them
        for job in self._jobs.values():
            job.ended(job.close(max(0.0, end - monotonic())))
        if left := join_all(self._threads, self._limits.join_s):
            logger.warning("loads still on the network at shutdown threads=%s", ",".join(left))

    def __repr__(self) -> str:
        return f"<Loader {len(self._jobs)} plans, {len(self._queue)} spans waiting>"

    def _is_stuck(self) -> bool:
        """Whether every thread has worked on one task for longer than any load's deadline. Then a
        file system hangs, its calls cannot be cancelled, and queueing is pointless."""
        longest_s = max(self._limits.deadline_s, self._limits.step_deadline_s)
        return self._queue.hanging(longest_s) >= len(self._threads)

    def _start_thread(self, number: int, lane: Lane) -> Thread:
        name = f"objkv-load-{number}"
        thread = Thread(target=self._work, args=(lane,), name=name, daemon=True)
        thread.start()
        return thread

    def _work(self, lane: Lane) -> None:
        lane.adopt_thread()
        while (task := self._queue.take()) is not None:
            began = thread_time()
            try:
                self._run(lane, task)
            finally:
                self._queue.finish(thread_time() - began)
            del task  # do not keep it alive while waiting for the next one

    def _run(self, lane: Lane, task: Task) -> None:
        """Load one span. Every fault is a miss."""
        job, index, _ = task
        wide = self._wide_slabs(task)
        if wide is not None and not wide.enter(task):
            return  # queued again when another task leaves
        done = False
        try:
            if job.wanted(index):
                slabs = self._slabs if wide is None else wide.pool()
                with EndsBy(monotonic() + job.deadline - self._clock()):
                    done = self._fetch(slabs, lane, task)
                self._trouble.worked()
        except UnwantedError:
            self._recorder.count("load_given_up")
        except (PayloadError, ValueTooLong) as exc:
            logger.warning(
                "payload refused, recomputing request=%s chunk=%s reason=%s",
                job.plan.request_id,
                job.plan.moves[index].move.prefix_hash.hex(),
                exc,
            )
            self._recorder.count("load_corrupt")
            self._reject(job, index, corrupt=True)
        except ObjkvError as exc:
            self._recorder.count("load_errors")
            self._trouble.failed(exc)
        except Exception:  # a dead thread would hang every later load
            self._recorder.count("load_errors")
            logger.exception("load failed unexpectedly request=%s", job.plan.request_id)
        finally:
            if wide is not None and (other := wide.leave()) is not None:
                self._queue.put_back(other)
        if not done:
            job.fail(index, rejected=False)
        if job.is_over():
            self._over.set()

    def _fetch(self, slabs: SlabPool, lane: Lane, task: Task) -> bool:
        """Load one span into its blocks. Returns False if the payload is missing."""
        job, index, _ = task
        load = job.plan.moves[index]
        source, cuts = self._layouts.of(load), self._limits.cuts
        decoder = Decoder(task, load, source, lane, slabs, cuts=cuts, seal=self._cache.seal)
        trace = decoder.trace
        try:
            with decoder:
                nbytes = self._cache.get_into(
                    decoder.claim.key,
                    decoder.buffer,
                    hot=decoder.hot,
                    arrived=decoder.arrived,
                    on_hot=trace.came_hot,
                    start=decoder.start,
                )
                if nbytes is not None:
                    rest = decoder.end(nbytes)
                    self._recorder.count("load_bytes", nbytes)
                    where = "hot_load_bytes" if trace.hot else "bulk_load_bytes"
                    self._recorder.count(where, nbytes)
                    if rest:
                        self._queue.add_spans(job, index, rest)
                    if job.plan.sync:  # do not wait for the copies before reporting the span
                        self._span_done(job, index, decoder)
        except Exception as exc:
            trace.failed(str(exc) or type(exc).__name__)
            raise
        if nbytes is None:
            trace.failed("indexed, but gone")
            self._recorder.count("load_ghosts")
            self._reject(job, index, corrupt=False)
            return False
        assert decoder.header is not None
        trace.copied(nbytes, decoder.header.codec)
        if not job.plan.sync:
            self._span_done(job, index, decoder)
        return True

    def _wide_slabs(self, task: Task) -> WideSlabs[Task] | None:
        """Return the wide slabs if the payload does not fit into this rank's own slabs."""
        job, index, _ = task
        wide = self._wide
        if wide is None or not job.plan.moves.has_parts:
            return None
        load = job.plan.moves[index]
        if load.part is None:
            return None
        tokens = load.move.token_end - load.move.token_start
        nbytes = self._layouts.of(load).payload_bytes_max(tokens)
        return wide if nbytes > self._slabs.slab_bytes else None

    def _span_done(self, job: LoadJob, index: int, decoder: Decoder) -> None:
        header = decoder.header
        assert header is not None
        if job.span_done(index):
            self._cache.note_load(decoder.claim, header, hot=decoder.hot, seconds=decoder.seconds)

    def _reject(self, job: LoadJob, index: int, *, corrupt: bool) -> None:
        load = job.plan.moves[index]
        key = claim_of(job.plan.namespace, load, self._layouts.of(load)).key
        self._cache.reject(key, dict(load.records), corrupt=corrupt)
        job.fail(index, rejected=True)

    def _count(self, job: LoadJob, outcome: LoadOutcome) -> None:
        self._recorder.observe("load_seconds", self._clock() - job.started)
        self._recorder.count("loads")
        job.ended(outcome)
        if outcome.failed:
            self._recorder.count("load_failures")
            self._recorder.count("load_failed_blocks", len(outcome.failed_blocks))
