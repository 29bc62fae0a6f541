"""The outbox of a replica's worker: memory in which it hands payloads to the agent.

The worker makes, maps and writes it. The agent never maps it: that would allocate what the worker
has not written, at the agent's expense. It reads each payload into the arena, and verifies that.
"""

import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from threading import Lock
from time import monotonic
from typing import NamedTuple

import numpy as np

from objkv.agent.client import AgentConnection
from objkv.agent.memory.arena import PAGE, check_size, make_memory
from objkv.agent.messages import Commit, CommitStatus, Drop, SavedPart
from objkv.cache.chunks import InFlightSaves
from objkv.errors import ObjkvError, PayloadError, TransferError
from objkv.keys.chunk import ChunkKey
from objkv.stores.base import Buffer

logger = logging.getLogger(__name__)
_PAUSE_S = 5.0
"""How long nothing is saved after the agent reported that its store is full."""
_PIECES_MAX = 1024
"""The most buffers that one call of ``preadv`` may fill."""
_DROPS_MAX = 4096
RETRY_S = 1.0
"""Pause between attempts to reach an agent."""
TAKEN = frozenset((CommitStatus.ACCEPTED, CommitStatus.HELD_BACK, CommitStatus.PART))
"""The agent has a copy."""


class OutboxPayload(NamedTuple):
    """A payload in an outbox, which is handed over."""

    key: ChunkKey
    path: str
    """The key's."""
    payload: Buffer
    part: SavedPart | None = None
    """Its place in a payload of several ranks, which is saved when the agent has all of it."""


