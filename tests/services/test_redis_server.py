"""The index on a real redis-server alone: the contract, TLS, access rights, a server in trouble."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from objkv.assembly.redis import connect_redis
from objkv.config import Config
from objkv.errors import StoreDenied, StoreError, StoreUnavailable
from objkv.index.base import PruneIndex, Usage
from objkv.index.redis.index import RedisIndex
from tests.contracts.clock import ManualClock
from tests.contracts.index_contract import (
    FIELD,
    LONG_S,
    NAMESPACE,
    IndexContract,
    at_once,
    chunk,
    get,
    prefix_hash,
    shard,
)
from tests.support.servers.fixtures import PATIENT, documented_rights, flushed
from tests.support.servers.redis import (
    START_S,
    RedisServer,
    redis_server,
    valkey_server,
    wait_until,
)

pytestmark = pytest.mark.service


def opened(url: str, **settings: object) -> RedisIndex:
    config = Config.model_validate({"index_url": url, **PATIENT, **settings})
    return RedisIndex(connect_redis(url, config))


class TestRedisIndexOnRedis(IndexContract):
    @pytest.fixture
    def clock(self, redis_alone: RedisServer) -> ManualClock:
        return flushed(redis_alone)

    @pytest.fixture
    def index(self, redis_alone: RedisServer, clock: ManualClock) -> PruneIndex:
        client = connect_redis(redis_alone.url, Config(index_url=redis_alone.url, **PATIENT))
        return RedisIndex(client, clock=clock)

    def put_garbage(self, index: PruneIndex, number: int) -> None:
        assert isinstance(index, RedisIndex)
        index._client.set(f"objkv:i:{NAMESPACE}:{prefix_hash(number).hex()}", "theirs")


def test_tls_with_the_right_authority_works_with_and_without_a_client_certificate(
    redis_tls: RedisServer, certificates: Path
) -> None:
    index = opened(redis_tls.url, redis_ca_file=certificates / "ca.pem")
    index.publish(chunk(), {FIELD: shard()}, ttl_s=LONG_S)
    files = {
        "redis_ca_file": certificates / "ca.pem",
        "redis_cert_file": certificates / "cert.pem",
        "redis_key_file": certificates / "key.pem",
    }
    assert get(opened(redis_tls.url, **files)) is not None


def test_tls_with_the_wrong_authority_is_denied_with_what_to_set(
    redis_tls: RedisServer, certificates: Path
) -> None:
    for settings in ({"redis_ca_file": certificates / "other-ca.pem"}, {}):
        with pytest.raises(StoreDenied, match="set redis_ca_file to the PEM file of the CA"):
            opened(redis_tls.url, **settings).check()


def test_a_plain_client_at_a_tls_server_gets_an_error(redis_tls: RedisServer) -> None:
    with pytest.raises(StoreDenied, match="requires TLS: write rediss"):
        opened(redis_tls.url.replace("rediss", "redis")).check()


@pytest.fixture(params=["redis", "valkey"])
def guarded(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RedisServer]:
    """A server with a user that has just what objkv needs, and users that lack some of it."""
    rights = documented_rights()
    acl = tmp_path / "users.acl"
    acl.write_text(
        "user default off\n"
        f"user objkv on >secret ~objkv:* {rights}\n"
        f"user reader on >secret ~objkv:* {rights} -hset -set\n"
        f"user stranger on >secret ~theirs:* {rights}\n"
    )
    start = valkey_server
    if request.param == "redis":
        request.getfixturevalue("redis_alone")
        start = redis_server
    with start(tmp_path / "server", args=("--aclfile", str(acl))) as server:
        yield server


def test_a_user_with_the_documented_rights_can_do_everything(guarded: RedisServer) -> None:
    index = opened(guarded.url, redis_username="objkv", redis_password="secret")
    index.check()
    index.publish(chunk(), {FIELD: shard()}, ttl_s=LONG_S)
    index.touch(NAMESPACE, [prefix_hash(1)], ttl_s=LONG_S)
    assert index.lease("x", "me", ttl_ms=60_000)
    index.release("x", "me")
    assert index.pin(NAMESPACE, prefix_hash(1), until_s=2**33, ttl_s=LONG_S)
    assert index.pin(NAMESPACE, prefix_hash(1), until_s=0, ttl_s=LONG_S)
    assert get(index) is not None
    assert len(list(index.scan(NAMESPACE))) == 1
    assert index.namespaces() == [NAMESPACE]
    assert index.forget(NAMESPACE, prefix_hash(1), FIELD, shard())
    index.publish(chunk(), {FIELD: shard()}, ttl_s=LONG_S)
    assert [one.payloads for one in index.usage()] == [1]
    index.set_usage(Usage(NAMESPACE, 1, 1, counted_s=1))
    assert index.drop(NAMESPACE, prefix_hash(1))


def test_missing_rights_are_denied_with_where_they_are_listed(guarded: RedisServer) -> None:
    reader = opened(guarded.url, redis_username="reader", redis_password="secret")
    assert get(reader) is None
    with pytest.raises(StoreDenied, match="the ACL that `objkv access` prints"):
        reader.publish(chunk(), {FIELD: shard()}, ttl_s=LONG_S)
    stranger = opened(guarded.url, redis_username="stranger", redis_password="secret")
    for call in (stranger.check, lambda: get(stranger)):
        with pytest.raises(StoreDenied, match="the ACL that `objkv access` prints"):
            call()


def test_a_wrong_password_is_denied_and_not_shown(guarded: RedisServer) -> None:
    for settings in ({}, {"redis_username": "objkv", "redis_password": "hush"}):
        with pytest.raises(StoreDenied, match="redis_username and redis_password") as caught:
            opened(guarded.url, **settings).check()
        assert "hush" not in str(caught.value)


@pytest.fixture
def mortal(tmp_path: Path, redis_alone: RedisServer) -> Iterator[RedisServer]:
    """A server that a test may kill, freeze or fill."""
    with redis_server(tmp_path / "mortal") as server:
        yield server


def test_a_server_that_comes_back_is_used_again(mortal: RedisServer) -> None:
    index = opened(mortal.url)
    index.publish(chunk(), {FIELD: shard()}, ttl_s=LONG_S)
    mortal.kill()
    with pytest.raises(StoreUnavailable):
        get(index)
    mortal.start()
    assert get(index) is None
    index.publish(chunk(), {FIELD: shard()}, ttl_s=LONG_S)
    assert get(index) is not None


def test_a_connection_that_the_server_closed_is_mended_unseen(mortal: RedisServer) -> None:
    index = opened(mortal.url)
    index.publish(chunk(), {FIELD: shard()}, ttl_s=LONG_S)
    mortal.client().client_kill_filter(_type="normal", skipme=True)
    assert get(index) is not None


def test_a_frozen_server_is_unavailable_and_not_waited_for_forever(mortal: RedisServer) -> None:
    index = opened(mortal.url, lookup_deadline_ms=500)
    wait_until(lambda: answers(index), "the server to answer")
    mortal.pause()
    try:
        with pytest.raises(StoreUnavailable):
            get(index)
    finally:
        mortal.resume()
    wait_until(lambda: answers(index), "the server to answer again")


def answers(index: RedisIndex) -> bool:
    try:
        return get(index) is None
    except StoreUnavailable:
        return False


def test_a_full_server_still_answers_lookups(mortal: RedisServer) -> None:
    index = opened(mortal.url)
    index.publish(chunk(), {FIELD: shard()}, ttl_s=LONG_S)
    mortal.client().config_set("maxmemory", "1")
    with pytest.raises(StoreUnavailable, match="raise the server's maxmemory"):
        index.publish(chunk(2), {FIELD: shard()}, ttl_s=LONG_S)
    assert get(index) is not None


def test_a_replica_is_unavailable_for_writing(
    mortal: RedisServer, redis_alone: RedisServer
) -> None:
    mortal.client().replicaof("127.0.0.1", redis_alone.port)
    with pytest.raises(StoreUnavailable, match=r"READONLY|read only|MASTERDOWN|LOADING"):
        opened(mortal.url).publish(chunk(), {FIELD: shard()}, ttl_s=LONG_S)


def test_a_cluster_url_at_a_single_server_says_what_to_write(redis_alone: RedisServer) -> None:
    with pytest.raises(StoreDenied, match="use redis:// or rediss://"):
        opened(redis_alone.url.replace("redis://", "redis+cluster://")).check()


def test_more_threads_than_connections_wait_for_one_another(redis_alone: RedisServer) -> None:
    flushed(redis_alone)
    looking = redis_alone.client()
    others = {client["id"] for client in looking.client_list(_type="normal")}
    index = opened(redis_alone.url, redis_calls_max=2)
    at_once(
        [lambda n=n: index.publish(chunk(n), {FIELD: shard()}, ttl_s=LONG_S) for n in range(1, 13)]  # type: ignore[misc]
    )
    assert len(list(index.scan(NAMESPACE))) == 12
    now = {client["id"] for client in looking.client_list(_type="normal")}
    assert 1 <= len(now - others) <= 2


def test_translated_errors_keep_their_cause(mortal: RedisServer) -> None:
    mortal.kill()
    with pytest.raises(StoreError) as caught:
        get(opened(mortal.url))
    assert isinstance(caught.value.__cause__, redis.RedisError)


START_AND_WAIT = """
import sys
from pathlib import Path
from tests.support.servers.redis import valkey_server
server = valkey_server(Path(sys.argv[1]))
print(server.port, flush=True)
sys.stdin.read()
"""


def test_servers_do_not_outlive_the_process_that_started_them(tmp_path: Path) -> None:
    command = [sys.executable, "-c", START_AND_WAIT, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        port = int(parent.stdout.readline())
        client = redis.Redis(port=port, retry=Retry(NoBackoff(), 0), socket_timeout=START_S)
        assert client.ping()
        parent.kill()

    def gone() -> bool:
        try:
            client.ping()
        except redis.ConnectionError:
            return True
        return False

    wait_until(gone, "the server to die with its parent", bound_s=60)
