"""``RedisStore`` keeps what every store promises, and makes no copy of a value."""

import socket
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import fakeredis
import pytest
import redis
from redis import exceptions as failures
from redis.backoff import NoBackoff
from redis.retry import Retry

from objkv.errors import StoreDenied, StoreError, StoreUnavailable, ValueTooLong
from objkv.stores.redis import UNDONE, RedisStore
from tests.contracts.store_contract import StoreContract
from tests.support.servers.listener import Scripted
from tests.support.servers.redis import RedisServer, valkey_server

TTL_S = 3_600
"""No test outlives it."""


class TestRedisStoreOnFakeredis(StoreContract):
    scans_in_order = False

    @pytest.fixture
    def store(self) -> RedisStore:
        return RedisStore(fakeredis.FakeRedis(), prefix="objkv:[p]*:", ttl_s=TTL_S)


@pytest.fixture
def store(client: redis.Redis) -> RedisStore:
    return RedisStore(client, prefix="objkv:p:", ttl_s=TTL_S)


class TestRedisStoreOnValkey(StoreContract):
    scans_in_order = False

    @pytest.fixture
    def store(self, client: redis.Redis) -> RedisStore:
        return RedisStore(client, prefix="objkv:[p]*:", ttl_s=TTL_S)


def test_every_key_has_a_time_to_live(store: RedisStore, client: redis.Redis) -> None:
    store.put("a", b"")
    store.put_if_absent("b", b"")
    assert 0 < client.ttl("objkv:p:a") <= TTL_S
    assert 0 < client.ttl("objkv:p:b") <= TTL_S


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


def test_scan_leaves_other_prefixes_alone(store: RedisStore, client: redis.Redis) -> None:
    other = RedisStore(client, prefix="objkv:q:", ttl_s=TTL_S)
    other.put("x", b"")
    store.put("y", b"")
    assert [entry.key for entry in store.scan("")] == ["y"]


def test_values_are_opaque(store: RedisStore) -> None:
    value = bytes(range(256))
    store.put("k", value)
    assert store.get("k") == value


UNAVAILABLE = [
    failures.ConnectionError("refused"),
    failures.TimeoutError("slow"),
    failures.BusyLoadingError("loading"),
    failures.ReadOnlyError("replica"),
    failures.OutOfMemoryError("used memory > maxmemory"),
    failures.ClusterDownError("down"),
    failures.SlotNotCoveredError("slot 7"),
    failures.MaxConnectionsError("too many"),
    failures.TryAgainError("moving"),
    failures.MovedError("7 127.0.0.1:7000"),
    failures.ResponseError("LOADING the dataset in memory"),
    failures.ResponseError("MASTERDOWN Link with MASTER is down"),
    redis.sentinel.MasterNotFoundError("no primary"),
]
DENIED = [
    failures.AuthenticationError("invalid password"),
    failures.NoPermissionError("this user has no permissions"),
    failures.ResponseError("NOAUTH Authentication required."),
    failures.ResponseError("WRONGPASS invalid username-password pair"),
    failures.ResponseError("NOPERM no permissions to run 'get'"),
]
OTHER = [failures.ResponseError("WRONGTYPE Operation against a key")]


