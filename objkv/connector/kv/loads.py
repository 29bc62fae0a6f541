"""The loads on which vLLM relies, from the allocation of their blocks to their end on all workers.
vLLM holds a request back until its load between steps is reported as ended, and lets the model read
the blocks of a load within the step. A load must therefore never be lost between two calls: if it
cannot be planned, it is reported as failed. Source: vLLM 0.31-0.33, ``schedule`` and
``_update_from_kv_xfer_finished`` in ``v1/core/sched/scheduler.py``."""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from time import gmtime, monotonic, strftime, time

from objkv.cache.admission import STEP_TOKENS_MIN, AdmissionPolicy, ChunkSize, LoadTime, Tier
from objkv.connector.kv.metadata import FailedLoad, StepReport
from objkv.connector.kv.planning import NULL_BLOCK, BlockTable, StoredPayloads
from objkv.connector.kv.requests import MatchResult
from objkv.index.base import Savings, ShardRecord, ShardRecords
from objkv.transfer.plan import LoadPlan


@dataclass(slots=True)
class StartedLoad:
    """A load that the workers execute, and its slowest report so far."""

    plan: LoadPlan
    tokens: int
    """How many tokens it loads. 0 if its request has ended."""
    hot_bytes: int
    """Bytes of the payloads with a hot copy, as stored."""
    bulk_bytes: int
    """Bytes of the others."""
    sent_at: float = 0.0
    slowest: LoadTime | None = None


