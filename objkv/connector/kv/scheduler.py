"""The scheduler's side: matches prompts with stored chunks and plans loads and saves. It never uses
the network: it polls lookups that run in the background, and waits for new ones at most 1 ms per
scheduling pass. Source of the call order: vLLM 0.31-0.33, ``v1/core/sched/scheduler.py``."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

from objkv.cache.admission import AdmissionPolicy
from objkv.cache.lookup import LOOKUP_TTL_S, LookupLimits, LookupService, OtherShapesIndex, Records
from objkv.cache.switch import AdmissionSwitch
from objkv.config import Config
from objkv.connector.kv.events import EventLog
from objkv.connector.kv.loads import PromisedLoads, Timing
from objkv.connector.kv.metadata import StepPlan, StepReport
from objkv.connector.kv.planning import BlockTable, StoredPayloads
from objkv.connector.kv.requests import MatchResult, Prefetch, RequestTracker, TrackedRequest
from objkv.connector.kv.saves import BlockTrust, SavePlanner
from objkv.connector.model.groups import Geometry
from objkv.connector.namespace import ReplicaNamespace
from objkv.connector.pacing import EmptySteps
from objkv.index.base import ShardRecord, ShardRecords, WriteIndex
from objkv.keys.identity import Identity
from objkv.stores.base import WriteStore
from objkv.telemetry import Recorder
from objkv.tracing import NO_TRACING, Tracing
from objkv.transfer.plan import LoadMoves, LoadPlan

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


logger = logging.getLogger(__name__)
_MATCH_WAIT_S = 1e-3
"""How long a scheduling pass waits for lookups of new requests, all together, so that a burst takes
no longer: their lookups run in parallel. A request whose lookup is late waits a whole step. The
wait costs nothing while the device computes the step before, which takes many times longer."""


def count_load(
    recorder: Recorder,
    moves: LoadMoves,
    records: Sequence[ShardRecord],
    span: tuple[int, int],
    draft_end: int,
) -> None:
    """Count a planned load of tokens ``[start, end)`` by the store that has them. ``records``: of
    the payload of each move. ``draft_end``: the end of those whose draft KV is stored."""
    start, end = span
    spans = moves.token_spans
    # A chunk is only as fast as its slowest group.
    cold = {chunk for chunk, record in zip(spans, records, strict=True) if not record.hot}
    hot = sum(min(end, last) - max(start, first) for first, last in set(spans) - cold)
    recorder.count("hits")
    recorder.count("hit_tokens", end - start)
    recorder.count("hit_hot_tokens", hot)
    recorder.count("hit_bulk_tokens", end - start - hot)
    recorder.count("hit_draftless_tokens", end - draft_end)


class SchedulerSide:
    """The scheduler's half of the connector. All methods are called by the scheduler's thread."""

    def __init__(
        self,
        config: Config,
        geometry: Geometry,
        identity: Identity,
        *,
        loads: bool,
        saves: bool,
        steps_in_flight: int,
        bulk: WriteStore,
        index: WriteIndex,
        recorder: Recorder,
        prefetch: Prefetch,
        tracing: Tracing = NO_TRACING,
        has_peers: bool = False,
        media_named: bool = True,
        events: EventLog | None = None,
        may_reuse: Callable[[], bool] = lambda: True,
    ) -> None:
        """Stores the identity document. ``switch`` is read once it is started. ``loads``,
        ``saves``: whether this replica does. ``steps_in_flight``, ``has_peers``: see
        ``EmptySteps``. ``media_named``: whether an image's identifier depends on its content, so
        that it is the same everywhere. ``events``: the log, if vLLM has KV events enabled.
        ``may_reuse``: see ``StepPlan``."""
        self._config, self._geometry = config, geometry
        self._loads_any, self._saves_any, self._media_named = loads, saves, media_named
        self._index, self._recorder, self._tracing = index, recorder, tracing
        payloads = StoredPayloads(geometry)
        limits = LookupLimits(config.lookup_deadline_ms / 1000, age_max_s=LOOKUP_TTL_S)
        found, fields = OtherShapesIndex(index, payloads.is_loadable), sorted(geometry.all_fields())
        self.lookups = LookupService(found, fields, recorder, limits, tracing=tracing)
        submit = self.lookups.submit
        self._namespace = ReplicaNamespace(identity, bulk, submit, writes=saves)
        self._namespace.announce()
        self.switch = AdmissionSwitch(config.admission, bulk, self._namespace, recorder, submit)
        self.requests = requests = RequestTracker(
            self.lookups, recorder, payloads, prefetch=prefetch
        )
        admission = AdmissionPolicy(lambda: self.switch.mode, recorder)
        self._timing = Timing(admission, payloads, steps_in_flight=steps_in_flight)
        self._trust = BlockTrust(steps_in_flight, ranks=geometry.ranks)
        self._saves = SavePlanner(config, geometry, requests, self._trust, loads=loads)
        bound_s = config.step_load_deadline_ms / 1000
        self._loads = PromisedLoads(geometry.block_tokens, bound_s, steps_in_flight=steps_in_flight)
        self._held, self._sync_loads, self._is_delayed, self._waiting = set[str](), False, False, -1
        self._steps = EmptySteps(steps_in_flight, has_peers=has_peers)
        self._wait_left_s = _MATCH_WAIT_S
        self.adapters, self._events, self._may_reuse = requests.adapters, events, may_reuse
        self.tables_ended: list[Sequence[int]] = []
        """Blocks of requests that ended in a step with loads within it; only with one group."""

    @property
    def namespace(self) -> str:
        """The current namespace. ``reset`` changes it."""
        return self._namespace.name

    def track(self, request: "Request") -> None:
        """Track a new request and start the lookup of its prompt."""
        trusted = self._namespace.open and (self._media_named or not request.mm_features)
        self.requests.add(request, self._namespace.name, trusted=trusted)
        self._namespace.announce()

    def match(self, request: "Request", computed: int) -> tuple[int | None, bool]:
        """Return how many tokens beyond ``computed`` can be loaded, and whether between steps. The
        number is None while the lookup is in progress. vLLM calls this in a hot loop, so it is
        cheap and repeatable. It may wait at most ``_MATCH_WAIT_S`` in a scheduling pass."""
        found = self._match(request, computed)
        if found[0] is None and self._await_lookup(request.request_id):
            found = self._match(request, computed)
        self._is_delayed |= found[0] is None
        return found

    def _await_lookup(self, request_id: str) -> bool:
        """Wait for the lookup of a new request, unless that delays others: while the device
        computes an earlier step, or if no request has begun. Returns whether it has ended."""
        tracked = self.requests.get(request_id)
        if tracked is None or tracked.awaited:
            return False
        tracked.awaited = True
        nothing_runs = self._count_waiting() == len(self.requests)
        if self._wait_left_s <= 0 or not (self._timing.steps or nothing_runs):
            return False
        began = monotonic()
        ended = self.lookups.wait_for(request_id, self._wait_left_s)
        self._wait_left_s -= monotonic() - began
        return ended

    def _count_waiting(self) -> int:
        if self._waiting < 0:
            self._waiting = self.requests.waiting()
        return self._waiting

    def _match(self, request: "Request", computed: int) -> tuple[int | None, bool]:
        tracked = self.requests.get(request.request_id)
        if tracked is None:
            return 0, False
        tracked.queried = True
        tracked.accounted = tracked.local_tokens = computed
        tracked.draft_complete = True
        if not self._may_load(tracked) or computed % self._geometry.block_tokens:
            return None if self._saves_any and self.requests.hashing(tracked) else 0, False
        records = self.requests.records(tracked)
        if records is None:
            return None, False
        usable = self._match_result(tracked, records, computed)
        if usable.end <= computed:
            return 0, False
        return usable.end - computed, not usable.sync

    def _may_load(self, tracked: TrackedRequest) -> bool:
        """Whether a request may read a cache: one for prompt_logprobs must compute its prompt."""
        skips = tracked.request.skip_reading_prefix_cache
        return self._loads_any and tracked.may_load and not skips

    def plan_load(self, request: "Request", blocks: BlockTable, tokens: int) -> None:
        """Plan the load of ``tokens`` external tokens, possibly 0, into the allocated ``blocks``.
        Never raises: vLLM already relies on the load, so one that cannot be planned is sent to the
        workers as lost, which report that it failed."""
        name = request.request_id
        try:
            self._plan_load(request, blocks, tokens)
        except Exception:
            logger.exception("load not planned, recomputing request=%s", name)
            if tracked := self.requests.get(name):
                tracked.may_load = tracked.may_save = tracked.saved = False  # see BlockTrust.add
            if tokens:
                self._loads.fail(name, blocks, tracked.match_result if tracked else None)

    def _plan_load(self, request: "Request", blocks: BlockTable, tokens: int) -> None:
        if tracked := self.requests.get(request.request_id):
            # vLLM may repeat a query. Its second allocation, after a load between steps, has none.
            if self._may_load(tracked) and tracked.queried:
                tracked.queried = False
                self._recorder.count("queries")
                self._recorder.count("query_tokens", request.num_tokens)
                self._recorder.count("local_hit_tokens", tracked.local_tokens)
            self._trust.add(tracked)
            self._saves.add(tracked)
        if tokens == 0:
            return
        assert tracked is not None
        usable = tracked.match_result
        assert tracked.hashes is not None
        assert usable is not None
        span = (usable.computed, usable.computed + tokens)
        tracked.accounted = span[1]
        payloads = self.requests.payloads
        draft_end = payloads.stored_draft_end(usable.records, span)
        chain, records = tracked.hashes.chain, usable.records
        moves, shards = payloads.load_moves(chain, records, blocks, span, draft_end)
        plan = LoadPlan(
            request.request_id,
            tracked.namespace,
            moves,
            usable.sync,
            tracked.traceparent,
            blocks_to_zero=payloads.draft_blocks_to_zero(blocks, (draft_end, span[1])),
        )
        if plan.blocks_to_zero:
            self._saves.drafts.lost(tracked, draft_end)
        count_load(self._recorder, moves, shards, span, draft_end)
        self._loads.plan(plan, tokens, shards)

    def plan_step(self, output: "SchedulerOutput") -> StepPlan:
        """Return the plan of everything that the workers do in this step. Never raises: whatever
        fails, it contains the planned loads, for whose end vLLM waits. It saves nothing then,
        because it is not known which blocks can be trusted."""
        loads, failed = self._loads.send()
        plan = StepPlan(loads, held=frozenset(self._held), failed_loads=failed)
        try:
            preempted = output.preempted_req_ids
            # Where it is unknown, any request may have been preempted.
            plan.reused = frozenset(self.requests.ids() if preempted is None else preempted)
            self._complete(plan, output)
        except Exception:
            logger.exception("step not planned in full, saving nothing of the requests in progress")
            self.requests.save_nothing()
            self._trust.next_step(None)
        return plan

    def _complete(self, plan: StepPlan, output: "SchedulerOutput") -> None:
        """Add everything to a plan that vLLM does not rely on, and record the step."""
        self._sync_loads, self.tables_ended = output.has_sync_kv_loads, []
        self._trust.next_step(output)
        self._waiting, self._wait_left_s = -1, _MATCH_WAIT_S  # once per scheduling pass
        is_delayed, self._is_delayed = self._is_delayed, False
        waits = any(load.sync for load in plan.loads)
        self._timing.step_planned(output.num_scheduled_tokens.values(), waits=waits)
        if self._saves_any:
            plan.saves = self._saves.plan(output)
        plan.may_reuse = self._may_reuse()
        computes = bool(output.total_num_scheduled_tokens)
        if is_delayed and not computes:  # loads that end meanwhile are reported with this step
            self.lookups.wait(self._steps.wait_s)
        elif not computes and not self._steps.others_run:
            plan.idle = self._loads.in_progress
        self._steps.planned(busy=computes or plan.idle)
        if self._events is not None:
            self._events.planned(plan, self.requests.get)

    def end_step(self) -> "tuple[KVCacheEvent, ...]":
        """Record that the oldest step in progress has its result. Returns its KV events."""
        self._timing.step_ended()
        return () if self._events is None else self._events.take_events()

    def update(self, output: "KVConnectorOutput") -> "list[Request]":
        """Process the workers' reports. Returns requests whose load failed whole. Never raises."""
        if output.finished_sending:
            self._held -= output.finished_sending
        report, received = output.kv_connector_worker_meta, output.finished_recving
        if not isinstance(report, StepReport):
            if not received and not output.failed_recving:  # as after nearly every step
                return []
            report = StepReport()
        for request_id in report.failed:  # first: otherwise vLLM would ask for the same load again
            if tracked := self.requests.get(request_id):
                tracked.may_load = False
        ended = self._loads.ended(report, received or ())
        try:
            for tracked in self.requests.save_again(report):
                self._saves.add(tracked)
            if self._events is not None:
                self._events.update(report, [load.plan.request_id for load in ended])
            for load in ended:
                self._touch(load.plan)
                if (savings := self._timing.loaded(load)) is not None:
                    self.lookups.submit(partial(self._index.credit, savings))
        except Exception:
            logger.exception("report of the workers not read")
        whole = map(self.requests.get, output.failed_recving or ())
        return [tracked.request for tracked in whole if tracked is not None]

    def finish(self, request: "Request", blocks: BlockTable) -> bool:
        """Forget a request. Returns whether saves may still read its blocks. Never raises."""
        request_id = request.request_id
        # Blocks of a load in progress are kept for the load alone: vLLM does not expect the end of
        # a save too.
        loads = request_id in self._loads
        try:
            if self._sync_loads and len(blocks) == 1:
                self.tables_ended.append(blocks[0])
            self._loads.request_ended(request_id)
            tracked = self.requests.end(request_id)
            held = tracked is not None and tracked.saved
        except Exception:
            logger.exception("keeping the blocks of an ended request for a step")
            held = not loads  # its saves may read them, and the workers know when none does
        if held:
            self._held.add(request_id)
        return held

    @property
    def holds_blocks(self) -> bool:
        """Whether blocks of ended requests are kept for saves, for a few steps at most."""
        return bool(self._held)

    def reset(self, *, clean: bool) -> bool:
        """Stop using everything stored so far, also in requests in progress: weights may differ."""
        self.requests.distrust()
        if self._events is not None:
            self._events.reset()
        return self._namespace.renew(clean=clean)

    @property
    def open(self) -> bool:
        """Whether requests may load and save. False while vLLM has blocks of old weights."""
        return self._namespace.open

    def close(self) -> None:
        """Stop the background thread."""
        self.lookups.close()
        self._tracing.close()

    def _match_result(
        self, tracked: TrackedRequest, records: Records, computed: int
    ) -> MatchResult:
        """Return the part of a request that should be loaded, decided once per lookup."""
        known, num_tokens = tracked.match_result, tracked.request.num_tokens
        if (
            known is None
            or known.records is not records
            or (known.num_tokens, known.computed) != (num_tokens, computed)
        ):
            wanted = records
            if (most := tracked.limits.load_tokens_max) is not None:
                wanted = records[: (computed + most) // self._geometry.chunk_tokens]
            end, sync = self._usable_tokens(wanted, num_tokens, computed)
            known = tracked.match_result = MatchResult(records, num_tokens, computed, end, sync)
        return known

    def _usable_tokens(
        self, records: Sequence[ShardRecords | None], num_tokens: int, computed: int
    ) -> tuple[int, bool]:
        """Return the end of the match in tokens, and whether to load it within the step. A load
        between steps may cover the whole prompt, because vLLM then recomputes the last token.
        Within a step, and with sliding windows, at least one token must remain to compute."""
        size = self._geometry.chunk_tokens
        if self._geometry.windowed:
            records = records[: (num_tokens - 1) // size]
        matched_end = self.requests.payloads.matched_end
        tokens = matched_end(records)
        behind = max(0, self._count_waiting() - 1)  # the request itself has nothing computed either
        admitted = self._timing.admit(records, computed, min(tokens, num_tokens), waiting=behind)
        if admitted < min(tokens, num_tokens):
            tokens = matched_end(records[: admitted // size])
        if self._geometry.windowed:
            return tokens, False
        if not self._loads_within_step(num_tokens, tokens, computed):
            return min(tokens, num_tokens), False
        step = self._geometry.block_tokens
        return min(tokens, (num_tokens - 1) // step * step), True

    def _loads_within_step(self, num_tokens: int, matched: int, computed: int) -> bool:
        """Whether to load within the step; in mode ``auto`` only if as much is computed."""
        mode = self._config.load_mode
        if mode == "auto" and num_tokens - matched < matched - computed:
            return False
        return self._loads.may_sync and mode != "async"

    def _touch(self, plan: LoadPlan) -> None:
        index, ttl_s = self._index, self._config.ttl_s
        self.lookups.submit(
            lambda: index.touch(plan.namespace, plan.moves.prefix_hashes(), ttl_s=ttl_s)
        )
