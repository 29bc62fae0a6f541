"""The scheduler's side: what is stored, what to load, what to save. Never touches the network.

Lookups run in the background and are polled; plans are made from their answers and from vLLM's
block tables, whole, once per step. Source of the call order: vLLM 0.31-0.33,
``v1/core/sched/scheduler.py``.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING

from objkv.cache.admission import Admission
from objkv.cache.lookup import LookupLimits, LookupService, Records
from objkv.cache.match import usable_chunks
from objkv.config import Config, LoadMode
from objkv.connector.guard import guarded
from objkv.connector.kv.coverage import any_shape
from objkv.connector.kv.events import NoEvents
from objkv.connector.kv.metadata import StepPlan, StepReport
from objkv.connector.kv.namespace import Home
from objkv.connector.kv.planning import Admissions, BlockTable, Saves, load_moves
from objkv.connector.kv.requests import RequestTracker, Tracked, Usable
from objkv.connector.kv.timing import Pace
from objkv.connector.model.groups import Geometry
from objkv.connector.model.weights import open_digests
from objkv.index.base import Shards
from objkv.index.near import NearIndex
from objkv.keys.identity import GroupIdentity, Identity
from objkv.stores.base import WriteStore
from objkv.telemetry import Recorder
from objkv.tracing import NO_TRACING, Tracing
from objkv.transfer.plan import LoadPlan, SavePlan

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


# Whether the forward pass may wait for the store: not after it waited in vain.
#
# A load within the step that is never answered holds up every request of the replica until its
# deadline. A breaker alone does not help: it lets a call through again every few seconds, and the
# model would wait for each. A load between steps holds up its own request only, so the next loads
# are of that kind until one succeeds, and soon enough for a step to have waited for it.


class Confidence:
    """The scheduler's thread only."""

    def __init__(self, bound_s: float, *, clock: Callable[[], float] = monotonic) -> None:
        """``bound_s``: how long the forward pass waits for a load within the step."""
        self._bound_s = bound_s
        self._clock = clock
        self._within: frozenset[str] = frozenset()
        self._between: dict[str, float] = {}
        self.holds = True
        """Whether loads within the step may be planned."""

    def planned(self, loads: Iterable[LoadPlan]) -> None:
        """A step was planned, with these loads."""
        now = self._clock()
        self._within = frozenset(load.request_id for load in loads if load.sync)
        self._between |= {load.request_id: now for load in loads if not load.sync}

    def reported(self, report: StepReport) -> None:
        """What workers told of it. A payload that was refused, or gone, was an answer."""
        for request_id in report.failed:
            self._between.pop(request_id, None)
        if not report.rejected and self._within & report.failed:
            self.holds = False

    def received(self, request_id: str) -> None:
        """A load between steps is over; it succeeded, unless ``reported`` said otherwise before."""
        started = self._between.pop(request_id, None)
        if started is not None and self._clock() - started < self._bound_s:
            self.holds = True


# What a request's records come to: how far its match reaches, and how it is loaded.
#
# Decided once per answer of the index, because the scheduler asks in a hot loop.


