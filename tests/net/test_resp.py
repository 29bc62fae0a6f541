"""One connection, read and written directly; and connections lent, kept and brought back without a
pool's other users noticing."""

import math
import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import fakeredis
import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st
from redis import exceptions

from objkv.net import resp as line_module
from objkv.net.deadline import EndsBy
from objkv.net.resp import RespConnection, RespConnections, packed
from tests.net.resp_wires import Connection, beside, wire
from tests.support.servers.redis import RedisServer

VALUE = bytes(range(256)) * 20


def read_value(line: RespConnection, buffer: bytearray) -> int:
    head = line.read_line(len(b"$%d\r\n" % len(buffer)))
    nbytes = int(head[1:])
    with memoryview(buffer) as view:
        line.read_value(view[:nbytes])
    return nbytes


@settings(deadline=None)
@given(st.binary(max_size=300), st.lists(st.integers(1, 40), max_size=8), st.integers(0, 400))
def test_a_value_is_read_however_it_is_cut(value: bytes, cuts: list[int], room: int) -> None:
    line, theirs = wire()
    answer = b"$%d\r\n%b\r\n" % (len(value), value)
    pieces, at = [], 0
    for cut in cuts:
        pieces.append(answer[at : at + cut])
        at += cut
    buffer = bytearray(max(room, len(value)))

    def serve() -> None:
        for piece in [*pieces, answer[at:]]:
            theirs.sendall(piece)

    server = beside(serve)
    nbytes = read_value(line, buffer)
    server.join()
    assert buffer[:nbytes] == value
    line._connection.disconnect()
    theirs.close()


def test_a_value_that_does_not_end_where_it_was_announced_is_no_value() -> None:
    line, theirs = wire()
    theirs.sendall(b"$3\r\nabcd\r\n")
    with pytest.raises(exceptions.InvalidResponse):
        read_value(line, bytearray(3))


@pytest.mark.parametrize("closes", [True, False])
@pytest.mark.parametrize(
    "sent", [b"", b"$5", b"$5\r\n", b"$5\r\nabc", b"$5\r\nabcde", b"$5\r\nabcde\r"]
)
def test_a_value_that_ends_early_is_a_lost_connection_or_a_timeout(
    sent: bytes, closes: bool
) -> None:
    line, theirs = wire(timeout_s=60 if closes else 0.05)
    theirs.sendall(sent)
    if closes:
        theirs.close()
    with pytest.raises(exceptions.ConnectionError if closes else exceptions.TimeoutError):
        read_value(line, bytearray(5))


def test_a_server_that_stops_reading_is_waited_for_no_longer_than_told_or_than_the_call() -> None:
    line, _theirs = wire(timeout_s=0.05)
    for wait in (lambda: line.send(bytes(8 << 20)), line.wait_to_receive):
        with pytest.raises(exceptions.TimeoutError):
            wait()
    line, _theirs = wire(timeout_s=5.0)
    while line.offer(memoryview(bytes(1 << 20))):
        pass
    now_s = time.monotonic()
    with EndsBy(now_s + 0.2), pytest.raises(exceptions.TimeoutError):
        line.wait_to_receive()
    assert time.monotonic() - now_s < 5


def test_a_line_without_an_end_is_refused() -> None:
    line, theirs = wire(timeout_s=2.0)
    theirs.sendall(b"-" + bytes(10_000))
    with pytest.raises(exceptions.InvalidResponse):
        line.read_line(5)


def test_a_command_arrives_whole_however_little_is_taken_at_once() -> None:
    line, theirs = wire()
    line.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_096)
    whole = b"head" + VALUE * 200 + b"tail"
    received = bytearray()

    def serve() -> None:
        while len(received) < len(whole):
            received.extend(theirs.recv(3_000))

    server = beside(serve)
    line.send(whole)
    server.join()
    assert received == whole


def test_an_offer_takes_what_there_is_room_for_and_waits_for_nothing() -> None:
    line, theirs = wire()
    view = memoryview(bytes(64 << 20))
    sent = 0
    while taken := line.offer(view[sent:]):
        sent += taken
    assert 0 < sent < len(view)
    theirs.sendall(b"x")
    assert line.wait_to_receive()
    assert line.receive() == b"x"


def test_a_connection_goes_back_with_the_time_out_it_came_with() -> None:
    line, _theirs = wire(timeout_s=7)
    line.end()
    connection = line._connection
    assert isinstance(connection, Connection)
    assert line.pool.released == [connection]
    assert connection._sock.gettimeout() == 7
    assert not connection.disconnected


@pytest.mark.parametrize("spoil", ["half read", "unrequested", "too much read", "ended"])
def test_a_connection_with_something_left_in_it_goes_back_closed(spoil: str) -> None:
    """Unexpected bytes would be taken as the next command's reply."""
    line, theirs = wire()
    assert line.is_fresh()
    if spoil == "half read":
        line.send(b"x")
    elif spoil == "unrequested":
        theirs.sendall(b"+OK\r\n")
    elif spoil == "too much read":
        theirs.sendall(b"$-1\r\n+OK\r\n")
        assert line.read_line(10) == b"$-1"
    else:
        theirs.close()
    assert spoil == "half read" or not line.is_fresh()
    line.end()
    assert line._connection.disconnected
    assert line.pool.released == [line._connection]


