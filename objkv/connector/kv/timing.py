"""Measures loading and computing on this replica for ``AdmissionPolicy``.

The scheduler times steps from plan to result. Several steps may be in progress, so each is measured
from the end of the previous one. Only steps that mostly compute prompts are used. Steps in which
requests mostly generate, one token each, are ignored, and so are steps whose forward pass waited
for loads. The workers time loads. Source of the call order: vLLM 0.31-0.33, ``update_from_output``
in ``v1/core/sched/scheduler.py``, which takes every step's events, and ``step_with_batch_queue`` in
``v1/engine/core.py``, which takes results in order.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from time import gmtime, monotonic, strftime, time

from objkv.cache.admission import STEP_TOKENS_MIN, AdmissionPolicy, ChunkSize, Tier
from objkv.connector.kv.loads import StartedLoad
from objkv.connector.kv.stored import StoredPayloads
from objkv.connector.model.groups import Geometry
from objkv.index.base import Savings, Shards

_HOT: Tier = "hot"
_BULK: Tier = "bulk"


class Timing:
    """Times steps and loads. For the scheduler's thread only. Never waits."""

    def __init__(
        self,
        admission: AdmissionPolicy,
        geometry: Geometry,
        *,
        steps_in_flight: int,
        payloads: StoredPayloads,
        clock: Callable[[], float] = monotonic,
        wall: Callable[[], float] = time,
    ) -> None:
        """``wall`` returns seconds since the epoch, for the month of savings."""
        self._admission = admission
        self._geometry = geometry
        self._clock = clock
        self._wall = wall
        # One more than possible: a step that vLLM never ended must not shift all later ones.
        self._steps: deque[tuple[int, float]] = deque(maxlen=steps_in_flight + 1)
        self._ended = 0.0
        self._payloads = payloads

    @property
    def steps(self) -> int:
        """Number of steps in progress."""
        return len(self._steps)

    def step_planned(self, scheduled: Collection[int], *, waits: bool) -> None:
        """Record a planned step: ``scheduled`` tokens per request, and whether it waits for
        loads."""
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
        """Record a load that succeeded. Returns what it saved: None if its request has ended, or no
        worker reported it."""
        if (took := load.slowest) is None or not load.tokens:
            return None
        # A load from both tiers measures bulk, which determines when it ends. If mixed loads were
        # ignored and every prompt began with hot chunks, bulk would never be measured.
        tier, nbytes = (_BULK, load.bulk_bytes) if load.bulk_bytes else (_HOT, load.hot_bytes)
        self._admission.loaded(tier, nbytes, took)
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
        self, found: Sequence[Shards | None], computed: int, end: int, *, waiting: int = 0
    ) -> int:
        """Return the token at which the load of ``[computed, end)`` should end. ``computed``: load
        nothing.

        ``found``: records per chunk of the prompt, complete for this replica up to ``end``.
        ``waiting``: number of requests behind this one.
        """
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

    def _chunk(self, shards: Shards, start: int, end: int) -> ChunkSize:
        nbytes, hot = self._payloads.size(shards)
        return ChunkSize(nbytes, end - start, _HOT if hot else _BULK)


def _prompt_tokens(scheduled: Collection[int]) -> int:
    """Return the tokens of requests that compute many at once, or 0 if others have most tokens."""
    total = sum(scheduled)
    if total - len(scheduled) < STEP_TOKENS_MIN - 1:  # each of them computes one at least
        return 0
    tokens = sum(count for count in scheduled if count >= STEP_TOKENS_MIN)
    return tokens if 2 * tokens >= total else 0
