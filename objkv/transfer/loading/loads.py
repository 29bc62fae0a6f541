"""Loads in progress, as the forward thread sees them, however payloads reach the host.

A block is loaded only if its last byte was verified and its payload is as long as its header
states. Any fault fails the move and all later chunks of the same plan. Nothing here raises into the
caller's thread.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Event
from time import monotonic

from objkv.telemetry import Recorder
from objkv.tracing import NO_TRACING, Tracing
from objkv.transfer.lanes import Lane, Mark
from objkv.transfer.loading.job import LoadJob
from objkv.transfer.paging import PagedGroup
from objkv.transfer.plan import LoadOutcome, LoadPlan
from objkv.transfer.sources import PayloadLayouts

logger = logging.getLogger(__name__)

_COPIES_S = 1.0
"""How long ``close`` waits for copies to the device, which write into blocks."""
_LOOK_S = 2e-4


@dataclass(frozen=True, slots=True)
class LoadLimits:
    """Bounds of the loader."""

    queue_max: int
    """Moves that may wait. A plan fails from the first move beyond this limit."""
    deadline_s: float
    """For loads between steps."""
    step_deadline_s: float
    """For loads within the step."""
    join_s: float = 5.0
    """How long ``close`` waits for threads that are still on the network."""


class Loads:
    """Executes load plans.

    The forward thread calls ``submit``, ``take_finished`` and ``wait_layer``. It waits for the
    network only if it needs a layer now. ``wait_over`` is for steps with nothing to compute.
    Subclasses bring the payloads.
    """

    def __init__(
        self,
        groups: Mapping[int, PagedGroup],
        lane: Lane,
        limits: LoadLimits,
        recorder: Recorder,
        *,
        clock: Callable[[], float] = monotonic,
        tracing: Tracing = NO_TRACING,
    ) -> None:
        """``lane``: one of the lanes that the copies use."""
        self._last_layers = {g: len(group.layers) - 1 for g, group in groups.items()}
        self._layouts = PayloadLayouts(groups)
        self._lane, self._limits, self._recorder = lane, limits, recorder
        self._clock, self._tracing = clock, tracing
        self._jobs: dict[str, LoadJob] = {}
        self._over = Event()

    @property
    def leased(self) -> int:
        """Number of payloads that are being read now."""
        raise NotImplementedError

    @property
    def in_flight(self) -> int:
        """Number of loads that are not over. Their copies to a device may take longer."""
        return sum(not job.is_over() for job in self._jobs.values())

    def _begin(self, job: LoadJob) -> int:
        """Start a job. Returns how many of its moves were accepted, from the first on."""
        raise NotImplementedError

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
        taken = self._begin(job)
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

    def cancel(self, request_id: str, *, request_ended: bool = False) -> None:
        """Stop fetching for a request. Its outcome is still reported. ``request_ended``: what did
        not fail before is no failure then, because nothing is recomputed."""
        if job := self._jobs.get(request_id):
            job.request_ended = request_ended and not job.is_over()
            job.cancel()

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
        """Stop. Unfinished plans never touch their blocks again. Idempotent."""
        raise NotImplementedError

    def _close_jobs(self) -> None:
        """Let no unfinished plan touch its blocks again."""
        end = monotonic() + _COPIES_S  # for all loads: a device that hangs ends none of them
        for job in self._jobs.values():
            job.ended(job.close(max(0.0, end - monotonic())))

    def _count(self, job: LoadJob, outcome: LoadOutcome) -> None:
        self._recorder.observe("load_seconds", self._clock() - job.started)
        self._recorder.count("loads")
        job.ended(outcome)
        if outcome.failed and not job.request_ended:
            self._recorder.count("load_failures")
            self._recorder.count("load_failed_blocks", len(outcome.failed_blocks))
