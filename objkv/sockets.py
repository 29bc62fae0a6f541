"""Sockets that wait in the kernel: one call where Python would poll, receive a little, and begin
again, each time without and with the interpreter's lock. See ``docs/decisions/0009``.
"""

import socket
import ssl
import struct
import sys
from typing import Final

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
