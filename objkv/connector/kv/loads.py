"""The loads on which vLLM relies, from the match that promised them to their end on all workers.

vLLM holds a request back until its load between steps is reported as ended, and lets the model read
the blocks of a load within the step. A load must therefore never be lost between two calls: if it
cannot be planned, the workers report that it failed. Source: vLLM 0.31-0.33, ``schedule`` and
``_update_from_kv_xfer_finished`` in ``v1/core/sched/scheduler.py``.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from objkv.connector.kv.metadata import LostLoad
from objkv.connector.kv.planning import BlockTable
from objkv.transfer.plan import LoadPlan

_NULL_BLOCK = 0


@dataclass(frozen=True, slots=True)
class _Promise:
    """A match that vLLM may act on."""

    computed: int
    """Tokens that need no load."""
    sync: bool


class ReliedLoads:
    """For the scheduler's thread only. No method raises."""

    def __init__(self, block_tokens: int) -> None:
        """``block_tokens``: tokens per block, if there is only one group."""
        self._block_tokens = block_tokens
        self._promises: dict[str, _Promise] = {}
        self._planned: dict[str, LoadPlan] = {}
        self._lost: dict[str, LostLoad] = {}
        self._awaited: set[str] = set()
        self._started: dict[str, LoadPlan] = {}

    def __contains__(self, request_id: str) -> bool:
        """Whether a load of this request is planned or awaited by vLLM."""
        return any(request_id in some for some in (self._planned, self._lost, self._awaited))

    @property
    def in_progress(self) -> bool:
        """Whether loads between steps were sent and have neither failed nor ended."""
        return bool(self._started)

    def promise(self, request_id: str, computed: int, *, sync: bool) -> None:
        """Record a match beyond ``computed`` tokens. The last one before ``plan`` counts."""
        self._promises[request_id] = _Promise(computed, sync)

    def plan(self, plan: LoadPlan) -> None:
        """Record the load for which vLLM has allocated blocks."""
        self._promises.pop(plan.request_id, None)
        self._planned[plan.request_id] = plan

    def lose(self, request_id: str, blocks: BlockTable) -> None:
        """Record that such a load cannot be planned. ``blocks``: all blocks of the request."""
        self._planned.pop(request_id, None)
        promise = self._promises.pop(request_id, _Promise(0, sync=False))
        lost: frozenset[int] = frozenset()
        if len(blocks) == 1:  # block ids of several groups are not unique
            # The blocks before these were computed, and other requests may share them.
            first = promise.computed // self._block_tokens
            lost = frozenset(blocks[0][first:]) - {_NULL_BLOCK}
        self._lost[request_id] = LostLoad(request_id, promise.sync, lost)

    def forget(self, request_id: str) -> None:
        """Forget the match of a request that ended or needs no load."""
        self._promises.pop(request_id, None)

    def send(self) -> tuple[tuple[LoadPlan, ...], tuple[LostLoad, ...]]:
        """Return the loads since the last call, for the plan of a step: planned and lost ones."""
        loads, lost = tuple(self._planned.values()), tuple(self._lost.values())
        self._planned, self._lost = {}, {}
        self._started |= {load.request_id: load for load in loads if not load.sync}
        self._awaited.update(load.request_id for load in loads if not load.sync)
        self._awaited.update(load.request_id for load in lost if not load.sync)
        return loads, lost

    def failed(self, request_id: str) -> None:
        """Record that a load failed on a worker. Others may still be loading."""
        self._started.pop(request_id, None)

    def received(self, request_ids: Iterable[str]) -> list[LoadPlan]:
        """Record that loads between steps ended on all workers. Returns those that succeeded."""
        ended = list(request_ids)
        self._awaited.difference_update(ended)
        plans = (self._started.pop(request_id, None) for request_id in ended)
        return [plan for plan in plans if plan is not None]
