"""objkv under vLLM's own offloading: a secondary tier below the CPU memory of OffloadingConnector,
see ``docs/models.md``. vLLM calls every method on the scheduler's thread. Only the constructor
raises; it and ``shutdown`` wait for the agent. Read against vLLM 0.32-0.33, ``v1/kv_offload``."""

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from objkv.agent.payloads import PayloadReader, PayloadWriter, WriteOutcome
from objkv.assembly.link import AgentLink
from objkv.background import Steps
from objkv.cache.lookup import LookupLimits
from objkv.cache.switch import AdmissionSwitch
from objkv.codec.payload import payload_bytes_max
from objkv.config.tier import TierOptions, read_options
from objkv.connector.counters import TIER_METRICS
from objkv.connector.guard import guarded, log_through_vllm, starts
from objkv.connector.hooks import EngineHooks, holds_nothing
from objkv.connector.namespace import ReplicaNamespace
from objkv.connector.tier.identity import (
    TierAdapters,
    TierIdentity,
    find_connector,
    none_hash,
    read_tier_identity,
)
from objkv.connector.tier.jobs import Job, JobRow, Rows, TierJobs, TierLookups, chunk_key, row_layer
from objkv.connector.wiring import replica_of, writer_name
from objkv.errors import ConfigError, StoreError
from objkv.stores.base import WriteStore
from objkv.telemetry import MemoryRecorder

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_offload.base import OffloadingSpec, OffloadKey, ReqContext, ScheduleEndContext
    from vllm.v1.kv_offload.tiering.base import TransferJob


logger = logging.getLogger(__name__)


class TierNamespace(ReplicaNamespace[TierIdentity]):
    """Begins with the first request, and excludes requests from before a renewal."""

    closed_text = (
        "the tier stops loads and saves until vLLM's caches are reset while no request holds a "
        "block: call reset_prefix_cache(reset_running_requests=True, reset_connector=True)"
    )

    def __init__(
        self,
        identity: TierIdentity,
        bulk: WriteStore,
        submit: Callable[[Callable[[], Steps[None] | None]], bool],
        *,
        writes: bool,
    ) -> None:
        """See the base class."""
        super().__init__(identity, bulk, submit, writes=writes)
        self._live: dict[str, bool] = {}
        """Whether a request began after the last renewal."""

    @property
    def current(self) -> str | None:
        """The current namespace, None while nothing may be loaded or saved."""
        return self.name if self.identity.none_hash and self.open else None

    def begin(self, request_id: str) -> None:
        """Record a new request. The first one sets the namespace, because vLLM chooses its hash
        after it has made its tiers."""
        self._live.setdefault(request_id, True)
        if not self.identity.none_hash and (first := none_hash()):
            self.identity = replace(self.identity, none_hash=first)
            self.name = self.identity.namespace()
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
        """Renew as the base class does. ``clean``: also vLLM's memory on the CPU has no KV."""
        self._live = dict.fromkeys(self._live, False)
        return super().renew(clean=clean)


