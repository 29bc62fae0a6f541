"""Connections are lent, kept and brought back without a pool's other users noticing."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import fakeredis
import pytest
import redis

from objkv.net import resp as line_module
from objkv.net.resp import RespConnection, RespConnections, packed
from tests.support.servers.redis import RedisServer

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


def ping(line: RespConnection | None) -> None:
    assert line is not None
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
    line = lines.take("k")
    ping(line)
    assert line is not None
    lines.give(line)
    assert lines.take("k") is line


@pytest.mark.parametrize("kind", ["fakeredis", "RESP3", "single"])
def test_other_connections_are_not_lent_and_not_lost(valkey: RedisServer, kind: str) -> None:
    if kind == "fakeredis":
        assert RespConnections(fakeredis.FakeRedis()).take("k") is None
        return
    client = connected(valkey, connections=1, protocol=3 if kind == "RESP3" else 2)
    if kind == "single":
        client = client.client()
    assert RespConnections(client).take("k") is None
    assert client.ping()


def test_a_kept_connection_that_the_server_closed_is_replaced(
    valkey: RedisServer, client: redis.Redis
) -> None:
    lines = RespConnections(client)
    first = lines.take("k")
    ping(first)
    assert first is not None
    lines.give(first)
    valkey.client().client_kill_filter(_type="normal", skipme=True)
    second = lines.take("k")
    ping(second)
    assert second is not first


@pytest.mark.parametrize("sent", [packed(b"PING"), packed(b"PING")[:-4]])
def test_what_was_not_read_to_its_end_is_not_lent_again(client: redis.Redis, sent: bytes) -> None:
    lines = RespConnections(client)
    line = lines.take("k")
    assert line is not None
    sock = line.sock
    line.send(sent)
    lines.give(line)
    again = lines.take("k")
    ping(again)
    assert again is not None
    assert again.sock is not sock


def test_a_connection_is_shown_to_its_pool_now_and_then(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = RespConnections(client)
    line = lines.take("k")
    assert line is not None
    lines.give(line)
    monkeypatch.setattr(line_module, "KEEP_S", 0.0)
    again = lines.take("k")
    ping(again)
    assert again is not None
    assert again is not line
    assert again.sock is line.sock


def test_the_last_connection_is_never_kept(valkey: RedisServer) -> None:
    with connected(valkey, connections=1, timeout=1) as client:
        lines = RespConnections(client)
        for _ in range(3):
            line = lines.take("k")
            ping(line)
            assert line is not None
            lines.give(line)
            assert client.ping()


def test_half_of_the_connections_are_kept_at_most(client: redis.Redis) -> None:
    lines = RespConnections(client)
    taken = [lines.take("k") for _ in range(3)]
    for line in taken:
        assert line is not None
        lines.give(line)
    assert free(client) == 2
    lines.close()
    assert free(client) == 4


def test_nothing_is_kept_while_somebody_may_wait_for_it(valkey: RedisServer) -> None:
    with connected(valkey, connections=2) as client:
        lines = RespConnections(client)
        taken = [lines.take("k"), lines.take("k")]
        assert taken[0] is not None
        lines.give(taken[0])
        assert free(client) == 1


def test_threads_share_few_connections_with_the_clients_own_calls(valkey: RedisServer) -> None:
    with connected(valkey, connections=3) as client:
        lines = RespConnections(client)

        def work(number: int) -> None:
            for _ in range(50):
                if number % 2:
                    assert client.ping()
                    continue
                line = lines.take("k")
                ping(line)
                assert line is not None
                lines.give(line)

        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(work, range(THREADS)))
        assert len(client.connection_pool._connections) <= 3
        lines.close()
        assert free(client) == 3


def test_closing_brings_everything_back(client: redis.Redis) -> None:
    lines = RespConnections(client)
    kept, late = lines.take("k"), lines.take("k")
    assert kept is not None
    assert late is not None
    lines.give(kept)
    lines.close()
    lines.close()
    lines.give(late)
    assert free(client) == 4
    assert client.ping()


def test_a_child_process_uses_none_of_its_parents_connections(client: redis.Redis) -> None:
    lines = RespConnections(client)
    line = lines.take("k")
    ping(line)
    assert line is not None
    lines.give(line)
    child = os.fork()
    if child == 0:
        try:
            own = lines.take("k")
            ping(own)
            os._exit(0 if own is not line and own is not None and own.sock is not line.sock else 2)
        except BaseException:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    again = lines.take("k")
    ping(again)
    assert again is line
