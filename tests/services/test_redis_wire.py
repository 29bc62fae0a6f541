"""Payloads and finds on the sockets of TLS, of a cluster, and of a primary behind Sentinels."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from objkv.assembly.redis import connect_redis
from objkv.config import Config
from objkv.errors import StoreUnavailable
from objkv.index.redis.index import RedisIndex
from objkv.stores.redis import RedisStore
from tests.contracts.index_contract import FIELD, LONG_S, NAMESPACE, chunk, prefix_hash, shard
from tests.contracts.store_contract import StoreContract
from tests.support.servers.fixtures import PATIENT, flushed
from tests.support.servers.redis import RedisServer, wait_until
from tests.support.servers.redis_groups import ServerGroup

pytestmark = pytest.mark.service

VALUE = bytes(range(256)) * 8_192
HASHES = [prefix_hash(number) for number in range(1, 3_001)]


def opened_store(url: str, **settings: Any) -> RedisStore:
    config = Config.model_validate({"index_url": url, **PATIENT, **settings})
    return RedisStore(connect_redis(url, config), prefix="objkv:p:", ttl_s=3_600)


def direct(store: RedisStore) -> RedisStore:
    """``store``, which may not leave gets and puts of payloads to its client."""
    for name in ("get", "set", "pipeline"):
        setattr(store._client, name, None)
    return store


@pytest.fixture
def tls_settings(certificates: Path) -> dict[str, Any]:
    return {"redis_ca_file": certificates / "ca.pem"}


class TestRedisStoreOnTls(StoreContract):
    scans_in_order = False

    @pytest.fixture
    def store(self, redis_tls: RedisServer, tls_settings: dict[str, Any]) -> Iterator[RedisStore]:
        store = opened_store(redis_tls.url, **tls_settings)
        store._client.flushall()
        yield store
        store.close()


class TestRedisStoreOnCluster(StoreContract):
    scans_in_order = False

    @pytest.fixture
    def store(self, cluster: ServerGroup) -> Iterator[RedisStore]:
        flushed(*cluster.primaries)
        store = opened_store(cluster.url)
        yield store
        store.close()


def test_payloads_pass_the_sockets_of_tls(
    redis_tls: RedisServer, tls_settings: dict[str, Any]
) -> None:
    store = direct(opened_store(redis_tls.url, **tls_settings))
    move_payloads(store)


def test_payloads_pass_the_sockets_of_every_node(cluster: ServerGroup) -> None:
    flushed(*cluster.primaries)
    move_payloads(direct(opened_store(cluster.url)))
    assert all(server.client().dbsize() for server in cluster.primaries)


def move_payloads(store: RedisStore) -> None:
    for number in range(20):
        store.put(f"k{number}", VALUE[number:])
    buffer, told = memoryview(bytearray(len(VALUE))), list[int]()
    for number in range(20):
        told.clear()
        assert store.get_into(f"k{number}", buffer, told.append) == len(VALUE) - number
        assert buffer[: len(VALUE) - number] == VALUE[number:]
        assert told == sorted(told)
        assert not store.put_if_absent(f"k{number}", b"other")
        assert store.get_into(f"k{number}", buffer[:50], start=100) == 50
        assert buffer[:50] == VALUE[number:][100:150]
    assert store.get_into("absent", buffer) is None
    store.close()


def filled(url: str, **settings: Any) -> RedisIndex:
    config = Config.model_validate({"index_url": url, **PATIENT, **settings})
    index = RedisIndex(connect_redis(url, config))
    for number in range(1, 3_001, 100):
        index.publish(chunk(number), {FIELD: shard(number)}, ttl_s=LONG_S)
    return index


def sizes(index: RedisIndex) -> dict[int, int]:
    found = index.find(NAMESPACE, HASHES, [FIELD])
    return {n + 1: shards[FIELD].nbytes for n, shards in enumerate(found) if shards}


EXPECTED = {number: number for number in range(1, 3_001, 100)}


def test_finds_pass_the_sockets_of_tls(
    redis_tls: RedisServer, tls_settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    index = filled(redis_tls.url, **tls_settings)
    monkeypatch.setattr(index, "lookup", None)
    assert sizes(index) == EXPECTED
    index.close()


def test_finds_pass_the_sockets_of_every_node(
    cluster: ServerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed(*cluster.primaries)
    index = filled(cluster.url)
    monkeypatch.setattr(index, "lookup", None)
    assert sizes(index) == EXPECTED
    index.close()


def test_a_moved_slot_is_followed(cluster: ServerGroup) -> None:
    """As it looks to a client whose topology is an old one."""
    flushed(*cluster.primaries)
    index, store = filled(cluster.url), opened_store(cluster.url)
    buffer = memoryview(bytearray(9))
    for client in (index._client, store._client):
        client.ping()  # opens it
        slots = client.nodes_manager.slots_cache
        first = client.get_primaries()[0]
        for slot in slots:
            slots[slot] = [first]
    for number in range(20):
        store.put(f"k{number}", b"%d" % number)
        nbytes = store.get_into(f"k{number}", buffer)
        assert nbytes is not None
        assert buffer[:nbytes] == b"%d" % number
    assert sizes(index) == EXPECTED
    index.close()
    store.close()


def test_a_cluster_that_lost_a_primary_is_found_and_read_again(
    mortal_cluster: ServerGroup,
) -> None:
    wait_until(lambda: works(lambda: filled(mortal_cluster.url)), "the cluster to be written")
    index, store = filled(mortal_cluster.url), opened_store(mortal_cluster.url)
    for number in range(20):
        store.put(f"k{number}", b"value")
    primary, replica = mortal_cluster.primaries[0].client(), mortal_cluster.replicas[0].client()
    wait_until(lambda: replica.dbsize() == primary.dbsize(), "the replica to have everything")
    assert sizes(index) == EXPECTED
    mortal_cluster.primaries[0].kill()
    wait_until(lambda: works(lambda: sizes(index)), "the replica to take over")
    assert sizes(index) == EXPECTED
    buffer = memoryview(bytearray(5))
    for number in range(20):
        assert store.get_into(f"k{number}", buffer) == 5
        store.put(f"k{number}", b"again")


def test_a_primary_that_sentinel_replaced_is_found_and_read(sentinel: ServerGroup) -> None:
    wait_until(lambda: works(lambda: filled(sentinel.url)), "the primary to be written")
    index, store = filled(sentinel.url), opened_store(sentinel.url)
    store.put("k", b"value")
    replica = sentinel.replicas[0].client()
    wait_until(lambda: replica.dbsize() == len(EXPECTED) + 1, "the replica to have everything")
    assert sizes(index) == EXPECTED
    sentinel.primaries[0].kill()
    wait_until(lambda: works(lambda: sizes(index)), "the replica to take over")
    wait_until(lambda: works(lambda: store.put("l", b"other")), "the replica to be written")
    assert sizes(index) == EXPECTED
    assert store.get_into("k", memoryview(bytearray(5))) == 5


def works(call: Any) -> bool:
    try:
        call()
    except StoreUnavailable:
        return False
    return True
