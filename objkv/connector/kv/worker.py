"""The worker's side: executes plans on this rank's paged cache, and reports failures, each a miss
or a drop. Source of the call order: vLLM 0.31-0.33, ``kv_connector_model_runner_mixin.py``."""

import logging
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from os import getpid

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from objkv.agent.outbox import AgentSaves
from objkv.cache.admission import LoadTime
from objkv.config import Config
from objkv.connector.guard import guarded
from objkv.connector.kv.metadata import FailedLoad, StepPlan, StepReport
from objkv.connector.model.groups import Geometry
from objkv.connector.pacing import EMPTY_STEP_S
from objkv.keys.chunk import ChunkKey
from objkv.tracing import Tracing
from objkv.transfer.lanes import Mark
from objkv.transfer.loading.loader import Loader
from objkv.transfer.paging import NOT_QUANTISED, PagedGroup, Quantised
from objkv.transfer.plan import LoadOutcome, LoadPlan
from objkv.transfer.saver import Saver

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rank:
    """The identity of this worker, and how far the scheduler may run ahead of it."""

    tp_rank: int
    writer: str
    batches_in_flight: int
    writes_early: bool = False
    """Whether the model runner writes to blocks for a step before it calls ``handle_preemptions``.
    Source: vLLM 0.32, ``update_requests`` in ``v1/worker/gpu/model_runner.py``."""
    pp_rank: int = 0
    workers: int = 1
    """How many workers this host may have, those of data-parallel replicas included."""
    step_tokens: int = 0
    """Most tokens that a step computes."""
    # Before Python 3.12 a mapping proxy cannot be a dataclass default.
    quantised: Mapping[str, Quantised] = field(default_factory=lambda: NOT_QUANTISED)
    """Element types and scales of quantised layers, by layer."""


