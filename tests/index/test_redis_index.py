import json

import fakeredis
import pytest
import redis
from redis import exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from objkv.errors import StoreDenied, StoreError, StoreUnavailable
from objkv.index.base import ChunkEntry, PruneIndex
from objkv.index.redis.index import RedisIndex
from objkv.index.shapes import SHAPES_HASH
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
from tests.support.servers.fixtures import flushed
from tests.support.servers.redis import RedisServer, wait_until
from tests.support.servers.round_trips import RoundTrips

NEVER = Retry(NoBackoff(), 0)
PATIENCE_S = 120
"""For a server on a machine that is busy with other things."""
GOOD = {"parent": "00" * 20, "tokens": "0-256"}
KEY = f"objkv:i:{NAMESPACE}:{prefix_hash(1).hex()}"


class TestRedisIndexOnValkey(IndexContract):
    @pytest.fixture
    def clock(self, valkey: RedisServer) -> ManualClock:
        return flushed(valkey)

    @pytest.fixture
    def index(self, valkey: RedisServer, clock: ManualClock) -> PruneIndex:
        return RedisIndex(valkey.client(), clock=clock)

    def put_garbage(self, index: PruneIndex, number: int) -> None:
        assert isinstance(index, RedisIndex)
        index._client.set(f"objkv:i:{NAMESPACE}:{prefix_hash(number).hex()}", "theirs")


def counted(server: RedisServer, trips: RoundTrips) -> redis.Redis:
    pool = redis.ConnectionPool(
        connection_class=trips.connection_class,
        port=server.port,
        protocol=2,
        socket_timeout=PATIENCE_S,
    )
    return redis.Redis.from_pool(pool)


@pytest.mark.parametrize(
    "fields",
    [
        {FIELD: "[1]"},
        GOOD,
        {**GOOD, FIELD: "not JSON"},
        {**GOOD, FIELD: "[" * 10_000},
        {**GOOD, FIELD: json.dumps([1, 2, "none", 0, "c", 1e999])},
        {**GOOD, FIELD: json.dumps([1, 2, "none", 0, "c", 5])},
        {**GOOD, FIELD: json.dumps([1, 2, "none", True, "c", 5], separators=(",", ":"))},
        {**GOOD, FIELD: json.dumps({"nbytes": 1}), "tokens": "0-256"},
        {FIELD: '[1,2,"none",0,"c",5]', "tokens": "0-256"},
        {FIELD: '[1,2,"none",0,"c",5]', "tokens": "0-256", "parent": "beef"},
        {FIELD: '[1,2,"none",0,"c",5]', "tokens": "0-256", "parent": b"\xff"},
        {FIELD: '[1,2,"none",0,"c",5]', "parent": "00" * 20, "tokens": "many"},
        {FIELD: '[1,2,"none",0,"c",5]', **GOOD, "hits": "many"},
    ],
)
def test_hashes_that_no_objkv_wrote_are_absent(
    client: redis.Redis, fields: dict[str, str | bytes]
) -> None:
    client.hset(KEY, mapping=fields)
    index = RedisIndex(client)
    assert get(index) is None
    assert list(index.scan(NAMESPACE)) == []
    index.touch(NAMESPACE, [prefix_hash(1)], ttl_s=LONG_S)
    index.publish(chunk(), {FIELD: shard()}, ttl_s=LONG_S)


def test_a_record_of_shapes_that_is_too_large_is_not_read(client: redis.Redis) -> None:
    """Every replica looks it up, and a writer could fill it for all the others."""
    index = RedisIndex(client)
    shapes = ChunkEntry(NAMESPACE, SHAPES_HASH, SHAPES_HASH, 0, 1)
    for hashes in ([SHAPES_HASH], [prefix_hash(1), SHAPES_HASH]):
        assert index.lookup(NAMESPACE, hashes) == [None] * len(hashes)
    index.publish(chunk(), {FIELD: shard()}, ttl_s=LONG_S)
    index.publish(shapes, {FIELD: shard()}, ttl_s=LONG_S)
    assert None not in index.lookup(NAMESPACE, [prefix_hash(1), SHAPES_HASH])
    key = KEY.rpartition(":")[0] + f":{SHAPES_HASH.hex()}"
    client.hset(key, mapping={f"9.L0-{n}_H0-1": "[0]" for n in range(1, 5_000)})
    found = index.lookup(NAMESPACE, [prefix_hash(1), SHAPES_HASH])
    assert [one is None for one in found] == [False, True]
    client.delete(key)
    client.set(key, "text")
    assert index.lookup(NAMESPACE, [SHAPES_HASH]) == [None]


