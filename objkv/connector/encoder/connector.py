"""The encoder cache's connector class that vLLM loads. It forwards to one of the two sides.

Methods of a running connector raise nothing into the engine and never wait, except ``shutdown``,
which has a deadline. An error is raised only if it breaks a promise on which vLLM relies: the
engine stops then in any case, and the error shows why. Source of the interface: vLLM 0.32-0.33,
``distributed/ec_transfer/ec_connector/base.py``.
"""

import logging
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
from objkv.codec.payload import HEADER_BYTES_MAX
from objkv.config import Config, load_config
from objkv.connector.counters import ENCODER_METRICS
from objkv.connector.encoder.copies import open_copies
from objkv.connector.encoder.fetch import EncoderFetcher, FetchLimits
from objkv.connector.encoder.identity import read_encoder_identity, read_form
from objkv.connector.encoder.items import EncoderPlan
from objkv.connector.encoder.scheduler import EncoderRoles, EncoderSchedulerSide
from objkv.connector.encoder.worker import (
    EncoderCache,
    EncoderSaveLimits,
    EncoderWorkerSide,
)
from objkv.connector.guard import guarded, speak_as_vllm
from objkv.connector.hooks import EngineHooks, follow_encoder_resets
from objkv.connector.metrics import TableMetrics, TableStats
from objkv.connector.model.identity import tensor_rank
from objkv.connector.wiring import may_save, replica_of, writer_name
from objkv.stores.base import WriteStore
from objkv.telemetry import MemoryRecorder

if TYPE_CHECKING:
    from vllm.config import ECTransferConfig, VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ECConnectorOutput
    from vllm.v1.request import Request


HELD_BYTES_MAX = 256 << 20
"""Bytes of outputs held for waiting requests, and the same again for outputs to be saved. That is
36 outputs of 7 MiB: 1,024 rows of 3,584 bfloat16 values, for one photo."""
ITEM_BYTES_MAX = HELD_BYTES_MAX // 4
"""Limit for one output, which crosses to the workers in one message (docs/decisions/0013)."""
NAME = "outputs"
"""What an encoder cache reads and writes, in names of threads."""


def open_encoder_scheduler(
    vllm_config: "VllmConfig", config: Config, link: AgentLink, recorder: MemoryRecorder
) -> EncoderSchedulerSide:
    """Open the scheduler's side. Reads the model's files. Raises ``ConfigError`` for unsupported
    models."""
    transfer = vllm_config.ec_transfer_config
    assert transfer is not None
    form = read_form(vllm_config, item_bytes_max=ITEM_BYTES_MAX)
    identity = read_encoder_identity(vllm_config, config)
    roles = EncoderRoles(
        loads=transfer.is_ec_consumer,
        saves=_may_save(config, transfer),
        steps_in_flight=max(1, vllm_config.max_concurrent_batches),
        has_peers=vllm_config.parallel_config.data_parallel_size > 1,
    )
    limits = FetchLimits(
        deadline_s=config.encoder_deadline_ms / 1000,
        queue_max=config.lookup_queue_max,
        held_bytes_max=HELD_BYTES_MAX,
        ttl_s=config.ttl_s,
    )
    reader = PayloadReader(link.connect, NAME) if roles.loads else None
    return EncoderSchedulerSide(
        roles,
        form,
        identity,
        EncoderFetcher(link.calls, reader, limits, recorder),
        bulk=cast("WriteStore", link.calls),
        admission=config.admission,
        recorder=recorder,
    )


def open_encoder_worker(
    vllm_config: "VllmConfig",
    config: Config,
    link: AgentLink,
    writer: str,
    recorder: MemoryRecorder,
) -> EncoderWorkerSide:
    """Open the worker's side, on the thread that runs the model. Raises ``ConfigError`` for
    unsupported models. ``writer``: the name of this process in payloads."""
    transfer = vllm_config.ec_transfer_config
    assert transfer is not None
    form = read_form(vllm_config, item_bytes_max=ITEM_BYTES_MAX)
    copies, outputs = open_copies(_device()), None
    if _may_save(config, transfer) and tensor_rank(vllm_config) == 0:
        nbytes_max = form.item_bytes_max + HEADER_BYTES_MAX
        outputs = PayloadWriter(
            link.connect, nbytes_max, NAME, writer=writer, begin=copies.adopt_thread
        )
    limits = EncoderSaveLimits(
        queue_max=config.save_queue_max,
        held_bytes_max=HELD_BYTES_MAX,
        item_bytes_max=form.item_bytes_max,
        deadline_s=config.save_deadline_ms / 1000,
    )
    drain_s = config.drain_deadline_ms / 1000
    return EncoderWorkerSide(copies, form.dtype, outputs, limits, recorder, drain_s=drain_s)


def _may_save(config: Config, transfer: "ECTransferConfig") -> bool:
    return may_save(config, producer=transfer.is_ec_producer, consumer=transfer.is_ec_consumer)


def _device() -> torch.device:
    """Return the device of vLLM's encoder cache: this worker's own device, not the first one."""
    kind = current_platform.device_type
    if kind == "cpu":
        return torch.device(kind)
    return torch.device(kind, torch.get_device_module(kind).current_device())


logger = logging.getLogger(__name__)


