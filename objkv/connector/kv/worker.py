"""The worker's side: executes plans on this rank's paged cache, and tells what did not work.

Everything that can go wrong here becomes a miss or a drop; the façade sees no exception. Source of
the call order: vLLM 0.31-0.33, ``v1/worker/kv_connector_model_runner_mixin.py``.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import getpid
from urllib.parse import urlsplit

import torch

from objkv.cache.admission import LoadTime
from objkv.cache.chunks import ChunkCache
from objkv.codec.payload import payload_bytes_max
from objkv.config import Config
from objkv.connector.kv.metadata import StepPlan, StepReport
from objkv.connector.model.groups import Geometry
from objkv.errors import ConfigError
from objkv.telemetry import Recorder
from objkv.tracing import NO_TRACING, Tracing
from objkv.transfer.lanes import open_lane
from objkv.transfer.loader import Loader, LoadLimits
from objkv.transfer.paging import NOT_QUANTISED, PagedGroup, Quantised, check_pages
from objkv.transfer.plan import LoadOutcome, LoadPlan
from objkv.transfer.queue import Task
from objkv.transfer.saver import SaveLimits, Saver
from objkv.transfer.slabs import SlabPool, WideSlabs
from objkv.transfer.sources import whole_payload_bytes_max

# How the pinned memory is divided: loads, saves, and payloads of other shapes.
#
# Neither loads nor saves can starve the other. What replicas of other shapes wrote may be larger
# than any payload of this rank; slabs for those are made when the first of them is loaded.

_PAGE = 4096
_WIDE_SHARE = 4
"""Payloads of other shapes may take as much again as this part of the pinned memory, or one pair of
slabs if that is more."""


@dataclass(frozen=True, slots=True)
class Pools:
    """How the pinned memory is divided."""

    slab_bytes: int
    load_slabs: int
    save_slabs: int
    load_threads: int


def plan_pools(config: Config, groups: Mapping[int, PagedGroup], chunk_tokens: int) -> Pools:
    """Half for loads, two slabs a thread (payload and decoded pages); the rest for saves, so that
    neither can starve the other. Raises ``ConfigError`` if there is no room for one of each."""
    # With room for token ids, which payloads of other replicas may carry.
    slab_bytes = max(payload_bytes_max(g.layers, tokens=chunk_tokens) for g in groups.values())
    # A page more: of another block size the header is a few bytes longer.
    slab_bytes = -(-slab_bytes // _PAGE) * _PAGE + _PAGE
    budget = config.pinned_bytes_max // slab_bytes
    load = min(2 * config.load_threads, budget // 2 // 2 * 2)
    save = min(config.save_queue_max + config.save_threads, budget - load)
    if load < 2 or save < 1:
        raise ConfigError(
            f"pinned_bytes_max={config.pinned_bytes_max} has no room for 4 slabs of {slab_bytes} "
            "bytes, one chunk each: raise it, or lower chunk_tokens"
        )
    return Pools(slab_bytes, load, save, load // 2)


def plan_wide(
    config: Config, groups: Mapping[int, PagedGroup], chunk_tokens: int, *, pinned: bool
) -> WideSlabs[Task]:
    """Slabs that hold any payload of the model, in pairs; memory is taken when they are needed."""
    largest = max(whole_payload_bytes_max(g, tokens=chunk_tokens) for g in groups.values())
    slab_bytes = -(-largest // _PAGE) * _PAGE + _PAGE
    pairs = config.pinned_bytes_max // _WIDE_SHARE // (2 * slab_bytes)
    return WideSlabs(
        pairs=min(max(1, pairs), config.load_threads), slab_bytes=slab_bytes, pinned=pinned
    )


# A rank's paged cache as vLLM registers it, group by group, checked before anything is trusted.


def read_pages(
    geometry: Geometry,
    ranks: tuple[int, int],
    kv_caches: Mapping[str, torch.Tensor],
    quantised: Mapping[str, Quantised] = NOT_QUANTISED,
) -> dict[int, PagedGroup]:
    """The groups that this rank has layers of. ``ranks``: TP and PP. Writes to free blocks, and
    puts back what was there. Raises ``ConfigError`` for a layout that objkv cannot use."""
    groups = {}
    for g in range(len(geometry.groups)):
        shape = geometry.shape(g, *ranks)
        if shape is None:
            continue  # no layer of it in this stage of the pipeline
        if missing := [name for name in shape.layers if name not in kv_caches]:
            raise ConfigError(f"vLLM registered no KV cache for {missing[0]}: objkv cannot save it")
        caches = [kv_caches[name] for name in shape.layers]
        groups[g] = PagedGroup(shape, caches, quantised)
        check_pages(groups[g], open_lane(groups[g].device))
    return groups


logger = logging.getLogger(__name__)
_IDLE_WAIT_S = 2e-3
"""How long a step with nothing to compute waits for a load."""
_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
_BACKGROUND_S = 1.0
"""How long a shutdown waits for what nobody needs: a copy to the hot store."""


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
    """What the engine is told after a step."""

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
        cache: ChunkCache,
        *,
        recorder: Recorder,
        kv_caches: Mapping[str, torch.Tensor],
        tracing: Tracing = NO_TRACING,
    ) -> None:
        self._config = config
        self._cache = cache
        ranks = (rank.tp_rank, rank.pp_rank)
        self._groups = read_pages(geometry, ranks, kv_caches, rank.quantised)
        self._places = {
            name: (g, i)
            for g, group in self._groups.items()
            for i, name in enumerate(group.shape.layers)
        }
        self._batches_in_flight = rank.batches_in_flight
        self._writes_early = rank.writes_early
        device = next(iter(self._groups.values())).device
        pools = plan_pools(config, self._groups, geometry.chunk_tokens)
        pinned = device.type == "cuda"
        slabs = [
            SlabPool(name, count=count, slab_bytes=pools.slab_bytes, pinned=pinned)
            for name, count in (("load", pools.load_slabs), ("save", pools.save_slabs))
        ]
        self._loader = Loader(
            cache,
            self._groups,
            slabs[0],
            wide=plan_wide(config, self._groups, geometry.chunk_tokens, pinned=pinned),
            lane_for_thread=lambda: open_lane(device, urgent=True),
            limits=LoadLimits(
                pools.load_threads,
                config.load_queue_max,
                config.load_deadline_ms / 1000,
                min(config.step_load_deadline_ms, config.load_deadline_ms) / 1000,
            ),
            recorder=recorder,
            tracing=tracing,
        )
        self._tracing = tracing
        self._saver = Saver(
            cache,
            self._groups,
            slabs[1],
            lane=open_lane(device),
            limits=SaveLimits(
                config.save_threads,
                config.save_queue_max,
                config.save_deadline_ms / 1000,
                config.codec,
                rank.writer,
                far=_is_far(config),
            ),
            recorder=recorder,
        )
        self._report = StepReport()
        self._failed_blocks, self._sent = set[int](), set[str]()
        self._lost: list[LoadOutcome] = []
        self._tainted_steps = 0
        self._in_layers = self._closed = False
        self._fails_whole = geometry.windowed or len(geometry.groups) > 1
        self._pid = getpid()
        logger.info(
            "objkv worker ready loader=%r saver=%r slabs=%r", self._loader, self._saver, slabs
        )

    def start_loads(self, plan: StepPlan) -> None:
        """Start this step's loads; does not wait."""
        for load in plan.loads:
            self._in_layers |= load.sync
            try:
                self._loader.submit(load)
            except Exception:  # vLLM counts on these blocks: it must hear that they failed
                logger.exception("load not started, recomputing request=%s", load.request_id)
                self._lose(load)

    def wait_layer(self, layer_name: str) -> None:
        """Before a layer's attention: its loaded blocks are there, or known to have failed."""
        if self._in_layers and (place := self._places.get(layer_name)):
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
            if self._writes_early:  # it ends the forward pass late, so this delays nothing else
                self._saver.fence()
        self._report.dropped |= dropped

    def before_reuse(self) -> None:
        """Before blocks change hands: whatever is still read from them is read first."""
        self._saver.fence()

    def results(self, plan: StepPlan, finished: set[str]) -> StepResults:
        """Transfers that ended; each is told once.

        With speculation vLLM asks for them before it calls ``end_forward``; what failed within the
        step must be told in that step all the same, or its tokens are believed.
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
            except Exception:  # what vLLM never hears has ended, its request waits for, for ever
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
        except Exception:  # vLLM counts on these blocks: it must hear that they failed
            logger.exception("loads not settled, recomputing them")
            for load in plan.loads:
                if load.sync:
                    self._lose(load)

    def _settle_layers(self) -> None:
        for outcome in self._loader.take_finished(sync=True):
            self._note(outcome)
            self._failed_blocks |= outcome.failed_blocks
            if outcome.failed:
                self._tainted_steps = self._batches_in_flight

    def _lose(self, plan: LoadPlan) -> None:
        outcome = _all_failed(plan)
        if not plan.sync:
            self._lost.append(outcome)
            return
        self._note(outcome)
        self._failed_blocks |= outcome.failed_blocks
        self._tainted_steps = self._batches_in_flight

    def _note(self, outcome: LoadOutcome) -> None:
        self._report.rejected |= outcome.rejected
        if outcome.failed:
            self._report.failed.add(outcome.request_id)
        elif outcome.first_s is not None:
            time = LoadTime(outcome.nbytes, outcome.seconds, outcome.first_s)
            self._report.loaded[outcome.request_id] = time


def _is_far(config: Config) -> bool:
    """Whether payloads cross a network. A directory counts as near: its disk makes puts slow, not
    loads, which mostly come from memory; and next door is not worth anybody's time to compress."""
    host = urlsplit(config.s3_endpoint_url or "").hostname
    return config.bulk_url.startswith("s3:") and host not in _THIS_MACHINE


def _all_failed(plan: LoadPlan) -> LoadOutcome:
    blocks = frozenset(block for load in plan.moves for block in load.move.block_ids)
    return LoadOutcome(plan.request_id, blocks, frozenset())