def test_a_connection_that_another_thread_closes_is_lost() -> None:
    """As when a client is closed with a call under way."""
    line, theirs = wire()
    line._connection.disconnect()
    for call in (line.wait_to_receive, line.receive, lambda: line.offer(memoryview(b"x"))):
        with pytest.raises(exceptions.ConnectionError):
            call()
    line.end()
    theirs.close()


PATIENCE_S = 120
THREADS = 8


@pytest.fixture(autouse=True)
def _kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause of the machine must not replace a connection."""
    monkeypatch.setattr(line_module, "KEEP_S", 1e9)


def connected(valkey: RedisServer, *, connections: int = 4, **options: object) -> redis.Redis:
    settings = {"protocol": 2, "socket_timeout": PATIENCE_S, "timeout": PATIENCE_S, **options}
    pool = redis.BlockingConnectionPool(port=valkey.port, max_connections=connections, **settings)
    return redis.Redis.from_pool(pool)


@pytest.fixture
def client(valkey: RedisServer) -> Iterator[redis.Redis]:
    with connected(valkey) as opened:
        yield opened


def taken(lines: RespConnections) -> RespConnection:
    line = lines.acquire("k")
    assert line is not None
    return line


def ping(line: RespConnection) -> None:
    line.send(packed(b"PING"))
    assert line.read_line(7) == b"+PONG"
    line.clean = True


def free(client: redis.Redis) -> int:
    pool = client.connection_pool
    assert isinstance(pool, redis.BlockingConnectionPool)
    return int(pool.pool.qsize())


def test_the_connections_of_this_redis_py_can_be_lent(client: redis.Redis) -> None:
    """If it fails, redis-py has renamed something: everything still works, at redis-py's speed."""
    lines = RespConnections(client)
    line = taken(lines)
    ping(line)
    lines.release(line)
    assert lines.acquire("k") is line


@pytest.mark.parametrize("kind", ["fakeredis", "RESP3", "single"])
def test_other_connections_are_not_lent_and_not_lost(valkey: RedisServer, kind: str) -> None:
    if kind == "fakeredis":
        assert RespConnections(fakeredis.FakeRedis()).acquire("k") is None
        return
    client = connected(valkey, connections=1, protocol=3 if kind == "RESP3" else 2)
    if kind == "single":
        client = client.client()
    assert RespConnections(client).acquire("k") is None
    assert client.ping()


def kill(_: RespConnection, server: RedisServer) -> None:
    server.client().client_kill_filter(_type="normal", skipme=True)


BEFORE: dict[str, tuple[Callable[[RespConnection, RedisServer], object], bool]] = {
    "closed by the server": (kill, False),
    "with an unread reply": (lambda line, _: line.send(packed(b"PING")), False),
    "with half a command": (lambda line, _: line.send(packed(b"PING")[:-4]), False),
    "old": (lambda line, _: setattr(line, "since_s", -math.inf), True),
}


@pytest.mark.parametrize(("use", "has_its_socket"), BEFORE.values(), ids=BEFORE)
def test_a_connection_that_is_closed_not_read_to_its_end_or_old_is_not_lent_again(
    valkey: RedisServer,
    client: redis.Redis,
    use: Callable[[RespConnection, RedisServer], object],
    has_its_socket: bool,
) -> None:
    """An old one is shown to its pool, which may replace it."""
    lines = RespConnections(client)
    line = taken(lines)
    sock = line.sock
    use(line, valkey)
    lines.release(line)
    again = taken(lines)
    ping(again)
    assert again is not line
    assert (again.sock is sock) is has_its_socket


def test_half_of_the_connections_are_kept_at_most_and_closing_returns_all(
    client: redis.Redis,
) -> None:
    lines = RespConnections(client)
    for line in [taken(lines) for _ in range(3)]:
        lines.release(line)
    assert free(client) == 2
    late = taken(lines)
    lines.close()
    lines.close()
    lines.release(late)
    assert free(client) == 4
    assert client.ping()


def test_nothing_is_kept_while_somebody_may_wait_for_it(valkey: RedisServer) -> None:
    with connected(valkey, connections=2) as client:
        lines = RespConnections(client)
        line, _ = taken(lines), taken(lines)
        lines.release(line)
        assert free(client) == 1


def test_threads_share_few_connections_with_the_clients_own_calls(valkey: RedisServer) -> None:
    with connected(valkey, connections=3, client_name="shared") as client:
        lines = RespConnections(client)

        def work(number: int) -> None:
            for _ in range(50):
                if number % 2:
                    assert client.ping()
                    continue
                line = taken(lines)
                ping(line)
                lines.release(line)

        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(work, range(THREADS)))
        assert sum(one["name"] == "shared" for one in client.client_list()) <= 3
        lines.close()
        assert free(client) == 3


def test_a_child_process_uses_none_of_its_parents_connections(client: redis.Redis) -> None:
    lines = RespConnections(client)
    line = taken(lines)
    lines.release(line)
    child = os.fork()
    if child == 0:
        try:
            own = taken(lines)
            ping(own)
            os._exit(0 if own is not line and own.sock is not line.sock else 2)
        except BaseException:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    again = lines.acquire("k")
    ping(again)
    assert again is line
