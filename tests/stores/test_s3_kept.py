"""Connections kept between requests: ready, quiet, and given back."""

import select
import socket
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from objkv.net.deadline import bound_waits, can_wait
from objkv.stores.s3 import http as s3_kept
from objkv.stores.s3.http import KeptConnections


class Pool:
    """As much of urllib3's as is used."""

    def __init__(self) -> None:
        self.pool: Any = SimpleNamespace(full=lambda: self.is_full)
        self.is_full = False
        self.back: list[Any] = []

    def _put_conn(self, connection: Any) -> None:
        self.back.append(connection)


class Pairs:
    """Connections with their other ends."""

    def __init__(self) -> None:
        self._open: list[socket.socket] = []

    def connection(self) -> tuple[Any, socket.socket]:
        ours, theirs = socket.socketpair()
        self._open += [ours, theirs]
        connection = SimpleNamespace(sock=ours)

        def close() -> None:
            ours.close()
            connection.sock = None

        connection.close = close
        return connection, theirs

    def close(self) -> None:
        for sock in self._open:
            sock.close()


@pytest.fixture
def pairs() -> Iterator[Pairs]:
    pairs = Pairs()
    yield pairs
    pairs.close()


def test_the_one_used_last_is_taken_first(pairs: Pairs) -> None:
    kept, pool = KeptConnections(), Pool()
    first, second = pairs.connection()[0], pairs.connection()[0]
    kept.keep(pool, first, 60)
    kept.keep(pool, second, 60)
    assert kept.take(pool) is second
    assert kept.take(pool) is first
    assert kept.take(pool) is None
    assert pool.back == []


@pytest.mark.parametrize("sent", [b"", b"x"])
def test_what_the_server_closed_or_still_speaks_on_is_closed(pairs: Pairs, sent: bytes) -> None:
    kept, pool = KeptConnections(), Pool()
    connection, server = pairs.connection()
    kept.keep(pool, connection, 60)
    server.sendall(sent) if sent else server.close()
    assert kept.take(pool) is None
    assert connection.sock is None
    assert pool.back == [None]  # its place in the pool is free


def test_those_of_another_pool_go_back_as_the_client_knows_them(pairs: Pairs) -> None:
    kept, pool, other = KeptConnections(), Pool(), Pool()
    connection, _ = pairs.connection()
    bound_waits(connection.sock, 0.02)
    kept.keep(pool, connection, 60)
    assert kept.take(other) is None
    assert (pool.back, other.back) == ([connection], [])
    assert connection.sock.gettimeout() == 60


def test_what_a_full_pool_has_no_place_for_is_closed(pairs: Pairs) -> None:
    kept, pool = KeptConnections(), Pool()
    quiet, (gone, server) = pairs.connection()[0], pairs.connection()
    kept.keep(pool, quiet, 60)
    kept.keep(pool, gone, 60)
    server.close()
    pool.is_full = True
    kept.close()
    assert (pool.back, quiet.sock, gone.sock) == ([], None, None)


def test_who_keeps_one_may_find_that_another_thread_took_it_already(pairs: Pairs) -> None:
    kept, pool = KeptConnections(), Pool()
    connection, _ = pairs.connection()

    class Emptied(deque[Any]):
        def append(self, _: Any) -> None:
            """Taken before the thread that appended it continues."""

    kept._idle = Emptied()
    kept.keep(pool, connection, 60)
    assert pool.back == []


def test_what_nobody_needed_for_a_while_goes_back(
    pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, pool, now = KeptConnections(), Pool(), [100.0]
    monkeypatch.setattr(s3_kept, "time", SimpleNamespace(monotonic=lambda: now[0]))
    old, new = pairs.connection()[0], pairs.connection()[0]
    kept.keep(pool, old, 60)
    now[0] += s3_kept.KEEP_S + 1
    kept.keep(pool, new, 60)
    assert pool.back == [old]
    assert kept.take(pool) is new


def test_after_a_fork_the_childs_parent_has_them(
    pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, pool = KeptConnections(), Pool()
    connection, server = pairs.connection()
    kept.keep(pool, connection, 60)
    monkeypatch.setattr(s3_kept, "os", SimpleNamespace(getpid=lambda: -1))
    assert kept.take(pool) is None
    assert connection.sock is not None
    assert pool.back == []
    server.close()


def test_once_closed_nothing_is_kept(pairs: Pairs) -> None:
    kept, pool, closed = KeptConnections(), Pool(), Pool()
    closed.pool = None
    connections = [pairs.connection()[0] for _ in range(3)]
    kept.keep(pool, connections[0], 60)
    kept.keep(closed, connections[1], 60)
    kept.close()
    kept.keep(pool, connections[2], 60)
    assert pool.back == [connections[0], connections[2]]
    assert connections[1].sock is None
    assert kept.take(pool) is None


@pytest.mark.skipif(not can_wait(socket.socket()), reason="waits in the kernel are Linux's")
def test_a_call_waits_in_the_kernel_for_all_but_not_for_ever(pairs: Pairs) -> None:
    connection, server = pairs.connection()
    ours, buffer = connection.sock, memoryview(bytearray(6))

    def receive_all() -> int:
        return int(ours.recv_into(buffer, 0, socket.MSG_WAITALL))

    bound_waits(ours, 0.02)
    with pytest.raises(BlockingIOError):
        receive_all()
    server.sendall(b"abc")
    assert receive_all() == 3  # what came until then
    server.sendall(b"def")
    server.shutdown(socket.SHUT_WR)
    assert receive_all() == 3
    assert receive_all() == 0
    poll = select.poll()
    poll.register(ours, select.POLLIN)
    assert poll.poll(0)
