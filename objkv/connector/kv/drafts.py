"""Matches of replicas with a draft, and prefixes whose draft KV is missing.

Replicas without the draft store the target's layers alone. A replica with the draft loads these,
and zeroes the draft's blocks. The output does not change, because the target decides on every
proposed token. But what the draft computes afterwards depends on those zeros, also in requests that
find the blocks in vLLM's own prefix cache. None of it may be stored, or every replica would load
it.
"""

from collections import OrderedDict
from collections.abc import Sequence

from objkv.cache.match import usable_chunks
from objkv.connector.kv.planning import BlockTable
from objkv.connector.kv.requests import TrackedRequest
from objkv.connector.kv.stored import StoredPayloads
from objkv.connector.model.groups import Geometry
from objkv.index.base import Shards
from objkv.keys.identity import GroupIdentity
from objkv.transfer.plan import Blank

_GAPS_MAX = 65_536
"""Gaps to remember, 100 bytes each. vLLM has long evicted the blocks of older ones."""


class DraftGaps:
    """Decides whether a request's draft KV may be stored. For the scheduler's thread only."""

    def __init__(self, geometry: Geometry) -> None:
        self._chunk_tokens = geometry.chunk_tokens
        self._gaps: OrderedDict[bytes, None] = OrderedDict()
        """Hashes of prefixes, in chunks. After each of them the draft's KV may be missing."""

    def lost(self, tracked: TrackedRequest, end: int) -> None:
        """Record a load without the draft's KV of tokens from ``end`` on."""
        assert tracked.hashes is not None
        tracked.draft_complete = False
        prefix = tracked.hashes.chain.parent(end // self._chunk_tokens)
        self._gaps[prefix] = None
        self._gaps.move_to_end(prefix)
        while len(self._gaps) > _GAPS_MAX:
            self._gaps.popitem(last=False)

    def is_complete(self, tracked: TrackedRequest, chunk: int) -> bool:
        """Whether the draft's KV of a chunk, whose hash is computed, depends on no gap."""
        if not tracked.draft_complete or not self._gaps:
            return tracked.draft_complete
        assert tracked.hashes is not None
        local = -(-tracked.local // self._chunk_tokens)  # chunks that vLLM had, the last in part
        before = map(tracked.hashes.chain.parent, range(min(chunk + 1, local)))
        return not any(prefix in self._gaps for prefix in before)


def matched_end(
    geometry: Geometry, payloads: StoredPayloads, records: Sequence[Shards | None]
) -> int:
    """Return how many leading tokens the replica can load, whether or not the draft's KV is stored
    too.

    A draft that needs the next token has no KV for the last block of a match, so the match ends
    before it, as in vLLM's own prefix cache; or one chunk earlier, if a window's payloads do not
    reach so far back.
    """

    def is_readable(shards: Shards, group: int, _identity: GroupIdentity) -> bool:
        return payloads.is_readable(shards, group)

    size, lag = geometry.chunk_tokens, geometry.lag
    groups = geometry.groups[: geometry.target_count]
    end = usable_chunks(records, groups, size, is_readable, lag) * size - lag
    if lag and geometry.windowed:
        whole = usable_chunks(records, groups, size, is_readable)
        before = usable_chunks(records[: max(0, whole - 1)], groups, size, is_readable)
        end = max(end, before * size)
    return max(0, end)


def stored_draft_end(
    geometry: Geometry,
    payloads: StoredPayloads,
    records: Sequence[Shards | None],
    span: tuple[int, int],
) -> int:
    """Return the end of those tokens of ``[start, end)`` whose draft KV is stored without a gap."""
    drafts = range(geometry.target_count, len(geometry.groups))
    if not drafts:
        return span[1]
    size, lag = geometry.chunk_tokens, geometry.lag
    first = (span[0] + lag) // size
    end = first * size
    for shards in records[first : -(-(span[1] + lag) // size)]:
        if shards is None or not all(payloads.is_readable(shards, g) for g in drafts):
            break
        end += size
    return min(span[1], max(span[0], end - lag))


def draft_blanks(
    geometry: Geometry, blocks: BlockTable, span: tuple[int, int]
) -> tuple[Blank, ...]:
    """Return the draft's blocks of tokens ``[start, end)``, which must be zeroed."""
    found = []
    for group in range(geometry.target_count, len(geometry.groups)):
        size = geometry.groups[group].block_size
        ids = blocks[geometry.table(group)][span[0] // size : span[1] // size]
        if held := tuple(block for block in ids if block):
            found.append(Blank(geometry.number(group), held))
    return tuple(found)
