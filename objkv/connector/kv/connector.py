"""The connector class that vLLM loads. It forwards to the scheduler's or the worker's side. Faults
of a running connector never reach the engine, see ``objkv.connector.guard``. It waits long only for
a layer or a load that the forward pass needs now, and for saves when the cache is unregistered or
the engine shuts down, always with a deadline."""

import logging
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from objkv.assembly.link import AgentLink
from objkv.config import load_config
from objkv.connector.counters import HISTOGRAMS
from objkv.connector.guard import guarded, log_through_vllm, starts
from objkv.connector.hooks import (
    EngineHooks,
    engine_of,
    evict_failed,
    follow_sleep,
    free_failed,
    holds_nothing,
    release_worker,
    reopen,
)
from objkv.connector.kv.events import events_enabled
from objkv.connector.kv.metadata import StepPlan
from objkv.connector.kv.scheduler import SchedulerSide
from objkv.connector.kv.wiring import open_scheduler_side, open_worker_side
from objkv.connector.kv.worker import WorkerSide
from objkv.connector.metrics import ObjKVPromMetrics, ObjKVStats
from objkv.connector.model.identity import read_geometry, warn_of_outer_policy
from objkv.connector.model.subgroups import shares_any
from objkv.connector.wiring import replica_of, writer_name
from objkv.errors import ConfigError
from objkv.keys.chunk import ChunkKey
from objkv.telemetry import MemoryRecorder

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_ACCEPTED_MAX = 65_536
"""Payloads to keep until the next report. Older ones are not reported."""


