"""The encoder cache's connector, which forwards to one of its two sides. Methods of a running one
never wait, except ``shutdown``, which has a deadline. They raise nothing into the engine, except
for a promise that cannot be kept: the engine stops then in any case, and the error shows why.
Source of the interface: vLLM 0.32-0.33, ``distributed/ec_transfer/ec_connector/base.py``."""

import weakref
from typing import TYPE_CHECKING, Any, cast

import torch
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
    ECConnectorWorkerMetadata,
)
from vllm.distributed.ec_transfer.ec_connector.metrics import (
    ECConnectorPromMetrics,
    ECConnectorStats,
)
from vllm.platforms import current_platform

from objkv.agent.payloads import PayloadReader, PayloadWriter
from objkv.assembly.link import AgentLink
from objkv.codec.header import HEADER_BYTES_MAX
from objkv.config import Config, load_config
from objkv.connector.counters import ENCODER_METRICS
from objkv.connector.encoder.fetch import EncoderFetcher
from objkv.connector.encoder.identity import read_encoder_identity, read_form
from objkv.connector.encoder.items import EncoderPlan, OutputForm
from objkv.connector.encoder.scheduler import EncoderSchedulerSide
from objkv.connector.encoder.worker import EncoderCache, EncoderWorkerSide, OutputCopies
from objkv.connector.guard import guarded, log_through_vllm, starts
from objkv.connector.hooks import EngineHooks, follow_encoder_resets
from objkv.connector.metrics import TableMetrics, TableStats
from objkv.connector.model.identity import ranks_of_worker
from objkv.connector.pacing import EmptySteps
from objkv.connector.wiring import may_save, replica_of, writer_name
from objkv.stores.base import WriteStore
from objkv.telemetry import MemoryRecorder

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ECConnectorOutput
    from vllm.v1.request import Request


HELD_BYTES_MAX = 256 << 20
"""Bytes of outputs held for waiting requests, and the same again for outputs to be saved. That is
36 outputs of 7 MiB: 1,024 rows of 3,584 bfloat16 values, for one photo."""
ITEM_BYTES_MAX = HELD_BYTES_MAX // 4
"""Limit for one output, which crosses to the workers in one message (decision 13)."""
NAME = "outputs"
"""What an encoder cache reads and writes, in names of threads."""


def _device() -> torch.device:
    """Return the device of vLLM's encoder cache: this worker's own device, not the first one."""
    kind = current_platform.device_type
    if kind == "cpu":
        return torch.device(kind)
    return torch.device(kind, torch.get_device_module(kind).current_device())


class ObjKVECStats(TableStats, ECConnectorStats):
    """Statistics of the encoder cache."""

    table = ENCODER_METRICS
    logged_prefix = "objkv_encoder_"


class ObjKVECPromMetrics(TableMetrics, ECConnectorPromMetrics):
    """Prometheus metrics of the encoder cache."""

    table = ENCODER_METRICS


