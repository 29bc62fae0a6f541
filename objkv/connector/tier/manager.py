"""objkv under vLLM's own offloading: a secondary tier below the CPU memory of OffloadingConnector.

It is for operators who run ``OffloadingConnector`` with ``TieringOffloadingSpec`` and want its
chunks, and those of other replicas, in objkv's stores. vLLM calls every method on the scheduler's
thread. Only the constructor and ``shutdown`` wait for the node's agent. Only the constructor
raises. Read against vLLM 0.32-0.33, ``v1/kv_offload/tiering/base.py``. Described in
``docs/tier.md``.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from objkv.assembly.link import Replica
from objkv.background import Steps
from objkv.cache.switch import AdmissionSwitch
from objkv.config import Config
from objkv.config.tier import read_options
from objkv.connector.guard import guarded, speak_as_vllm
from objkv.connector.hooks import EngineHooks, holds_nothing
from objkv.connector.metrics import tier_metric_definitions, tier_stats
from objkv.connector.namespace import ReplicaNamespace
from objkv.connector.tier.identity import (
    TierAdapters,
    TierIdentity,
    find_engine,
    none_hash,
    read_tier_identity,
)
from objkv.connector.tier.jobs import Job, Rows, row_layer
from objkv.connector.tier.store import TierStore
from objkv.connector.wiring import replica_of
from objkv.errors import ConfigError
from objkv.stores.base import WriteStore
from objkv.telemetry import MemoryRecorder

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import (
        OffloadingMetricMetadata,
        OffloadingSpec,
        OffloadKey,
        ReqContext,
        ScheduleEndContext,
    )
    from vllm.v1.kv_offload.tiering.base import TransferJob


logger = logging.getLogger(__name__)


class TierNamespace(ReplicaNamespace[TierIdentity]):
    """A namespace that begins with the first request and excludes requests from before a
    renewal."""

    def __init__(
        self,
        identity: TierIdentity,
        bulk: WriteStore,
        submit: Callable[[Callable[[], Steps[None] | None]], bool],
        *,
        writes: bool,
    ) -> None:
        super().__init__(identity, bulk, submit, writes=writes)
        self._begun = False
        self._live: dict[str, bool] = {}
        """Whether a request began after the last renewal."""

    @property
    def current(self) -> str | None:
        """The current namespace, None while nothing may be loaded or saved."""
        return self.name if self._begun and self.open else None

    @property
    def idle(self) -> bool:
        """Whether no request is in progress."""
        return not self._live

    def begin(self, request_id: str) -> None:
        """Record a new request. The first one sets the namespace, because vLLM chooses its hash
        after it has made its tiers."""
        self._live.setdefault(request_id, True)
        if not self._begun and (first := none_hash()) is not None:
            self.identity = replace(self.identity, none_hash=first)
            self.name = self.identity.namespace()
            self._begun = True
            logger.info("objkv tier namespace=%s", self.name)
        self.announce()

    def end(self, request_id: str) -> None:
        """Forget a request that ended."""
        self._live.pop(request_id, None)

    def of(self, request_id: str) -> str | None:
        """Return a request's namespace. None also for requests from before the last renewal."""
        return self.current if self._live.get(request_id, True) else None

    def announce(self) -> None:
        """Store the identity document as the base class does, once the namespace is set."""
        if self.current is not None:
            super().announce()

    def renew(self, *, clean: bool) -> bool:
        """Renew as the base class does. ``clean``: whether vLLM dropped all KV in its own memory,
        on the device and on the CPU."""
        self._live = dict.fromkeys(self._live, False)
        return super().renew(clean=clean)

    def _log_closed(self) -> None:
        logger.warning(
            "the tier stops loads and saves until vLLM's caches are reset while no request holds a "
            "block: call reset_prefix_cache(reset_running_requests=True, reset_connector=True)"
        )


