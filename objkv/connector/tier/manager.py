"""objkv under vLLM's own offloading: a secondary tier below the CPU memory of OffloadingConnector.

For who runs ``OffloadingConnector`` with ``TieringOffloadingSpec`` and wants what it evicts, and
what other replicas computed, in objkv's stores. vLLM calls every method on the scheduler's thread:
none of them waits for a store, and none but the constructor raises. Read against vLLM 0.32-0.33,
``v1/kv_offload/tiering/base.py``. Described in ``docs/tier.md``.
"""

import logging
import secrets
from collections.abc import Callable
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

from objkv.connector.guard import guarded, speak_as_vllm
from objkv.connector.hooks import EngineHooks, holds_nothing
from objkv.connector.tier.identity import (
    TierAdapters,
    TierIdentity,
    find_engine,
    none_hash,
    read_options,
    read_tier_identity,
)
from objkv.connector.tier.jobs import JobOutcome, TierChunk, TierJobs
from objkv.connector.tier.lookup import Answer
from objkv.connector.tier.metrics import tier_metric_definitions, tier_stats
from objkv.connector.tier.rows import RowForm
from objkv.connector.tier.store import TierStore
from objkv.errors import ConfigError
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


# The namespace that a tier lives in: when it begins, who may use it, and when it is left.

logger = logging.getLogger(__name__)


class TierHome:
    """Where chunks of a request belong. The scheduler's thread only; never waits."""

    def __init__(self, identity: TierIdentity, announce: Callable[[str, bytes], bool]) -> None:
        """
        Args:
            announce: stores a namespace's document in the background; False if there is no room.
        """
        self.identity = identity
        self._announce = announce
        self._announced: str | None = None
        self._name: str | None = None
        self._live: set[str] = set()
        self._distrusted: set[str] = set()
        self.open = True
        """False while vLLM's own memory may hold KV of other weights than it computes with."""

    @property
    def namespace(self) -> str | None:
        """None while nothing may be loaded or saved."""
        return self._name if self.open else None

    @property
    def idle(self) -> bool:
        """Whether no request is under way."""
        return not self._live

    def begin(self, request_id: str) -> None:
        """A request. vLLM chooses how it hashes after it made its tiers, and before the first."""
        self._live.add(request_id)
        if self._name is None and (first := none_hash()) is not None:
            self.identity = replace(self.identity, none_hash=first)
            self._name = self.identity.namespace()
            logger.info("objkv tier namespace=%s", self._name)
        name = self.namespace
        if name is not None and self._announced != name:
            document = self.identity.canonical()
            self._announced = name if self._announce(name, document) else None

    def end(self, request_id: str) -> None:
        """It ended."""
        self._live.discard(request_id)
        self._distrusted.discard(request_id)

    def of(self, request_id: str) -> str | None:
        """None too for requests that began before the last renewal."""
        return None if request_id in self._distrusted else self.namespace

    def renew(self, *, clean: bool) -> bool:
        """Weights may have changed: leave the namespace; True if there is a new one, which is this
        replica's own, by a random number.

        ``clean``: whether vLLM dropped all that its own memory held, of the device and of the CPU.
        If not, nothing is loaded or saved until a renewal that is.
        """
        self.open = clean
        self._distrusted |= self._live
        extra = {**dict(self.identity.extra), "reset": secrets.token_hex(8)}
        self.identity = replace(self.identity, extra=tuple(sorted(extra.items())))
        if self._name is not None:
            self._name = self.identity.namespace()
        if clean:
            logger.warning(
                "cache reset, the tier shares with nobody until a restart namespace=%s", self._name
            )
        else:
            logger.warning(
                "the tier neither loads nor saves until vLLM's caches are reset while no request "
                "holds a block: reset_prefix_cache(reset_running_requests=True, "
                "reset_connector=True)"
            )
        return clean


