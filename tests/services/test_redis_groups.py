"""The index on real clusters and behind Sentinels, also while a primary dies."""

from contextlib import closing

import pytest
import redis

from objkv.assembly.redis import connect_redis
from objkv.config import Config
from objkv.errors import StoreUnavailable
from objkv.index.base import PruneIndex
from objkv.index.redis.index import RedisIndex
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
from tests.support.servers.fixtures import PATIENT, documented_rights, flushed
from tests.support.servers.redis import START_S, wait_until
from tests.support.servers.redis_groups import ServerGroup
from tests.support.servers.round_trips import RoundTrips

pytestmark = pytest.mark.service

CHUNKS = 300
HASHES = [prefix_hash(number) for number in range(1, CHUNKS + 1)]


def opened(url: str) -> RedisIndex:
    return RedisIndex(connect_redis(url, Config(index_url=url, **PATIENT)))


def fill(index: RedisIndex) -> None:
    for number in range(1, CHUNKS + 1):
        index.publish(chunk(number), {FIELD: shard()}, ttl_s=LONG_S)


def all_there(index: RedisIndex) -> bool:
    try:
        return all(index.lookup(NAMESPACE, HASHES))
    except StoreUnavailable:
        return False


def writable(index: RedisIndex) -> bool:
    try:
        fill(index)
    except StoreUnavailable:
        return False
    return True


class TestRedisIndexOnCluster(IndexContract):
    @pytest.fixture
    def clock(self, cluster: ServerGroup) -> ManualClock:
        return flushed(*cluster.primaries)

    @pytest.fixture
    def index(self, cluster: ServerGroup, clock: ManualClock) -> PruneIndex:
        config = Config(index_url=cluster.url, **PATIENT)
        return RedisIndex(connect_redis(cluster.url, config), clock=clock)

    def put_garbage(self, index: PruneIndex, number: int) -> None:
        assert isinstance(index, RedisIndex)
        index._client.set(f"objkv:i:{NAMESPACE}:{prefix_hash(number).hex()}", "theirs")


def test_records_are_spread_over_the_primaries(cluster: ServerGroup) -> None:
    flushed(*cluster.primaries)
    fill(opened(cluster.url))
    sizes = [server.client().dbsize() for server in cluster.primaries]
    assert sum(sizes) == CHUNKS
    assert min(sizes) > CHUNKS / 6


def test_lookup_and_touch_are_one_round_trip_to_each_primary(cluster: ServerGroup) -> None:
    flushed(*cluster.primaries)
    trips = RoundTrips()
    client = redis.RedisCluster(
        # Only with a URL does the client take the class of its connections.
        url=cluster.primaries[0].url,
        connection_class=trips.connection_class,
        protocol=2,
        socket_timeout=START_S,  # a repeated query is another round trip
    )
    with closing(RedisIndex(client)) as index:
        index.touch(NAMESPACE, HASHES, ttl_s=LONG_S)
        for call in (
            lambda: index.lookup(NAMESPACE, HASHES),
            lambda: index.touch(NAMESPACE, HASHES, ttl_s=LONG_S),
        ):
            before = trips.by_port.copy()
            call()
            assert trips.by_port - before == {node.port: 1 for node in cluster.primaries}


def test_a_user_with_the_documented_rights_can_use_a_cluster(cluster: ServerGroup) -> None:
    flushed(*cluster.primaries)
    rights = [*documented_rights().split(), "+cluster|slots", "+command"]
    for server in [*cluster.primaries, *cluster.replicas]:
        client = server.client()
        client.execute_command("ACL", "SETUSER", "objkv", "on", ">secret", "~objkv:*", *rights)
    user = {"redis_username": "objkv", "redis_password": "secret"}
    config = Config.model_validate({"index_url": cluster.url, **user, **PATIENT})
    index = RedisIndex(connect_redis(cluster.url, config))
    index.check()
    fill(index)
    index.touch(NAMESPACE, HASHES, ttl_s=LONG_S)
    assert all_there(index)
    assert index.lease("x", "me", ttl_ms=60_000)
    assert index.pin(NAMESPACE, HASHES[0], until_s=2**33, ttl_s=LONG_S)
    assert index.forget(NAMESPACE, HASHES[0], FIELD, shard())
    assert index.drop(NAMESPACE, HASHES[1])
    assert [one.payloads for one in index.usage()] == [CHUNKS - 2]
    assert len(list(index.scan(NAMESPACE))) == CHUNKS - 2


def test_scripts_that_nodes_forgot_are_told_again(cluster: ServerGroup) -> None:
    flushed(*cluster.primaries)
    index = opened(cluster.url)
    fill(index)
    for server in cluster.primaries:
        server.client().script_flush()
    index.touch(NAMESPACE, HASHES, ttl_s=LONG_S)
    assert {record and record.hits for record in index.lookup(NAMESPACE, HASHES)} == {1}


def test_a_single_client_at_a_cluster_says_what_to_write(cluster: ServerGroup) -> None:
    index = opened(f"redis://127.0.0.1:{cluster.primaries[0].port}")
    with pytest.raises(StoreUnavailable, match=r"redis\+cluster://"):
        fill(index)


def test_a_cluster_that_lost_a_primary_recovers_with_its_records(
    mortal_cluster: ServerGroup,
) -> None:
    index = opened(mortal_cluster.url)
    # A node that a busy machine did not run for a moment may just be replaced.
    wait_until(lambda: writable(index), "the cluster to be written")
    wait_until(lambda: all_there(index), "the cluster to have everything")
    primary, replica = mortal_cluster.primaries[0].client(), mortal_cluster.replicas[0].client()
    wait_until(lambda: replica.dbsize() == primary.dbsize(), "the replica to have everything")
    mortal_cluster.primaries[0].kill()
    wait_until(lambda: all_there(index), "the replica to take over")
    wait_until(lambda: writable(index), "the replica to be written")


def test_a_cluster_that_is_up_later_than_its_client_is_used(
    mortal_cluster: ServerGroup,
) -> None:
    servers = [*mortal_cluster.primaries, *mortal_cluster.replicas]
    index = opened(mortal_cluster.url)
    for server in servers:
        server.kill()
    with pytest.raises(StoreUnavailable):
        get(index)
    for server in servers:
        server.start()
    wait_until(lambda: writable(index), "the cluster to be whole again")


def test_a_fail_over_by_sentinel_is_followed(sentinel: ServerGroup) -> None:
    index = opened(sentinel.url)
    wait_until(lambda: writable(index), "the primary to be written")
    replica = sentinel.replicas[0].client()
    wait_until(lambda: replica.dbsize() == CHUNKS, "the replica to have everything")
    sentinel.primaries[0].kill()
    wait_until(lambda: all_there(index), "the replica to take over")
    wait_until(lambda: writable(index), "the replica to be written")
    assert f":{sentinel.replicas[0].port}" in str(index._client.client_info())


def test_a_sentinel_that_is_gone_is_not_needed(sentinel: ServerGroup) -> None:
    sentinel.watchers[0].kill()
    index = opened(sentinel.url)
    index.check()


def test_a_service_that_no_sentinel_knows_is_unavailable(sentinel: ServerGroup) -> None:
    with pytest.raises(StoreUnavailable, match="no Sentinel has a live primary 'other'"):
        opened(sentinel.url.replace("service=objkv", "service=other")).check()
