"""Direct reads and writes on the sockets of redis-py's connections.

redis-py makes and routes the connections: login, TLS, retries, topology. A call that moves a
payload, or looks up a thousand chunks, uses the socket directly, because the client reads replies
through its own buffers and objects. A caller that gets no connection here uses the client.
"""

import math
import os
import select
import socket
import ssl
import time
from collections import deque
from functools import lru_cache
from threading import Event
from typing import Any, Final

import redis
from redis import exceptions

from objkv.net.deadline import bound_waits, check_end, deadline_socket, ends_s
from objkv.net.redis_errors import CLIENT_ERRORS, with_hint

Pool = Any
"""A connection pool of redis-py, whose types do not cover its use here."""
KEEP_S = 10.0
"""How long a connection is lent before it returns to its pool, which may replace it."""
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
"""The undocumented names of redis-py in use, by owner. Without one, calls go through the client."""
_LINE_BYTES_MAX = 4_096
_RECEIVE_BYTES = 65_536
_CRLF = b"\r\n"
_CLOSED = "the server closed the connection"


class RespConnection:
    """A connection of ``pool``, lent to one thread at a time. Raises redis-py's exceptions.
    ``clean`` is False from the first byte sent until the last one is read."""

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
        if not self.tls:  # with a time-out, Python would poll before each receive
            bound_waits(self.sock, self._timeout_s or 0.0)

    def is_fresh(self) -> bool:
        connection = self._connection
        return (
            connection._sock is self.sock
            and connection.pid == os.getpid()
            and time.monotonic() - self.since_s < KEEP_S
            and not connection.should_reconnect()
            and self._is_quiet()
        )

    def _is_quiet(self) -> bool:
        """Whether it has received no end of stream, and nothing but replies to its commands."""
        if self._rest:
            return False
        if self.tls and self.sock.pending():  # type: ignore[attr-defined]  # an SSLSocket's
            return False
        return not self._poll.poll(0)

    def end(self) -> None:
        """Return the connection to its pool; close it first unless it is clean."""
        if self._connection.pid != os.getpid():
            return  # it belongs to the parent process
        if not self.clean or not self._is_quiet():
            self._connection.disconnect()
        elif not self.tls and self._connection._sock is self.sock:
            self.sock.settimeout(self._timeout_s)
        self.pool.release(self._connection)

    def send(self, command: bytes) -> None:
        self.clean = False
        sent = 0
        try:
            while sent < len(command):  # not sendall: its wait would not end without a time-out
                check_end()
                sent += self.sock.send(command[sent:])
        except OSError as exc:
            raise _lost(exc) from exc

    def offer(self, data: memoryview) -> int:
        """Send what the socket accepts at once; all of it with TLS. Return the number of bytes."""
        self.clean = False
        try:
            if not self.tls:
                return self.sock.send(data, socket.MSG_DONTWAIT)
            self.sock.sendall(data)
            return len(data)
        except BlockingIOError:
            return 0
        except OSError as exc:
            raise _lost(exc) from exc

    def wait_to_receive(self) -> bool:
        """Wait, after an offer that sent nothing, until the socket is readable or writable. Return
        whether it is readable."""
        poll = select.poll()
        try:
            poll.register(self.sock, select.POLLIN | select.POLLOUT)
        except ValueError as exc:  # another thread closed it together with its client
            raise exceptions.ConnectionError(_CLOSED) from exc
        left_s = ends_s() - time.monotonic()
        timeout_s = left_s if self._timeout_s is None else min(left_s, self._timeout_s)
        ready = poll.poll(None if timeout_s == math.inf else max(0.0, 1000 * timeout_s))
        if not ready:
            raise exceptions.TimeoutError("timeout on the socket")
        return ready[0][1] & ~select.POLLOUT != 0

    def receive(self, nbytes: int = _RECEIVE_BYTES) -> bytes:
        """Return at least one and at most ``nbytes`` bytes."""
        try:
            check_end()
            data = self.sock.recv(nbytes)
        except OSError as exc:
            raise _lost(exc) from exc
        if not data:
            raise exceptions.ConnectionError(_CLOSED)
        return data

    def read_line(self, nbytes: int) -> bytes:
        """Return the next line without its end. Receives only ``nbytes`` at first, so that what
        follows it can be received straight into its target."""
        data = self._rest or self.receive(nbytes)
        while (end := data.find(_CRLF)) < 0:
            if len(data) > _LINE_BYTES_MAX:
                raise exceptions.InvalidResponse("a line without an end")
            data += self.receive(64)
        self._rest = data[end + 2 :]
        return data[:end]

    def read_value(self, buffer: memoryview) -> None:
        """Receive a value into ``buffer``, which has exactly its announced length."""
        nbytes = len(buffer)
        got = min(len(self._rest), nbytes)
        buffer[:got] = self._rest[:got]
        self._rest, end = b"", self._rest[got:]
        while got < nbytes:
            try:
                check_end()
                count = self.sock.recv_into(buffer[got:])
            except OSError as exc:
                raise _lost(exc) from exc
            if not count:
                raise exceptions.ConnectionError(_CLOSED)
            got += count
        while len(end) < 2:
            end += self.receive(2 - len(end))
        if end != _CRLF:
            raise exceptions.InvalidResponse(f"a value of other than the announced {nbytes} bytes")


def _lost(exc: OSError) -> exceptions.RedisError:
    if isinstance(exc, TimeoutError | BlockingIOError):
        return exceptions.TimeoutError("timeout on the socket")
    return exceptions.ConnectionError(f"error on the socket: {exc}")


