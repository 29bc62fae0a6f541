"""What loading and computing take on this replica, told to ``Admission`` in its own words.

Steps are timed on the scheduler, from plan to result: several may be under way at once, and each
counts from the end of the one before. Loads are timed by the workers. Source of the call order:
vLLM 0.31-0.33, ``update_from_output`` in ``v1/core/sched/scheduler.py``, which takes every step's
events, and ``step_with_batch_queue`` in ``v1/engine/core.py``, which takes results in order.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from time import monotonic

from objkv.cache.admission import Admission, ChunkSize, Tier
from objkv.connector.geometry import Geometry
from objkv.connector.metadata import StepReport
from objkv.index.base import Shards
from objkv.transfer.plan import LoadPlan

_LOADS_MAX = 4096


class Pace:
    """Used by the scheduler's thread only; never waits."""

    def __init__(
        self,
        admission: Admission,
        geometry: Geometry,
        *,
        steps_in_flight: int,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._admission = admission
        self._geometry = geometry
        self._clock = clock
        # One more than can be: a step that vLLM never ended must not shift all later ones.
        self._steps: deque[tuple[int, float]] = deque(maxlen=steps_in_flight + 1)
        self._ended = 0.0
        self._tiers: dict[str, Tier] = {}

    def step_planned(self, tokens: int, loads: Iterable[LoadPlan]) -> None:
        """A step of ``tokens`` was handed out, with these loads."""
        self._steps.append((tokens, self._clock()))
        for plan in loads:
            if (tier := _one_tier(plan)) is not None and len(self._tiers) < _LOADS_MAX:
                self._tiers[plan.request_id] = tier

    def step_ended(self) -> None:
        """The oldest step under way has its result."""
        if not self._steps:
            return
        now = self._clock()
        tokens, planned = self._steps.popleft()
        self._admission.computed(tokens, now - max(planned, self._ended))
        self._ended = now

    def reported(self, report: StepReport) -> None:
        """Workers told how their loads went."""
        for request_id in report.failed:
            self._tiers.pop(request_id, None)
        for request_id, load in report.loaded.items():
            if (tier := self._tiers.pop(request_id, None)) is not None:
                self._admission.loaded(tier, load)

    def request_ended(self, request_id: str) -> None:
        """Nothing more will be heard of its load."""
        self._tiers.pop(request_id, None)

    def admit(
        self, found: Sequence[Shards | None], computed: int, end: int, *, waiting: int = 0
    ) -> int:
        """Where in tokens the load of ``[computed, end)`` should end, ``computed`` for no load.

        ``found``: per chunk of the prompt, complete for this replica up to ``end``; ``waiting``:
        requests behind this one.
        """
        if self._admission.decided is not None:
            return end if self._admission.decided else computed
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
        # Ranks load at once, each its own shards.
        records = list(shards.values())
        nbytes = sum(record.nbytes for record in records) // self._geometry.tp_size
        tier: Tier = "hot" if all(record.hot for record in records) else "bulk"
        return ChunkSize(nbytes, end - start, tier)


def _one_tier(plan: LoadPlan) -> Tier | None:
    """The tier of all of a plan's payloads; of a mixed load nothing can be told."""
    hot = {record.hot for load in plan.moves for _, record in load.records}
    if len(hot) != 1:
        return None
    return "hot" if hot.pop() else "bulk"
