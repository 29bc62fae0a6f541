"""One end of a socket for a ``RespConnection``, without a server or a pool behind it."""

import os
import socket
from collections.abc import Callable
from threading import Thread
from typing import Any

from objkv.net.resp import RespConnection


class Connection:
    """The part of redis-py's connection that a ``RespConnection`` needs."""

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        self._sock = sock
        self.pid = os.getpid()
        self.socket_timeout = timeout_s
        self.protocol = 2
        self.disconnected = False
        sock.settimeout(timeout_s)

    def should_reconnect(self) -> bool:
        return False

    def disconnect(self) -> None:
        self.disconnected = True
        self._sock.close()


class Pool:
    def __init__(self) -> None:
        self.released: list[Any] = []

    def release(self, connection: Any) -> None:
        self.released.append(connection)


def wire(*, timeout_s: float = 60) -> tuple[RespConnection, socket.socket]:
    """A line and the server's end of its socket."""
    ours, theirs = socket.socketpair()
    theirs.settimeout(60)
    return RespConnection(Pool(), Connection(ours, timeout_s)), theirs


def beside(serve: Callable[[], object]) -> Thread:
    """``serve`` in a thread that has started; join it."""
    thread = Thread(target=serve, daemon=True)
    thread.start()
    return thread