@pytest.mark.parametrize("error", [*UNAVAILABLE, *DENIED, *OTHER])
def test_errors_say_who_can_act(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = StoreUnavailable if error in UNAVAILABLE else StoreDenied
    client = fakeredis.FakeRedis()

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(client, "execute_command", fail)
    store = RedisStore(client, prefix="p:", ttl_s=TTL_S)
    for call in (lambda: store.get("k"), lambda: store.put_if_absent("k", b"")):
        with pytest.raises(StoreError) as caught:
            call()
        assert type(caught.value) is (StoreError if error in OTHER else kind)
        assert caught.value.__cause__ is error
        assert ("ACL" in str(caught.value)) is (error in DENIED)


def test_a_server_that_goes_away_is_unavailable_until_it_is_back(tmp_path: Path) -> None:
    with valkey_server(tmp_path) as server:
        once = Retry(NoBackoff(), 0)
        client = redis.Redis(host="127.0.0.1", port=server.port, socket_timeout=120, retry=once)
        store = RedisStore(client, prefix="p:", ttl_s=TTL_S)
        store.check()
        server.stop()
        for call in (store.check, lambda: store.get("k"), lambda: store.put("k", b"")):
            with pytest.raises(StoreUnavailable):
                call()
        server.start()
        store.check()
        assert store.get("k") is None
        store.close()


def test_repr_says_where(store: RedisStore) -> None:
    assert repr(store) == "<RedisStore objkv:p:* for 3600 s>"


MIB = 1 << 20
COPY_BYTES_MAX = 128 << 10
VALUE = bytes(range(256)) * (MIB // 256)


@pytest.fixture
def direct(client: redis.Redis) -> RedisStore:
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


def test_gets_and_puts_make_no_copy_of_a_value(direct: RedisStore) -> None:
    buffer = room(MIB)
    assert extra_bytes(lambda: direct.put("k", VALUE)) < COPY_BYTES_MAX
    assert extra_bytes(lambda: direct.put_if_absent("k", VALUE)) < COPY_BYTES_MAX
    assert extra_bytes(lambda: direct.get_into("k", buffer)) < COPY_BYTES_MAX
    assert buffer == VALUE
    assert extra_bytes(lambda: direct.get_into("k", buffer[1:], start=1)) < COPY_BYTES_MAX
    assert buffer == VALUE


def test_a_copy_would_be_noticed(direct: RedisStore) -> None:
    """Else the test before this one would prove nothing."""
    direct.put("k", VALUE)
    assert extra_bytes(lambda: direct.get("k")) >= MIB


def test_the_client_is_not_needed_where_its_connections_can_be_lent(
    direct: RedisStore, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("get", "set", "pipeline", "execute_command"):
        monkeypatch.setattr(client, name, None)
    buffer = room(MIB)
    assert direct.put_if_absent("k", VALUE)
    assert not direct.put_if_absent("k", b"other")
    assert direct.get_into("k", buffer) == MIB
    direct.put("k", b"new")
    assert direct.get_into("k", buffer, start=1) == 2
    assert buffer[:2] == b"ew"
    assert direct.get_into("absent", buffer) is None
    assert direct.get_into("absent", buffer, start=0) is None
    assert direct.get_into("k", buffer, start=10) == 0


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
@pytest.mark.parametrize("nbytes", [0, 1, 20, 100_000])
def test_what_is_put_is_gotten(direct: RedisStore, kind: type, nbytes: int) -> None:
    direct.put("k", kind(VALUE[:nbytes]))
    assert direct.get("k") == VALUE[:nbytes]
    for extra in (0, 1, 10 * nbytes):
        buffer = room(nbytes + extra)
        assert direct.get_into("k", buffer) == nbytes
        assert buffer[:nbytes] == VALUE[:nbytes]


def test_a_value_is_told_piece_by_piece_as_it_arrives(direct: RedisStore) -> None:
    direct.put("k", VALUE)
    buffer, told = room(MIB), list[int]()

    def arrived(nbytes: int) -> None:
        assert buffer[:nbytes] == VALUE[:nbytes]
        told.append(nbytes)

    assert direct.get_into("k", buffer, arrived) == MIB
    assert told == sorted(set(told))
    assert told[-1] == MIB
    assert len(told) >= 4


def test_a_value_that_is_too_long_leaves_no_bytes_to_the_next_call(
    direct: RedisStore, client: redis.Redis
) -> None:
    direct.put("long", VALUE)
    direct.put("short", b"short")
    buffer = room(10)
    for _ in range(3):
        with pytest.raises(ValueTooLong):
            direct.get_into("long", buffer)
        assert direct.get_into("short", buffer) == 5
        assert buffer[:5] == b"short"
    direct.close()


def test_a_caller_who_stops_in_the_middle_leaves_no_bytes_to_the_next_call(
    direct: RedisStore,
) -> None:
    direct.put("k", VALUE)
    buffer = room(MIB)

    def stop(_: int) -> None:
        raise OSError("the caller's own")

    with pytest.raises(OSError, match="the caller's own"):
        direct.get_into("k", buffer, stop)
    with pytest.raises(OSError, match="the caller's own"):
        direct.get_into("k", buffer, stop, start=0)
    assert direct.get_into("k", buffer) == MIB
    assert buffer == VALUE


def test_refusals_are_translated_as_the_clients_are(
    valkey: RedisServer, client: redis.Redis
) -> None:
    client.execute_command("ACL", "SETUSER", "weak", "on", ">secret", "~*", "-@all", "+client")
    user = redis.Redis(
        port=valkey.port, protocol=2, username="weak", password="secret", socket_timeout=120
    )
    direct = RedisStore(user, prefix="p:", ttl_s=TTL_S)
    calls: list[Callable[[], object]] = [
        lambda: direct.get_into("k", room(9)),
        lambda: direct.get_into("k", room(9), start=0),
        lambda: direct.put("k", b"value"),
        lambda: direct.put_if_absent("k", b"value"),
    ]
    for call in calls * 2:
        with pytest.raises(StoreDenied, match="ACL"):
            call()
    client.execute_command("ACL", "DELUSER", "weak")


def test_a_key_of_another_type_is_a_store_error(direct: RedisStore, client: redis.Redis) -> None:
    client.hset("p:k", "field", "value")
    for _ in range(2):
        with pytest.raises(StoreError, match="WRONGTYPE"):
            direct.get_into("k", room(9))
        with pytest.raises(StoreError, match="WRONGTYPE"):
            direct.get_into("k", room(9), start=0)
    direct.put("k", b"value")
    assert direct.get_into("k", room(9)) == 5


def test_a_connection_that_the_server_closes_meanwhile_costs_no_value(
    direct: RedisStore, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = room(5)
    calls: list[Callable[[], object]] = [
        lambda: direct.put("k", b"value"),
        lambda: direct.get_into("k", buffer),
        lambda: direct.get_into("k", buffer, start=0),
        lambda: direct.put_if_absent("l", b"value"),
    ]
    # It looks open until it is used, as one does that a firewall has forgotten.
    monkeypatch.setattr("objkv.net.resp.RespConnection._is_quiet", lambda _: True)
    direct.put("k", b"value")
    for call in calls:
        client.client_kill_filter(_type="normal", skipme=True)
        call()
    assert buffer == b"value"
    assert direct.get("l") == b"value"


def answering(get: bytes, *, closes: bool = False) -> Scripted:
    """A server that answers each GET with ``get``, and all else with OK."""

    def serve(connection: socket.socket) -> None:
        while data := connection.recv(65_536):
            is_get = b"GET" in data
            connection.sendall(get if is_get else b"+OK\r\n" * data.count(b"*"))
            if is_get and closes:
                return

    return Scripted(serve)


def at(server: Scripted) -> redis.Redis:
    once = Retry(NoBackoff(), 0)
    return redis.Redis(port=server.address[1], protocol=2, socket_timeout=120, retry=once)


@pytest.mark.parametrize("closes", [True, False])
def test_a_value_that_was_begun_is_not_begun_again(closes: bool) -> None:
    """The beginning of another value may differ, and a verifier may have read this one's."""
    with answering(b"$100\r\nabcdefgh", closes=closes) as server, at(server) as client:
        connection = client.connection_pool.get_connection()
        client.connection_pool.release(connection)
        told: list[int] = []

        def arrived(nbytes: int) -> None:
            told.append(nbytes)
            if not closes:  # from here on: what comes before may take its time
                connection._sock.settimeout(0.05)

        with pytest.raises(StoreUnavailable):
            RedisStore(client, prefix="p:", ttl_s=TTL_S).get_into("k", room(100), arrived)
        assert (server.connections, told) == (1, [8])


@pytest.mark.parametrize("head", [b"$", b"$x", b"$-2", b"$1 "])
def test_an_answer_that_announces_no_value_is_a_store_error(head: bytes) -> None:
    with answering(head + b"\r\n") as server, at(server) as client:
        store = RedisStore(client, prefix="p:", ttl_s=TTL_S)
        with pytest.raises(StoreError, match="instead of a value"):
            store.get_into("k", room(100))


def test_a_value_without_room_is_the_clients(direct: RedisStore) -> None:
    direct.put("k", b"")
    assert direct._values.get_into("p:k", room(0), None, 0) == UNDONE
    assert direct.get_into("k", room(0), start=0) == 0
    assert direct.get_into("absent", room(0), start=0) is None
    assert direct.get_into("k", room(0)) == 0


def test_closing_gives_the_connections_back(valkey: RedisServer) -> None:
    pool = redis.BlockingConnectionPool(
        port=valkey.port, protocol=2, max_connections=4, timeout=120, socket_timeout=120
    )
    direct = RedisStore(redis.Redis(connection_pool=pool), prefix="p:", ttl_s=TTL_S)
    direct.put("k", b"value")
    assert pool.pool.qsize() == 3
    direct.close()
    direct.close()
    assert pool.pool.qsize() == 4
