"""The worker's side: executes plans on this rank's paged cache, and reports what did not work.

Everything that can go wrong here becomes a miss or a drop; the façade sees no exception. Source of
the call order: vLLM 0.31-0.33, ``v1/worker/kv_connector_model_runner_mixin.py``.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import getpid

from objkv.cache.admission import LoadTime
from objkv.cache.chunks import ChunkCache
from objkv.config import Config
from objkv.connector.kv.metadata import StepPlan, StepReport
from objkv.connector.model.groups import Geometry
from objkv.tracing import Tracing
from objkv.transfer.loader import Loader
from objkv.transfer.paging import NOT_QUANTISED, PagedGroup, Quantised
from objkv.transfer.plan import LoadOutcome, LoadPlan
from objkv.transfer.saver import Saver

logger = logging.getLogger(__name__)
_IDLE_WAIT_S = 2e-3
"""How long a step with nothing to compute waits for a load."""
_BACKGROUND_S = 1.0
"""How long a shutdown waits for optional work: a copy to the hot store."""


@dataclass(frozen=True, slots=True)
class Rank:
    """Which worker this is, and how far the scheduler may run ahead of it."""

    tp_rank: int
    writer: str
    batches_in_flight: int
    writes_early: bool = False
    """Whether the model runner zeroes and copies blocks for a step before it calls
    ``handle_preemptions``. Source: vLLM 0.32, ``update_requests`` in
    ``v1/worker/gpu/model_runner.py``."""
    pp_rank: int = 0
    # A mapping proxy is no default for a dataclass before Python 3.12.
    quantised: Mapping[str, Quantised] = field(default_factory=lambda: NOT_QUANTISED)
    """By layer, what elements mean where their tensor does not say it."""


@dataclass(frozen=True, slots=True)
class StepResults:
    """The engine's results of a step."""

    sent: set[str]
    received: set[str]
    failed: set[str]


class WorkerSide:
    """All methods are called by the worker's forward thread."""

    def __init__(
        self,
        config: Config,
        geometry: Geometry,
        rank: Rank,
        groups: Mapping[int, PagedGroup],
        *,
        loader: Loader,
        saver: Saver,
        cache: ChunkCache,
        tracing: Tracing,
    ) -> None:
        self._config, self._rank = config, rank
        self._cache, self._tracing = cache, tracing
        self._loader, self._saver = loader, saver
        self._layers = {
            name: (g, i) for g, group in groups.items() for i, name in enumerate(group.shape.layers)
        }
        self._report = StepReport()
        self._failed_blocks, self._sent = set[int](), set[str]()
        self._lost: list[LoadOutcome] = []
        self._tainted_steps = 0
        self._in_layers = self._closed = False
        self._fails_whole = geometry.windowed or len(geometry.groups) > 1
        self._pid = getpid()

    def start_loads(self, plan: StepPlan) -> None:
        """Start this step's loads; does not wait."""
        for load in plan.loads:
            self._in_layers |= load.sync
            try:
                self._loader.submit(load)
            except Exception:  # vLLM counts on these blocks: report that they failed
                logger.exception("load not started, recomputing request=%s", load.request_id)
                self._lose(load)

    def wait_layer(self, layer_name: str) -> None:
        """Before a layer's attention: its loaded blocks are there, or known to have failed."""
        if self._in_layers and (place := self._layers.get(layer_name)):
            self._loader.wait_layer(*place)

    def end_forward(self, plan: StepPlan) -> None:
        """After the forward pass: settle loads within the step, then take finished chunks out."""
        self._settle_step(plan)
        if self._tainted_steps:
            # Computed on blocks that were not loaded, or by a step scheduled before that was known.
            self._tainted_steps -= 1
            dropped = {(s.request_id, m.move.chunk) for s in plan.saves for m in s.moves}
        else:
            dropped = self._saver.gather(plan.saves)
            if self._rank.writes_early:  # this model runner reuses blocks before it preempts
                self._saver.fence()
        self._report.dropped |= dropped

    def before_reuse(self) -> None:
        """Before blocks change hands: whatever is still read from them is read first."""
        self._saver.fence()

    def results(self, plan: StepPlan, finished: set[str]) -> StepResults:
        """Transfers that ended; each is reported once.

        With speculation vLLM calls it before ``end_forward``; what failed within the step must be
        reported in that step all the same, or its tokens are believed.
        """
        self._settle_step(plan)
        for request_id in finished:
            self._loader.cancel(request_id)
            if request_id not in plan.held:
                self._saver.forget(request_id)
        if plan.idle and not self._lost:
            # vLLM spins on empty steps: each would take the processor, and the GIL, from the load.
            self._loader.wait_over(_IDLE_WAIT_S)
        received: set[str] = set()
        failed: set[str] = set()
        lost, self._lost = self._lost, []
        for outcome in [*lost, *self._loader.take_finished(sync=False)]:
            received.add(outcome.request_id)
            if outcome.failed and self._fails_whole:
                failed.add(outcome.request_id)
            else:
                self._failed_blocks |= outcome.failed_blocks
            try:
                self._note(outcome)
            except Exception:  # a load that is never reported is waited for, for ever
                logger.exception("load not reported request=%s", outcome.request_id)
        self._sent &= plan.held
        sent = {r for r in plan.held - self._sent if self._saver.left_device(r)}
        self._sent |= sent
        return StepResults(sent, received, failed)

    def take_failed_blocks(self) -> set[int]:
        """Blocks that do not hold what was promised, since the last call; single-group models."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_report(self) -> StepReport | None:
        """What the scheduler's side should know, since the last call."""
        report, self._report = self._report, StepReport()
        return None if report.is_empty() else report

    def close(self) -> None:
        """Drain saves within the configured bound, then stop all threads. Idempotent."""
        if self._closed or getpid() != self._pid:
            return  # a fork that ends has none of its parent's threads to wait for
        self._closed = True
        self._saver.close(self._config.drain_deadline_ms / 1000)
        self._loader.close()
        self._cache.close(_BACKGROUND_S)
        self._tracing.close()

    def _settle_step(self, plan: StepPlan) -> None:
        if not self._in_layers:
            return
        self._in_layers = False
        try:
            self._settle_layers()
        except Exception:  # vLLM counts on these blocks: report that they failed
            logger.exception("loads not settled, recomputing them")
            for load in plan.loads:
                if load.sync:
                    self._lose(load)

    def _settle_layers(self) -> None:
        for outcome in self._loader.take_finished(sync=True):
            self._note(outcome)
            self._failed_blocks |= outcome.failed_blocks
            if outcome.failed:
                self._tainted_steps = self._rank.batches_in_flight

    def _lose(self, plan: LoadPlan) -> None:
        outcome = _all_failed(plan)
        if not plan.sync:
            self._lost.append(outcome)
            return
        self._note(outcome)
        self._failed_blocks |= outcome.failed_blocks
        self._tainted_steps = self._rank.batches_in_flight

    def _note(self, outcome: LoadOutcome) -> None:
        self._report.rejected |= outcome.rejected
        if outcome.failed:
            self._report.failed.add(outcome.request_id)
        elif outcome.first_s is not None:
            time = LoadTime(outcome.nbytes, outcome.seconds, outcome.first_s)
            self._report.loaded[outcome.request_id] = time


def _all_failed(plan: LoadPlan) -> LoadOutcome:
    blocks = frozenset(block for load in plan.moves for block in load.move.block_ids)
    return LoadOutcome(plan.request_id, blocks, frozenset())