class ObjKVECStats(TableStats, ECConnectorStats):
    """Statistics of the encoder cache."""

    table = ENCODER_METRICS
    logged_prefix = "objkv_encoder_"


class ObjKVECPromMetrics(TableMetrics, ECConnectorPromMetrics):
    """Prometheus metrics of the encoder cache."""

    table = ENCODER_METRICS


class ObjKVECConnector(ECConnectorBase):
    """Shares encoder outputs for images, sounds and videos with every replica that uses the same
    stores and the same model.

    The settings are those of ``objkv.config.Config``, from ``OBJKV_*``, a TOML file, and
    ``ec_connector_extra_config``. Raises ``ConfigError`` at start, which names the fix.
    """

    def __init__(self, vllm_config: "VllmConfig", role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        speak_as_vllm()
        config = load_config(vllm_config.ec_transfer_config.ec_connector_extra_config)
        recorder = MemoryRecorder()
        self._link = AgentLink(config, replica_of(vllm_config))
        self._link.await_agent()
        self._scheduler: EncoderSchedulerSide | None = None
        self._worker: EncoderWorkerSide | None = None
        if role == ECConnectorRole.SCHEDULER:
            self._scheduler = open_encoder_scheduler(vllm_config, config, self._link, recorder)
            self._hooks = EngineHooks(self._scheduler, lambda: None, patches=config.vllm_patches)
            follow_encoder_resets(self._scheduler, patches=config.vllm_patches)
        else:
            self._worker = open_encoder_worker(
                vllm_config, config, self._link, writer_name(self), recorder
            )
            # This drains saves even if the engine is garbage-collected or the process just exits.
            weakref.finalize(self, self._worker.close)

    # Worker's side.

    @property
    def worker(self) -> EncoderWorkerSide | None:
        """The worker's side, in a worker."""
        return self._worker

    def start_load_caches(self, encoder_cache: EncoderCache, **kwargs: Any) -> None:
        """Add this step's loaded outputs to vLLM's encoder cache. See the base class."""
        if self._worker is not None and self._is_consumer:
            self._worker.load(self._plan(), encoder_cache)

    @guarded(None)
    def save_caches(self, encoder_cache: EncoderCache, mm_hash: str, **kwargs: Any) -> None:
        """Save an output that was just encoded, in the background. See the base class."""
        if self._worker is not None and self._is_producer:
            self._worker.save(self._plan(), encoder_cache, mm_hash)

    @guarded(None)
    def build_connector_worker_meta(self) -> ECConnectorWorkerMetadata | None:
        """Return this worker's numbers, which the scheduler's side reports."""
        return self._worker.take_report() if self._worker is not None else None

    # Scheduler's side.

    @guarded(True)
    def ensure_cache_available(self, request: "Request", num_computed_tokens: int) -> bool:
        """Whether the request's stored outputs are loaded, failed, or past their deadline."""
        return self._side().is_ready(request, num_computed_tokens)

    @guarded(False)
    def has_cache_item(self, identifier: str) -> bool:
        """Whether the item's verified output is in memory, so that the step's plan can send it; for
        an ``ec_producer``, whether it is stored."""
        return self._side().has_item(identifier)

    def update_state_after_alloc(self, request: "Request", index: int) -> None:
        """Plan the load of a promised item, or the save of one that is encoded."""
        self._side().allocate(request, index)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> ECConnectorMetadata:
        """Return the step's plan, which contains the outputs to load."""
        return self._side().plan_step(scheduler_output)

    @guarded(None)
    def update_connector_output(self, connector_output: "ECConnectorOutput") -> None:
        """Process the workers' reports."""
        self._side().update(connector_output)

    def request_finished(self, request: "Request") -> tuple[bool, dict[str, Any] | None]:
        """Return that nothing must be kept for saves, which hold their outputs themselves."""
        self._finished(request)
        return False, None

    @guarded(None)
    def _finished(self, request: "Request") -> None:
        self._side().finish(request)

    @guarded(False)
    def reset_cache(self) -> bool:
        """Stop using everything stored so far."""
        return self._side().reset()

    # Both.

    def get_ec_connector_stats(self) -> ObjKVECStats | None:
        """Return the numbers of this process and the workers since the last call. None on a
        worker."""
        if self._scheduler is None:
            return None
        numbers = self._scheduler.take_numbers()
        return ObjKVECStats(data=cast("dict[str, Any]", numbers)) if numbers else None

    def shutdown(self) -> None:
        """Hand saves over within ``drain_deadline_ms``, stop threads, close connections.
        Idempotent."""
        self._shutdown()

    @guarded(None)
    def _shutdown(self) -> None:
        for side in (self._worker, self._scheduler):
            if side is not None:
                side.close()
        self._worker = None
        self._link.calls.close()

    @classmethod
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> ObjKVECStats:
        """Rebuild statistics from the data that another process sent."""
        return ObjKVECStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ObjKVECPromMetrics:
        """Return the Prometheus metrics of this connector."""
        return ObjKVECPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def _plan(self) -> EncoderPlan:
        plan = self._get_connector_metadata()
        assert isinstance(plan, EncoderPlan)
        return plan

    def _side(self) -> EncoderSchedulerSide:
        assert self._scheduler is not None
        return self._scheduler
