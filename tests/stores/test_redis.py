"""``RedisStore`` keeps what every store promises, against fakeredis and an embedded Valkey."""

from pathlib import Path

import fakeredis
import pytest
import redis
from redis import exceptions as failures
from redis.backoff import NoBackoff
from redis.retry import Retry

from objkv.errors import StoreDenied, StoreError, StoreUnavailable
from objkv.stores.redis import RedisStore
from tests.contracts.store_contract import StoreContract
from tests.support.servers.redis import valkey_server

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
    store = RedisStore(client, prefix="p:", ttl_s=TTL_S)
    with pytest.raises(StoreError) as caught:
        store.get("k")
    assert caught.value.__cause__ is error
    with pytest.raises(type(caught.value)):
        store.put_if_absent("k", b"")
    return caught.value


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