class ObjKVTier(SecondaryTierManager):
    """The secondary tier, an entry of ``secondary_tiers``: ``{"type": "ObjKVTier", "module_path":
    "objkv.connector.tier", "bulk_url": …, "index_url": …}``, with any setting of ``Config`` and
    ``TierOptions``. Raises ``ConfigError`` at start, which names the fix."""

    medium: ClassVar[Medium] = Medium.STORAGE

    @starts
    def __init__(
        self,
        offloading_spec: "OffloadingSpec",
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        """``primary_kv_view``: vLLM's memory, ``[rows, row_bytes]``, C-contiguous, one-byte
        elements. Only rows of a load in progress are written."""
        super().__init__(
            offloading_spec, primary_kv_view, tier_type, backpressure_detector=backpressure_detector
        )
        log_through_vllm()
        own, resolved = read_options(options)
        config = self._config = resolved.config
        self._set_events(own, offloading_spec)
        rows, row_bytes = _shape(primary_kv_view)
        connector = find_connector(offloading_spec)
        self._connector = weakref.ref(connector)  # which owns the tier
        vllm_config = connector._vllm_config
        identity = read_tier_identity(offloading_spec, vllm_config, row_bytes, config, own.settings)
        layer = row_layer(row_bytes, identity.kv_dtype)
        self._rows = Rows(layer, identity.chunk_tokens(), primary_kv_view.cast("B"))
        self._recorder = numbers = MemoryRecorder()
        self._open(vllm_config)
        # These have the verbs that replicas use; the rest is for operators.
        submit, documents = self._lookups.submit, cast("WriteStore", self._link.calls)
        writes = config.role != "reader"
        self.namespace = TierNamespace(identity, documents, submit, writes=writes)
        self._switch = AdmissionSwitch(config.admission, documents, self.namespace, numbers, submit)
        self._switch.start()
        self.adapters = TierAdapters(lambda: self.reset(clean=False))
        # vLLM's CPU memory may have KV of old weights even if the device has none, so only a reset
        # of both resumes the tier.
        self._hooks = EngineHooks(self, lambda: None, patches=config.vllm_patches)
        logger.info(
            "objkv tier ready rows=%d row_bytes=%d weights=%s", rows, row_bytes, identity.weights
        )

    def _set_events(self, options: TierOptions, spec: "OffloadingSpec") -> None:
        if options.locality is not None:
            self.locality = Locality(options.locality)
        self._events_enabled = options.enable_kv_events
        if self._events_enabled and not spec.kv_events_config.enable_kv_cache_events:
            logger.warning("enable_kv_events is set, but vLLM has KV events turned off")
            self._events_enabled = False
        self._events: list[OffloadingEvent] = []

    def _open(self, vllm_config: "VllmConfig") -> None:
        """Begin the lookups and the jobs. Waits for an agent."""
        config, rows, recorder = self._config, self._rows, self._recorder
        link = self._link = AgentLink(config, replica_of(vllm_config))
        nbytes_max = payload_bytes_max((rows.layer,))
        self._writer = PayloadWriter(link.connect, nbytes_max, "chunks", writer=writer_name(self))
        self._reader = PayloadReader(link.connect, "chunks")
        link.await_agent()
        limits = LookupLimits(config.lookup_deadline_ms / 1000)
        # A folder that is its own index ends its answers early.
        is_folder = config.index_url == "bulk:"
        self._lookups = TierLookups(link.calls, recorder, limits, ends_early=is_folder)
        load_s, save_s = config.load_deadline_ms / 1000, config.save_deadline_ms / 1000
        self._loads = TierJobs("load", rows, recorder, deadline_s=load_s)
        self._saves = TierJobs("save", rows, recorder, deadline_s=save_s)

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
        self._lookups.forget(req_context.req_id)

    @guarded(LookupResult.MISS)
    def lookup(self, key: "OffloadKey", req_context: "ReqContext") -> LookupResult:
        """Return whether the chunk is stored, or RETRY until that is known or the deadline."""
        namespace = self.namespace.of(req_context.req_id)
        if namespace is None or self._switch.mode == "never":
            return LookupResult.MISS
        return self._lookups.ask(req_context.req_id, namespace, key)

    @guarded(None)
    def on_schedule_end(self, context: "ScheduleEndContext") -> None:
        """Send the lookups of this step."""
        self._lookups.flush()

    # Jobs.

    @guarded(None)  # a job that was begun ends at its deadline
    def submit_store(self, job_metadata: "TransferJob") -> None:
        """Save rows that are not stored, in the background. A reader saves nothing."""
        saves = self._begin(self._saves, job_metadata)
        if self._config.role == "reader":
            for one in saves:
                one.settle(done=True)
        elif saves and not self._lookups.submit(partial(self._save_new, saves)):
            for one in saves:
                self._writer.write(one)

    @guarded(None)
    def submit_load(self, job_metadata: "TransferJob") -> None:
        """Load chunks that were found into rows, in the background. Each may fail by itself."""
        loads = []
        for one in self._begin(self._loads, job_metadata):
            if self._lookups.has_found(job_metadata.req_context.req_id, one.key):
                loads.append(one)
            else:
                one.settle(done=False)
        self._reader.read(loads)

    @guarded(())
    def get_finished_jobs(self) -> tuple[JobResult, ...]:
        """Return the jobs that ended, including those past their deadline."""
        loads, saves = self._loads.take_finished(), self._saves.take_finished()
        for job in loads:
            self._lookups.deny(job.failed)  # later lookups must not wait for the same load again
            self._touch(job.done)
            self._report(job.noted, removed=True)
        for job in saves:
            self._report(job.noted, removed=False)
        return tuple(map(self._result, (*loads, *saves)))

    @guarded(None)
    def drain_jobs(self) -> None:
        """End all jobs and leave the namespace: weights may have changed if vLLM resets caches."""
        connector = self._connector()
        self.reset(clean=holds_nothing(getattr(connector, "_kv_cache_manager", None)))

    def reset(self, *, clean: bool) -> bool:
        """Stop using everything stored so far; see ``TierNamespace``. Does not wait for a store."""
        try:
            self._loads.give_up()
            self._saves.give_up()
            self._reader.recheck()
        finally:
            self._lookups.clear()
            renewed = self.namespace.renew(clean=clean)
        return renewed

    @guarded(None)
    def shutdown(self) -> None:
        """Save queued chunks within ``drain_deadline_ms``, then stop. Idempotent."""
        self._loads.close(0.0)
        self._saves.close(self._config.drain_deadline_ms / 1000)
        self._rows.memory.release()
        self._lookups.close()
        self._reader.close()
        self._writer.close(0.0)
        self._link.calls.close()

    # Events and metrics.

    @guarded(())
    def take_events(self) -> tuple[OffloadingEvent, ...]:
        """Return events of saved and missing chunks, if the tier reports events."""
        events, self._events = tuple(self._events), []
        return events

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        """Return the metrics of tiers by their full names."""
        table = TIER_METRICS
        kinds = (OffloadingCounterMetadata, table.counters), (OffloadingGaugeMetadata, table.gauges)
        return {
            table.prefix + name: kind(text) for kind, texts in kinds for name, text in texts.items()
        }

    @guarded(None)
    def get_stats(self) -> OffloadingConnectorStats | None:
        """Return the numbers since the last call."""
        stats, numbers = OffloadingConnectorStats(), self._recorder.drain()
        for name in numbers.keys() & TIER_METRICS.counters:
            stats.increase_counter(TIER_METRICS.prefix + name, numbers[name])
        for name in numbers.keys() & TIER_METRICS.gauges:
            stats.set_gauge(TIER_METRICS.prefix + name, numbers[name])
        return stats if numbers else None

    # Internal methods.

    def _begin(self, jobs: TierJobs, job: "TransferJob") -> Sequence[JobRow]:
        namespace = self.namespace.of(job.req_context.req_id)
        return jobs.begin(job.job_id, namespace, tuple(job.keys), job.chunk_ids)

    def _save_new(self, saves: Sequence[JobRow]) -> Steps[None]:
        """Save the chunks that are not stored already. On the lookup thread."""
        names = [one.claim.key for one in saves]
        fields = sorted({name.field for name in names})
        hashes = [name.prefix_hash for name in names]
        try:
            found = yield from self._link.calls.find(names[0].namespace, hashes, fields)
        except StoreError:
            self._recorder.count("lookup_errors")
            found = [None] * len(names)
        for one, shards in zip(saves, found, strict=True):
            if shards is None or one.claim.key.field not in shards:
                self._writer.write(one)
            else:
                one.end(WriteOutcome.EXISTED, 0)

    def _touch(self, keys: Sequence[bytes]) -> None:
        """Extend the life of the records of loaded chunks."""
        namespace = self.namespace.current
        if namespace is not None and keys:
            hashes = [chunk_key(namespace, key).prefix_hash for key in keys]
            touch = partial(self._link.calls.touch, namespace, hashes, ttl_s=self._config.ttl_s)
            self._lookups.submit(touch)

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


def _shape(view: memoryview) -> tuple[int, int]:
    """Return the number of rows in vLLM's memory, and their length."""
    shape = view.shape or ()
    if len(shape) != 2 or 0 in shape or view.itemsize != 1 or not view.c_contiguous:
        raise ConfigError(
            f"objkv does not support this layout of vLLM's CPU memory, {shape} of {view.format!r}: "
            "check that cpu_bytes_to_use is large enough for one chunk"
        )
    return shape[0], shape[1]
