"""Connections lent from the pools of a redis-py client, some of them kept between calls.

Whatever is out of the ordinary is left to the client: a call that gets no line makes itself with
the client, which knows what to do about it.
"""

import socket
from collections import deque
from threading import Event
from typing import Any

import redis
from redis import exceptions

from objkv.resp.line import Line, Pool

_IS_KNOWN = tuple(map(int, redis.__version__.split(".")[:2])) >= (5, 3)
"""Before, a connection was asked for with the command it was for, among other differences."""
_USED = ("pid", "socket_timeout", "should_reconnect", "check_health", "disconnect")
CLIENT_ERRORS = (exceptions.RedisError, exceptions.RedisClusterException)
"""All that redis-py raises."""


class Lines:
    """Lends connections of ``client``, and keeps some of them from one call to the next.

    Taking a connection from its pool and bringing it back costs as much as a small value does. So
    up to half of a pool's connections stay here, and never the last one, for which somebody else
    may be waiting; a pool whose connections are all in use gets every one of them back.
    """

    def __init__(self, client: Any) -> None:
        self.is_cluster = isinstance(client, redis.RedisCluster)
        self._client = client
        self._kept: dict[Pool, deque[Line]] = {}
        self._closed = Event()

    def pool_of(self, key: str) -> Pool | None:
        """The pool of the server that has ``key``; None where connections cannot be lent."""
        client = self._client
        if not _IS_KNOWN:
            return None
        if self.is_cluster:
            client = client.get_redis_connection(client.get_node_from_key(key))
        return client.connection_pool if client.connection is None else None

    def take(self, key: str) -> Line | None:
        """A line to the server of ``key``, for ``give``. None where the client has to do it.

        Raises redis-py's exceptions, but on a cluster, whose client then looks for the server.
        """
        try:
            return self.take_from(self.pool_of(key))
        except CLIENT_ERRORS:
            if self.is_cluster:
                return None
            raise

    def take_from(self, pool: Pool | None) -> Line | None:
        """A line on a connection of ``pool``, for ``give``. None where the pool's connections are
        not as we know them: no sockets (in tests, with a cache), another protocol."""
        if pool is None:
            return None
        lines = self._kept.get(pool)
        while lines and (line := _popped(lines)):
            if line.is_fresh():
                return line
            line.end()
        return _opened(pool)

    def give(self, line: Line) -> None:
        """The end of a call. What is not clean is closed."""
        pool = line.pool
        if not line.clean or self._closed.is_set() or not _has_more(pool):
            line.end()
            return
        lines = self._kept.get(pool)
        if lines is None:
            lines = self._kept.setdefault(pool, deque())
            self._end_old()
        if len(lines) >= pool.max_connections // 2:
            line.end()
            return
        lines.append(line)
        if self._closed.is_set():  # meanwhile
            self.close()

    def close(self) -> None:
        """Bring everything back. Idempotent; what is lent goes back when its call ends."""
        self._closed.set()
        for lines in list(self._kept.values()):
            while line := _popped(lines):
                line.end()

    def _end_old(self) -> None:
        """Bring back what nobody uses: pools of nodes that have left a cluster are not asked for
        again. Their empty queues stay, because another thread may be about to fill one."""
        for lines in list(self._kept.values()):
            while (line := _popped(lines)) and not line.is_fresh():
                line.end()
            if line:
                lines.append(line)


def can_lend(connection: Any) -> bool:
    """Whether a connected connection is as we know them: RESP2 on a socket of its own."""
    is_socket = isinstance(getattr(connection, "_sock", None), socket.socket)
    is_known = all(hasattr(connection, name) for name in _USED)
    return is_socket and is_known and str(getattr(connection, "protocol", None)) == "2"


def _opened(pool: Pool) -> Line | None:
    """A line on a connection of ``pool``, which waits for one and connects it."""
    connection = pool.get_connection()
    try:
        connection.check_health()
        if can_lend(connection):
            return Line(pool, connection)
    except BaseException:
        pool.release(connection)
        raise
    pool.release(connection)
    return None


def _has_more(pool: Pool) -> bool:
    """Whether the pool can lend another one at once: then nobody is waiting for this one."""
    free = getattr(pool, "pool", None)  # of a BlockingConnectionPool; looked at without its lock
    return free is None or bool(getattr(free, "queue", ()))


def _popped(lines: deque[Line]) -> Line | None:
    try:
        return lines.pop()
    except IndexError:  # empty, or another thread was faster
        return None