def packed(*words: bytes | int) -> bytes:
    """Return a command in its wire format."""
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        text = b"%d" % word if isinstance(word, int) else word
        parts.append(b"$%d\r\n%b\r\n" % (len(text), text))
    return b"".join(parts)


class RespConnections:
    """Lends connections of ``client``, and keeps up to half of them between calls, because taking
    one from its pool and returning it costs as much as reading a small value. A pool whose
    connections are all in use, so that threads may wait for one, gets every one back."""

    def __init__(self, client: Any) -> None:
        self.is_cluster = isinstance(client, redis.RedisCluster)
        self._client = client
        self._kept: dict[Pool, deque[RespConnection]] = {}
        self._closed = Event()

    def pool_of(self, key: str) -> Pool | None:
        """Return the pool of the server that has ``key``; None if it cannot be used."""
        client = self._client
        if self.is_cluster:
            client = client.get_redis_connection(client.get_node_from_key(key))
        return client.connection_pool if client.connection is None else None

    def acquire(self, key: str) -> RespConnection | None:
        """Return a connection to the server of ``key``, to pass to ``release``; None if the caller
        must use the client. Raises redis-py's exceptions, except on a cluster."""
        try:
            return self.acquire_from(self.pool_of(key))
        except CLIENT_ERRORS:
            if self.is_cluster:
                return None
            raise

    def acquire_from(self, pool: Pool | None) -> RespConnection | None:
        """Return a connection of ``pool``, to pass to ``release``; None if they are of an unknown
        kind: without sockets (in tests, with a cache), or with another protocol."""
        if pool is None:
            return None
        kept = self._kept.get(pool)
        while kept and (one := _popped(kept)):
            if one.is_fresh():
                return one
            one.end()
        return _opened(pool)

    def release(self, one: RespConnection) -> None:
        """Take back a connection after a call. Closes it unless it is clean."""
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
        if self._closed.is_set():  # closed meanwhile
            self.close()

    def close(self) -> None:
        """Return all connections to their pools, lent ones when their calls end. Idempotent."""
        self._closed.set()
        for kept in list(self._kept.values()):
            while one := _popped(kept):
                one.end()

    def _end_old(self) -> None:
        """Return unused connections, such as those to nodes that have left the cluster. Empty
        queues stay, because another thread may be about to fill one."""
        for kept in list(self._kept.values()):
            while (one := _popped(kept)) and not one.is_fresh():
                one.end()
            if one:
                kept.append(one)


def can_lend(connection: Any) -> bool:
    """Whether a connected connection is of the known kind: RESP2 on its own socket."""
    is_socket = isinstance(getattr(connection, "_sock", None), socket.socket)
    is_known = all(hasattr(connection, name) for name in PRIVATE_NAMES["connection"])
    return is_socket and is_known and str(getattr(connection, "protocol", None)) == "2"


def _opened(pool: Pool) -> RespConnection | None:
    """Return a connection of ``pool``, connected, waiting for a free one if necessary."""
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
    """Whether the pool can lend another at once, so that no thread waits for this one."""
    free = getattr(pool, "pool", None)  # a BlockingConnectionPool's, read without its lock
    return free is None or bool(getattr(free, "queue", ()))


def _popped(kept: deque[RespConnection]) -> RespConnection | None:
    try:
        return kept.pop()
    except IndexError:  # empty, or another thread was faster
        return None


def keep_deadlines(pool: Any) -> None:
    """Make ``pool``, which must have no connection yet, use deadline sockets."""
    pool.connection_class = _deadline_class(pool.connection_class)


class DeadlinePool(redis.BlockingConnectionPool):
    """A pool with deadline sockets from the start: the pool class of a cluster's client."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)  # type: ignore[no-untyped-call]  # its base class is
        keep_deadlines(self)


class _Deadline:
    """A mix-in for connection classes."""

    socket_connect_timeout: float
    credential_provider: Any
    _sock: socket.socket | None
    _login_at_s = 0.0

    def connect(self) -> None:
        """A login that grew too old is renewed by connecting again."""
        if self._sock is not None and self.should_reconnect():
            self.disconnect()  # type: ignore[attr-defined]  # of the class after it, like all below
        super().connect()  # type: ignore[misc]

    def should_reconnect(self) -> bool:
        """Whether to connect again before the next command: the server announced maintenance, or
        the credentials of this login may have expired."""
        login_s: float = getattr(self.credential_provider, "login_s", math.inf)
        is_old = time.monotonic() - self._login_at_s > login_s
        return is_old or super().should_reconnect()  # type: ignore[misc]

    def connect_check_health(self, *args: Any, **options: Any) -> None:
        """The error hints at a server that answers only with, or only without, TLS."""
        try:
            super().connect_check_health(*args, **options)  # type: ignore[misc]
        except (exceptions.ConnectionError, exceptions.TimeoutError) as exc:
            found = with_hint(exc, tls=isinstance(self, redis.SSLConnection))
            if found is exc:
                raise
            raise found from exc

    def _connect(self) -> socket.socket:
        usual_s, left_s = self.socket_connect_timeout, ends_s() - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the deadline passed")
        self._login_at_s = time.monotonic()
        self.socket_connect_timeout = min(usual_s, left_s)
        try:
            made: socket.socket = super()._connect()  # type: ignore[misc]
            return deadline_socket(made)
        finally:
            self.socket_connect_timeout = usual_s


@lru_cache
def _deadline_class(kind: type) -> type:
    return type(f"Deadline{kind.__name__}", (_Deadline, kind), {})
