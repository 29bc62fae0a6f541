"""Whether what an arena's cache keeps of its payloads agrees with itself."""

from itertools import pairwise

from objkv.agent import arena_cache
from objkv.agent.arena_cache import ArenaCache
from objkv.agent.memory.arena import CellState, Extents


def covers_once(extents: Extents) -> bool:
    """Whether gaps and extents cover everything once."""
    with extents._lock:
        pieces = sorted([*extents._free, *extents._taken.items()])
        touching = all(a[1] == b[0] for a, b in pairwise(pieces))
        covers = (pieces[0][0], pieces[-1][1]) == (extents._start, extents._end)
        free = sum(end - start for start, end in extents._free)
        return touching and covers and free == extents.free_bytes


def is_consistent(cache: ArenaCache) -> bool:
    """Whether memory, cells, states and ranking agree with each other."""
    with cache._lock:
        everything, placed, unsaved = cache._all, cache._at.values(), cache.unsaved
        ranked = [one for one in cache._by_key.values() if one.state is CellState.READY]
        return (
            covers_once(cache._extents)
            and cache._extents._taken.keys() == cache._at.keys()
            and all(cache._extents.size(one.offset) == one.extent_bytes for one in placed)
            and len(cache._cells) + sum(one.cell >= 0 for one in everything) == arena_cache.CELLS
            and cache._idle_bytes == sum(one.extent_bytes for one in everything if not one.leases)
            and len(ranked) == len(cache._ranking)
            and all(path in cache._by_key or unsaved.keep(path) for path in unsaved.paths)
            and all(one.key in cache._ranking for one in ranked)
            and cache.unread_bytes == sum(one.nbytes for one in ranked if one.is_unused)
            and all(one.leases >= (one.state is CellState.FILLING) for one in everything)
            and all(one.leases > 0 for one in everything if not one.is_listed)
        )