class PromisedLoads:
    """For the scheduler's thread only. No method raises. A load within the step to which no store
    answers blocks every request of the replica until its deadline, also when it is a circuit
    breaker's probe. A load between steps blocks only its own request. After such a load all are
    therefore to be between steps, until one succeeds within the time that a step would wait."""

    def __init__(
        self,
        block_tokens: int,
        bound_s: float,
        *,
        steps_in_flight: int = 1,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """``block_tokens``: of a group, if there is only one. ``bound_s``: how long the forward
        pass waits for a load within the step. ``steps_in_flight``: how many steps may be planned
        before the report of the first one comes."""
        self._block_tokens, self._bound_s, self._clock = block_tokens, bound_s, clock
        self._planned: dict[str, StartedLoad] = {}
        self._failed: dict[str, FailedLoad] = {}
        self._awaited: set[str] = set()
        self._started: dict[str, StartedLoad] = {}
        """Loads between steps."""
        self._within: deque[dict[str, StartedLoad]] = deque(maxlen=steps_in_flight)
        """Loads within each step that may be in progress, the oldest first."""
        self.may_sync = True
        """Whether loads within the step may be planned."""

    def __contains__(self, request_id: str) -> bool:
        """Whether a load of this request is planned or awaited by vLLM."""
        return any(request_id in some for some in (self._planned, self._failed, self._awaited))

    @property
    def in_progress(self) -> bool:
        """Whether loads between steps were sent and have neither failed nor ended."""
        return bool(self._started)

    def plan(self, plan: LoadPlan, tokens: int, records: Sequence[ShardRecord]) -> None:
        """Record a load for which vLLM has allocated blocks. ``records``: of its payloads."""
        hot = sum([record.nbytes for record in records if record.hot])
        bulk = sum([record.nbytes for record in records]) - hot
        self._planned[plan.request_id] = StartedLoad(plan, tokens, hot, bulk)

    def fail(self, request_id: str, blocks: BlockTable, match: MatchResult | None) -> None:
        """Record that such a load cannot be planned. ``match``: the one that vLLM acts on."""
        self._planned.pop(request_id, None)
        computed, sync = (0, False) if match is None else (match.computed, match.sync)
        lost: frozenset[int] = frozenset()
        if len(blocks) == 1:  # block ids of several groups are not unique
            # The blocks before these were computed, and other requests may share them.
            first = computed // self._block_tokens
            lost = frozenset(blocks[0][first:]) - {NULL_BLOCK}
        self._failed[request_id] = FailedLoad(request_id, sync, lost)

    def request_ended(self, request_id: str) -> None:
        """Note that a request has ended. Its loads may not have."""
        for loads in (self._started, *self._within):
            if (load := loads.get(request_id)) is not None:
                load.tokens = 0

    def send(self) -> tuple[tuple[LoadPlan, ...], tuple[FailedLoad, ...]]:
        """Return the loads since the last call, for the plan of a step: planned and failed ones."""
        planned, lost, now = self._planned, tuple(self._failed.values()), self._clock()
        self._planned, self._failed = {}, {}
        for load in planned.values():
            load.sent_at = now
        within = {name: load for name, load in planned.items() if load.plan.sync}
        self._within.append(within)
        self._started |= {name: load for name, load in planned.items() if not load.plan.sync}
        self._awaited |= planned.keys() - within.keys()
        self._awaited.update(load.request_id for load in lost if not load.sync)
        return tuple(load.plan for load in planned.values()), lost

    def ended(self, report: StepReport, received: Collection[str]) -> list[StartedLoad]:
        """Record the workers' report, and the loads between steps that ended on all of them.
        Returns those that succeeded. A refused or missing payload means that the store answered."""
        if not report.rejected and any(loads.keys() & report.failed for loads in self._within):
            self.may_sync = False
        for loads in (self._started, *self._within):
            for request_id in report.failed & loads.keys():
                del loads[request_id]
            for request_id in report.loaded.keys() & loads.keys():
                load, took = loads[request_id], report.loaded[request_id]
                load.slowest = max(load.slowest or took, took, key=lambda one: one.seconds)
        self._awaited.difference_update(received)
        between = [self._started.pop(name) for name in received if name in self._started]
        if any(self._clock() - load.sent_at < self._bound_s for load in between):
            self.may_sync = True
        within = [
            loads.pop(name) for loads in self._within for name in report.loaded if name in loads
        ]
        return within + between


class Timing:
    """Measures loading and computing on this replica for ``AdmissionPolicy``. For the scheduler's
    thread only. Never waits. Steps are timed from plan to result, and several may be in progress,
    so each from the end of the previous one. Steps in which requests mostly generate, one token
    each, or whose forward pass waited for loads, are ignored. The workers time loads. Source of the
    call order: vLLM 0.31-0.33, ``update_from_output``, which takes every step's events, and
    ``step_with_batch_queue``, which takes results in order."""

    def __init__(
        self,
        admission: AdmissionPolicy,
        payloads: StoredPayloads,
        *,
        steps_in_flight: int,
        clock: Callable[[], float] = monotonic,
        wall: Callable[[], float] = time,
    ) -> None:
        """``wall`` returns seconds since the epoch, for the month of savings."""
        self._admission, self._geometry, self._payloads = admission, payloads.geometry, payloads
        self._clock, self._wall = clock, wall
        # One more than possible: a step that vLLM never ended must not shift all later ones.
        self._steps: deque[tuple[int, float]] = deque(maxlen=steps_in_flight + 1)
        self._ended = 0.0

    @property
    def steps(self) -> int:
        """Number of steps in progress."""
        return len(self._steps)

    def step_planned(self, scheduled: Collection[int], *, waits: bool) -> None:
        """``scheduled``: tokens per request. ``waits``: whether the step waits for loads."""
        self._steps.append((0 if waits else _prompt_tokens(scheduled), self._clock()))

    def step_ended(self) -> None:
        """Record that the oldest step in progress has its result."""
        if not self._steps:
            return
        now = self._clock()
        tokens, planned = self._steps.popleft()
        self._admission.computed(tokens, now - max(planned, self._ended))
        self._ended = now

    def loaded(self, load: StartedLoad) -> Savings | None:
        """Record a load that succeeded. Returns what it saved, None if that is not known."""
        if (took := load.slowest) is None or not load.tokens:
            return None
        # A load from both tiers measures bulk, which determines when it ends. If mixed loads were
        # ignored and every prompt began with hot chunks, bulk would never be measured.
        tier: Tier = "bulk" if load.bulk_bytes else "hot"
        self._admission.loaded(tier, load.bulk_bytes or load.hot_bytes, took)
        month = strftime("%Y-%m", gmtime(self._wall()))
        token_s, gpus = self._admission.seconds_per_token, self._geometry.ranks
        savings = Savings(load.plan.namespace, month, loads=1, tokens=load.tokens)
        if token_s is None:
            return savings
        return replace(
            savings,
            timed_tokens=load.tokens,
            compute_gpu_us=int(1e6 * gpus * load.tokens * token_s),
            load_gpu_us=int(1e6 * gpus * took.seconds),
        )

    def admit(
        self, found: Sequence[ShardRecords | None], computed: int, end: int, *, waiting: int = 0
    ) -> int:
        """Return the token at which the load of ``[computed, end)`` should end; ``computed``: load
        nothing. ``found``: records per chunk of the prompt, complete for this replica up to
        ``end``. ``waiting``: number of requests behind this one."""
        if (decided := self._admission.decided) is not None:
            return end if decided else computed
        size = self._geometry.chunk_tokens
        first = computed // size
        chunks = [
            self._chunk(shards, max(chunk * size, computed), min((chunk + 1) * size, end))
            for chunk, shards in enumerate(found[first : -(-end // size)], start=first)
            if shards is not None
        ]
        admitted = self._admission.admit(chunks, waiting=waiting)
        return end if admitted == len(chunks) else max(computed, (first + admitted) * size)

    def _chunk(self, shards: ShardRecords, start: int, end: int) -> ChunkSize:
        nbytes, hot = self._payloads.size(shards)
        return ChunkSize(nbytes, end - start, "hot" if hot else "bulk")


def _prompt_tokens(scheduled: Collection[int]) -> int:
    """Return the tokens of requests that compute many at once, or 0 if others have most tokens."""
    total = sum(scheduled)
    if total - len(scheduled) < STEP_TOKENS_MIN - 1:  # each of them computes one at least
        return 0
    tokens = sum(count for count in scheduled if count >= STEP_TOKENS_MIN)
    return tokens if 2 * tokens >= total else 0