class ObjKVConnector(KVConnectorBase_V1, SupportsHMA):
    """Shares the KV of prompts with every replica that uses the same stores and the same model. The
    settings are those of ``objkv.config.Config``, from ``OBJKV_*``, a TOML file, and
    ``kv_connector_extra_config``. Raises ``ConfigError`` at start, which names the fix."""

    @starts
    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        log_through_vllm()
        self._config = load_config(self._kv_transfer_config.kv_connector_extra_config)
        self.recorder = MemoryRecorder(sampled=HISTOGRAMS)
        self.scheduler: SchedulerSide | None = None
        """In the scheduler's process, if there is a KV cache to share."""
        self.worker: WorkerSide | None = None
        """In a worker that has its paged cache."""
        self._asleep = False
        self._engine = engine_of(get_current_vllm_config_or_none())
        self._shares = shares_any(kv_cache_config)
        if not self._shares:
            if role == KVConnectorRole.SCHEDULER:
                logger.info("this engine has no KV cache to share, loading and saving no KV")
            return
        try:
            self._open(vllm_config, role, kv_cache_config)
        except Exception:
            release_worker(vllm_config)  # or the next engine would get it
            raise

    def _open(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        self._geometry = read_geometry(vllm_config, kv_cache_config, self._config)
        self._link = AgentLink(self._config, replica_of(vllm_config))
        self._link.await_agent()
        has_events = events_enabled(vllm_config)
        self._accepted = deque[ChunkKey](maxlen=_ACCEPTED_MAX) if has_events else None
        warn_of_outer_policy(vllm_config)
        if role == KVConnectorRole.SCHEDULER:
            self.scheduler = open_scheduler_side(
                vllm_config,
                kv_cache_config,
                self._config,
                self._geometry,
                self._link,
                self.recorder,
                manager=lambda: self._kv_cache_manager,
            )
            self._hooks = EngineHooks(
                self.scheduler, lambda: self._kv_cache_manager, patches=self._config.vllm_patches
            )

    # Worker's side.

    @starts
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Open the worker's side with this rank's paged cache. Raises ``ConfigError``."""
        self._refuse_other_engine()
        if not self._shares:
            return
        self._kv_caches = kv_caches
        try:
            self._open_worker()
        except Exception:
            if self.worker is None:
                release_worker(self._vllm_config)  # or the next engine would get this one
            raise
        follow_sleep(self, patches=self._config.vllm_patches)

    def _refuse_other_engine(self) -> None:
        """Raise ``ConfigError`` if vLLM passes the cache of another engine than that for which it
        has made this connector. A process has one, and keeps that of an engine that failed to
        start. Source: vLLM 0.31-0.33, ``distributed/kv_transfer/kv_transfer_state.py``."""
        mine, theirs = self._engine, engine_of(get_current_vllm_config_or_none())
        if mine is not None and theirs is not None and theirs is not mine:
            raise ConfigError(
                "vLLM still has the objkv connector of another engine in this process, which runs "
                "or failed to start: start each engine in a process of its own, or shut the other "
                "one down and call vllm.distributed.kv_transfer.ensure_kv_transfer_shutdown()"
            )

    def _open_worker(self) -> None:
        self.worker = open_worker_side(
            self._vllm_config,
            self._config,
            self._geometry,
            self._link,
            writer=writer_name(self),
            recorder=self.recorder,
            kv_caches=self._kv_caches,
            accepted=self._accepted,
        )
        # This drains saves even if the engine is garbage-collected or the process just exits.
        self._finalizer = weakref.finalize(self, self.worker.close)

    @guarded(None)
    def unregister_kv_caches(self) -> None:
        """Drain saves within ``drain_deadline_ms``, then never touch the paged cache again, because
        vLLM is about to unmap it. vLLM 0.33 calls this before it sleeps; for other versions see
        ``follow_sleep``. vLLM sleeps only when no request has a block, so none waits for a load."""
        if self.worker is not None:
            self._asleep = True  # the closed worker saves nothing and fails all its loads
            self._finalizer.detach()
            self.worker.close()

    @guarded(None)
    def restore_kv_caches(self) -> None:
        """Reopen the worker: the paged cache is mapped again at the same addresses."""
        if self.worker is not None and self._asleep:
            self._open_worker()
            self._asleep = False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: "KVTransferConfig") -> bool:
        """True: the cache is unregistered before its memory is unmapped. For vLLM 0.33."""
        return True

    @guarded(None)
    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Receive the step's plan, before the forward pass. See the base class."""
        super().bind_connector_metadata(connector_metadata)
        if self.worker is not None:
            self.worker.before_forward(self._plan())

    @guarded(None)
    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """Start this step's loads. See the base class."""
        if self.worker is not None:
            self.worker.start_loads(self._plan())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """See ``WorkerSide.wait_layer``."""
        if self.worker is not None:
            self.worker.wait_layer(layer_name)

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: "AttentionMetadata",
        **kwargs: Any,
    ) -> None:
        """Do nothing: whole chunks are gathered after the step."""

    @guarded(None)
    def wait_for_save(self) -> None:
        """Settle loads within the step and gather finished chunks. See the base class."""
        if self.worker is not None:
            self.worker.end_forward(self._plan())

    @guarded(None)
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """See ``WorkerSide.before_reuse``."""
        if self.worker is not None:
            assert isinstance(kv_connector_metadata, StepPlan)
            self.worker.before_reuse(kv_connector_metadata)

    @guarded(KVConnectorTransferResults())
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the saves and loads that ended. See the base class."""
        if self.worker is None:
            return KVConnectorTransferResults()
        return self.worker.results(self._plan(), finished_req_ids)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks to recompute. Not guarded: an empty set in its place would let the
        model use blocks that were not loaded."""
        return self.worker.take_failed_blocks() if self.worker is not None else set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """See the base class."""
        return None if self.worker is None else self.worker.take_report()

    @guarded(None)
    def get_kv_connector_stats(self) -> ObjKVStats | None:
        """Return this side's numbers since the last call."""
        data: dict[str, Any] = {**self.recorder.drain(), **self.recorder.samples()}
        return ObjKVStats(data=data) if data else None

    @guarded(None)
    def shutdown(self) -> None:
        """Drain saves within ``drain_deadline_ms``, stop threads, close connections. Idempotent."""
        if self.worker is not None:
            self.worker.close()
            self.worker = None
        if self.scheduler is not None:
            self.scheduler.close()
        if self._shares:
            self._link.calls.close()

    # Scheduler's side.

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a dropped save only causes a later miss."""
        return False

    def has_pending_block_frees(self) -> bool:
        """Whether blocks will be free soon, so that vLLM waits a step instead of preempting."""
        return self.scheduler is not None and self.scheduler.holds_blocks

    @guarded(None)
    def on_new_request(self, request: "Request") -> None:
        """Start the lookup of the request's prompt."""
        if self.scheduler is not None:
            reopen(self.scheduler, self._kv_cache_manager)
            self.scheduler.track(request)

    @guarded((0, False))
    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """See ``SchedulerSide.match``."""
        side = self.scheduler
        return (0, False) if side is None else side.match(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        """See ``SchedulerSide.plan_load``."""
        if self.scheduler is not None:
            ids = blocks.get_block_ids() if num_external_tokens else ()
            self.scheduler.plan_load(request, ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        """See ``SchedulerSide.plan_step``."""
        return StepPlan() if self.scheduler is None else self.scheduler.plan_step(scheduler_output)

    @guarded(None)
    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """Process the workers' reports."""
        side, manager = self.scheduler, self._kv_cache_manager
        if side is None:
            return
        failed_requests = side.update(connector_output)
        if failed_requests and manager is not None:
            guarded(None)(free_failed)(manager, failed_requests)
        if connector_output.invalid_block_ids and manager is not None:
            failed = connector_output.invalid_block_ids
            evict_failed(manager, side.requests.ids(), side.tables_ended, failed)

    @guarded(())
    def take_events(self) -> "tuple[KVCacheEvent, ...]":
        """Return the KV events. vLLM calls this once per step, with the step's result."""
        return () if self.scheduler is None else self.scheduler.end_step()

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return whether the request's blocks must be kept for in-flight saves."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The form of ``request_finished`` for models with several groups."""
        return self.scheduler is not None and self.scheduler.finish(request, block_ids), None

    @guarded(False)
    def reset_cache(self) -> bool:
        """Stop using everything stored so far. Returns False while such blocks are still in use."""
        if self.scheduler is None:
            return True
        return self.scheduler.reset(clean=holds_nothing(self._kv_cache_manager))

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Whether layers may wait for loads, so that Python must run between graph pieces."""
        return load_config(extra_config).load_mode != "async"

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ObjKVStats:
        """Rebuild statistics from the data that another process sent."""
        return ObjKVStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any, **more: Any) -> ObjKVPromMetrics:
        """Return the Prometheus metrics of this connector."""
        return ObjKVPromMetrics(*args, **more)

    def _plan(self) -> StepPlan:
        plan = self._get_connector_metadata()
        assert isinstance(plan, StepPlan)
        return plan
