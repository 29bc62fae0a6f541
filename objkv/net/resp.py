"""Connections of redis-py whose sockets are written and read directly.

redis-py makes the connections and knows where they lead: log-in, TLS, retries, topology. A call
that moves a payload, or looks up a thousand chunks, sends its command and reads the answer on the
socket itself, because the client reads every answer through buffers and objects of its own.
Whatever is out of the ordinary is left to the client: a call that gets no connection here is made
with the client, which knows what to do about it.
"""

import os
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from threading import Event
from typing import Any, Final

import redis
from redis import exceptions

from objkv.net.deadline import bound_waits, can_wait, check_end, deadline_socket, ends_s

Arrived = Callable[[int], None]
Pool = Any
"""A connection pool of redis-py, which has no types for what is used here."""
KEEP_S = 10.0
"""How long a connection is lent before its pool sees it again, which may replace it."""
CLIENT_ERRORS = (exceptions.RedisError, exceptions.RedisClusterException)
"""All that redis-py raises."""
PRIVATE_NAMES: Final = {
    "connection": (
        "_sock",
        "pid",
        "socket_timeout",
        "should_reconnect",
        "check_health",
        "disconnect",
    ),
    "connection class": ("_connect",),
    "pool": ("pool", "max_connections", "connection_class", "get_connection", "release"),
}
"""What is used here of redis-py that it does not document, by owner. The calls of a connection that
lacks one of its names are left to the client."""
_IS_KNOWN = tuple(map(int, redis.__version__.split(".")[:2])) >= (5, 3)
"""Earlier, getting a connection took the command as argument, among other differences."""
_LINE_BYTES_MAX = 4_096
_RECEIVE_BYTES = 65_536
_PIECE_BYTES = 524_288
"""``arrived`` is called for each: its bytes are still in the cache, and the server goes on sending
meanwhile."""
_CRLF = b"\r\n"
_CLOSED = "Connection closed by server."


class RespConnection:
    """A connection of ``pool``, lent to one thread at a time. Raises redis-py's exceptions for lost
    ones.

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
        """Whether it has neither ended nor received anything but answers to its commands."""
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

    def read_line(self, nbytes: int) -> bytes:
        """The next line, without its end. At most ``nbytes`` are received at first: what follows
        the line is to be received where it belongs."""
        data = self._rest or self.receive(nbytes)
        while (end := data.find(_CRLF)) < 0:
            if len(data) > _LINE_BYTES_MAX:
                raise exceptions.InvalidResponse("a line without an end")
            data += self.receive(64)
        self._rest = data[end + 2 :]
        return data[:end]

    def read_bulk(self, head: bytes, buffer: memoryview, arrived: Arrived | None) -> None:
        """Receive the value that line ``head`` announced into ``buffer``, which is as long.

        ``arrived`` gets the whole length only when nothing can fail any more: the caller may then
        use the buffer, which another store would fill anew after an error.
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


