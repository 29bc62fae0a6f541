"""Deadlines of calls, and sockets that respect them.

Client libraries have only time-outs for one piece that is sent or received, which a server that
sends a byte now and then never exceeds. So they get deadline sockets (decision 20 in
``docs/decisions.md``). objkv's own readers wait in the kernel, in one call, while Python would
poll, receive a little and repeat (decision 9).
"""

import math
import socket
import ssl
import struct
import time
from contextvars import ContextVar, Token
from typing import Any


def bound_waits(sock: socket.socket, seconds: float) -> None:
    """Make each call on ``sock`` wait in the kernel for at most ``seconds``; 0 waits forever. Not
    for TLS, which keeps state between calls.

    A call that reaches the limit returns its partial result, or raises BlockingIOError without one.
    A signal restarts the wait, so a profiler's timer of less than ``seconds`` prolongs it forever.
    """
    whole, part = divmod(seconds, 1)
    bound = struct.pack("ll", int(whole), int(part * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bound)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bound)
    sock.settimeout(None)


_ENDS_S: ContextVar[float] = ContextVar("ends_s", default=math.inf)


class EndsBy:
    """A context manager that ends this thread's calls on deadline sockets by ``ends_s``, a time of
    ``time.monotonic``, or by an outer ``EndsBy`` if that is earlier."""

    __slots__ = ("_ends_s", "_token")

    def __init__(self, ends_s: float) -> None:
        self._ends_s = ends_s

    def __enter__(self) -> None:
        self._token: Token[float] = _ENDS_S.set(min(self._ends_s, _ENDS_S.get()))

    def __exit__(self, *_: object) -> None:
        _ENDS_S.reset(self._token)


def ends_s() -> float:
    """Return the deadline of this thread's call, by ``time.monotonic``; infinite without one."""
    return _ENDS_S.get()


def check_end() -> None:
    """Raise TimeoutError if the deadline of this thread's call has passed."""
    if time.monotonic() >= _ENDS_S.get():
        raise TimeoutError("the deadline passed")


def deadline_socket(sock: socket.socket) -> socket.socket:
    """Return the same connection as a socket that respects ``EndsBy``, in place of ``sock``. A TLS
    connection must have had its handshake."""
    timeout_s = sock.gettimeout()
    if isinstance(sock, ssl.SSLSocket):
        sock.__class__ = _DeadlineTlsSocket
        made: socket.socket = sock
    else:
        made = _DeadlineSocket(fileno=sock.detach())
    made.settimeout(timeout_s)
    return made


class _DeadlineSocket(socket.socket):
    """Respects ``EndsBy`` if Python does the waiting, but not while calls wait in the kernel."""

    _usual_s: float | None = None

    def settimeout(self, value: float | None) -> None:
        self._usual_s = value
        super().settimeout(value)

    def recv(self, *args: Any) -> bytes:
        self._hurry()
        return super().recv(*args)

    def recv_into(self, *args: Any) -> int:
        self._hurry()
        return super().recv_into(*args)

    def send(self, *args: Any) -> int:
        self._hurry()
        return super().send(*args)

    def sendall(self, *args: Any) -> None:
        self._hurry()
        super().sendall(*args)

    def _hurry(self) -> None:
        """Limit the next call's wait to the deadline, and to the usual time-out."""
        left_s = _ENDS_S.get() - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the deadline passed")
        if self._usual_s is not None:
            super().settimeout(min(self._usual_s, left_s))


class _DeadlineTlsSocket(_DeadlineSocket, ssl.SSLSocket):
    """The same methods, ahead of those of TLS."""
