"""What an agent keeps of its payloads, and whether it agrees with itself."""

from itertools import pairwise

from objkv.agent import arena_cache
from objkv.agent.arena_cache import ArenaCache
from objkv.agent.core import Core
from objkv.agent.held_back import HeldBackPayloads
from objkv.agent.memory.arena import CellState, Extents
from objkv.agent.saves import NodeSaves
from objkv.codec.payload import read_header


def paths_of(held: HeldBackPayloads) -> set[str]:
    """The paths that they would have in the bulk store."""
    return set(held._by_path)


def forget_all(cache: ArenaCache) -> None:
    """Empty an arena, except for what is being read."""
    with cache._lock:
        found = list(cache._by_key)
    for key in found:
        cache.forget(key)


def threads_of(core: Core) -> int:
    """Threads that have not ended."""
    return sum(thread.is_alive() for thread in core._threads)


def fetches_of(core: Core) -> int:
    """Payloads that wait for a thread or are being fetched."""
    with core._changed:
        return len(core._fetches) + len(core._busy)


def waiting_of(saves: NodeSaves) -> int:
    """Payloads that wait for a thread that saves."""
    return saves._pool.waiting


def covers_once(extents: Extents) -> bool:
    """Whether gaps and extents cover everything once."""
    pieces = sorted([*extents._free, *extents._taken.items()])
    touching = all(a[1] == b[0] for a, b in pairwise(pieces))
    covers = pieces[-1][1] - pieces[0][0] == extents.total_bytes
    free = sum(end - start for start, end in extents._free)
    return touching and covers and free == extents.free_bytes


def is_consistent(cache: ArenaCache) -> bool:
    """Whether memory, cells, states and ranking agree with each other."""
    with cache._lock:
        everything, placed, held = cache._all, cache._at.values(), cache.held_back
        ranked = [one for one in cache._by_key.values() if one.state is CellState.READY]
        return (
            covers_once(cache._extents)
            and cache._extents._taken.keys() == cache._at.keys()
            and all(cache._extents.size(one.offset) == one.extent_bytes for one in placed)
            and len(cache._cells) + sum(one.cell >= 0 for one in everything) == arena_cache.CELLS
            and cache._idle_bytes == sum(one.extent_bytes for one in everything if not one.leases)
            and len(ranked) == len(cache._ranking)
            and all(path in cache._by_key or held.keep_on_disk(path) for path in paths_of(held))
            and all(one.key in cache._ranking for one in ranked)
            and cache.unread_bytes == sum(one.nbytes for one in ranked if one.is_unused)
            and all(one.leases >= (one.state is CellState.FILLING) for one in everything)
            and all(one.leases > 0 for one in everything if not one.is_listed)
        )


def keeps_promises(cache: ArenaCache) -> bool:
    """Whether all payloads with a layout are what its number promises. The arena is open."""
    layouts: dict[int, tuple[object, ...]] = {}
    with cache._lock:
        found = list(cache._by_key.values())
    for one in found:
        if one.layout and one.state is CellState.READY:
            header = read_header(cache.view(one))
            claim, frames = header.claim, header.frames
            origin = claim.parent_hash, claim.token_start, claim.token_end
            layout = frames.layers, frames.starts, frames.ends, header.nbytes
            is_plain = header.codec == "none" and not any(header.marks)
            is_one = layouts.setdefault(one.layout, layout) == layout
            has_length = header.nbytes == one.nbytes
            is_claimed = (one.key, one.origin) == (claim.key.path(), origin)
            if not (is_plain and is_one and has_length and is_claimed):
                return False
    return True
