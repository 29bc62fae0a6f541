"""Values pass between Redis and the caller's memory without a copy, or the client has to do it."""

import socket
import tracemalloc
from collections.abc import Callable
from threading import Thread

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from objkv.errors import StoreDenied, StoreError, StoreUnavailable, ValueTooLong
from objkv.stores.redis import UNDONE, RedisStore
from tests.support.servers.redis import RedisServer

TTL_S = 3_600
MIB = 1 << 20
COPY_BYTES_MAX = 128 << 10
VALUE = bytes(range(256)) * (MIB // 256)


@pytest.fixture
def store(client: redis.Redis) -> RedisStore:
    return RedisStore(client, prefix="p:", ttl_s=TTL_S)


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
    assert extra_bytes(lambda: store.get_into("k", buffer[1:], start=1)) < COPY_BYTES_MAX
    assert buffer == VALUE


def test_a_copy_would_be_noticed(store: RedisStore) -> None:
    """Else the test before this one would prove nothing."""
    store.put("k", VALUE)
    assert extra_bytes(lambda: store.get("k")) >= MIB


def test_the_client_is_not_needed_where_its_connections_can_be_lent(
    store: RedisStore, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("get", "set", "pipeline", "execute_command"):
        monkeypatch.setattr(client, name, None)
    buffer = room(MIB)
    assert store.put_if_absent("k", VALUE)
    assert not store.put_if_absent("k", b"other")
    assert store.get_into("k", buffer) == MIB
    store.put("k", b"new")
    assert store.get_into("k", buffer, start=1) == 2
    assert buffer[:2] == b"ew"
    assert store.get_into("absent", buffer) is None
    assert store.get_into("absent", buffer, start=0) is None
    assert store.get_into("k", buffer, start=10) == 0


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
@pytest.mark.parametrize("nbytes", [0, 1, 20, 100_000])
def test_what_is_put_is_gotten(store: RedisStore, kind: type, nbytes: int) -> None:
    store.put("k", kind(VALUE[:nbytes]))
    assert store.get("k") == VALUE[:nbytes]
    for extra in (0, 1, 10 * nbytes):
        buffer = room(nbytes + extra)
        assert store.get_into("k", buffer) == nbytes
        assert buffer[:nbytes] == VALUE[:nbytes]


def test_a_value_is_told_piece_by_piece_as_it_arrives(store: RedisStore) -> None:
    store.put("k", VALUE)
    buffer, told = room(MIB), list[int]()

    def arrived(nbytes: int) -> None:
        assert buffer[:nbytes] == VALUE[:nbytes]
        told.append(nbytes)

    assert store.get_into("k", buffer, arrived) == MIB
    assert told == sorted(set(told))
    assert told[-1] == MIB
    assert len(told) >= 4


def test_a_value_that_is_too_long_leaves_no_bytes_to_the_next_call(
    store: RedisStore, client: redis.Redis
) -> None:
    store.put("long", VALUE)
    store.put("short", b"short")
    buffer = room(10)
    for _ in range(3):
        with pytest.raises(ValueTooLong):
            store.get_into("long", buffer)
        assert store.get_into("short", buffer) == 5
        assert buffer[:5] == b"short"
    store.close()


def test_a_caller_who_stops_in_the_middle_leaves_no_bytes_to_the_next_call(
    store: RedisStore,
) -> None:
    store.put("k", VALUE)
    buffer = room(MIB)

    def stop(_: int) -> None:
        raise OSError("the caller's own")

    with pytest.raises(OSError, match="the caller's own"):
        store.get_into("k", buffer, stop)
    with pytest.raises(OSError, match="the caller's own"):
        store.get_into("k", buffer, stop, start=0)
    assert store.get_into("k", buffer) == MIB
    assert buffer == VALUE


def test_refusals_are_translated_as_the_clients_are(
    valkey: RedisServer, client: redis.Redis
) -> None:
    client.execute_command("ACL", "SETUSER", "weak", "on", ">secret", "~*", "-@all", "+client")
    user = redis.Redis(
        port=valkey.port, protocol=2, username="weak", password="secret", socket_timeout=120
    )
    store = RedisStore(user, prefix="p:", ttl_s=TTL_S)
    calls: list[Callable[[], object]] = [
        lambda: store.get_into("k", room(9)),
        lambda: store.get_into("k", room(9), start=0),
        lambda: store.put("k", b"value"),
        lambda: store.put_if_absent("k", b"value"),
    ]
    for call in calls * 2:
        with pytest.raises(StoreDenied, match="ACL"):
            call()
    client.execute_command("ACL", "DELUSER", "weak")


def test_a_key_of_another_type_is_a_store_error(store: RedisStore, client: redis.Redis) -> None:
    client.hset("p:k", "field", "value")
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


@pytest.mark.parametrize("end", ["closes", "stops"])
def test_a_value_that_was_begun_is_not_begun_again(end: str) -> None:
    """The beginning of another value may differ, and a verifier may have read this one's."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        gets = []

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                while data := connection.recv(65_536):
                    if b"GET" not in data:
                        connection.sendall(b"+OK\r\n" * data.count(b"*"))
                        continue
                    gets.append(data)
                    connection.sendall(b"$100\r\nabcdefgh")
                    if end == "closes":
                        return

        server = Thread(target=serve, daemon=True)
        server.start()
        client = redis.Redis(
            port=listening.getsockname()[1],
            protocol=2,
            socket_timeout=120,
            retry=Retry(NoBackoff(), 0),
        )
        connection = client.connection_pool.get_connection()
        client.connection_pool.release(connection)
        told: list[int] = []

        def arrived(nbytes: int) -> None:
            told.append(nbytes)
            if end == "stops":  # from here on: what comes before may take its time
                connection._sock.settimeout(0.05)

        with pytest.raises(StoreUnavailable):
            RedisStore(client, prefix="p:", ttl_s=TTL_S).get_into("k", room(100), arrived)
        server.join()
        assert (len(gets), told) == (1, [8])


@pytest.mark.parametrize("head", [b"$", b"$x", b"$-2", b"$1 "])
def test_an_answer_that_announces_no_value_is_a_store_error(head: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                while data := connection.recv(65_536):
                    is_get = b"GET" in data
                    connection.sendall(head + b"\r\n" if is_get else b"+OK\r\n" * data.count(b"*"))

        server = Thread(target=serve, daemon=True)
        server.start()
        port = listening.getsockname()[1]
        client = redis.Redis(port=port, protocol=2, socket_timeout=120)
        with pytest.raises(StoreError, match="instead of a value"):
            RedisStore(client, prefix="p:", ttl_s=TTL_S).get_into("k", room(100))
        client.close()
        server.join()


def test_a_value_without_room_is_the_clients(store: RedisStore) -> None:
    store.put("k", b"")
    assert store._values.get_into("p:k", room(0), None, 0) == UNDONE
    assert store.get_into("k", room(0), start=0) == 0
    assert store.get_into("absent", room(0), start=0) is None
    assert store.get_into("k", room(0)) == 0


def test_closing_gives_the_connections_back(valkey: RedisServer) -> None:
    pool = redis.BlockingConnectionPool(
        port=valkey.port, protocol=2, max_connections=4, timeout=120, socket_timeout=120
    )
    store = RedisStore(redis.Redis(connection_pool=pool), prefix="p:", ttl_s=TTL_S)
    store.put("k", b"value")
    assert pool.pool.qsize() == 3
    store.close()
    store.close()
    assert pool.pool.qsize() == 4
