"""An agent's core inside the process that uses it: what a worker has without a node's agent."""

from collections.abc import Callable, Sequence
from threading import Lock

from objkv.agent.alarm import Alarm, wait_for
from objkv.agent.arena import Arena
from objkv.agent.core import Core, CoreLimits, Urgency
from objkv.agent.fill import Wanted
from objkv.agent.leases import ArenaLease, LeaseHolder, lease_of
from objkv.cache.chunks import ChunkCache
from objkv.errors import TransferError
from objkv.telemetry import Recorder

_COUNTED_BY_READERS = frozenset(("load_bytes", "load_corrupt", "load_errors", "load_ghosts"))


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
        """Return a new connection. Raises ``TransferError`` after ``close``."""
        with self._lock:
            if self._closed:
                raise TransferError("the worker's loads are closed")
            self._open += 1
        return InsideConnection(self.core, self.arena, self._ended)

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
        self._core = core
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
        self._core.reject(wanted)

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
    """Drops what the readers of the same process count themselves."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def count(self, name: str, amount: float = 1) -> None:
        """See ``Recorder``."""
        if name not in _COUNTED_BY_READERS:
            self._recorder.count(name, amount)

    def observe(self, name: str, value: float) -> None:
        """See ``Recorder``."""
        self._recorder.observe(name, value)

    def level(self, name: str, value: float) -> None:
        """See ``Recorder``."""
        self._recorder.level(name, value)