def test_fields_of_a_later_version_do_not_hide_the_others(client: redis.Redis) -> None:
    index = RedisIndex(client)
    index.publish(chunk(), {FIELD: shard()}, ttl_s=LONG_S)
    client.hset(KEY, mapping={"colour": "red", "0.L9-1_H0-1": "[1,2,3]"})
    record = get(index)
    assert record is not None
    assert record.shards == {FIELD: shard()}


def test_a_record_is_written_as_documented(client: redis.Redis) -> None:
    index = RedisIndex(client, clock=lambda: 1_700_000_007.5)
    index.publish(chunk(), {FIELD: shard(4096)}, ttl_s=LONG_S)
    index.touch(NAMESPACE, [prefix_hash(1)], ttl_s=LONG_S)
    assert client.hgetall(KEY) == {
        b"parent": b"00" * 20,
        b"tokens": b"0-256",
        b"hits": b"1",
        b"touched": b"1700000007",
        FIELD.encode(): b'[4096,4095,"none",1,"00000000000000000000000000001000",1700000000]',
    }


def test_every_key_expires_but_the_totals(client: redis.Redis) -> None:
    index = RedisIndex(client)
    for number in (1, 2, 3):
        index.publish(chunk(number), {FIELD: shard()}, ttl_s=LONG_S)
    index.touch(NAMESPACE, [prefix_hash(n) for n in (1, 2, 3, 4)], ttl_s=LONG_S)
    index.lease("x", "me", ttl_ms=LONG_S)
    index.pin(NAMESPACE, prefix_hash(1), until_s=2**33, ttl_s=LONG_S)
    index.usage()
    lasting = [key for key in client.scan_iter() if client.pttl(key) == -1]
    assert lasting == [b"objkv:u:totals"]


def test_a_record_really_expires(client: redis.Redis) -> None:
    index = RedisIndex(client)
    index.publish(chunk(), {FIELD: shard()}, ttl_s=1)
    wait_until(lambda: get(index) is None, "the record to expire", bound_s=60)


def test_the_holder_of_a_lease_renews_it(client: redis.Redis) -> None:
    index = RedisIndex(client)
    index.lease("x", "me", ttl_ms=1_000)
    index.lease("x", "me", ttl_ms=60_000)
    assert client.pttl("objkv:l:x") > 1_000


def test_a_lookup_of_a_thousand_hashes_is_one_round_trip(valkey: RedisServer) -> None:
    trips = RoundTrips()
    index = RedisIndex(counted(valkey, trips))
    index.check()
    before = trips.count
    index.lookup(NAMESPACE, [prefix_hash(n) for n in range(1000)])
    assert trips.count - before == 1
    index.close()


def test_a_touch_of_a_thousand_hashes_is_one_round_trip_once_the_server_knows_the_script(
    valkey: RedisServer,
) -> None:
    trips = RoundTrips()
    index = RedisIndex(counted(valkey, trips))
    index.touch(NAMESPACE, [prefix_hash(1)], ttl_s=1)
    before = trips.count
    index.touch(NAMESPACE, [prefix_hash(n) for n in range(1000)], ttl_s=1)
    assert trips.count - before == 1
    index.close()


def test_a_thousand_sightings_are_one_round_trip_once_the_server_knows_the_script(
    valkey: RedisServer,
) -> None:
    trips = RoundTrips()
    index = RedisIndex(counted(valkey, trips))
    names = [str(number) for number in range(1000)]
    assert index.sight(names[:1], ttl_s=LONG_S) == [False]
    before = trips.count
    assert index.sight(names, ttl_s=LONG_S) == [True] + [False] * 999
    assert trips.count - before == 1
    index.close()


def test_commands_one_after_the_other_are_a_round_trip_each(valkey: RedisServer) -> None:
    """Commands are really counted: otherwise the two tests before this one would prove nothing."""
    trips = RoundTrips()
    with counted(valkey, trips) as client:
        client.ping()
        before = trips.by_port[valkey.port]
        for _ in range(3):
            client.ping()
        assert trips.by_port[valkey.port] - before == 3


def test_a_server_that_forgot_the_scripts_learns_them_again(client: redis.Redis) -> None:
    index = RedisIndex(client)
    index.publish(chunk(), {FIELD: shard()}, ttl_s=LONG_S)
    client.script_flush()
    index.publish(chunk(), {FIELD: shard()}, ttl_s=LONG_S)
    client.script_flush()
    index.touch(NAMESPACE, [prefix_hash(1)], ttl_s=LONG_S)
    record = get(index)
    assert record is not None
    assert record.hits == 1
    assert index.sight(["x"], ttl_s=LONG_S) == [False]
    client.script_flush()
    assert index.sight(["y", "x"], ttl_s=LONG_S) == [False, True]


