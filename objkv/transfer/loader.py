"""Loads: fetch threads bring payloads into slabs, verify them there, and lanes scatter them.

A block counts as loaded only when its last byte was verified, and its payload was as long as its
header says. Any fault fails the move, and with it all later chunks of the same plan; nothing here
raises into the caller's thread.
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
from objkv.transfer.fetch import Cuts, Decoder, UnwantedError, claim_of
from objkv.transfer.job import LoadJob
from objkv.transfer.lanes import Lane
from objkv.transfer.paging import PagedGroup
from objkv.transfer.plan import LoadOutcome, LoadPlan
from objkv.transfer.queue import Task, TaskQueue
from objkv.transfer.slabs import SlabPool, WideSlabs
from objkv.transfer.sources import Sources

logger = logging.getLogger(__name__)

_OVERDUE_SHARE = 4
"""A load between steps that has waited for this part of its time waits no longer behind others."""


@dataclass(frozen=True, slots=True)
class LoadLimits:
    """Bounds of the loader."""

    threads: int
    queue_max: int
    """Moves waiting for a thread; a plan that would exceed it fails from there on."""
    deadline_s: float
    step_deadline_s: float
    """The same for loads within the step."""
    cuts: Cuts = field(default_factory=Cuts)
    join_s: float = 5.0
    """How long closing waits for threads that are still on the network."""


class Loader:
    """Executes load plans. ``submit``, ``take_finished`` and ``wait_layer`` are called by the
    forward thread, which never waits for the network but for a layer it needs now; ``wait_over`` is
    for steps in which it has nothing to compute."""

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
        """``wide``: for payloads of other shapes that ``slabs`` are too small for; without it these
        are misses."""
        self._cache = cache
        self._last_layers = {g: len(group.layers) - 1 for g, group in groups.items()}
        self._sources = Sources(groups)
        self._slabs = slabs
        self._wide = wide
        self._limits = limits
        self._recorder = recorder
        self._clock = clock
        self._tracing = tracing
        self._trouble = Trouble(logger, "loads")
        self._jobs: dict[str, LoadJob] = {}
        self._over = Event()
        self._queue = TaskQueue(limits.queue_max, overdue_s=limits.deadline_s / _OVERDUE_SHARE)
        self._lanes = [lane_for_thread() for _ in range(limits.threads)]
        self._threads = [self._start_thread(i, lane) for i, lane in enumerate(self._lanes)]

    def submit(self, plan: LoadPlan) -> None:
        """Start a plan; its outcome comes from ``take_finished``. Never waits, never raises."""
        plan = self._sources.spread(plan)
        limit_s = self._limits.step_deadline_s if plan.sync else self._limits.deadline_s
        deadline = self._clock() + limit_s
        filled = [self._sources.of(load).filled for load in plan.moves]
        job = LoadJob(plan, filled, deadline, self._clock)
        job.span = self._tracing.begin("objkv.load", plan.traceparent, request_id=plan.request_id)
        assert plan.request_id not in self._jobs
        for lane in self._lanes:
            lane.follow_compute()  # what earlier kernels still do to these blocks comes first
        self._jobs[plan.request_id] = job  # nothing fails from here on: its end is reported once
        taken = 0 if self._is_stuck() else self._queue.add(job)
        if taken < len(plan.moves):
            self._recorder.count("load_refused", len(plan.moves) - taken)
            for i in range(taken, len(plan.moves)):
                job.fail(i, rejected=False)

    def wait_layer(self, group: int, layer: int) -> None:
        """Order computing after the arrival of one layer, for all sync plans: blocks until the
        layer was given to the lanes, then the compute stream waits for them."""
        for job in self._jobs.values():
            if job.plan.sync:
                for mark in job.wait_layer(group, layer):
                    mark.hold_compute()

    def cancel(self, request_id: str) -> None:
        """The request was aborted: stop fetching for it; its outcome is still reported."""
        if job := self._jobs.get(request_id):
            job.cancel()

    def wait_over(self, seconds: float) -> None:
        """Block until a load between steps is over, at most so long. For a thread that has nothing
        better to do."""
        self._over.clear()
        if not any(job.is_over() for job in self._jobs.values() if not job.plan.sync):
            self._over.wait(seconds)

    def take_finished(self, *, sync: bool) -> list[LoadOutcome]:
        """Outcomes of the plans of one kind that are over since the last call, each once.

        Sync plans are waited for, up to their deadlines. Plans of the other kind are left for
        another call, because the engine takes the two in different places.
        """
        outcomes = []
        for request_id, job in list(self._jobs.items()):
            if job.plan.sync != sync:
                continue
            if sync:
                for group, last in self._last_layers.items():
                    job.wait_layer(group, last)
                job.wait_over()
            elif not job.is_over():
                continue
            outcome = job.close()
            del self._jobs[request_id]
            self._count(job, outcome)
            outcomes.append(outcome)
        return outcomes

    def close(self) -> None:
        """Stop all threads; plans that are not over never touch their blocks again.

        A thread that is on the network ends with its call, whose deadline may lie further off than
        this waits; its payload goes nowhere. Idempotent.
        """
        self._queue.close()
        for job in self._jobs.values():
            job.ended(job.close())
        if left := join_all(self._threads, self._limits.join_s):
            logger.warning("loads still on the network at shutdown threads=%s", ",".join(left))

    def __repr__(self) -> str:
        return f"<Loader {len(self._jobs)} plans, {len(self._queue)} spans waiting>"

    def _is_stuck(self) -> bool:
        """Whether every thread has been at one task for longer than any load may take: a file
        system hangs, and a call on it cannot be ended. Then nothing is worth waiting for."""
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
            since_s = thread_time()
            try:
                self._run(lane, task)
            finally:
                self._queue.finish(thread_time() - since_s)
            del task  # not kept while waiting for the next one

    def _run(self, lane: Lane, task: Task) -> None:
        """Load one span. Every fault is a miss."""
        job, index, _ = task
        wide = self._wide_slabs(task)
        if wide is not None and not wide.enter(task):
            return  # until another task leaves
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
                "payload refused, recomputing request=%s reason=%s", job.plan.request_id, exc
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
        """Bring one span into its blocks; False if there is no payload."""
        job, index, _ = task
        source, cuts = self._sources.of(job.plan.moves[index]), self._limits.cuts
        decoder = Decoder(task, source, lane, slabs, cuts=cuts, seal=self._cache.seal)
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
                    if job.plan.sync:  # the last layer waits for nothing but its copies
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
        """Where its payload goes if it does not fit into this rank's own slabs."""
        job, index, _ = task
        load, wide = job.plan.moves[index], self._wide
        if load.part is None or wide is None:
            return None
        tokens = load.move.token_end - load.move.token_start
        nbytes = self._sources.of(load).payload_bytes_max(tokens)
        return wide if nbytes > self._slabs.slab_bytes else None

    def _span_done(self, job: LoadJob, index: int, decoder: Decoder) -> None:
        header = decoder.header
        assert header is not None
        if job.span_done(index):
            self._cache.note_load(decoder.claim, header, hot=decoder.hot, seconds=decoder.seconds)

    def _reject(self, job: LoadJob, index: int, *, corrupt: bool) -> None:
        load = job.plan.moves[index]
        key = claim_of(job.plan.namespace, load, self._sources.of(load)).key
        self._cache.reject(key, dict(load.records), corrupt=corrupt)
        job.fail(index, rejected=True)

    def _count(self, job: LoadJob, outcome: LoadOutcome) -> None:
        self._recorder.observe("load_seconds", self._clock() - job.started)
        self._recorder.count("loads")
        job.ended(outcome)
        if outcome.failed:
            self._recorder.count("load_failures")
            self._recorder.count("load_failed_blocks", len(outcome.failed_blocks))
