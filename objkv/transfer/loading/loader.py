"""Loads: threads fetch payloads into slabs and verify them there, and lanes scatter them to blocks.

No thread sleeps until a device has finished: the slabs and the outcomes of loads
between steps are released by polling.
"""

import logging
from collections.abc import Callable, Mapping
from threading import Thread
from time import monotonic, thread_time

from objkv.background import join_all
from objkv.cache.chunks import ChunkCache
from objkv.errors import ObjkvError, PayloadError, ValueTooLong
from objkv.net.deadline import EndsBy
from objkv.telemetry import Recorder, Trouble
from objkv.tracing import NO_TRACING, Tracing
from objkv.transfer.lanes import Lane
from objkv.transfer.loading.fetch import Decoder
from objkv.transfer.loading.job import LoadJob
from objkv.transfer.loading.loads import LoadLimits, Loads
from objkv.transfer.loading.queue import Task, TaskQueue
from objkv.transfer.loading.writing import UnwantedError, claim_of
from objkv.transfer.paging import PagedGroup
from objkv.transfer.slabs import SlabPool, WideSlabs

logger = logging.getLogger(__name__)

_OVERDUE_SHARE = 1 / 4
"""A load between steps is overdue after this share of its deadline: it then goes before others."""


class Loader(Loads):
    """Fetches payloads itself, in this process."""

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
        lanes = [lane_for_thread() for _ in range(limits.threads)]
        super().__init__(groups, lanes[0], limits, recorder, clock=clock, tracing=tracing)
        self._cache, self._slabs, self._wide = cache, slabs, wide
        self._trouble = Trouble(logger, "loads")
        self._queue = TaskQueue(limits.queue_max, overdue_s=limits.deadline_s * _OVERDUE_SHARE)
        self._threads = [self._start_thread(i, lane) for i, lane in enumerate(lanes)]

    def close(self) -> None:
        """Stop all threads. Unfinished plans never touch their blocks again.

        A thread that is on the network ends with its call, possibly after this returns, and its
        payload is discarded. Idempotent.
        """
        self._queue.close()
        self._close_jobs()
        if left := join_all(self._threads, self._limits.join_s):
            logger.warning("loads still on the network at shutdown threads=%s", ",".join(left))

    def __repr__(self) -> str:
        return f"<Loader {len(self._jobs)} plans, {len(self._queue)} spans waiting>"

    def _begin(self, job: LoadJob) -> int:
        return 0 if self._is_stuck() else self._queue.add(job)

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