class ObjKVECConnector(ECConnectorBase):
    """Shares encoder outputs for images, sounds and videos with every replica that uses the same
    stores and the same model. Settings: ``objkv.config.Config``, from ``OBJKV_*``, a TOML file, and
    ``ec_connector_extra_config``. Raises ``ConfigError`` at start, which names the fix."""

    @starts
    def __init__(self, vllm_config: "VllmConfig", role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        log_through_vllm()
        transfer = self._vllm_config.ec_transfer_config
        config = load_config(transfer.ec_connector_extra_config)
        loads, encodes = transfer.is_ec_consumer, transfer.is_ec_producer
        saves = may_save(config, producer=encodes, consumer=loads)
        link = self._link = AgentLink(config, replica_of(vllm_config))
        link.await_agent()
        form = read_form(vllm_config, item_bytes_max=ITEM_BYTES_MAX)
        self.worker: EncoderWorkerSide | None = None
        if role == ECConnectorRole.SCHEDULER:
            side = self._open_scheduler(config, form, loads=loads, saves=saves)
            self._scheduler, self._close = side, side.close
            self._hooks = EngineHooks(side, lambda: None, patches=config.vllm_patches)
            follow_encoder_resets(side, patches=config.vllm_patches)
        else:
            self.worker = self._open_worker(config, saves=saves)
            # This drains saves even if the engine is garbage-collected or the process just exits.
            self._close = weakref.finalize(self, self.worker.close)

    def _open_scheduler(
        self, config: Config, form: OutputForm, *, loads: bool, saves: bool
    ) -> EncoderSchedulerSide:
        recorder, vllm_config, link = MemoryRecorder(), self._vllm_config, self._link
        identity = read_encoder_identity(vllm_config, config)
        reader = PayloadReader(link.connect, NAME) if loads else None
        has_peers = vllm_config.parallel_config.data_parallel_size > 1
        return EncoderSchedulerSide(
            form,
            identity,
            EncoderFetcher(link.calls, reader, config, recorder, held_bytes_max=HELD_BYTES_MAX),
            loads=loads,
            saves=saves,
            steps=EmptySteps(max(1, vllm_config.max_concurrent_batches), has_peers=has_peers),
            bulk=cast("WriteStore", link.calls),
            admission=config.admission,
            recorder=recorder,
        )

    def _open_worker(self, config: Config, *, saves: bool) -> EncoderWorkerSide:
        """Open the worker's side, on the thread that runs the model."""
        copies, writer = OutputCopies(_device()), None
        if saves and ranks_of_worker(self._vllm_config.parallel_config)[0] == 0:
            writer = PayloadWriter(
                self._link.connect,
                ITEM_BYTES_MAX + HEADER_BYTES_MAX,
                NAME,
                writer=writer_name(self),
                begin=copies.adopt_thread,
            )
        return EncoderWorkerSide(
            copies, writer, config, MemoryRecorder(), ITEM_BYTES_MAX, HELD_BYTES_MAX
        )

    # Worker's side.

    def start_load_caches(self, encoder_cache: EncoderCache, **kwargs: Any) -> None:
        """Add this step's loaded outputs to vLLM's encoder cache. See the base class."""
        if self.worker is not None:
            plan = cast("EncoderPlan", self._get_connector_metadata())
            self.worker.load(plan, encoder_cache)

    @guarded(None)
    def save_caches(self, encoder_cache: EncoderCache, mm_hash: str, **kwargs: Any) -> None:
        """Save an output that was just encoded, in the background. See the base class."""
        if self.worker is not None:
            plan = cast("EncoderPlan", self._get_connector_metadata())
            self.worker.save(plan, encoder_cache, mm_hash)

    @guarded(None)
    def build_connector_worker_meta(self) -> ECConnectorWorkerMetadata | None:
        """Return this worker's numbers, which the scheduler's side reports."""
        return self.worker.take_report() if self.worker is not None else None

    # Scheduler's side.

    @guarded(True)
    def ensure_cache_available(self, request: "Request", num_computed_tokens: int) -> bool:
        """Whether the request's stored outputs are loaded, failed, or past their deadline."""
        return self._scheduler.is_ready(request, num_computed_tokens)

    @guarded(False)
    def has_cache_item(self, identifier: str) -> bool:
        """See ``EncoderSchedulerSide.has_item``."""
        return self._scheduler.has_item(identifier)

    def update_state_after_alloc(self, request: "Request", index: int) -> None:
        """Plan the load of a promised item, or the save of one that is encoded."""
        self._scheduler.allocate(request, index)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> ECConnectorMetadata:
        """See ``EncoderSchedulerSide.plan_step``."""
        return self._scheduler.plan_step(scheduler_output)

    @guarded(None)
    def update_connector_output(self, connector_output: "ECConnectorOutput") -> None:
        """Process the workers' reports."""
        self._scheduler.update(connector_output)

    @guarded((False, None))
    def request_finished(self, request: "Request") -> tuple[bool, None]:
        """Return that nothing must be kept for saves, which hold their outputs themselves."""
        self._scheduler.finish(request)
        return False, None

    @guarded(False)
    def reset_cache(self) -> bool:
        """Stop using everything stored so far."""
        return self._scheduler.reset()

    # Both.

    @guarded(None)
    def get_ec_connector_stats(self) -> ObjKVECStats | None:
        """Return all numbers since the last call, on the scheduler's side only."""
        if self.role is not ECConnectorRole.SCHEDULER:
            return None
        numbers = self._scheduler.take_numbers()
        return ObjKVECStats(data=cast("dict[str, Any]", numbers)) if numbers else None

    @guarded(None)
    def shutdown(self) -> None:
        """Hand saves over within ``drain_deadline_ms``, then stop. Idempotent."""
        self._close()
        self.worker = None
        self._link.calls.close()

    @classmethod
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> ObjKVECStats:
        """Rebuild statistics from the data that another process sent."""
        return ObjKVECStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any, **more: Any) -> ObjKVECPromMetrics:
        """Return the Prometheus metrics of this connector."""
        return ObjKVECPromMetrics(*args, **more)
