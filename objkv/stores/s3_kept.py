"""Connections that stay here between two requests, ready as they are.

To take one from the client's pool, make it ours, and bring it back costs as much as to sign a
request. What nobody needed for a while goes back to the pool, for the client to use.
"""

import os
import select
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from threading import Event
from typing import Any

KEEP_S = 10.0


@dataclass(frozen=True, slots=True)
class _Idle:
    pool: Any
    connection: Any
    timeout_s: float
    """What the client expects to find set."""
    poll: select.poll
    pid: int
    since_s: float

    def is_quiet(self) -> bool:
        """Whether it is open, and nothing came that nobody asked for, the end included."""
        return self.connection.sock is not None and not self.poll.poll(0)

    def give_back(self) -> None:
        """To the pool, as the client left it."""
        if self.pid != os.getpid():
            return  # a parent process's
        places = self.pool.pool
        # Full, if the client opened others meanwhile: the pool would say so in the log.
        has_room = places is not None and not places.full()
        if self.is_quiet() and has_room:
            self.connection.sock.settimeout(self.timeout_s)
            self.pool._put_conn(self.connection)
            return
        self.connection.close()
        if has_room:
            self.pool._put_conn(None)


class Kept:
    """Of all pools of one client. Safe from many threads."""

    def __init__(self) -> None:
        self._idle: deque[_Idle] = deque()
        self._closed = Event()

    def take(self, pool: Any) -> Any | None:
        """The connection of ``pool`` that was used last, or None; for ``keep``, or the pool."""
        while pool.pool is not None and (idle := self._popped()) is not None:
            if idle.pool is pool and idle.pid == os.getpid() and idle.is_quiet():
                return idle.connection
            idle.give_back()
        return None

    def keep(self, pool: Any, connection: Any, timeout_s: float) -> None:
        """Keep a connection that carries nothing any more."""
        poll, now_s = select.poll(), time.monotonic()
        poll.register(connection.sock, select.POLLIN)
        self._idle.append(_Idle(pool, connection, timeout_s, poll, os.getpid(), now_s))
        with suppress(IndexError):  # taken by another thread
            if self._idle[0].since_s < now_s - KEEP_S:
                self._idle.popleft().give_back()
        if self._closed.is_set():
            self.close()

    def close(self) -> None:
        """Bring all back; what is kept from now on goes back at once. Idempotent."""
        self._closed.set()
        while (idle := self._popped()) is not None:
            idle.give_back()

    def _popped(self) -> _Idle | None:
        try:
            return self._idle.pop()
        except IndexError:  # empty, or another thread was faster
            return None
