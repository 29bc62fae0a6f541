"""Which chunks to give up when a quota is reached: a pure function of what the index tells.

A chunk is of use only together with all that come before it in its prompt, so chains lose their
ends first. Among ends the least valuable go first. What they are worth falls with the time since
they were last used, as for LRU; it is higher for what was hit often and lower for what is deep in a
long prompt, but both count only for a while: what nobody has asked for in some times the pause that
is usual between two hits is judged by its age alone. Measured against others in
``docs/operations/eviction.md``.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

_HITS_WEIGHT = 2.0
_DEPTH_WEIGHT = 0.3
_HALF_LIFE_PAUSES = 0.7
"""So many usual pauses after the last use, hits and depth count half as much."""
_YOUNG_PAUSES = 0.7
"""Ages below so many usual pauses hardly differ."""
_PAUSE_MIN_S = 1.0
"""The usual pause where nothing was hit twice, too: then age alone decides."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One chunk of one namespace, as far as giving it up goes."""

    prefix_hash: bytes
    parent_hash: bytes
    token_start: int
    token_end: int
    nbytes: int
    """Of all its payloads."""
    hits: int
    touched_s: int
    created_s: int
    pinned: bool

    @property
    def used_s(self) -> int:
        """When it was last saved or hit."""
        return max(self.touched_s, self.created_s)


Worth = Callable[[Candidate], float]
"""What a chunk is worth: of ends of chains the one with the least goes first."""
Policy = Callable[[Sequence[Candidate], float], Worth]
"""Makes a ``Worth`` for these candidates, at a moment in seconds since the epoch."""


def choose(
    candidates: Iterable[Candidate],
    *,
    free_bytes: int,
    now_s: float,
    policy: Policy | None = None,
) -> list[Candidate]:
    """What to give up, in this order, until ``free_bytes`` are free, or all that may go is gone.

    No chunk is given up before every chunk that continues it; none that is pinned, or that a
    pinned one continues. Chunks whose beginning is not among the candidates are of no use and go
    first. The same candidates in any order give the same answer. O(n log n).
    """
    if free_bytes <= 0:
        return []
    known = {one.prefix_hash: one for one in sorted(candidates, key=_order)}
    chunks = sorted(known.values(), key=_order)
    parents = {one.prefix_hash: _parent(one, known) for one in chunks}
    kept = _kept(chunks, parents)
    children = dict.fromkeys(known, 0)
    useless: dict[bytes, bool] = {}
    for one in chunks:  # parents come before what continues them
        parent = parents[one.prefix_hash]
        useless[one.prefix_hash] = one.token_start > 0 if parent is None else useless[parent]
        if parent is not None:
            children[parent] += 1
    worth = (policy or by_use)(chunks, now_s)

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


def by_use(candidates: Sequence[Candidate], now_s: float) -> Worth:
    """Recency, frequency, size and depth, each in proportion to the usual pause between hits."""
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
    """The mean time between two hits of a chunk, over those that were hit and are not the first of
    their prompt: beginnings that everybody shares would hide how others are used."""
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
    """The chunk that it continues, None if that is not known. It ends where this one starts, so
    records that lie cannot make a loop."""
    parent = known.get(one.parent_hash)
    if parent is None or parent.token_end != one.token_start:
        return None
    return parent.prefix_hash if parent.token_start < one.token_start else None


def _kept(chunks: Sequence[Candidate], parents: Mapping[bytes, bytes | None]) -> set[bytes]:
    """What is pinned, and what that continues."""
    kept: set[bytes] = set()
    for one in reversed(chunks):
        if one.pinned or one.prefix_hash in kept:
            kept.add(one.prefix_hash)
            parent = parents[one.prefix_hash]
            if parent is not None:
                kept.add(parent)
    return kept
