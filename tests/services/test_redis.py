"""The index and the hot store on real servers: alone, with TLS, as a cluster and behind Sentinels,
also while a primary dies; and what is said at the wrong kind of server."""

import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis

from objkv.assembly.redis import connect_redis
from objkv.config import Config
from objkv.errors import StoreDenied, StoreUnavailable
from objkv.index.base import PruneIndex
from objkv.index.redis.index import RedisIndex
from objkv.stores.redis import RedisStore
from tests.contracts.clock import ManualClock
from tests.contracts.index_contract import (
    FIELD,
    LONG_S,
    NAMESPACE,
    IndexContract,
    chunk,
    get,
    prefix_hash,
    shard,
)
from tests.contracts.store_contract import ValuesContract
from tests.support.servers.fixtures import PATIENT, flushed
from tests.support.servers.redis import START_S, RedisServer
from tests.support.servers.redis_groups import ServerGroup
from tests.support.servers.round_trips import RoundTrips
from tests.support.waiting import wait_for_server

pytestmark = pytest.mark.slow

VALUE = bytes(range(256)) * 8_192
HASHES = [prefix_hash(number) for number in range(1, 3_001)]
EXPECTED = {number: number for number in range(1, 3_001, 100)}


def index_at(url: str, **settings: Any) -> RedisIndex:
    config = Config.model_validate({"index_url": url, **PATIENT, **settings})
    return RedisIndex(connect_redis(config))


def store_at(url: str, **settings: Any) -> RedisStore:
    config = Config.model_validate({"index_url": url, **PATIENT, **settings})
    return RedisStore(connect_redis(config), prefix="objkv:p:", ttl_s=3_600)


def fill(index: RedisIndex) -> None:
    for number in EXPECTED:
        index.publish(chunk(number), {FIELD: shard(number)}, ttl_s=LONG_S)


def sizes(index: RedisIndex) -> dict[int, int]:
    found = index.find(NAMESPACE, HASHES, [FIELD])
    return {n + 1: shards[FIELD].nbytes for n, shards in enumerate(found) if shards}


def works(call: Callable[[], Any]) -> bool:
    try:
        call()
    except StoreUnavailable:
        return False
    return True


class TestRedisIndexOnCluster(IndexContract):
    def put_garbage(self, index: PruneIndex, number: int) -> None:
        assert isinstance(index, RedisIndex)
        index.client.set(f"objkv:i:{NAMESPACE}:{prefix_hash(number).hex()}", "theirs")

    @pytest.fixture
    def clock(self, cluster: ServerGroup) -> ManualClock:
        return flushed(*cluster.primaries)

    @pytest.fixture
    def index(self, cluster: ServerGroup, clock: ManualClock) -> PruneIndex:
        config = Config(index_url=cluster.url, **PATIENT)
        return RedisIndex(connect_redis(config), clock=clock)


@pytest.fixture
def trusting(certificates: Path) -> dict[str, Any]:
    return {"redis_ca_file": certificates / "ca.pem"}


class TestRedisStoreOnTls(ValuesContract):
    @pytest.fixture
    def store(self, redis_tls: RedisServer, trusting: dict[str, Any]) -> Iterator[RedisStore]:
        store = store_at(redis_tls.url, **trusting)
        store.client.flushall()
        yield store
        store.close()


class TestRedisStoreOnCluster(ValuesContract):
    @pytest.fixture
    def store(self, cluster: ServerGroup) -> Iterator[RedisStore]:
        flushed(*cluster.primaries)
        store = store_at(cluster.url)
        yield store
        store.close()


def pass_directly(store: RedisStore, index: RedisIndex) -> None:
    fill(index)
    buffer, told = memoryview(bytearray(len(VALUE))), list[int]()
    for number in range(20):
        store.put(f"k{number}", VALUE[number:])
        assert not store.put_if_absent(f"k{number}", b"other")
        assert store.get_into(f"k{number}", buffer[:50], start=100) == 50
        assert buffer[:50] == VALUE[number:][100:150]
    for name in ("get", "set", "pipeline"):
        setattr(store.client, name, None)
    index.lookup = None  # type: ignore[assignment,method-assign]
    for number in range(20):
        told.clear()
        assert store.get_into(f"k{number}", buffer, told.append) == len(VALUE) - number
        assert buffer[: len(VALUE) - number] == VALUE[number:]
        assert told == [len(VALUE) - number]
    assert store.get_into("absent", buffer) is None
    assert sizes(index) == EXPECTED
    index.close()
    store.close()


def test_payloads_and_finds_pass_the_sockets_of_tls(
    redis_tls: RedisServer, trusting: dict[str, Any]
) -> None:
    pass_directly(store_at(redis_tls.url, **trusting), index_at(redis_tls.url, **trusting))


def test_payloads_and_finds_pass_the_sockets_of_every_node(cluster: ServerGroup) -> None:
    flushed(*cluster.primaries)
    pass_directly(store_at(cluster.url), index_at(cluster.url))
    counts = [server.client().dbsize() for server in cluster.primaries]
    assert min(counts) > sum(counts) / 8


