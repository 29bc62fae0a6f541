"""Leases of payloads: as a client sees them, and as the agent keeps those of one client."""

from collections.abc import Sequence
from typing import NamedTuple

from objkv.agent.core import Core
from objkv.agent.fill import Wanted
from objkv.agent.memory.arena import ALL_FRAMES, Board, CellState, Progress
from objkv.agent.messages import OpenAnswer, ProtocolError
from objkv.agent.queue import Urgency
from objkv.agent.residents import MissReason, Resident
from objkv.background import Alarm


class ArenaLease(NamedTuple):
    """A payload that the client may read, now or soon."""

    number: int
    """0 if there is no lease: the payload is a miss."""
    cell: int
    progress: Progress
    """The state when it was opened."""


def lease_of(answer: OpenAnswer, board: Board) -> ArenaLease:
    """Return the lease that an answer describes."""
    state = CellState(answer.state)
    if state is CellState.FILLING:
        return ArenaLease(answer.lease, answer.cell, board.read(answer.cell))
    frames = ALL_FRAMES if state is CellState.READY else 0
    progress = Progress(state, frames, answer.offset, answer.nbytes, answer.reason)
    return ArenaLease(answer.lease, answer.cell, progress)


class LeaseHolder:
    """The leases of one client. Its methods run on one thread, except for ``wake``."""

    def __init__(self, core: Core) -> None:
        self.alarm = Alarm()
        """Rings at each progress of a payload that this client waits for."""
        self._core = core
        self._leases: dict[int, Resident] = {}
        self._next = 1

    def __len__(self) -> int:
        return len(self._leases)

    def wake(self) -> None:
        """See ``Waiter``."""
        self.alarm.ring()

    def lease(
        self, wanted: Sequence[Wanted], *, deadline_s: float, urgency: Urgency
    ) -> list[OpenAnswer]:
        """Open payloads, see ``Core.open``."""
        opened = self._core.open(self, wanted, deadline_s=deadline_s, urgency=urgency)
        return [self._answer(one) for one in opened]

    def end(self, numbers: Sequence[int]) -> None:
        """End leases. Raises ``ProtocolError`` for one that this client does not hold."""
        for number in numbers:
            resident = self._leases.pop(number, None)
            if resident is None:
                raise ProtocolError(f"lease {number} is not this client's")
            self._core.residents.release(resident)

    def end_all(self) -> None:
        """End all leases, and forget the client. Idempotent."""
        for resident in self._leases.values():
            self._core.residents.release(resident, self)
        self._leases.clear()
        self._core.forget_client(self)
        self.alarm.close()

    def _answer(self, one: Resident | MissReason) -> OpenAnswer:
        if isinstance(one, MissReason):
            return OpenAnswer(CellState.FAILED, one, 0, 0, 0, 0)
        number = self._next
        self._next = number % 0xFFFF_FFFF + 1
        assert number not in self._leases
        self._leases[number] = one
        # The state is read first: if it is READY, the rest is final.
        state = CellState.READY if one.state is CellState.READY else CellState.FILLING
        place = (0, one.offset, one.nbytes) if state is CellState.READY else (one.cell, 0, 0)
        return OpenAnswer(state, MissReason.NONE, number, *place)
