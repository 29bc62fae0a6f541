"""Whether an arena is sound, and ones whose leases and connections end at the worst moment."""

from itertools import pairwise
from typing import Any

from objkv.agent import residents as module
from objkv.agent.client import AgentConnection
from objkv.agent.core import Core
from objkv.agent.memory.arena import CellState, Extents
from objkv.agent.residents import Resident, Residents
from objkv.errors import TransferError

POISON = 0xEE


def is_sound(residents: Residents) -> bool:
    """Whether memory, cells, states and ranking agree with each other."""
    with residents._lock:
        everything, placed = residents._all, residents._at.values()
        ranked = [one for one in residents._by_key.values() if one.state is CellState.READY]
        return (
            are_divided(residents._extents)
            and residents._extents._taken.keys() == residents._at.keys()
            and all(residents._extents.size(one.offset) == one.extent_bytes for one in placed)
            and len(residents._cells) + sum(one.cell >= 0 for one in everything) == module.CELLS
            and residents._idle_bytes
            == sum(one.extent_bytes for one in everything if not one.leases)
            and len(ranked) == len(residents._ranking)
            and all(
                path in residents._by_key or residents.unsaved.keep(path)
                for path in list(residents.unsaved._by_path)
            )
            and all(one.key in residents._ranking for one in ranked)
            and residents._unread.nbytes == sum(one.nbytes for one in ranked if one.is_unused)
            and all(one.leases >= (one.state is CellState.FILLING) for one in everything)
            and all(one.leases > 0 for one in everything if not one.is_listed)
        )


def are_divided(extents: Extents) -> bool:
    """Whether gaps and extents cover everything once."""
    with extents._lock:
        pieces = sorted([*extents._free, *extents._taken.items()])
        touching = all(a[1] == b[0] for a, b in pairwise(pieces))
        covers = (pieces[0][0], pieces[-1][1]) == (extents._start, extents._end)
        free = sum(end - start for start, end in extents._free)
        return touching and covers and free == extents._free_bytes


def threads_of(core: Core) -> int:
    """Its threads that have not ended."""
    return sum(thread.is_alive() for thread in core._threads)


def in_flight(core: Core) -> int:
    """Payloads that wait for a thread or are being fetched."""
    with core._changed:
        return len(core._turns) + len(core._busy._deadlines)


class SpoilingResidents(Residents):
    """Overwrites a payload when its last lease ends, and forgets it."""

    def __init__(self, *given: Any, keeps: bool = False) -> None:
        """``keeps``: as usual, nothing is overwritten."""
        super().__init__(*given)
        self._keeps = keeps

    def release(self, one: Resident, *waiter: Any) -> None:
        self._spoil(one)
        super().release(one, *waiter)

    def failed(self, one: Resident, *why: Any) -> None:
        self._spoil(one)
        super().failed(one, *why)

    def _spoil(self, one: Resident) -> None:
        if one.leases > 1 or self._keeps:
            return
        self.forget(one.key)
        if one.leases == 1 and one.offset >= 0:  # nobody has found it meanwhile
            self.view(one)[:] = bytes([POISON]) * one.nbytes


class CanBeLost:
    """A connection that fails once ``is_lost``, which its agent does not know."""

    is_lost = False

    @property
    def is_open(self) -> bool:
        return super().is_open and not self.is_lost

    def open(self, *wanted: Any, **how: Any) -> Any:
        self._check()
        return super().open(*wanted, **how)

    def release(self, leases: Any) -> None:
        self._check()
        super().release(leases)

    def wait(self, seconds: float, also: Any = None) -> bool:
        return not self.is_lost and super().wait(seconds, also)

    def _check(self) -> None:
        if self.is_lost:
            raise TransferError("the connection is lost")


class LossyConnection(CanBeLost, AgentConnection):
    """A connection that can be lost."""
