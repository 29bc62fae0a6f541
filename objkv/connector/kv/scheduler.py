"""The scheduler's side: matches prompts with stored chunks and plans loads and saves.

It never uses the network. It polls lookups that run in the background, and makes one plan per step
from their answers and vLLM's block tables. Source of the call order: vLLM 0.31-0.33,
``v1/core/sched/scheduler.py``.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING

from objkv.cache.lookup import LookupService, Records
from objkv.cache.match import usable_chunks
from objkv.config import Config
from objkv.connector.guard import guarded
from objkv.connector.kv.events import NoEvents
from objkv.connector.kv.metadata import StepPlan, StepReport
from objkv.connector.kv.namespace import ReplicaNamespace
from objkv.connector.kv.planning import BlockTable, BlockTrust, SavePlanner, load_moves
from objkv.connector.kv.requests import RequestTracker, TrackedRequest, Usable
from objkv.connector.kv.timing import Timing
from objkv.connector.model.groups import Geometry
from objkv.index.base import Shards
from objkv.index.near import NearIndex
from objkv.keys.identity import GroupIdentity, Identity
from objkv.telemetry import Recorder
from objkv.tracing import Tracing
from objkv.transfer.plan import LoadPlan, SavePlan

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


logger = logging.getLogger(__name__)
_EMPTY_STEP_S, _BESIDE_STEPS_S = 1e-3, 1e-4
"""How long an empty step waits for the index: if it is the only step, and while another step is in
progress."""


@dataclass(frozen=True, slots=True)
class Roles:
    """The roles of this replica, and properties of its engine."""

    loads: bool
    saves: bool
    copies_are_synchronous: bool
    steps_in_flight: int
    """How many steps may be scheduled before the first one ends."""
    media_named: bool = True
    """Whether an image's identifier depends on its content, so that it is the same everywhere."""


class SyncGate:
    """Stops loads within the step after one to which no store answered. For the scheduler's thread
    only.

    Such a load blocks every request of the replica until its deadline. A circuit breaker alone does
    not help: it lets a probe through every few seconds, and the model would wait for each one. A
    load between steps blocks only its own request. All loads are therefore of that kind, until one
    succeeds within the time that a step would wait.
    """

    def __init__(self, bound_s: float, *, clock: Callable[[], float] = monotonic) -> None:
        """``bound_s``: how long the forward pass waits for a load within the step."""
        self._bound_s = bound_s
        self._clock = clock
        self._within: frozenset[str] = frozenset()
        self._between: dict[str, float] = {}
        self.open = True
        """Whether loads within the step may be planned."""

    def planned(self, loads: Iterable[LoadPlan]) -> None:
        """Record the loads of a planned step."""
        now = self._clock()
        self._within = frozenset(load.request_id for load in loads if load.sync)
        self._between |= {load.request_id: now for load in loads if not load.sync}

    def reported(self, report: StepReport) -> None:
        """Record the workers' report. A refused or missing payload means that the store
        answered."""
        for request_id in report.failed:
            self._between.pop(request_id, None)
        if not report.rejected and self._within & report.failed:
            self.open = False

    def received(self, request_id: str) -> None:
        """Record the end of a load between steps. It succeeded, unless ``reported`` has recorded
        its failure."""
        started = self._between.pop(request_id, None)
        if started is not None and self._clock() - started < self._bound_s:
            self.open = True


