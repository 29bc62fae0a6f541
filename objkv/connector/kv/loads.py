"""The loads on which vLLM relies, from the match that promised them to their end on all workers.

vLLM holds a request back until its load between steps is reported as ended, and lets the model read
the blocks of a load within the step. A load must therefore never be lost between two calls: if it
cannot be planned, the workers report that it failed. Source: vLLM 0.31-0.33, ``schedule`` and
``_update_from_kv_xfer_finished`` in ``v1/core/sched/scheduler.py``.
"""

from collections.abc import Callable, Iterable
from time import monotonic

from objkv.connector.kv.metadata import LostLoad, StepReport
from objkv.connector.kv.planning import BlockTable
from objkv.transfer.plan import LoadPlan

_NULL_BLOCK = 0


class ReliedLoads:
    """For the scheduler's thread only. No method raises.

    A load within the step to which no store answers blocks every request of the replica until its
    deadline. A circuit breaker alone does not help: it lets a probe through every few seconds, and
    the model would wait for each one. A load between steps blocks only its own request. After such
    a load, all loads are therefore to be of that kind, until one succeeds within the time that a
    step would wait.
    """

    def __init__(
        self, block_tokens: int, bound_s: float, *, clock: Callable[[], float] = monotonic
    ) -> None:
        """``block_tokens``: tokens per block, if there is only one group. ``bound_s``: how long the
        forward pass waits for a load within the step."""
        self._block_tokens, self._bound_s, self._clock = block_tokens, bound_s, clock
        self._promises: dict[str, tuple[int, bool]] = {}
        """Matches that vLLM may act on: tokens that need no load, and whether it is within the
        step."""
        self._planned: dict[str, LoadPlan] = {}
        self._lost: dict[str, LostLoad] = {}
        self._awaited: set[str] = set()
        self._started: dict[str, tuple[LoadPlan, float]] = {}
        """Loads between steps, and when they were sent."""
        self._within: frozenset[str] = frozenset()
        self.may_sync = True
        """Whether loads within the step may be planned."""

    def __contains__(self, request_id: str) -> bool:
        """Whether a load of this request is planned or awaited by vLLM."""
        return any(request_id in some for some in (self._planned, self._lost, self._awaited))

    @property
    def in_progress(self) -> bool:
        """Whether loads between steps were sent and have neither failed nor ended."""
        return bool(self._started)

    def promise(self, request_id: str, computed: int, *, sync: bool) -> None:
        """Record a match beyond ``computed`` tokens. The last one before ``plan`` counts."""
        self._promises[request_id] = computed, sync

    def plan(self, plan: LoadPlan) -> None:
        """Record the load for which vLLM has allocated blocks."""
        self._promises.pop(plan.request_id, None)
        self._planned[plan.request_id] = plan

    def lose(self, request_id: str, blocks: BlockTable) -> None:
        """Record that such a load cannot be planned. ``blocks``: all blocks of the request."""
        self._planned.pop(request_id, None)
        computed, sync = self._promises.pop(request_id, (0, False))
        lost: frozenset[int] = frozenset()
        if len(blocks) == 1:  # block ids of several groups are not unique
            # The blocks before these were computed, and other requests may share them.
            first = computed // self._block_tokens
            lost = frozenset(blocks[0][first:]) - {_NULL_BLOCK}
        self._lost[request_id] = LostLoad(request_id, sync, lost)

    def forget(self, request_id: str) -> None:
        """Forget the match of a request that ended or needs no load."""
        self._promises.pop(request_id, None)

    def send(self) -> tuple[tuple[LoadPlan, ...], tuple[LostLoad, ...]]:
        """Return the loads since the last call, for the plan of a step: planned and lost ones."""
        loads, lost = tuple(self._planned.values()), tuple(self._lost.values())
        self._planned, self._lost = {}, {}
        now = self._clock()
        self._within = frozenset(load.request_id for load in loads if load.sync)
        self._started |= {load.request_id: (load, now) for load in loads if not load.sync}
        self._awaited.update(load.request_id for load in loads if not load.sync)
        self._awaited.update(load.request_id for load in lost if not load.sync)
        return loads, lost

    def reported(self, report: StepReport) -> None:
        """Record the loads that failed on some worker. Others may still be loading. A refused or
        missing payload means that the store answered."""
        for request_id in report.failed:
            self._started.pop(request_id, None)
        if not report.rejected and self._within & report.failed:
            self.may_sync = False

    def received(self, request_ids: Iterable[str]) -> list[LoadPlan]:
        """Record that loads between steps ended on all workers. Returns those that succeeded."""
        ended = list(request_ids)
        self._awaited.difference_update(ended)
        succeeded = [self._started.pop(name) for name in ended if name in self._started]
        if any(self._clock() - sent_at < self._bound_s for _, sent_at in succeeded):
            self.may_sync = True
        return [plan for plan, _ in succeeded]