_ANSWERS = {
    Answer.YES: LookupResult.HIT,
    Answer.NO: LookupResult.MISS,
    Answer.LATER: LookupResult.RETRY,
}


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
        self._options, config = read_options(options)
        self._row_count, row_bytes = _rows(primary_kv_view)
        self._engine = find_engine(offloading_spec)
        identity = read_tier_identity(
            offloading_spec, self._engine, row_bytes, config, self._options
        )
        tokens = max(group.tokens_per_block for group in identity.groups)
        form = RowForm.of(row_bytes, identity.kv_dtype, tokens * identity.blocks_per_chunk)
        if self._options.locality is not None:
            self.locality = Locality(self._options.locality)
        self._events: list[OffloadingEvent] | None = None
        if self._options.enable_kv_events:
            if offloading_spec.kv_events_config.enable_kv_cache_events:
                self._events = []
            else:
                logger.warning("enable_kv_events is set, but vLLM has KV events turned off")
        self._recorder = MemoryRecorder()
        self._store = TierStore(
            config,
            form,
            primary_kv_view.cast("B"),
            self._recorder,
            queue_max=self._options.queue_max,
        )
        self.home = TierHome(identity, self._store.announce)
        self._closed = False
        logger.info(
            "objkv tier ready rows=%d row_bytes=%d weights=%s",
            self._row_count,
            row_bytes,
            identity.weights,
        )
        if self._engine is None:
            logger.warning(
                "vLLM's configuration is not seen: replicas are told apart by 'settings' alone"
            )
        self.adapters = TierAdapters(lambda: self.reset(clean=False))
        # vLLM's blocks cannot be seen from here, and its CPU memory may hold old weights' KV when
        # the device's does not: only a reset of all of it opens the tier again.
        self._hooks = EngineHooks(self, lambda: None)

    # Requests.

    @guarded(RequestOffloadingContext())
    def on_new_request(self, req_context: "ReqContext") -> RequestOffloadingContext:
        """Chunks are offloaded as they are computed."""
        self.home.begin(req_context.req_id)
        return RequestOffloadingContext()

    @guarded(None)
    def on_request_finished(self, req_context: "ReqContext") -> None:
        """Forget what was found for it."""
        self.home.end(req_context.req_id)
        self._store.lookups.forget(req_context.req_id)

    @guarded(LookupResult.MISS)
    def lookup(self, key: "OffloadKey", req_context: "ReqContext") -> LookupResult:
        """Whether the chunk is stored; RETRY until that is known, at most until the deadline."""
        namespace = self.home.of(req_context.req_id)
        if namespace is None:
            return LookupResult.MISS
        return _ANSWERS[self._store.lookups.ask(req_context.req_id, namespace, key)]

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
            self.reset(clean=self.home.idle)

    @property
    def open(self) -> bool:
        """Whether requests may load and save: not while vLLM may hold KV of other weights."""
        return self.home.open

    def reset(self, *, clean: bool) -> bool:
        """Use nothing that was stored so far; see ``TierHome``. Waits for no store."""
        try:
            self._store.give_up()
        finally:
            self._store.lookups.clear()
            renewed = self.home.renew(clean=clean)
        return renewed

    def shutdown(self) -> None:
        """Save what is queued within ``drain_deadline_ms``, then stop. Idempotent."""
        if not self._closed:
            self._closed = True
            self._shutdown()

    @guarded(None)
    def _shutdown(self) -> None:
        self._store.close()

    # What vLLM shows.

    @guarded(tuple[OffloadingEvent, ...]())
    def take_events(self) -> tuple[OffloadingEvent, ...]:
        """Chunks that were saved, or found gone, if the tier is to tell."""
        if not self._events:
            return ()
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
        return f"<ObjKVTier {self.home.namespace}, {self._store!r}>"

    # Within.

    def _submit(self, jobs: TierJobs, job: "TransferJob") -> None:
        entries: list[TierChunk] = []
        namespace = None
        try:
            record = self._store.lookups.record
            for key, row in zip(job.keys, job.chunk_ids, strict=True):
                assert 0 <= row < self._row_count
                entries.append(TierChunk(key, int(row), record(key) if job.is_promotion else None))
            namespace = self.home.of(job.req_context.req_id)
        except Exception:  # vLLM counts on an outcome of every job
            logger.exception("tier job not understood job=%s", job.job_id)
            entries = [TierChunk(key, 0) for key in job.keys]
        jobs.submit(job.job_id, namespace, entries)

    def _loaded(self, outcome: JobOutcome) -> JobResult:
        if outcome.failed:
            # Whoever still asks must not be told to wait for the same load again.
            self._store.lookups.deny(outcome.failed)
        if outcome.done and (namespace := self.home.namespace) is not None:
            self._store.touch(namespace, outcome.done)
        self._tell(outcome.noted, removed=True)
        return self._result(outcome)

    def _saved(self, outcome: JobOutcome) -> JobResult:
        self._tell(outcome.noted, removed=False)
        return self._result(outcome)

    def _result(self, outcome: JobOutcome) -> JobResult:
        return JobResult(
            outcome.job_id,
            outcome.success,
            successful_keys=outcome.done or None,
            transfer_time=outcome.seconds,
            transfer_bytes=len(outcome.done) * self.block_size_bytes,
        )

    def _tell(self, keys: tuple[bytes, ...], *, removed: bool) -> None:
        if keys and self._events is not None:
            event = OffloadingEvent(list(keys), self.medium, removed, locality=self.locality)
            self._events.append(event)


def _rows(view: memoryview) -> tuple[int, int]:
    """How many rows vLLM's memory has, and how long they are."""
    shape = view.shape or ()
    if len(shape) != 2 or 0 in shape or view.itemsize != 1 or not view.c_contiguous:
        raise ConfigError(
            f"objkv does not know this layout of vLLM's CPU memory: {shape} of {view.format!r}; is "
            "cpu_bytes_to_use large enough for one chunk?"
        )
    return shape[0], shape[1]