class ObjKVTier(SecondaryTierManager):
    """The secondary tier, configured by an entry of ``secondary_tiers``: ``{"type": "ObjKVTier",
    "module_path": "objkv.connector.tier", "bulk_url": …, "index_url": …}``. The entry may contain
    every setting of ``Config`` and of ``TierOptions``. Raises ``ConfigError`` at start, which names
    the fix.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: "OffloadingSpec",
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        """
        Args:
            primary_kv_view: vLLM's memory, ``[rows, row_bytes]``, C-contiguous, one-byte elements.
                Only rows of a load in progress are written.
        """
        super().__init__(
            offloading_spec,
            primary_kv_view,
            tier_type,
            backpressure_detector=backpressure_detector,
        )
        speak_as_vllm()
        config = self._read_options(options, offloading_spec)
        self._row_count, row_bytes = _rows(primary_kv_view)
        engine = self._engine = find_engine(offloading_spec)
        identity = read_tier_identity(offloading_spec, engine, row_bytes, config, self._options)
        self._recorder = numbers = MemoryRecorder()
        replica = Replica(offloading_spec.config.engine_id)
        if engine is not None:
            replica = replica_of(engine.config)
        layer = row_layer(row_bytes, identity.kv_dtype)
        rows = Rows(layer, identity.chunk_tokens(), primary_kv_view.cast("B"))
        self._store = TierStore(config, replica, rows, numbers, queue_max=self._options.queue_max)
        submit, documents = self._store.lookups.submit, self._store.documents
        writes = config.role != "reader"
        self.namespace = TierNamespace(identity, documents, submit, writes=writes)
        self._switch = AdmissionSwitch(config.admission, documents, self.namespace, numbers, submit)
        self._switch.start()
        self._closed = False
        self.adapters = TierAdapters(lambda: self.reset(clean=False))
        # vLLM's CPU memory may have KV of old weights even if the device has none, so only a reset
        # of both resumes the tier.
        self._hooks = EngineHooks(self, lambda: None, patches=config.vllm_patches)
        self._log_ready(identity)

    def _read_options(self, options: Mapping[str, Any], spec: "OffloadingSpec") -> Config:
        self._options, resolved = read_options(options)
        if self._options.locality is not None:
            self.locality = Locality(self._options.locality)
        self._events_enabled = self._options.enable_kv_events
        if self._events_enabled and not spec.kv_events_config.enable_kv_cache_events:
            logger.warning("enable_kv_events is set, but vLLM has KV events turned off")
            self._events_enabled = False
        self._events: list[OffloadingEvent] = []
        return resolved.config

    def _log_ready(self, identity: TierIdentity) -> None:
        logger.info(
            "objkv tier ready rows=%d row_bytes=%d weights=%s",
            self._row_count,
            identity.row_bytes,
            identity.weights,
        )
        if self._engine is None:
            logger.warning(
                "vLLM's configuration was not found: only 'settings' distinguish replicas"
            )

    # Requests.

    @guarded(RequestOffloadingContext())
    def on_new_request(self, req_context: "ReqContext") -> RequestOffloadingContext:
        """Register the request. Its chunks are offloaded as they are computed."""
        self.namespace.begin(req_context.req_id)
        return RequestOffloadingContext()

    @guarded(None)
    def on_request_finished(self, req_context: "ReqContext") -> None:
        """Forget the request and its lookups."""
        self.namespace.end(req_context.req_id)
        self._store.lookups.forget(req_context.req_id)

    @guarded(LookupResult.MISS)
    def lookup(self, key: "OffloadKey", req_context: "ReqContext") -> LookupResult:
        """Return whether the chunk is stored, or RETRY while that is unknown, at most until the
        deadline."""
        namespace = self.namespace.of(req_context.req_id)
        if namespace is None or self._switch.mode == "never":
            return LookupResult.MISS
        return self._store.lookups.ask(req_context.req_id, namespace, key)

    @guarded(None)
    def on_schedule_end(self, context: "ScheduleEndContext") -> None:
        """Send the lookups of this step. While the engine ends, limit the time for saves, because
        vLLM goes on stepping until all are done or it is killed."""
        self._store.lookups.flush()
        if self._engine is not None and self._engine.ends:
            self._store.finish(self._engine.grace_s, idle=self.namespace.idle)

    # Jobs.

    def submit_store(self, job_metadata: "TransferJob") -> None:
        """Save rows in the background. Rows without room in the queue are dropped."""
        self._submit(self._store.save, job_metadata)

    def submit_load(self, job_metadata: "TransferJob") -> None:
        """Load into rows in the background. Each key succeeds or fails separately."""
        self._submit(self._store.load, job_metadata)

    @guarded(tuple[JobResult, ...]())
    def get_finished_jobs(self) -> tuple[JobResult, ...]:
        """Return the jobs that ended since the last call, including those past their deadline."""
        loads = self._store.loads.take_finished()
        for job in loads:
            self._store.loaded(self.namespace.current, job)
            self._report(job.noted, removed=True)
        saves = self._store.saves.take_finished()
        for job in saves:
            self._report(job.noted, removed=False)
        return tuple(map(self._result, (*loads, *saves)))

    @guarded(None)
    def drain_jobs(self) -> None:
        """End all jobs at once and leave the namespace, because vLLM calls this when it resets its
        caches and weights may have changed. Earlier KV is never loaded or saved again."""
        engine = self._engine
        if engine is not None and engine.connector is not None:
            self.reset(clean=holds_nothing(engine.manager()))
        else:  # without a request in progress no block is held
            self.reset(clean=self.namespace.idle)

    @property
    def open(self) -> bool:
        """Whether requests may load and save. False while vLLM may have KV of old weights."""
        return self.namespace.open

    def reset(self, *, clean: bool) -> bool:
        """Stop using everything stored so far; see ``TierNamespace``. Does not wait for a store."""
        try:
            self._store.give_up()
        finally:
            self._store.lookups.clear()
            renewed = self.namespace.renew(clean=clean)
        return renewed

    @guarded(None)
    def shutdown(self) -> None:
        """Save queued chunks within ``drain_deadline_ms``, then stop. Idempotent."""
        if not self._closed:
            self._closed = True
            self._store.close()

    # Events and metrics.

    @guarded(tuple[OffloadingEvent, ...]())
    def take_events(self) -> tuple[OffloadingEvent, ...]:
        """Return events of saved and missing chunks, if the tier reports events."""
        events, self._events = tuple(self._events), []
        return events

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> "dict[str, OffloadingMetricMetadata]":
        """Return the metrics of tiers by their full names."""
        return tier_metric_definitions()

    @guarded(None)
    def get_stats(self) -> Any:
        """Return the numbers since the last call."""
        return tier_stats(self._recorder.drain())

    # Internal methods.

    def _submit(self, begin: Callable[..., None], job: "TransferJob") -> None:
        keys = tuple(job.keys)
        namespace, rows = None, [0] * len(keys)
        try:
            rows = [int(row) for row in job.chunk_ids]
            assert len(rows) == len(keys)
            assert all(0 <= row < self._row_count for row in rows)
            namespace = self.namespace.of(job.req_context.req_id)
        except Exception:  # vLLM expects an outcome for every job
            logger.exception("invalid tier job job=%s", job.job_id)
        begin(job.job_id, namespace, keys, rows)

    def _result(self, job: Job) -> JobResult:
        return JobResult(
            job.job_id,
            success=not job.failed,
            successful_keys=job.done or None,
            transfer_time=job.seconds,
            transfer_bytes=len(job.done) * self.block_size_bytes,
        )

    def _report(self, keys: list[bytes], *, removed: bool) -> None:
        if keys and self._events_enabled:
            event = OffloadingEvent(keys, self.medium, removed, locality=self.locality)
            self._events.append(event)


def _rows(view: memoryview) -> tuple[int, int]:
    """Return the number of rows in vLLM's memory, and their length."""
    shape = view.shape or ()
    if len(shape) != 2 or 0 in shape or view.itemsize != 1 or not view.c_contiguous:
        raise ConfigError(
            f"objkv does not support this layout of vLLM's CPU memory, {shape} of {view.format!r}: "
            "check that cpu_bytes_to_use is large enough for one chunk"
        )
    return shape[0], shape[1]
