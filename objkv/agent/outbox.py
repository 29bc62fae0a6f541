"""The outbox of a replica's worker: memory in which it hands payloads to the agent.

The worker makes, maps and writes it. The agent never maps it: that would allocate what the worker
has not written, at the agent's expense. It reads each payload into the arena, and verifies that.
"""

import logging
import os
from collections.abc import Callable
from threading import Lock
from time import monotonic

import numpy as np

from objkv.agent.client import AgentConnection
from objkv.agent.memory.arena import PAGE, check_size, make_memory
from objkv.agent.messages import CommitStatus
from objkv.cache.chunks import InFlightSaves, SaveOutcome
from objkv.codec.payload import Claim, Header
from objkv.errors import ObjkvError, PayloadError, StoreBusy, TransferError
from objkv.keys.chunk import ChunkKey
from objkv.stores.base import Buffer

logger = logging.getLogger(__name__)
_PAUSE_S = 5.0
"""How long nothing is saved after the agent reported that its store is full."""
RETRY_S = 1.0
"""Pause between attempts to reach an agent."""


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
        """Takes over ``fd``. Raises ``TransferError`` unless it is a memfd of a fixed size: reading
        another file might take for ever."""
        self._fd = fd
        try:
            self.nbytes = check_size(fd, "outbox", writable=True)
        except TransferError:
            self.close()
            raise

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Read ``len(buffer)`` bytes, which the client may change meanwhile. Raises
        ``PayloadError`` if there are not as many."""
        at = 0
        while at < len(buffer):
            got = os.preadv(self._fd, [buffer[at:]], offset + at)
            if not got:
                raise PayloadError("a payload outside of the outbox")
            at += got

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return ``nbytes``, as ``read_into`` does."""
        content = bytearray(nbytes)
        self.read_into(memoryview(content), offset)
        return bytes(content)

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
        process has mapped it. ``accepted``: called for each payload that the agent saves."""
        self._connect, self._outbox, self._clock = connect, outbox, clock
        self._accepted = accepted
        self._base, self._end = memory.ctypes.data, memory.ctypes.data + memory.nbytes
        self._memory = memory
        self.in_flight = InFlightSaves()
        """Payloads that are being handed over, and those that just were."""
        self._marking = Lock()
        """Not ``_lock``, which is held while an agent is connected to: forward passes begin saves.
        """
        self._puts = set[str]()
        """Payloads that were begun with ``puts``."""
        self._lock = Lock()
        self._agent: AgentConnection | None = None
        self._full_until = self._retry_at = -1.0

    def has_room(self) -> bool:
        """Whether to save anything at all."""
        return self._clock() >= self._full_until

    def begin_save(self, key: ChunkKey, *, puts: bool = False) -> bool:
        """Whether a payload is not being saved, nor was just saved. The caller then calls
        ``end_save``. ``puts``: whether the agent must not hold it back, also if it does so
        already."""
        path = key.path()
        with self._marking:
            if puts:
                self.in_flight.forget(path)
                self._puts.add(path)
            return self.in_flight.begin(path)

    def end_save(self, key: ChunkKey) -> None:
        """A save has ended, with or without success."""
        with self._marking:
            self._puts.discard(key.path())
            self.in_flight.end(key.path())

    def save(self, claim: Claim, payload: Buffer, header: Header) -> SaveOutcome:
        """Hand ``payload``, which is in the outbox, to the agent. When this returns, the agent has
        a copy, and saves it, or unless it was begun with ``puts`` keeps it in memory until it is
        seen again, even if this process ends.

        Raises ``StoreBusy`` if the agent's store is overloaded, and ``TransferError``.
        """
        view = np.frombuffer(payload, np.uint8)
        assert self._base <= view.ctypes.data <= self._end - view.nbytes
        puts, offset = claim.key.path() in self._puts, view.ctypes.data - self._base
        status = self._reach().commit(offset, view.nbytes, puts=puts)
        if status is CommitStatus.HELD_BACK and not puts and claim.key.path() in self._puts:
            status = self._reach().commit(offset, view.nbytes, puts=True)
        if status in (CommitStatus.ACCEPTED, CommitStatus.HELD_BACK):
            self.in_flight.keep(claim.key.path())
            if status is CommitStatus.ACCEPTED and self._accepted is not None:
                self._accepted(claim.key)  # what is kept other nodes do not find yet
            return SaveOutcome[status.name]
        if status is CommitStatus.REPEATED:
            return SaveOutcome.EXISTED
        if status is CommitStatus.SHED:
            raise StoreBusy("the agent's store is overloaded")
        if status is CommitStatus.OVER_QUOTA:
            self._full_until = self._clock() + _PAUSE_S
        raise TransferError(f"the agent did not take a payload: {status.name}")

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
