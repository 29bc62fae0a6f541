"""Sockets that wait in the kernel, and sockets that know when a call has to be over.

The former make one call where Python would poll, receive a little, and begin again, each time
without and with the interpreter's lock. See ``docs/decisions/0009``.

The latter are what clients get that know time-outs only: a server that sends a byte now and then
never lets one pass. See ``docs/decisions/0020``.
"""

import math
import socket
import ssl
import struct
import sys
import time
from contextvars import ContextVar, Token
from typing import Any, Final

WAITS_IN_KERNEL: Final = sys.platform == "linux"
"""Whether ``bound_waits`` may be used: the layout of its options is Linux's."""


def can_wait(sock: socket.socket) -> bool:
    """Whether ``bound_waits`` is for it: TLS has a state of its own between two calls."""
    return WAITS_IN_KERNEL and not isinstance(sock, ssl.SSLSocket)


def bound_waits(sock: socket.socket, seconds: float) -> None:
    """From now on a single call on ``sock`` waits at most so long; 0 is for ever.

    A call whose time is over returns what it has done, or raises BlockingIOError if that is
    nothing. One that a signal interrupts begins again: a timer that fires more often than
    ``seconds`` in the same thread, as profilers have, keeps it waiting.
    """
    whole, part = divmod(seconds, 1)
    bound = struct.pack("ll", int(whole), int(part * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bound)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bound)
    sock.settimeout(None)


def receive_all(sock: socket.socket, into: memoryview) -> int:
    """Receive until ``into`` is full, the other side has ended, or the time is over."""
    return sock.recv_into(into, 0, socket.MSG_WAITALL)


_ENDS_S: ContextVar[float] = ContextVar("ends_s", default=math.inf)
_IS_TRIAL: ContextVar[bool] = ContextVar("is_trial", default=False)


class EndsBy:
    """A context manager: what this thread does on punctual sockets meanwhile ends by ``ends_s``, a
    time of ``time.monotonic``, or by an earlier one around it."""

    __slots__ = ("_ends_s", "_token")

    def __init__(self, ends_s: float) -> None:
        self._ends_s = ends_s

    def __enter__(self) -> None:
        self._token: Token[float] = _ENDS_S.set(min(self._ends_s, _ENDS_S.get()))

    def __exit__(self, *_: object) -> None:
        _ENDS_S.reset(self._token)


def ends_s() -> float:
    """When what this thread does now has to be over, of ``time.monotonic``; infinite: never."""
    return _ENDS_S.get()


class Trial:
    """A context manager: what this thread asks for meanwhile is to find out whether a server is
    back, and is not worth asking twice."""

    __slots__ = ("_token",)

    def __enter__(self) -> None:
        self._token: Token[bool] = _IS_TRIAL.set(True)

    def __exit__(self, *_: object) -> None:
        _IS_TRIAL.reset(self._token)


def is_trial() -> bool:
    """Whether this thread only tries a server."""
    return _IS_TRIAL.get()


def check_end() -> None:
    """Raise TimeoutError if what this thread does had to be over by now."""
    if time.monotonic() >= _ENDS_S.get():
        raise TimeoutError("the deadline passed")


def punctual(sock: socket.socket) -> socket.socket:
    """The same connection, as a socket that heeds ``EndsBy``; use the result only."""
    timeout_s = sock.gettimeout()
    if isinstance(sock, ssl.SSLSocket):
        sock.__class__ = _PunctualTls
        sock.settimeout(timeout_s)
        return sock
    made = _PunctualSocket(fileno=sock.detach())
    made.settimeout(timeout_s)
    return made


class _PunctualSocket(socket.socket):
    """Heeds ``EndsBy`` wherever Python keeps the time, not while calls wait in the kernel."""

    _usual_s: float | None = None
    _is_hurried = False

    def settimeout(self, value: float | None) -> None:
        self._usual_s = value
        self._is_hurried = False
        super().settimeout(value)

    def recv(self, *args: Any) -> bytes:
        _hurry(self)
        return super().recv(*args)

    def recv_into(self, *args: Any) -> int:
        _hurry(self)
        return super().recv_into(*args)

    def send(self, *args: Any) -> int:
        _hurry(self)
        return super().send(*args)

    def sendall(self, *args: Any) -> None:
        _hurry(self)
        super().sendall(*args)


class _PunctualTls(ssl.SSLSocket):
    """The same, of a TLS connection. A socket becomes one when its handshake is over."""

    _usual_s: float | None = None
    _is_hurried = False

    def settimeout(self, value: float | None) -> None:
        self._usual_s = value
        self._is_hurried = False
        super().settimeout(value)

    def recv(self, *args: Any) -> bytes:
        _hurry(self)
        return super().recv(*args)

    def recv_into(self, *args: Any) -> int:
        _hurry(self)
        return super().recv_into(*args)

    def send(self, *args: Any) -> int:
        _hurry(self)
        return super().send(*args)


def _hurry(sock: _PunctualSocket | _PunctualTls) -> None:
    """Have the next call on it wait no longer than there is time, nor than usual."""
    end_s = _ENDS_S.get()
    if end_s == math.inf:
        if sock._is_hurried:
            sock.settimeout(sock._usual_s)
        return
    left_s = end_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the deadline passed")
    usual_s = sock._usual_s
    if usual_s is None or (left_s >= usual_s and not sock._is_hurried):
        return
    sock.settimeout(min(usual_s, left_s))
    sock._usual_s, sock._is_hurried = usual_s, True