class WorkerSide:
    """The worker's half of the connector. All methods are called by the forward thread."""

    def __init__(
        self,
        config: Config,
        geometry: Geometry,
        rank: Rank,
        groups: Mapping[int, PagedGroup],
        *,
        loader: Loader,
        saver: Saver,
        target: AgentSaves,
        tracing: Tracing,
        accepted: deque[ChunkKey] | None = None,
    ) -> None:
        """``target``: of ``saver``. ``accepted``: payloads that the agent saves and does
        not hold back, to be reported."""
        self._config, self._rank, self._tracing, self._groups = config, rank, tracing, groups
        self.loader, self.saver, self._target = loader, saver, target
        self._layers = {
            name: (g, i) for g, group in groups.items() for i, name in enumerate(group.shape.layers)
        }
        self._report, self._accepted = StepReport(), accepted
        self._failed_blocks, self._sent = set[int](), set[str]()
        self._received, self._failed = set[str](), set[str]()
        self._tainted_steps = 0
        self._in_layers = self._layers_failed = self._is_unmarked = self._closed = False
        self._before_forward: Mark | None = None
        self._device = next((group.device for group in groups.values()), None)
        self._drops_tokens = geometry.windowed
        self._fails_whole = geometry.windowed or geometry.several_tables
        self._pid = getpid()

    def before_forward(self, plan: StepPlan) -> None:
        """Mark the point that this step's loads follow. Never raises. vLLM starts most loads when
        it has launched the forward pass, and they must not wait for that. Their blocks are free of
        earlier work here: vLLM frees a block only after the steps that may write it, clears and
        copies blocks before it binds the plan, and ``before_reuse`` has made computing wait for
        saves. Source: vLLM 0.31-0.33, ``defer_block_free`` in ``v1/core/sched/scheduler.py``."""
        self._before_forward, self._is_unmarked = None, False
        if plan.loads:
            try:
                self._before_forward = self.loader.mark_compute()
            except Exception:  # loads that follow nothing could write to blocks in use
                logger.exception("forward pass not marked, recomputing the step's loads")
                self._is_unmarked = True

    def start_loads(self, plan: StepPlan) -> None:
        """Start this step's loads. Does not wait."""
        mark, self._before_forward = self._before_forward, None
        for load in plan.loads:
            if self._is_unmarked:
                self._fail_load(_all_of(load))
                continue
            self._in_layers |= load.sync
            try:
                self._clear(load)
                self.loader.submit(load, mark)
            except Exception:  # vLLM relies on these blocks: report that they failed
                logger.exception("load not started, recomputing request=%s", load.request_id)
                self._fail_load(_all_of(load))
        for lost in plan.failed_loads:
            self._fail_load(lost)

    def _clear(self, load: LoadPlan) -> None:
        if self._closed:  # vLLM may have unmapped the cache, and the loader refuses the load
            return
        for zeroed in load.blocks_to_zero:
            if (group := self._groups.get(zeroed.group)) is not None:
                group.clear(zeroed.block_ids)

    def wait_layer(self, layer_name: str) -> None:
        """Block until a layer's blocks are loaded or have failed. Never raises: if it fails, all
        loads within the step have, and vLLM discards what is computed from their blocks."""
        if not self._in_layers or self._layers_failed:
            return
        try:
            if place := self._layers.get(layer_name):
                self.loader.wait_layer(*place)
        except Exception:
            logger.exception("layer not awaited, recomputing layer=%s", layer_name)
            self._layers_failed = True

    def end_forward(self, plan: StepPlan) -> None:
        """Settle loads within the step, then save. Called after the forward pass."""
        self._settle_step(plan)
        if self._tainted_steps:
            # These chunks depend on blocks that were not loaded, or were computed in a step that
            # was scheduled before the failure was known.
            self._tainted_steps -= 1
            self._report.dropped |= {
                (s.request_id, m.move.chunk) for s in plan.saves for m in s.moves
            }
        elif plan.saves:
            self._save(plan)
        if self._rank.writes_early and plan.may_reuse:
            self._fence()  # this model runner writes to blocks before ``before_reuse``

    @guarded(None)
    def _save(self, plan: StepPlan) -> None:
        self.saver.gather(plan.saves)

    def before_reuse(self, plan: StepPlan) -> None:
        """Make computing wait until saves have read those blocks that this step may write. Others
        stay with their requests until ``results`` reports their saves."""
        if self._drops_tokens:
            self._fence()  # any block may have left a window, any state may be overwritten
        elif plan.reused:
            self._fence(plan.reused)

    def _fence(self, request_ids: Collection[str] | None = None) -> None:
        try:
            self.saver.fence(request_ids)
        except Exception:  # otherwise saves could read blocks that are overwritten
            logger.exception("saves not fenced, waiting for the device")
            if self._device is not None:
                torch.get_device_module(self._device).synchronize(self._device)

    def results(self, plan: StepPlan, finished: set[str]) -> KVConnectorTransferResults:
        """Return the transfers that ended, each once. With speculation vLLM calls this before
        ``end_forward``, and uses a step's tokens unless its failures are reported here."""
        self._settle_step(plan)
        for request_id in finished:
            self._cancel(request_id)
        self._take_loads(plan)
        self._sent &= plan.held
        sent = set[str]()
        if waits := plan.held - self._sent:
            left_device = guarded(False)(self.saver.left_device)  # else requests keep their blocks
            sent = {r for r in waits if left_device(r)}
            self._sent |= sent
        received, failed = self._received, self._failed
        self._received, self._failed = set(), set()
        return KVConnectorTransferResults(
            finished_sending=sent, finished_recving=received, failed_recving=failed
        )

    @guarded(None)
    def _cancel(self, request_id: str) -> None:
        self.loader.cancel(request_id, request_ended=True)

    @guarded(None)
    def _take_loads(self, plan: StepPlan) -> None:
        if plan.idle and not self._received:
            self.loader.wait_over(EMPTY_STEP_S)
        for outcome in self.loader.take_finished(sync=False):
            self._end_load(outcome)

    def _end_load(self, outcome: LoadOutcome, *, whole: bool = False) -> None:
        """``whole``: whether all of the load failed, whatever its blocks."""
        self._received.add(outcome.request_id)
        if whole or (outcome.failed and self._fails_whole):
            self._failed.add(outcome.request_id)
            self._report.failed.add(outcome.request_id)
        else:
            self._failed_blocks |= outcome.failed_blocks
        try:
            self._note(outcome)
        except Exception:  # vLLM waits for ever for a load that is never reported
            logger.exception("load not reported request=%s", outcome.request_id)

    def take_failed_blocks(self) -> set[int]:
        """Return the blocks whose load failed since the last call. Single-group models only."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_report(self) -> StepReport | None:
        """Return the report for the scheduler's side since the last call."""
        report, self._report = self._report, StepReport()
        report.dropped |= self.saver.take_dropped()
        while self._accepted:  # another thread appends
            key = self._accepted.popleft()
            report.stored.add((key.namespace, key.prefix_hash, key.field))
        return None if report == StepReport() else report

    def close(self) -> None:
        """Drain saves within the configured bound, then stop all threads. Idempotent."""
        if self._closed or getpid() != self._pid:
            return  # a forked process has none of its parent's threads
        self._closed = True
        self.saver.close(self._config.drain_deadline_ms / 1000)
        self.loader.close()
        self._target.close()
        self._tracing.close()

    def _settle_step(self, plan: StepPlan) -> None:
        if not self._in_layers:
            return
        failed, self._in_layers, self._layers_failed = self._layers_failed, False, False
        try:
            for outcome in self.loader.take_finished(sync=True):
                self._note(outcome)
                self._failed_blocks |= outcome.failed_blocks
                if outcome.failed:
                    self._tainted_steps = self._rank.batches_in_flight
        except Exception:
            logger.exception("loads not settled, recomputing them")
            failed = True
        for load in plan.loads:
            if failed and load.sync:  # vLLM relies on these blocks: report that they failed
                self.loader.cancel(load.request_id)
                self._fail_load(_all_of(load))

    def _fail_load(self, load: FailedLoad) -> None:
        if not load.sync:  # it is reported with those that ended
            outcome = LoadOutcome(load.request_id, load.blocks, frozenset())
            self._end_load(outcome, whole=not load.blocks)
            return
        self._report.failed.add(load.request_id)
        self._failed_blocks |= load.blocks
        self._tainted_steps = self._rank.batches_in_flight

    def _note(self, outcome: LoadOutcome) -> None:
        self._report.rejected |= outcome.rejected
        if outcome.failed:
            self._report.failed.add(outcome.request_id)
        elif outcome.first_s is not None:
            self._report.loaded[outcome.request_id] = LoadTime(outcome.seconds, outcome.first_s)


def _all_of(plan: LoadPlan) -> FailedLoad:
    return FailedLoad(plan.request_id, plan.sync, plan.moves.blocks_from(0))
