"""What a request's records come to: how far its match reaches, and how it is loaded.

Decided once per answer of the index, because the scheduler asks in a hot loop.
"""

from collections.abc import Sequence

from objkv.cache.lookup import Records
from objkv.cache.match import usable_chunks
from objkv.config import LoadMode
from objkv.connector.confidence import Confidence
from objkv.connector.geometry import Geometry
from objkv.connector.pace import Pace
from objkv.connector.tracking import RequestTracker, Tracked, Usable
from objkv.index.base import Shards
from objkv.keys.identity import GroupIdentity


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
