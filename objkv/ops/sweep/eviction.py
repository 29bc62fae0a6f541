"""Chooses which chunks to evict when a quota is reached: a pure function of index records.

A chunk is usable only with all chunks before it in its prompt, so chains lose their last chunks
first. Among these, the least valuable are evicted first. Value falls with the time since the last
use, as in LRU. Hits raise it, and depth in a long prompt lowers it, but both fade: a chunk without
hits for several usual pauses between hits is judged by its age alone.
``docs/operations/eviction.md`` compares this policy with others.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

_HITS_WEIGHT = 2.0
_DEPTH_WEIGHT = 0.3
_HALF_LIFE_PAUSES = 0.7
"""Number of usual pauses after the last use in which the weight of hits and depth halves."""
_YOUNG_PAUSES = 0.7
"""Ages below this many usual pauses hardly differ."""
_PAUSE_MIN_S = 1.0
"""Minimum usual pause, also used if no chunk was hit twice: then age alone decides."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One chunk of one namespace, with the values that decide about its eviction."""

    prefix_hash: bytes
    parent_hash: bytes
    token_start: int
    token_end: int
    nbytes: int
    """Size of all its payloads."""
    hits: int
    touched_s: int
    created_s: int
    pinned: bool

    @property
    def used_s(self) -> int:
        """Time of its last save or hit."""
        return max(self.touched_s, self.created_s)


def choose(candidates: Iterable[Candidate], *, free_bytes: int, now_s: float) -> list[Candidate]:
    """Return the chunks to evict, in this order, to free ``free_bytes``, or all that may be. A
    chunk is evicted after every chunk that continues it. Pinned chunks, and those that a pinned one
    continues, never are. Chunks whose predecessors are not among the candidates are useless and
    come first. The order of candidates does not matter. O(n log n)."""
    if free_bytes <= 0:
        return []
    known = {one.prefix_hash: one for one in sorted(candidates, key=_order)}
    chunks = sorted(known.values(), key=_order)
    parents = {one.prefix_hash: _parent(one, known) for one in chunks}
    kept = _kept(chunks, parents)
    children = dict.fromkeys(known, 0)
    useless: dict[bytes, bool] = {}
    for one in chunks:  # parents come before their children
        parent = parents[one.prefix_hash]
        useless[one.prefix_hash] = one.token_start > 0 if parent is None else useless[parent]
        if parent is not None:
            children[parent] += 1
    worth = by_use(chunks, now_s)

    def ranked(one: Candidate) -> tuple[bool, float, int, bytes]:
        return (not useless[one.prefix_hash], worth(one), -one.token_start, one.prefix_hash)

    ends = [ranked(o) for o in chunks if not children[o.prefix_hash] and o.prefix_hash not in kept]
    heapq.heapify(ends)
    chosen: list[Candidate] = []
    freed = 0
    while ends and freed < free_bytes:
        one = known[heapq.heappop(ends)[-1]]
        chosen.append(one)
        freed += one.nbytes
        parent = parents[one.prefix_hash]
        if parent is not None:
            children[parent] -= 1
            if not children[parent] and parent not in kept:
                heapq.heappush(ends, ranked(known[parent]))
    return chosen


def by_use(candidates: Sequence[Candidate], now_s: float) -> Callable[[Candidate], float]:
    """Value by recency, frequency, size and depth, by the usual pause between hits."""
    pause_s = usual_pause_s(candidates)

    def worth(one: Candidate) -> float:
        tokens = max(1, one.token_end - one.token_start)
        age_s = max(0.0, now_s - one.used_s)
        fresh = math.pow(0.5, age_s / (_HALF_LIFE_PAUSES * pause_s))
        often = _HITS_WEIGHT * math.log1p(one.hits * fresh)
        deep = _DEPTH_WEIGHT * fresh * math.log(max(1.0, one.token_end / tokens))
        dear = math.log(tokens / max(1, one.nbytes))
        return often - deep + dear - math.log(age_s + _YOUNG_PAUSES * pause_s)

    return worth


def usual_pause_s(candidates: Iterable[Candidate]) -> float:
    """Return the average time between two hits of a chunk. It covers chunks that were hit and are
    not the first of their prompt, because widely shared beginnings would hide how others are used.
    """
    pauses = [
        max(0, one.touched_s - one.created_s) / one.hits
        for one in candidates
        if one.hits and one.token_start
    ]
    return max(_PAUSE_MIN_S, sum(pauses) / len(pauses)) if pauses else _PAUSE_MIN_S


def _order(one: Candidate) -> tuple[object, ...]:
    return (
        one.token_start, one.prefix_hash, one.token_end, one.parent_hash, one.created_s,
        one.touched_s, one.hits, one.nbytes, one.pinned,
    )  # fmt: skip


def _parent(one: Candidate, known: Mapping[bytes, Candidate]) -> bytes | None:
    """Return the chunk that it continues, or None if that is unknown. The parent must end where
    this chunk starts, so false records cannot form a loop."""
    parent = known.get(one.parent_hash)
    if parent is None or parent.token_end != one.token_start:
        return None
    return parent.prefix_hash if parent.token_start < one.token_start else None


def _kept(chunks: Sequence[Candidate], parents: Mapping[bytes, bytes | None]) -> set[bytes]:
    """Return pinned chunks and all their predecessors."""
    kept: set[bytes] = set()
    for one in reversed(chunks):
        if one.pinned or one.prefix_hash in kept:
            kept.add(one.prefix_hash)
            parent = parents[one.prefix_hash]
            if parent is not None:
                kept.add(parent)
    return kept
