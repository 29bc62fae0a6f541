"""``RedisStore`` keeps what every store promises, and makes no copy of a value."""

import socket
import tracemalloc
from collections.abc import Callable

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from objkv.errors import StoreError, StoreUnavailable
from objkv.stores.redis import RedisStore
from tests.contracts.store_contract import ValuesContract
from tests.support.servers.listener import Scripted
from tests.support.servers.redis import RedisServer

TTL_S = 3_600
"""No test outlives it."""


@pytest.fixture
def store(client: redis.Redis) -> RedisStore:
    return RedisStore(client, prefix="objkv:p:", ttl_s=TTL_S)


class TestRedisStoreOnValkey(ValuesContract):
    @pytest.fixture
    def store(self, client: redis.Redis) -> RedisStore:
        return RedisStore(client, prefix="objkv:[p]*:", ttl_s=TTL_S)


def test_every_key_has_a_time_to_live_and_a_prefix(store: RedisStore, client: redis.Redis) -> None:
    RedisStore(client, prefix="objkv:q:", ttl_s=TTL_S).put("x", b"")
    store.put("a", b"")
    store.put_if_absent("b", b"")
    assert 0 < client.ttl("objkv:p:a") <= TTL_S
    assert 0 < client.ttl("objkv:p:b") <= TTL_S
    assert sorted(client.keys("objkv:p:*")) == [b"objkv:p:a", b"objkv:p:b"]


def test_age_is_what_has_passed_of_the_time_to_live(client: redis.Redis) -> None:
    now_s = 10_000.0
    store = RedisStore(client, prefix="", ttl_s=TTL_S, clock=lambda: now_s)
    store.put("k", b"")
    client.pexpire("k", 1_000_000)
    left_before_s = client.pttl("k") / 1000
    head = store.head("k")
    left_after_s = client.pttl("k") / 1000
    assert head is not None
    age_s = now_s - head.modified_s
    assert TTL_S - left_before_s - 1 <= age_s <= TTL_S - left_after_s + 1


MIB = 1 << 20
COPY_BYTES_MAX = 128 << 10
VALUE = bytes(range(256)) * (MIB // 256)


def room(nbytes: int) -> memoryview:
    return memoryview(bytearray(nbytes))


def extra_bytes(call: Callable[[], object]) -> int:
    """How much memory ``call`` takes at its highest, beyond what there is."""
    call()  # created once, before the test
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_gets_and_puts_make_no_copy_of_a_value(store: RedisStore) -> None:
    buffer = room(MIB)
    assert extra_bytes(lambda: store.put("k", VALUE)) < COPY_BYTES_MAX
    assert extra_bytes(lambda: store.put_if_absent("k", VALUE)) < COPY_BYTES_MAX
    assert extra_bytes(lambda: store.get_into("k", buffer)) < COPY_BYTES_MAX
    assert buffer == VALUE


def test_a_key_of_another_type_is_a_store_error(store: RedisStore, client: redis.Redis) -> None:
    client.hset("objkv:p:k", "field", "value")
    for _ in range(2):
        with pytest.raises(StoreError, match="WRONGTYPE"):
            store.get_into("k", room(9))
        with pytest.raises(StoreError, match="WRONGTYPE"):
            store.get_into("k", room(9), start=0)
    store.put("k", b"value")
    assert store.get_into("k", room(9)) == 5


def test_a_connection_that_the_server_closes_meanwhile_costs_no_value(
    store: RedisStore, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = room(5)
    calls: list[Callable[[], object]] = [
        lambda: store.put("k", b"value"),
        lambda: store.get_into("k", buffer),
        lambda: store.get_into("k", buffer, start=0),
        lambda: store.put_if_absent("l", b"value"),
    ]
    # It looks open until it is used, as one does that a firewall has forgotten.
    monkeypatch.setattr("objkv.net.resp.RespConnection._is_quiet", lambda _: True)
    store.put("k", b"value")
    for call in calls:
        client.client_kill_filter(_type="normal", skipme=True)
        call()
    assert buffer == b"value"
    assert store.get("l") == b"value"


def answering(get: bytes, *, closes: bool = False) -> Scripted:
    """A server that answers each GET with ``get``, and all else with OK."""

    def serve(connection: socket.socket) -> None:
        while data := connection.recv(65_536):
            is_get = b"GET" in data
            connection.sendall(get if is_get else b"+OK\r\n" * data.count(b"*"))
            if is_get and closes:
                return

    return Scripted(serve)


def at(server: Scripted, timeout_s: float = 120) -> redis.Redis:
    once = Retry(NoBackoff(), 0)
    return redis.Redis(port=server.address[1], protocol=2, socket_timeout=timeout_s, retry=once)


@pytest.mark.parametrize("closes", [True, False])
def test_a_value_that_ends_early_is_told_to_nobody(closes: bool) -> None:
    with answering(b"$100\r\nabcdefgh", closes=closes) as server, at(server, 1) as client:
        told: list[int] = []
        store = RedisStore(client, prefix="p:", ttl_s=TTL_S)
        with pytest.raises(StoreUnavailable):
            store.get_into("k", room(100), told.append)
        assert told == []


@pytest.mark.parametrize("head", [b"$", b"$x", b"$-2", b"$1 "])
def test_an_answer_that_announces_no_value_is_a_store_error(head: bytes) -> None:
    with answering(head + b"\r\n") as server, at(server) as client:
        store = RedisStore(client, prefix="p:", ttl_s=TTL_S)
        with pytest.raises(StoreError, match="instead of a value"):
            store.get_into("k", room(100))


def test_closing_gives_the_connections_back(valkey: RedisServer) -> None:
    pool = redis.BlockingConnectionPool(
        port=valkey.port, protocol=2, max_connections=4, timeout=120, socket_timeout=120
    )
    store = RedisStore(redis.Redis(connection_pool=pool), prefix="p:", ttl_s=TTL_S)
    assert store.get_into("k", room(1)) is None
    assert pool.pool.qsize() == 3
    store.close()
    store.close()
    assert pool.pool.qsize() == 4
