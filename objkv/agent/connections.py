"""Connections to a core: their leases of payloads, and the connection within one process.

``objkv.agent.client`` has the connection by a socket.
"""

from collections.abc import Callable, Sequence
from threading import Lock
from typing import NamedTuple, Protocol

from objkv.agent.core import Core, CoreLimits
from objkv.agent.fill import Wanted
from objkv.agent.memory.arena import ALL_FRAMES, Arena, Board, CellState, Progress
from objkv.agent.messages import OpenAnswer, ProtocolError
from objkv.agent.queue import Urgency
from objkv.agent.residents import MissReason, Resident
from objkv.background import Alarm, wait_for
from objkv.cache.chunks import ChunkCache
from objkv.errors import TransferError
from objkv.telemetry import Recorder

_OF_AN_AGENT = "agent_"
_COUNTED_BY_READERS = frozenset(("load_bytes", "load_corrupt", "load_ghosts"))


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


class ArenaConnection(Protocol):
    """A way to a core's payloads: through a socket, or within the process.

    Everything that fails raises ``TransferError`` and leaves the connection unusable. A connection
    that failed still holds its leases until ``close``: whatever reads the arena must have finished
    by then, because its memory is reused.
    """

    is_inside: bool
    """Whether the core belongs to this process."""

    @property
    def arena(self) -> Arena:
        """The memory. Valid until ``close``."""

    @property
    def is_open(self) -> bool:
        """Whether the connection has not failed."""

    def open(
        self, wanted: Sequence[Wanted], *, deadline_s: float, urgency: Urgency
    ) -> list[ArenaLease]:
        """Open payloads of one namespace for reading, in order. Each lease must be released."""

    def release(self, leases: Sequence[int]) -> None:
        """End leases. The memory may change from now on."""

    def reject(self, wanted: Wanted) -> None:
        """Report that a resident payload is not what its key promises a reader. Its record is
        forgotten, and this copy is not served any more."""

    def wait(self, seconds: float, also: Alarm) -> bool:
        """Wait for progress of a payload that is being filled, or for ``also``, for at most
        ``seconds``. Returns False if the core has gone."""

    def close(self) -> None:
        """End the connection and all its leases, and unmap the arena. Idempotent."""


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
        place = (one.offset, one.nbytes) if state is CellState.READY else (0, 0)
        return OpenAnswer(state, MissReason.NONE, number, one.cell, *place)


class InsideAgent:
    """A core and its arena. Thread-safe."""

    def __init__(
        self, cache: ChunkCache, nbytes: int, limits: CoreLimits, recorder: Recorder
    ) -> None:
        """``nbytes``: of the arena. Raises ``ConfigError`` if the system has no memory for it. The
        caller still owns ``cache``."""
        self.arena = Arena.create(nbytes)
        self.core = Core(cache, self.arena, limits, _Uncounted(recorder))
        self._lock = Lock()
        self._open, self._closed = 0, False
        self.core.on_ended = self._unmap

    def connect(self) -> "InsideConnection":
        """Return a new connection. Raises ``TransferError`` after ``close``, and if no descriptor
        is free."""
        with self._lock:
            if self._closed:
                raise TransferError("the worker's loads are closed")
            try:
                connection = InsideConnection(self.core, self.arena, self._ended)
            except OSError as exc:
                raise TransferError(f"no alarm for loads: {exc}") from exc
            self._open += 1
        return connection

    def close(self, seconds: float) -> bool:
        """End the core's threads, for at most ``seconds``. The arena is unmapped when the last
        connection is closed and the last thread has ended, which may be later. Returns whether the
        threads have ended. Idempotent."""
        ended = self.core.close(seconds)
        with self._lock:
            self._closed = True
        self._unmap()
        return ended

    def _ended(self) -> None:
        with self._lock:
            self._open -= 1
        self._unmap()

    def _unmap(self) -> None:
        with self._lock:
            is_unused = self._closed and not self._open and self.core.has_ended
        if is_unused:
            self.arena.close()

    def __repr__(self) -> str:
        return f"<InsideAgent {self.core!r}>"


class InsideConnection:
    """See ``ArenaConnection``. Belongs to one thread, except for ``is_open``."""

    is_inside = True

    def __init__(self, core: Core, arena: Arena, ended: Callable[[], None]) -> None:
        """``ended``: called at the end of ``close``."""
        self.arena, self._ended = arena, ended
        self.core = core
        self._holder = LeaseHolder(core)
        self._is_closed = False

    @property
    def is_open(self) -> bool:
        """See ``ArenaConnection``."""
        return not self._is_closed

    def open(
        self, wanted: Sequence[Wanted], *, deadline_s: float, urgency: Urgency
    ) -> list[ArenaLease]:
        """See ``ArenaConnection``."""
        answers = self._holder.lease(wanted, deadline_s=deadline_s, urgency=urgency)
        return [lease_of(one, self.arena.board) for one in answers]

    def release(self, leases: Sequence[int]) -> None:
        """See ``ArenaConnection``."""
        self._holder.end(leases)

    def reject(self, wanted: Wanted) -> None:
        """See ``ArenaConnection``."""
        self.core.reject(wanted)

    def wait(self, seconds: float, also: Alarm) -> bool:
        """See ``ArenaConnection``."""
        return wait_for([self._holder.alarm, also], seconds)

    def close(self) -> None:
        """End the connection and all its leases. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._holder.end_all()
            self._ended()

    def __repr__(self) -> str:
        return f"<InsideConnection {len(self._holder)} leases>"


class _Uncounted:
    """Drops what readers of the same process count themselves, and what only an agent reports."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def count(self, name: str, amount: float = 1) -> None:
        """See ``Recorder``."""
        if name not in _COUNTED_BY_READERS and not name.startswith(_OF_AN_AGENT):
            self._recorder.count(name, amount)

    def observe(self, name: str, value: float) -> None:
        """See ``Recorder``."""
        self._recorder.observe(name, value)

    def level(self, name: str, value: float) -> None:
        """See ``Recorder``."""
        self._recorder.level(name, value)