class Matching:
    """The scheduler's thread only; pure but for what it counts."""

    def __init__(
        self,
        mode: LoadMode,
        geometry: Geometry,
        confidence: Confidence,
        pace: Pace,
        requests: RequestTracker,
    ) -> None:
        self._mode = mode
        self._geometry = geometry
        self._confidence = confidence
        self._pace = pace
        self._requests = requests
        self._reach = requests.reach
        self._waiting: int | None = None

    def next_step(self) -> None:
        """A step was scheduled: others wait now."""
        self._waiting = None

    def usable(self, tracked: Tracked, records: Records, computed: int) -> Usable:
        """What can, and should, be loaded of a request that has ``computed`` tokens."""
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
        """The end of the match in tokens, and whether to load it within the step.

        A load between steps may cover the whole prompt: vLLM then computes the last token again.
        Within a step, and with sliding windows, at least one token must be left to compute.
        """
        size = self._geometry.chunk_tokens
        if self._geometry.windowed:
            records = records[: (num_tokens - 1) // size]
        tokens = self._matched(records)
        if self._waiting is None:
            self._waiting = self._requests.waiting()
        behind = max(0, self._waiting - 1)  # the request itself has nothing computed either
        admitted = self._pace.admit(records, computed, min(tokens, num_tokens), waiting=behind)
        if admitted < min(tokens, num_tokens):
            tokens = self._matched(records[: admitted // size])
        if self._geometry.windowed:
            return tokens, False
        if not self._loads_within_step(num_tokens, tokens, computed):
            return min(tokens, num_tokens), False
        step = self._geometry.block_tokens
        return min(tokens, (num_tokens - 1) // step * step), True

    def _matched(self, records: Sequence[Shards | None]) -> int:
        size = self._geometry.chunk_tokens
        return usable_chunks(records, self._geometry.groups, size, self._readable) * size

    def _loads_within_step(self, num_tokens: int, matched: int, computed: int) -> bool:
        """Layer by layer pays when there is as much to compute as to load."""
        if self._mode == "auto" and num_tokens - matched < matched - computed:
            return False
        return self._confidence.holds and self._mode != "async"

    def _readable(self, shards: Shards, group: int, _identity: GroupIdentity) -> bool:
        return self._reach.is_readable(shards, group)


# Where the tokens of requests came from: the replica itself, the hot store, the bulk store, or
# nowhere, so that they are computed. Counted when vLLM gives a request its blocks.


class Hits:
    """The scheduler's thread only."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._asked: dict[str, int] = {}

    def asked(self, request_id: str, computed: int) -> None:
        """vLLM has ``computed`` tokens of a request, and asks for more. It may ask often."""
        self._asked[request_id] = computed

    def given(self, request: "Request") -> None:
        """vLLM gave a request blocks. After a load between steps it does so again without asking:
        that is the same query. Source: vLLM 0.31-0.33, ``v1/core/sched/scheduler.py``."""
        computed = self._asked.pop(request.request_id, None)
        if computed is None:
            return
        self._recorder.count("queries")
        self._recorder.count("query_tokens", request.num_tokens)
        self._recorder.count("local_hit_tokens", computed)

    def planned(self, plan: LoadPlan, start: int, end: int) -> None:
        """Tokens ``[start, end)`` of a request are to be loaded."""
        cold: set[tuple[int, int]] = set()
        chunks: set[tuple[int, int]] = set()
        for load in plan.moves:
            span = (max(start, load.move.token_start), min(end, load.move.token_end))
            chunks.add(span)
            if not all(record.hot for _, record in load.records):
                cold.add(span)  # what one of its groups has in bulk comes no sooner
        hot = sum(last - first for first, last in chunks - cold)
        self._recorder.count("hits")
        self._recorder.count("hit_tokens", end - start)
        self._recorder.count("hit_hot_tokens", hot)
        self._recorder.count("hit_bulk_tokens", end - start - hot)

    def ended(self, request_id: str) -> None:
        """A request ended, maybe before it was given blocks."""
        self._asked.pop(request_id, None)


logger = logging.getLogger(__name__)
_EMPTY_STEP_S, _BESIDE_STEPS_S = 1e-3, 1e-4
"""How long a step with nothing to compute waits for an answer of the index: alone, and while the
result of another is due."""
_ANSWER_AGE_MIN_S = 10.0
"""Steps may take seconds, and an answer must be good for some of them."""


@dataclass(frozen=True, slots=True)
class Roles:
    """What this replica does, and how."""

    loads: bool
    saves: bool
    copies_are_synchronous: bool
    steps_in_flight: int
    """How many steps may be scheduled before the first of them is over."""
    media_named: bool = True
    """Whether an image's identifier says what it shows, here and everywhere."""


class SchedulerSide:
    """All methods are called by the scheduler's thread."""

    def __init__(
        self,
        config: Config,
        roles: Roles,
        geometry: Geometry,
        identity: Identity,
        *,
        bulk: WriteStore,
        index: NearIndex,
        recorder: Recorder,
        tracing: Tracing = NO_TRACING,
    ) -> None:
        self._config = config
        self._roles = roles
        self._geometry = geometry
        self._index = index
        self._hits = Hits(recorder)
        self._tracing = tracing
        shapes, reach = any_shape(config, geometry, index, writes=roles.saves)
        self._lookups = LookupService(
            shapes,
            sorted(geometry.all_fields()),
            recorder,
            LookupLimits(
                config.lookup_deadline_ms / 1000,
                config.lookup_queue_max,
                age_max_s=max(config.near_ttl_ms / 1000, _ANSWER_AGE_MIN_S),
            ),
            tracing=tracing,
        )
        self._requests = RequestTracker(geometry, self._lookups, recorder, open_digests(), reach)
        self.adapters = self._requests.adapters
        self._admissions = Admissions(roles.steps_in_flight, ranks=geometry.ranks)
        self._confidence = Confidence(config.step_load_deadline_ms / 1000)
        self._pace = Pace(
            Admission(config.admission, recorder),
            geometry,
            steps_in_flight=roles.steps_in_flight,
            reach=reach,
        )
        self._matching = Matching(
            config.load_mode, geometry, self._confidence, self._pace, self._requests
        )
        self._saves = Saves(config, geometry, self._requests, self._admissions, loads=roles.loads)
        self._loads: dict[str, LoadPlan] = {}
        self._loading: dict[str, LoadPlan] = {}
        self._held: set[str] = set()
        self._sync_loads = False
        self.events = NoEvents()
        self.tables_ended: list[Sequence[int]] = []
        """Blocks of requests that ended during a step with loads within it; single-group models."""
        self._home = Home(identity, bulk, self._lookups.submit, writes=roles.saves)
        self._home.announce()
        public = config.public()
        logger.info(
            "objkv ready model=%s namespace=%s chunk_tokens=%d load_mode=%s bulk=%s index=%s",
            identity.model,
            self._home.namespace,
            identity.chunk_tokens,
            config.load_mode,
            public["bulk_url"],
            public["index_url"],
        )

    @property
    def namespace(self) -> str:
        """The current namespace; it changes with ``reset``."""
        return self._home.namespace

    def track(self, request: "Request") -> None:
        """A request arrived: start asking what is stored of it."""
        trusted = self._home.open and (self._roles.media_named or not request.mm_features)
        self._requests.add(request, self._home.namespace, trusted=trusted)
        self._home.announce()

    def match(self, request: "Request", computed: int) -> tuple[int | None, bool]:
        """How many tokens beyond ``computed`` can be loaded, and whether between steps.

        None: not known yet, ask again. Cheap and free of side effects: asked in a hot loop.
        """
        tracked = self._requests.get(request.request_id)
        self._hits.asked(request.request_id, computed)
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
        usable = self._matching.usable(tracked, records, computed)
        if usable.end <= computed:
            return 0, False
        return usable.end - computed, not usable.sync

    def plan_load(self, request: "Request", blocks: BlockTable, tokens: int) -> None:
        """vLLM allocated ``blocks`` and wants ``tokens`` external tokens in them, maybe none."""
        self._hits.given(request)
        if tracked := self._requests.get(request.request_id):
            self._admissions.add(tracked)
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
            request.request_id, tracked.namespace, tuple(moves), usable.sync, tracked.traceparent
        )
        self._loads[request.request_id] = plan
        self._hits.planned(plan, *span)

    def plan_step(self, output: "SchedulerOutput") -> StepPlan:
        """Everything that the workers do in this step."""
        self._admissions.next_step(output)
        self._sync_loads, self.tables_ended = output.has_sync_kv_loads, []
        loads = tuple(self._loads.values())
        self._confidence.planned(loads)
        self._matching.next_step()
        self._pace.step_planned(output.num_scheduled_tokens.values(), loads)
        self._loads = {}
        for plan in loads:
            if plan.sync:
                self._touch(plan)
            else:
                self._loading[plan.request_id] = plan
        saves = self._planned_saves(output) if self._roles.saves else ()
        empty = not output.total_num_scheduled_tokens
        if empty and not self._loading:
            # vLLM spins on empty steps while it waits; let the threads it waits for have the GIL.
            self._lookups.wait(_BESIDE_STEPS_S if self._pace.steps > 1 else _EMPTY_STEP_S)
        plan = StepPlan(loads, saves, frozenset(self._held), idle=empty and bool(self._loading))
        self.events.planned(plan, self._requests.get)
        return plan

    def end_step(self) -> "tuple[KVCacheEvent, ...]":
        """The oldest step under way has its result; what is to be told of it."""
        self._pace.step_ended()
        return self.events.take()

    def update(self, output: "KVConnectorOutput") -> "list[Request]":
        """What the workers told. Returns the requests whose whole load failed."""
        self._held -= output.finished_sending or set()
        if isinstance(report := output.kv_connector_worker_meta, StepReport):
            self._read_report(report)
        self.events.update(output)
        for request_id in output.finished_recving or ():
            self._confidence.received(request_id)
            self._pace.received(request_id)
            if plan := self._loading.pop(request_id, None):
                self._touch(plan)
        failed = map(self._requests.get, output.failed_recving or ())
        return [tracked.request for tracked in failed if tracked is not None]

    def finish(self, request: "Request", blocks: BlockTable) -> bool:
        """A request ended; True if its blocks must live until its saves have left them."""
        if self._sync_loads and len(blocks) == 1:
            self.tables_ended.append(blocks[0])
        self._pace.request_ended(request.request_id)
        self._hits.ended(request.request_id)
        tracked = self._requests.end(request.request_id)
        if tracked is None or not tracked.saved or self._roles.copies_are_synchronous:
            return False
        self._held.add(request.request_id)
        return True

    def reset(self, *, clean: bool) -> bool:
        """Forget everything stored so far, as far as this replica is concerned; see ``Home``.

        Weights may have changed: requests under way neither load nor save any more.
        """
        self._index.clear()
        self._requests.distrust()
        self.events.reset()
        return self._home.renew(clean=clean)

    @property
    def open(self) -> bool:
        """Whether requests may load and save: not while vLLM holds blocks of other weights."""
        return self._home.open

    @property
    def requests_under_way(self) -> tuple[str, ...]:
        """The requests that have not ended."""
        return self._requests.ids()

    def close(self) -> None:
        """Stop the background threads."""
        self._lookups.close()
        self._tracing.close()

    @guarded(tuple[SavePlan, ...]())
    def _planned_saves(self, output: "SchedulerOutput") -> tuple[SavePlan, ...]:
        plans = tuple(self._saves.plan(output))
        for plan in plans:
            # Somebody may ask for what is being saved as soon as it is there.
            names = [save.move.prefix_hash for save in plan.moves]
            self._index.invalidate(plan.namespace, *names)
        return plans

    def _read_report(self, report: StepReport) -> None:
        self._confidence.reported(report)
        self._pace.reported(report)
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
        hashes = list(dict.fromkeys(load.move.prefix_hash for load in plan.moves))
        ttl_s = self._config.ttl_s
        self._lookups.submit(lambda: self._index.touch(plan.namespace, hashes, ttl_s=ttl_s))