class HitCounters:
    """Counts the source of each token when vLLM allocates blocks to a request: the replica, the hot
    store, the bulk store, or computation. For the scheduler's thread only."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._queried: dict[str, int] = {}

    def queried(self, request_id: str, computed: int) -> None:
        """Record that vLLM has ``computed`` tokens of a request and queries for the rest. vLLM may
        repeat a query."""
        self._queried[request_id] = computed

    def allocated(self, request: "Request") -> None:
        """Count a query when vLLM allocates blocks to the request. The second allocation after a
        load between steps has no query and is not counted. Source: vLLM 0.31-0.33,
        ``v1/core/sched/scheduler.py``."""
        computed = self._queried.pop(request.request_id, None)
        if computed is None:
            return
        self._recorder.count("queries")
        self._recorder.count("query_tokens", request.num_tokens)
        self._recorder.count("local_hit_tokens", computed)

    def planned(self, plan: LoadPlan, start: int, end: int) -> None:
        """Count a planned load of tokens ``[start, end)``."""
        spans, moves_hot = plan.moves.token_spans, plan.moves.hot
        chunks = set(spans)
        # A chunk is only as fast as its slowest group.
        cold = {span for span, hot in zip(spans, moves_hot, strict=True) if not hot}
        hot = sum(min(end, last) - max(start, first) for first, last in chunks - cold)
        self._recorder.count("hits")
        self._recorder.count("hit_tokens", end - start)
        self._recorder.count("hit_hot_tokens", hot)
        self._recorder.count("hit_bulk_tokens", end - start - hot)

    def ended(self, request_id: str) -> None:
        """Forget a request that ended, possibly before vLLM allocated blocks to it."""
        self._queried.pop(request_id, None)


class SchedulerSide:
    """The scheduler's half of the connector. All methods are called by the scheduler's thread.
    ``wiring.make_scheduler_side`` makes it."""

    def __init__(
        self,
        config: Config,
        roles: Roles,
        geometry: Geometry,
        *,
        index: NearIndex,
        lookups: LookupService,
        requests: RequestTracker,
        timing: Timing,
        namespace: ReplicaNamespace[Identity],
        recorder: Recorder,
        tracing: Tracing,
    ) -> None:
        self._config, self._roles, self._geometry = config, roles, geometry
        self._index, self._lookups = index, lookups
        self._requests, self._timing = requests, timing
        self._namespace, self._tracing = namespace, tracing
        self._trust = BlockTrust(roles.steps_in_flight, ranks=geometry.ranks)
        self._saves = SavePlanner(config, geometry, requests, self._trust, loads=roles.loads)
        self._sync_gate = SyncGate(config.step_load_deadline_ms / 1000)
        self._hits = HitCounters(recorder)
        self._loads, self._loading = dict[str, LoadPlan](), dict[str, LoadPlan]()
        self._held: set[str] = set()
        self._sync_loads = False
        self._waiting: int | None = None
        self.adapters = requests.adapters
        self.events = NoEvents()
        self.tables_ended: list[Sequence[int]] = []
        """Blocks of requests that ended in a step with loads within it; only with one group."""

    @property
    def namespace(self) -> str:
        """The current namespace. ``reset`` changes it."""
        return self._namespace.name

    def track(self, request: "Request") -> None:
        """Track a new request and start the lookup of its prompt."""
        trusted = self._namespace.open and (self._roles.media_named or not request.mm_features)
        self._requests.add(request, self._namespace.name, trusted=trusted)
        self._namespace.announce()

    def match(self, request: "Request", computed: int) -> tuple[int | None, bool]:
        """Return how many tokens beyond ``computed`` can be loaded, and whether between steps.

        The number is None while the lookup is in progress. vLLM calls this in a hot loop, so it is
        cheap and repeatable.
        """
        tracked = self._requests.get(request.request_id)
        self._hits.queried(request.request_id, computed)
        if tracked is None:
            return 0, False
        tracked.accounted = computed
        if (
            not self._roles.loads
            or not tracked.may_load
            or request.skip_reading_prefix_cache
            or computed % self._geometry.block_tokens
        ):
            return None if self._roles.saves and self._requests.hashing(tracked) else 0, False
        records = self._requests.records(tracked)
        if records is None:
            return None, False
        usable = self._usable(tracked, records, computed)
        if usable.end <= computed:
            return 0, False
        return usable.end - computed, not usable.sync

    def plan_load(self, request: "Request", blocks: BlockTable, tokens: int) -> None:
        """Plan the load of ``tokens`` external tokens, possibly 0, into the allocated
        ``blocks``."""
        self._hits.allocated(request)
        if tracked := self._requests.get(request.request_id):
            self._trust.add(tracked)
        if tokens == 0:
            return
        assert tracked is not None
        usable = tracked.usable
        assert tracked.hashes is not None
        assert usable is not None
        span = (usable.computed, usable.computed + tokens)
        tracked.accounted = span[1]
        moves = load_moves(self._geometry, tracked.hashes.chain, usable.records, blocks, span)
        plan = LoadPlan(
            request.request_id, tracked.namespace, moves, usable.sync, tracked.traceparent
        )
        self._loads[request.request_id] = plan
        self._hits.planned(plan, *span)

    def plan_step(self, output: "SchedulerOutput") -> StepPlan:
        """Return the plan of everything that the workers do in this step."""
        self._trust.next_step(output)
        self._sync_loads, self.tables_ended = output.has_sync_kv_loads, []
        loads = tuple(self._loads.values())
        self._sync_gate.planned(loads)
        self._waiting = None  # counted once a step
        self._timing.step_planned(output.num_scheduled_tokens.values(), loads)
        self._loads = {}
        for plan in loads:
            if plan.sync:
                self._touch(plan)
            else:
                self._loading[plan.request_id] = plan
        saves = self._planned_saves(output) if self._roles.saves else ()
        empty = not output.total_num_scheduled_tokens
        if empty and not self._loading:
            # vLLM spins on empty steps while it waits. Release the GIL for the lookup threads.
            self._lookups.wait(_BESIDE_STEPS_S if self._timing.steps > 1 else _EMPTY_STEP_S)
        plan = StepPlan(loads, saves, frozenset(self._held), idle=empty and bool(self._loading))
        self.events.planned(plan, self._requests.get)
        return plan

    def end_step(self) -> "tuple[KVCacheEvent, ...]":
        """Record that the oldest step in progress has its result. Returns its KV events."""
        self._timing.step_ended()
        return self.events.take()

    def update(self, output: "KVConnectorOutput") -> "list[Request]":
        """Process the workers' reports. Returns the requests whose whole load failed."""
        self._held -= output.finished_sending or set()
        if isinstance(report := output.kv_connector_worker_meta, StepReport):
            self._read_report(report)
        self.events.update(output)
        for request_id in output.finished_recving or ():
            self._sync_gate.received(request_id)
            self._timing.received(request_id)
            if plan := self._loading.pop(request_id, None):
                self._touch(plan)
        failed = map(self._requests.get, output.failed_recving or ())
        return [tracked.request for tracked in failed if tracked is not None]

    def finish(self, request: "Request", blocks: BlockTable) -> bool:
        """Forget a request that ended. Returns whether its blocks must be kept until its saves have
        read them."""
        if self._sync_loads and len(blocks) == 1:
            self.tables_ended.append(blocks[0])
        self._timing.request_ended(request.request_id)
        self._hits.ended(request.request_id)
        tracked = self._requests.end(request.request_id)
        if tracked is None or not tracked.saved or self._roles.copies_are_synchronous:
            return False
        self._held.add(request.request_id)
        return True

    def reset(self, *, clean: bool) -> bool:
        """Stop using everything stored so far, because weights may have changed.

        Requests in progress no longer load or save. See ``ReplicaNamespace.renew``.
        """
        self._index.clear()
        self._requests.distrust()
        self.events.reset()
        return self._namespace.renew(clean=clean)

    @property
    def open(self) -> bool:
        """Whether requests may load and save. False while vLLM has blocks of old weights."""
        return self._namespace.open

    @property
    def requests_under_way(self) -> tuple[str, ...]:
        """Ids of the requests that have not ended."""
        return self._requests.ids()

    def close(self) -> None:
        """Stop the background threads."""
        self._lookups.close()
        self._tracing.close()

    def _usable(self, tracked: TrackedRequest, records: Records, computed: int) -> Usable:
        """Return the part of a request with ``computed`` tokens that should be loaded. Decided once
        per lookup."""
        known, num_tokens = tracked.usable, tracked.request.num_tokens
        if (
            known is None
            or known.records is not records
            or (known.num_tokens, known.computed) != (num_tokens, computed)
        ):
            end, sync = self._usable_tokens(records, num_tokens, computed)
            known = tracked.usable = Usable(records, num_tokens, computed, end, sync)
        return known

    def _usable_tokens(
        self, records: Sequence[Shards | None], num_tokens: int, computed: int
    ) -> tuple[int, bool]:
        """Return the end of the match in tokens, and whether to load it within the step.

        A load between steps may cover the whole prompt, because vLLM then recomputes the last
        token. Within a step, and with sliding windows, at least one token must remain to compute.
        """
        size = self._geometry.chunk_tokens
        if self._geometry.windowed:
            records = records[: (num_tokens - 1) // size]
        tokens = self._matched(records)
        if self._waiting is None:
            self._waiting = self._requests.waiting()
        behind = max(0, self._waiting - 1)  # the request itself has nothing computed either
        admitted = self._timing.admit(records, computed, min(tokens, num_tokens), waiting=behind)
        if admitted < min(tokens, num_tokens):
            tokens = self._matched(records[: admitted // size])
        if self._geometry.windowed:
            return tokens, False
        if not self._loads_within_step(num_tokens, tokens, computed):
            return min(tokens, num_tokens), False
        step = self._geometry.block_tokens
        return min(tokens, (num_tokens - 1) // step * step), True

    def _matched(self, records: Sequence[Shards | None]) -> int:
        """Return how many leading tokens this replica can load."""
        size, coverage = self._geometry.chunk_tokens, self._requests.coverage

        def is_readable(shards: Shards, group: int, _identity: GroupIdentity) -> bool:
            return coverage.is_readable(shards, group)

        return usable_chunks(records, self._geometry.groups, size, is_readable) * size

    def _loads_within_step(self, num_tokens: int, matched: int, computed: int) -> bool:
        """Whether to load within the step. In mode ``auto`` that needs at least as many tokens to
        compute as to load."""
        mode = self._config.load_mode
        if mode == "auto" and num_tokens - matched < matched - computed:
            return False
        return self._sync_gate.open and mode != "async"

    @guarded(tuple[SavePlan, ...]())
    def _planned_saves(self, output: "SchedulerOutput") -> tuple[SavePlan, ...]:
        plans = tuple(self._saves.plan(output))
        for plan in plans:
            # The next lookup must find these chunks as soon as they are stored.
            names = [save.move.prefix_hash for save in plan.moves]
            self._index.invalidate(plan.namespace, *names)
        return plans

    def _read_report(self, report: StepReport) -> None:
        self._sync_gate.reported(report)
        self._timing.reported(report)
        for request_id, chunk in report.dropped:
            self._requests.unstore(request_id, chunk)
        for request_id in report.failed:
            self._loading.pop(request_id, None)
            if tracked := self._requests.get(request_id):
                tracked.may_load = False
        for namespace, prefix_hash in report.rejected:
            self._index.invalidate(namespace, prefix_hash)
        self._requests.reject(prefix_hash for _, prefix_hash in report.rejected)

    def _touch(self, plan: LoadPlan) -> None:
        index, ttl_s = self._index, self._config.ttl_s
        self._lookups.submit(
            lambda: index.touch(plan.namespace, plan.moves.prefix_hashes(), ttl_s=ttl_s)
        )
