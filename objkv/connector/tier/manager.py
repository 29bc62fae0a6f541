"""objkv under vLLM's own offloading: a secondary tier below the CPU memory of OffloadingConnector.

For who runs ``OffloadingConnector`` with ``TieringOffloadingSpec`` and wants what it evicts, and
what other replicas computed, in objkv's stores. vLLM calls every method on the scheduler's thread:
none of them waits for a store, and none but the constructor raises. Read against vLLM 0.32-0.33,
``v1/kv_offload/tiering/base.py``. Described in ``docs/tier.md``.
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

from objkv.config import Config
from objkv.connector.guard import guarded, speak_as_vllm
from objkv.connector.hooks import EngineHooks, holds_nothing
from objkv.connector.kv.namespace import ReplicaNamespace
from objkv.connector.metrics import tier_metric_definitions, tier_stats
from objkv.connector.tier.identity import (
    TierAdapters,
    TierIdentity,
    find_engine,
    none_hash,
    read_options,
    read_tier_identity,
)
from objkv.connector.tier.jobs import JobOutcome, TierChunk, TierJobs
from objkv.connector.tier.store import TierStore
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
    """Begins with the first request, and is not that of requests that began before a renewal."""

    def __init__(
        self,
        identity: TierIdentity,
        bulk: WriteStore,
        submit: Callable[[Callable[[], None]], bool],
        *,
        writes: bool,
    ) -> None:
        super().__init__(identity, bulk, submit, writes=writes)
        self._begun = False
        self._live: set[str] = set()
        self._distrusted: set[str] = set()

    @property
    def current(self) -> str | None:
        """None while nothing may be loaded or saved."""
        return self.name if self._begun and self.open else None

    @property
    def idle(self) -> bool:
        """Whether no request is under way."""
        return not self._live

    def begin(self, request_id: str) -> None:
        """A request. vLLM chooses how it hashes after it made its tiers, and before the first."""
        self._live.add(request_id)
        if not self._begun and (first := none_hash()) is not None:
            self.identity = replace(self.identity, none_hash=first)
            self.name = self.identity.namespace()
            self._begun = True
            logger.info("objkv tier namespace=%s", self.name)
        self.announce()

    def end(self, request_id: str) -> None:
        """It ended."""
        self._live.discard(request_id)
        self._distrusted.discard(request_id)

    def of(self, request_id: str) -> str | None:
        """None too for requests that began before the last renewal."""
        return None if request_id in self._distrusted else self.current

    def announce(self) -> None:
        """As the base class, once there is a name."""
        if self.current is not None:
            super().announce()

    def renew(self, *, clean: bool) -> bool:
        """As the base class; ``clean``: whether vLLM dropped all that its own memory held, of the
        device and of the CPU."""
        self._distrusted |= self._live
        return super().renew(clean=clean)

    def _log_closed(self) -> None:
        logger.warning(
            "the tier neither loads nor saves until vLLM's caches are reset while no request holds "
            "a block: reset_prefix_cache(reset_running_requests=True, reset_connector=True)"
        )


class ObjKVTier(SecondaryTierManager):
    """One entry of ``secondary_tiers``: ``{"type": "ObjKVTier", "module_path":
    "objkv.connector.tier", "bulk_url": …, "index_url": …}``; every setting of ``Config`` and of
    ``TierOptions`` may stand there. Raises ``ConfigError`` at start, with what to do.
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
            primary_kv_view: ``[rows, row_bytes]``, C-contiguous, of one-byte elements: vLLM's
                memory. Written only in rows that vLLM names in a load, until that has ended.
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
        self._recorder = MemoryRecorder()
        memory, queue_max = primary_kv_view.cast("B"), self._options.queue_max
        form = identity.row_form()
        self._store = TierStore(config, form, memory, self._recorder, queue_max=queue_max)
        lookups, writes = self._store.lookups, config.role != "reader"
        self.namespace = TierNamespace(identity, self._store.bulk, lookups.submit, writes=writes)
        self._closed = False
        self.adapters = TierAdapters(lambda: self.reset(clean=False))
        self._hooks = EngineHooks(self, _no_manager, patches=config.vllm_patches)
        self._log_ready(identity)

    def _read_options(self, options: Mapping[str, Any], spec: "OffloadingSpec") -> Config:
        self._options, config = read_options(options)
        if self._options.locality is not None:
            self.locality = Locality(self._options.locality)
        self._events_enabled = self._options.enable_kv_events
        if self._events_enabled and not spec.kv_events_config.enable_kv_cache_events:
            logger.warning("enable_kv_events is set, but vLLM has KV events turned off")
            self._events_enabled = False
        self._events: list[OffloadingEvent] = []
        return config

    def _log_ready(self, identity: TierIdentity) -> None:
        logger.info(
            "objkv tier ready rows=%d row_bytes=%d weights=%s",
            self._row_count,
            identity.row_bytes,
            identity.weights,
        )
        if self._engine is None:
            logger.warning(
                "vLLM's configuration is not seen: replicas are told apart by 'settings' alone"
            )

    # Requests.

    @guarded(RequestOffloadingContext())
    def on_new_request(self, req_context: "ReqContext") -> RequestOffloadingContext:
        """Chunks are offloaded as they are computed."""
        self.namespace.begin(req_context.req_id)
        return RequestOffloadingContext()

    @guarded(None)
    def on_request_finished(self, req_context: "ReqContext") -> None:
        """Forget what was found for it."""
        self.namespace.end(req_context.req_id)
        self._store.lookups.forget(req_context.req_id)

    @guarded(LookupResult.MISS)
    def lookup(self, key: "OffloadKey", req_context: "ReqContext") -> LookupResult:
        """Whether the chunk is stored; RETRY until that is known, at most until the deadline."""
        namespace = self.namespace.of(req_context.req_id)
        if namespace is None:
            return LookupResult.MISS
        return self._store.lookups.ask(req_context.req_id, namespace, key)

    @guarded(None)
    def on_schedule_end(self, context: "ScheduleEndContext") -> None:
        """Send the questions of this step."""
        self._store.lookups.flush()

    # Jobs.

    def submit_store(self, job_metadata: "TransferJob") -> None:
        """Save rows in the background; those there is no room for are dropped."""
        self._submit(self._store.saves, job_metadata)

    def submit_load(self, job_metadata: "TransferJob") -> None:
        """Load into rows in the background; each key is loaded, or fails, by itself."""
        self._submit(self._store.loads, job_metadata)

    @guarded(tuple[JobResult, ...]())
    def get_finished_jobs(self) -> tuple[JobResult, ...]:
        """Jobs that ended since the last call; one past its deadline ends here."""
        loads = [self._loaded(outcome) for outcome in self._store.loads.take_finished()]
        return (*loads, *(self._saved(outcome) for outcome in self._store.saves.take_finished()))

    @guarded(None)
    def drain_jobs(self) -> None:
        """End all jobs at once, and leave the namespace: vLLM calls it when it resets its caches,
        and weights may have changed. Nothing that was computed before is loaded or saved again."""
        engine = self._engine
        if engine is not None and engine.connector is not None:
            self.reset(clean=holds_nothing(engine.manager()))
        else:  # who has no request under way holds no block
            self.reset(clean=self.namespace.idle)

    @property
    def open(self) -> bool:
        """Whether requests may load and save: not while vLLM may hold KV of other weights."""
        return self.namespace.open

    def reset(self, *, clean: bool) -> bool:
        """Use nothing that was stored so far; see ``TierNamespace``. Waits for no store."""
        try:
            self._store.give_up()
        finally:
            self._store.lookups.clear()
            renewed = self.namespace.renew(clean=clean)
        return renewed

    @guarded(None)
    def shutdown(self) -> None:
        """Save what is queued within ``drain_deadline_ms``, then stop. Idempotent."""
        if not self._closed:
            self._closed = True
            self._store.close()

    # What vLLM shows.

    @guarded(tuple[OffloadingEvent, ...]())
    def take_events(self) -> tuple[OffloadingEvent, ...]:
        """Chunks that were saved, or found gone, where the tier reports events."""
        events, self._events = tuple(self._events), []
        return events

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> "dict[str, OffloadingMetricMetadata]":
        """Counters of tiers, by their full names."""
        return tier_metric_definitions()

    @guarded(None)
    def get_stats(self) -> Any:
        """Numbers since the last call."""
        return tier_stats(self._recorder.drain())

    def __repr__(self) -> str:
        return f"<ObjKVTier {self.namespace.current}, {self._store!r}>"

    # Within.

    def _submit(self, jobs: TierJobs, job: "TransferJob") -> None:
        entries: list[TierChunk] = []
        namespace = None
        try:
            record = self._store.lookups.record
            for key, row in zip(job.keys, job.chunk_ids, strict=True):
                assert 0 <= row < self._row_count
                entries.append(TierChunk(key, int(row), record(key) if job.is_promotion else None))
            namespace = self.namespace.of(job.req_context.req_id)
        except Exception:  # vLLM counts on an outcome of every job
            logger.exception("tier job not understood job=%s", job.job_id)
            entries = [TierChunk(key, 0) for key in job.keys]
        jobs.submit(job.job_id, namespace, entries)

    def _loaded(self, outcome: JobOutcome) -> JobResult:
        if outcome.failed:
            # Later lookups must not wait for the same load again.
            self._store.lookups.deny(outcome.failed)
        if outcome.done and (namespace := self.namespace.current) is not None:
            self._store.touch(namespace, outcome.done)
        self._report(outcome.noted, removed=True)
        return self._result(outcome)

    def _saved(self, outcome: JobOutcome) -> JobResult:
        self._report(outcome.noted, removed=False)
        return self._result(outcome)

    def _result(self, outcome: JobOutcome) -> JobResult:
        return JobResult(
            outcome.job_id,
            outcome.success,
            successful_keys=outcome.done or None,
            transfer_time=outcome.seconds,
            transfer_bytes=len(outcome.done) * self.block_size_bytes,
        )

    def _report(self, keys: tuple[bytes, ...], *, removed: bool) -> None:
        if keys and self._events_enabled:
            event = OffloadingEvent(list(keys), self.medium, removed, locality=self.locality)
            self._events.append(event)


def _no_manager() -> None:
    """vLLM's blocks cannot be seen from here, and its CPU memory may hold old weights' KV when the
    device's does not: only a reset of all of it opens the tier again."""


def _rows(view: memoryview) -> tuple[int, int]:
    """How many rows vLLM's memory has, and how long they are."""
    shape = view.shape or ()
    if len(shape) != 2 or 0 in shape or view.itemsize != 1 or not view.c_contiguous:
        raise ConfigError(
            f"objkv does not know this layout of vLLM's CPU memory: {shape} of {view.format!r}; is "
            "cpu_bytes_to_use large enough for one chunk?"
        )
    return shape[0], shape[1]