def test_a_sighting_takes_little_memory_and_ends(client: redis.Redis) -> None:
    index = RedisIndex(client)
    index.sight([f"{NAMESPACE}/{prefix_hash(1).hex()}/{FIELD}"], ttl_s=LONG_S)
    (key,) = client.keys()
    assert key.startswith(b"objkv:s:")
    assert client.memory_usage(key) <= 128
    assert 0 < client.ttl(key) <= LONG_S


def test_others_keys_and_other_prefixes_are_left_alone(client: redis.Redis) -> None:
    client.set("theirs", "x")
    client.set(f"objkv:i:{NAMESPACE}:short", "x")
    ours, other = RedisIndex(client), RedisIndex(client, prefix="other")
    other.publish(chunk(), {FIELD: shard()}, ttl_s=LONG_S)
    assert ours.namespaces() == []
    assert list(ours.scan(NAMESPACE)) == []
    assert list(ours.scan("*")) == []
    assert other.namespaces() == [NAMESPACE]


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (exceptions.ConnectionError("gone"), StoreUnavailable, "gone"),
        (exceptions.TimeoutError("slow"), StoreUnavailable, "slow"),
        (exceptions.BusyLoadingError("loading"), StoreUnavailable, "loading"),
        (exceptions.ReadOnlyError("You can't write"), StoreUnavailable, "can't write"),
        (exceptions.ClusterDownError("down"), StoreUnavailable, "down"),
        (exceptions.TryAgainError("later"), StoreUnavailable, "later"),
        (exceptions.MasterDownError("MASTERDOWN"), StoreUnavailable, "MASTERDOWN"),
        (exceptions.RedisClusterException("no node"), StoreUnavailable, "no node"),
        (exceptions.MovedError("1 127.0.0.1:7000"), StoreUnavailable, "redis[+]cluster"),
        (exceptions.ResponseError("MISCONF disk"), StoreUnavailable, "MISCONF"),
        (exceptions.ResponseError("ERR @user_script:3: -OOM no"), StoreUnavailable, "maxmemory"),
        (exceptions.OutOfMemoryError("command not allowed"), StoreUnavailable, "maxmemory"),
        (exceptions.AuthenticationError("WRONGPASS"), StoreDenied, "redis_password"),
        (exceptions.AuthorizationError("no"), StoreDenied, "redis_password"),
        (
            exceptions.ResponseError("NOAUTH Authentication required."),
            StoreDenied,
            "redis_password",
        ),
        (exceptions.NoPermissionError("hset"), StoreDenied, "objkv access"),
        (exceptions.ResponseError("ERR ACL failure in script: x"), StoreDenied, "objkv access"),
        (exceptions.ResponseError("ERR something else"), StoreError, "something else"),
    ],
)
def test_errors_say_who_can_act(error: Exception, kind: type[StoreError], words: str) -> None:
    class Failing(fakeredis.FakeRedis):
        def execute_command(self, *args: object, **options: object) -> object:
            raise error

        def pipeline(self, *args: object, **options: object) -> object:
            raise error

    index = RedisIndex(Failing())
    for call in (index.check, lambda: get(index), lambda: next(index.scan(NAMESPACE))):
        with pytest.raises(StoreError, match=words) as caught:
            call()
        assert type(caught.value) is kind
        assert caught.value.__cause__ is error


def test_a_server_that_is_not_there_is_unavailable() -> None:
    index = RedisIndex(redis.Redis(port=1, protocol=2, retry=NEVER))
    with pytest.raises(StoreUnavailable):
        get(index)
    with pytest.raises(StoreUnavailable):
        index.publish(chunk(), {FIELD: shard()}, ttl_s=1)


def test_a_missing_password_is_denied(valkey: RedisServer) -> None:
    def client(password: str | None) -> redis.Redis:
        return redis.Redis(
            port=valkey.port, password=password, retry=NEVER, socket_timeout=PATIENCE_S, protocol=2
        )

    admin = valkey.client()
    admin.config_set("requirepass", "secret")
    try:
        with pytest.raises(StoreDenied, match="redis_username and redis_password"):
            get(RedisIndex(client(None)))
        with pytest.raises(StoreDenied, match="redis_username and redis_password"):
            RedisIndex(client("wrong")).check()
    finally:
        admin.config_set("requirepass", "")


def test_repr_tells_the_keys_but_no_server() -> None:
    assert repr(RedisIndex(fakeredis.FakeRedis(), prefix="team-a")) == "<RedisIndex team-a:*>"