def test_tls_needs_the_right_authority_and_takes_a_certificate(
    redis_tls: RedisServer, certificates: Path, trusting: dict[str, Any]
) -> None:
    index_at(redis_tls.url, **trusting).publish(chunk(), {FIELD: shard()}, ttl_s=LONG_S)
    files = {
        "redis_cert_file": certificates / "cert.pem",
        "redis_key_file": certificates / "key.pem",
    }
    assert get(index_at(redis_tls.url, **trusting, **files)) is not None
    for settings in ({"redis_ca_file": certificates / "other-ca.pem"}, {}):
        with pytest.raises(StoreDenied, match="set redis_ca_file to the PEM file of the CA"):
            index_at(redis_tls.url, **settings).check()


def test_lookup_and_touch_are_one_round_trip_to_each_primary(cluster: ServerGroup) -> None:
    flushed(*cluster.primaries)
    trips, hashes = RoundTrips(), HASHES[:300]
    client = redis.RedisCluster(
        # Only with a URL does the client take the class of its connections.
        url=cluster.primaries[0].url,
        connection_class=trips.connection_class,
        protocol=2,
        socket_timeout=START_S,  # a repeated query is another round trip
    )
    with closing(RedisIndex(client)) as index:
        index.touch(NAMESPACE, hashes, ttl_s=LONG_S)
        for call in (
            lambda: index.lookup(NAMESPACE, hashes),
            lambda: index.touch(NAMESPACE, hashes, ttl_s=LONG_S),
        ):
            before = trips.by_port.copy()
            call()
            assert trips.by_port - before == {node.port: 1 for node in cluster.primaries}


def test_a_moved_slot_is_followed(cluster: ServerGroup) -> None:
    """As it looks to a client whose topology is an old one."""
    flushed(*cluster.primaries)
    index, store = index_at(cluster.url), store_at(cluster.url)
    fill(index)
    buffer = memoryview(bytearray(9))
    for client in (index.client, store.client):
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


def outlives_a_primary(group: ServerGroup) -> RedisIndex:
    """Records and values are there again once a replica has taken over."""
    index, store = index_at(group.url), store_at(group.url)
    # A node that a busy machine did not run for a moment may just be replaced.
    wait_for_server(lambda: works(lambda: fill(index)), "the group to be written")
    for number in range(20):
        store.put(f"k{number}", b"value")
    primary, replica = group.primaries[0].client(), group.replicas[0].client()
    wait_for_server(lambda: replica.dbsize() == primary.dbsize(), "the replica to have everything")
    assert sizes(index) == EXPECTED
    group.primaries[0].kill()
    wait_for_server(lambda: works(lambda: sizes(index)), "the replica to take over")
    assert sizes(index) == EXPECTED
    assert all(index.lookup(NAMESPACE, [prefix_hash(number) for number in EXPECTED]))
    wait_for_server(lambda: works(lambda: fill(index)), "the replica to be written")
    buffer = memoryview(bytearray(5))
    for number in range(20):
        assert store.get_into(f"k{number}", buffer) == 5
        store.put(f"k{number}", b"again")
    return index


def test_a_cluster_that_lost_a_primary_recovers_with_its_records_and_values(
    mortal_cluster: ServerGroup,
) -> None:
    outlives_a_primary(mortal_cluster)


def test_a_fail_over_by_sentinel_is_followed(sentinel: ServerGroup) -> None:
    index = outlives_a_primary(sentinel)
    assert f":{sentinel.replicas[0].port}" in str(index.client.client_info())


def test_one_sentinel_fewer_is_enough_and_must_know_the_service(sentinel: ServerGroup) -> None:
    with pytest.raises(StoreUnavailable, match="no Sentinel has a live primary 'other'"):
        index_at(sentinel.url.replace("service=objkv", "service=other")).check()
    sentinel.watchers[0].kill()
    index_at(sentinel.url).check()


KINDS = [("", ""), ("+cluster", ""), ("+sentinel", "/0?service=objkv")]


@pytest.mark.parametrize(("kind", "end"), KINDS)
def test_tls_where_there_is_none_and_none_where_there_is(
    valkey: RedisServer, redis_tls: RedisServer, kind: str, end: str
) -> None:
    mute = index_at(f"rediss{kind}://127.0.0.1:{valkey.port}{end}", lookup_deadline_ms=500)
    with pytest.raises(StoreUnavailable, match="redis if the server does not use TLS"):
        mute.check()
    with pytest.raises(StoreUnavailable, match="rediss if the server requires TLS"):
        index_at(f"redis{kind}://127.0.0.1:{redis_tls.port}{end}").check()


def test_a_cluster_taken_for_a_server_and_the_reverse(
    cluster: ServerGroup, redis_alone: RedisServer
) -> None:
    with pytest.raises(StoreUnavailable, match=r"redis\+cluster://"):
        fill(index_at(f"redis://127.0.0.1:{cluster.primaries[0].port}"))
    with pytest.raises(StoreDenied, match="use redis:// or rediss://"):
        index_at(redis_alone.url.replace("redis://", "redis+cluster://")).check()


def test_who_does_not_answer_is_unavailable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(StoreUnavailable) as caught:
        index_at(f"redis://127.0.0.1:{port}").check()
    assert "TLS" not in str(caught.value)
    with pytest.raises(StoreUnavailable, match="no Sentinel in index_url answers") as caught:
        index_at(f"redis+sentinel://127.0.0.1:{port}/0?service=kv").check()
    assert "ConnectionPool" not in str(caught.value)
