"""One connection of redis-py, whose socket is written and read directly.

redis-py makes the connections and knows where they lead: log-in, TLS, retries, topology. A call
that moves a payload, or asks for a thousand chunks, sends its command and reads the answer on the
socket itself, because the client reads every answer through buffers and objects of its own.
"""

import os
import select
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any

from redis import exceptions

from objkv.sockets import bound_waits, can_wait, check_end

Arrived = Callable[[int], None]
Pool = Any
"""A connection pool of redis-py, which has no types for what is used here."""

KEEP_S = 10.0
"""How long a connection is lent before its pool sees it again, which may replace it."""
_LINE_BYTES_MAX = 4_096
_RECEIVE_BYTES = 65_536
_PIECE_BYTES = 524_288
"""So often ``arrived`` is told: what it looks at is in the cache still, and the server goes on
sending meanwhile."""
_CRLF = b"\r\n"
_CLOSED = "Connection closed by server."


class Line:
    """One connection, lent to one thread at a time. Raises redis-py's exceptions for lost ones.

    ``clean`` is False from the first byte sent to the last one read.
    """

    def __init__(self, pool: Pool, connection: Any) -> None:
        self.pool = pool
        self.clean = True
        self.sock: socket.socket = connection._sock
        self.tls = isinstance(self.sock, ssl.SSLSocket)
        self.since_s = time.monotonic()
        self._connection = connection
        self._timeout_s: float | None = connection.socket_timeout
        self._rest = b""
        self._poll = select.poll()
        self._poll.register(self.sock, select.POLLIN)
        # One system call less for each receive: Python polls before it where it keeps the time.
        self._blocking = can_wait(self.sock)
        if self._blocking:
            bound_waits(self.sock, self._timeout_s or 0.0)

    def is_fresh(self) -> bool:
        """Whether it may be used again."""
        connection = self._connection
        return (
            connection._sock is self.sock
            and connection.pid == os.getpid()
            and time.monotonic() - self.since_s < KEEP_S
            and not connection.should_reconnect()
            and self._is_quiet()
        )

    def _is_quiet(self) -> bool:
        """Whether nothing was, or can be, read from it that no command asked for, the end
        included."""
        if self._rest:
            return False
        if self.tls and self.sock.pending():  # type: ignore[attr-defined]  # an SSLSocket's
            return False
        return not self._poll.poll(0)

    def end(self) -> None:
        """Give the connection back to its pool, closed unless it is clean."""
        if self._connection.pid != os.getpid():
            return  # a parent process's
        if not self.clean or not self._is_quiet():
            self._connection.disconnect()
        elif self._blocking and self._connection._sock is self.sock:
            self.sock.settimeout(self._timeout_s)
        self.pool.release(self._connection)

    def send(self, *parts: bytes | memoryview) -> None:
        """Send all of ``parts``, one after the other, without copying them together."""
        self.clean = False
        try:
            check_end()
            if len(parts) == 1 or self.tls:
                for part in parts:
                    self._send_all(part, 0)
                return
            sent = self.sock.sendmsg(parts)
            for part in parts:
                if sent < len(part):
                    self._send_all(part, sent)
                sent = max(0, sent - len(part))
        except OSError as exc:
            raise _lost(exc) from exc

    def _send_all(self, part: bytes | memoryview, sent: int) -> None:
        if not self._blocking:
            self.sock.sendall(memoryview(part)[sent:])
            return
        while sent < len(part):  # not sendall: of a socket without a time-out that waits for ever
            check_end()
            sent += self.sock.send(memoryview(part)[sent:])

    def offer(self, data: memoryview) -> int:
        """Send as much of ``data`` as is taken at once; with TLS all of it. Returns how much."""
        self.clean = False
        try:
            if self._blocking:
                return self.sock.send(data, socket.MSG_DONTWAIT)
            self.sock.sendall(data)
            return len(data)
        except BlockingIOError:
            return 0
        except OSError as exc:
            raise _lost(exc) from exc

    def wait_to_receive(self) -> bool:
        """After an offer of which nothing was taken: wait until there is something to receive, or
        room to send; whether it is the former."""
        poll = select.poll()
        try:
            poll.register(self.sock, select.POLLIN | select.POLLOUT)
        except ValueError as exc:  # closed with its client, by another thread
            raise exceptions.ConnectionError(_CLOSED) from exc
        timeout_s = self._timeout_s
        ready = poll.poll(None if timeout_s is None else 1000 * timeout_s)
        if not ready:
            raise exceptions.TimeoutError("Timeout on the socket")
        return ready[0][1] & ~select.POLLOUT != 0

    def receive(self, nbytes: int = _RECEIVE_BYTES) -> bytes:
        """Some bytes, at least one and at most ``nbytes``."""
        try:
            check_end()
            data = self.sock.recv(nbytes)
        except OSError as exc:
            raise _lost(exc) from exc
        if not data:
            raise exceptions.ConnectionError(_CLOSED)
        return data

    def read_line(self, expected: int) -> bytes:
        """The next line, without its end. ``expected`` bytes are received first, not more: what
        follows is to be received where it belongs."""
        data = self._rest or self.receive(expected)
        while (end := data.find(_CRLF)) < 0:
            if len(data) > _LINE_BYTES_MAX:
                raise exceptions.InvalidResponse("a line without an end")
            data += self.receive(64)
        self._rest = data[end + 2 :]
        return data[:end]

    def read_bulk(self, head: bytes, buffer: memoryview, arrived: Arrived | None) -> None:
        """Receive the value that line ``head`` announced into ``buffer``, which is as long.

        ``arrived`` is told of all of it when nothing can fail any more: whoever was told of a whole
        value may use the buffer, which another store would fill anew after an error.
        """
        nbytes = len(buffer)
        got, end = 0, self._rest
        if end:
            got = min(len(end), nbytes)
            buffer[:got] = end[:got]
            self._rest, end = b"", end[got:]
        receive_into = self.sock.recv_into
        while got < nbytes:
            try:
                check_end()
                count = receive_into(buffer[got : got + _PIECE_BYTES])
            except OSError as exc:
                raise _lost(exc) from exc
            if not count:
                raise exceptions.ConnectionError(_CLOSED)
            got += count
            if arrived is not None and got < nbytes:
                arrived(got)
        while len(end) < 2:
            end += self.receive(2 - len(end))
        if end != _CRLF:
            raise exceptions.InvalidResponse(f"{head!r} announced another length")
        if arrived is not None:
            arrived(nbytes)


def _lost(exc: OSError) -> exceptions.RedisError:
    if isinstance(exc, TimeoutError | BlockingIOError):
        return exceptions.TimeoutError("Timeout on the socket")
    return exceptions.ConnectionError(f"Error on the socket: {exc}")


def packed(*words: bytes | int) -> bytes:
    """A command as it is sent."""
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        text = b"%d" % word if isinstance(word, int) else word
        parts.append(b"$%d\r\n%b\r\n" % (len(text), text))
    return b"".join(parts)