class RespConnections:
    """Lends connections of ``client``, and keeps some of them from one call to the next.

    Taking a connection from its pool and bringing it back costs as much as a small value does. So
    up to half of a pool's connections stay here, and never the last one, for which another thread
    may be waiting; a pool whose connections are all in use gets every one of them back.
    """

    def __init__(self, client: Any) -> None:
        self.is_cluster = isinstance(client, redis.RedisCluster)
        self._client = client
        self._kept: dict[Pool, deque[RespConnection]] = {}
        self._closed = Event()

    def pool_of(self, key: str) -> Pool | None:
        """The pool of the server that has ``key``; None where connections cannot be lent."""
        client = self._client
        if not _IS_KNOWN:
            return None
        if self.is_cluster:
            client = client.get_redis_connection(client.get_node_from_key(key))
        return client.connection_pool if client.connection is None else None

    def take(self, key: str) -> RespConnection | None:
        """A connection to the server of ``key``, for ``give``. None: left to the client.

        Raises redis-py's exceptions, but on a cluster, whose client then looks for the server.
        """
        try:
            return self.take_from(self.pool_of(key))
        except CLIENT_ERRORS:
            if self.is_cluster:
                return None
            raise

    def take_from(self, pool: Pool | None) -> RespConnection | None:
        """A connection of ``pool``, for ``give``. None where the pool's connections are not as we
        know them: no sockets (in tests, with a cache), another protocol."""
        if pool is None:
            return None
        kept = self._kept.get(pool)
        while kept and (one := _popped(kept)):
            if one.is_fresh():
                return one
            one.end()
        return _opened(pool)

    def give(self, one: RespConnection) -> None:
        """The end of a call. What is not clean is closed."""
        pool = one.pool
        if not one.clean or self._closed.is_set() or not _has_more(pool):
            one.end()
            return
        kept = self._kept.get(pool)
        if kept is None:
            kept = self._kept.setdefault(pool, deque())
            self._end_old()
        if len(kept) >= pool.max_connections // 2:
            one.end()
            return
        kept.append(one)
        if self._closed.is_set():  # meanwhile
            self.close()

    def close(self) -> None:
        """Bring everything back. Idempotent; what is lent goes back when its call ends."""
        self._closed.set()
        for kept in list(self._kept.values()):
            while one := _popped(kept):
                one.end()

    def _end_old(self) -> None:
        """Bring back unused connections: those to nodes that have left a cluster are not taken
        again. Empty queues stay, because another thread may be about to fill one."""
        for kept in list(self._kept.values()):
            while (one := _popped(kept)) and not one.is_fresh():
                one.end()
            if one:
                kept.append(one)


def can_lend(connection: Any) -> bool:
    """Whether a connected connection is as we know them: RESP2 on a socket of its own."""
    is_socket = isinstance(getattr(connection, "_sock", None), socket.socket)
    is_known = all(hasattr(connection, name) for name in PRIVATE_NAMES["connection"])
    return is_socket and is_known and str(getattr(connection, "protocol", None)) == "2"


def _opened(pool: Pool) -> RespConnection | None:
    """A connection of ``pool``, which waits for one and connects it."""
    connection = pool.get_connection()
    try:
        connection.check_health()
        if can_lend(connection):
            return RespConnection(pool, connection)
    except BaseException:
        pool.release(connection)
        raise
    pool.release(connection)
    return None


def _has_more(pool: Pool) -> bool:
    """Whether the pool can lend another one at once: then no thread is waiting for this one."""
    free = getattr(pool, "pool", None)  # of a BlockingConnectionPool; looked at without its lock
    return free is None or bool(getattr(free, "queue", ()))


def _popped(kept: deque[RespConnection]) -> RespConnection | None:
    try:
        return kept.pop()
    except IndexError:  # empty, or another thread was faster
        return None


def keep_deadlines(pool: Any) -> None:
    """``pool``, which has no connection yet, makes its connections of deadline sockets."""
    pool.connection_class = _deadline_class(pool.connection_class)


class DeadlinePool(redis.BlockingConnectionPool):
    """Makes such connections from the beginning: the pool class of a cluster's client."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)  # type: ignore[no-untyped-call]  # its base class is
        keep_deadlines(self)


class _Deadline:
    """Mixed in before a class of connections."""

    socket_connect_timeout: float

    def _connect(self) -> socket.socket:
        usual_s, left_s = self.socket_connect_timeout, ends_s() - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the deadline passed")
        self.socket_connect_timeout = min(usual_s, left_s)
        try:
            made: socket.socket = super()._connect()  # type: ignore[misc]  # of the class after it
            return deadline_socket(made)
        finally:
            self.socket_connect_timeout = usual_s


@lru_cache
def _deadline_class(kind: type) -> type:
    return type(f"Deadline{kind.__name__}", (_Deadline, kind), {})