class Outbox:
    """Memory that a worker writes."""

    def __init__(self, nbytes: int) -> None:
        """Raises ``OSError``."""
        self.nbytes = -(-nbytes // PAGE) * PAGE
        self.fd = make_memory("outbox", self.nbytes)
        """The memfd. This object closes it."""

    def close(self) -> None:
        """Close the descriptor. Mappings stay. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class ClientOutbox:
    """The agent's end of an outbox."""

    def __init__(self, fd: int) -> None:
        """Takes over ``fd``. Raises ``TransferError`` unless it is a memfd of a fixed size:
        others may block, or shrink under a reader."""
        self._fd = fd
        try:
            self.nbytes = check_size(fd, "outbox", writable=True)
        except TransferError:
            self.close()
            raise

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer``. Its client may write meanwhile. Raises ``PayloadError`` at an end."""
        at = 0
        while at < len(buffer):
            got = os.preadv(self._fd, [buffer[at:]], offset + at)
            if not got:
                raise PayloadError("a payload outside of the outbox")
            at += got

    def read_pieces(self, pieces: Sequence[memoryview], offset: int) -> None:
        """Read consecutive bytes into several buffers, as ``read_into`` does."""
        for first in range(0, len(pieces), _PIECES_MAX):
            some = pieces[first : first + _PIECES_MAX]
            nbytes = sum(map(len, some))
            if os.preadv(self._fd, some, offset) != nbytes:
                raise PayloadError("a payload outside of the outbox")
            offset += nbytes

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return ``nbytes``, fewer than 2 GiB, as ``read_into`` does."""
        content = os.pread(self._fd, nbytes, offset)
        if len(content) != nbytes:
            raise PayloadError("a payload outside of the outbox")
        return content

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class AgentSaves:
    """Where a worker's payloads go: to the agent. Thread-safe."""

    def __init__(
        self,
        connect: Callable[[int], AgentConnection],
        outbox: Outbox,
        memory: np.ndarray[tuple[int], np.dtype[np.uint8]],
        *,
        accepted: Callable[[ChunkKey], object] | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """``connect``: returns a new connection that has the outbox with the given descriptor, or
        raises ``ObjkvError``. ``outbox``: this object closes it. ``memory``: the outbox, as this
        process has mapped it. ``accepted``: called for each payload that the agent saves and
        does not hold back."""
        self._connect, self._outbox, self._clock = connect, outbox, clock
        self._accepted, self._memory = accepted, memory
        self.in_flight = InFlightSaves()
        """Payloads that are being handed over, and those that just were."""
        self._marking = Lock()
        """Not ``_lock``, held while an agent is connected to: forward passes begin saves."""
        self._drops = deque[Drop](maxlen=_DROPS_MAX)
        self._puts = set[str]()
        """Payloads that were begun with ``puts``."""
        self._lock = Lock()
        self._agent: AgentConnection | None = None
        self._full_until = self._retry_at = -1.0

    def has_room(self) -> bool:
        """Whether to save anything at all."""
        return self._clock() >= self._full_until

    def begin_save(self, path: str, *, puts: bool = False, again: bool = False) -> bool:
        """Begin a save, unless it runs or just ended. If it begins, ``end_save`` must follow.
        ``puts``: the agent must not hold it back, or no longer. ``again``: also one that just
        ended."""
        with self._marking:
            if puts or again:
                self.in_flight.forget(path)
            if puts:
                self._puts.add(path)
            return self.in_flight.begin(path)

    def end_save(self, path: str) -> None:
        """A save has ended, with or without success."""
        with self._marking:
            self._puts.discard(path)
            self.in_flight.end(path)

    def save(self, handed: Sequence[OutboxPayload]) -> list[CommitStatus]:
        """Hand payloads to the agent, at most ``COMMITS_MAX``. It has a copy then of those that are
        ``TAKEN``, and saves them even if this process ends, or keeps them in memory until they are
        seen again unless they were begun with ``puts``. Raises ``TransferError`` without answer."""
        commits = [self._commit(one) for one in handed]
        statuses = self._reach().commit(commits)
        for at, (key, path, _, _) in enumerate(handed):
            is_due = path in self._puts and not commits[at].puts  # it was begun again since
            if is_due and statuses[at] is CommitStatus.HELD_BACK:
                (statuses[at],) = self._reach().commit([commits[at]._replace(puts=True)])
            if statuses[at] in TAKEN:
                self.in_flight.mark_saved(path)
            if statuses[at] is CommitStatus.ACCEPTED and self._accepted is not None:
                self._accepted(key)  # what is held back other nodes do not find yet
            if statuses[at] is CommitStatus.OVER_QUOTA:
                self._full_until = self._clock() + _PAUSE_S
        return statuses

    def _commit(self, handed: OutboxPayload) -> Commit:
        view = np.frombuffer(handed.payload, np.uint8)
        offset = view.ctypes.data - self._memory.ctypes.data
        assert 0 <= offset <= self._memory.nbytes - view.nbytes
        return Commit(offset, view.nbytes, handed.path in self._puts, handed.part)

    def drop(self, path: str, part: SavedPart) -> None:
        """Note that this rank will not save its part of a payload. Never waits."""
        self._drops.append(Drop(part.number, part.position.parts, path))

    def send_drops(self) -> None:
        """Report what was noted, so that an agent does not wait for it. Raises nothing."""
        while self._drops:
            try:
                self._reach().drop(self._drops.popleft())
            except (ObjkvError, IndexError):  # without an agent no join waits; another thread sent
                return

    def close(self) -> None:
        """End the connection. Accepted payloads are still saved. Idempotent."""
        with self._lock:
            if self._agent is not None:
                self._agent.close()
                self._agent = None
            self._outbox.close()

    def _reach(self) -> AgentConnection:
        with self._lock:
            if self._agent is not None and not self._agent.has_ended():
                return self._agent
            if self._clock() < self._retry_at or self._outbox.fd < 0:
                raise TransferError("no agent")
            if self._agent is not None:
                self._agent.close()
                self._agent = None
            try:
                self._agent = self._connect(self._outbox.fd)
            except ObjkvError:
                self._retry_at = self._clock() + RETRY_S
                raise
            return self._agent
