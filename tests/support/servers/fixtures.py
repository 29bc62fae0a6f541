"""Real servers as fixtures: Valkey, Redis alone, with TLS and in groups, and S3 by Ceph. Those that
no test kills are started once per run."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from objkv.config import Config
from objkv.stores.s3.client import open_s3_access
from tests.contracts.clock import ManualClock
from tests.support.needs import need
from tests.support.servers.ceph import S3Server, ceph_missing, ceph_radosgw
from tests.support.servers.certificates import make_certificates
from tests.support.servers.redis import (
    RedisServer,
    redis_binary,
    redis_missing,
    redis_server,
    valkey_server,
)
from tests.support.servers.redis_groups import ServerGroup, redis_cluster, redis_sentinel

BUCKET = "kv-cache"
PATIENT = {"lookup_deadline_ms": 20_000}
"""A client that gives a server on a busy machine 40 s for an answer; for all tests but of that."""
NOBODY_DIES_MS = 120_000


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with valkey_server(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture
def client(valkey: RedisServer) -> Iterator[redis.Redis]:
    with valkey.client() as opened:
        opened.flushall()
        yield opened


class ServerClock(ManualClock):
    """Time as the servers see it: passing means that every key has so much less to live."""

    def __init__(self, *clients: redis.Redis) -> None:
        super().__init__()
        self.clients = clients

    def advance(self, seconds: float) -> None:
        super().advance(seconds)
        for client in self.clients:
            for key in client.scan_iter():
                left_ms = client.pttl(key)
                if 0 <= left_ms <= seconds * 1000:
                    client.delete(key)
                elif left_ms > 0:
                    client.pexpire(key, left_ms - int(seconds * 1000))


def flushed(*servers: RedisServer) -> ServerClock:
    clients = [server.client() for server in servers]
    for client in clients:
        client.flushall()
    return ServerClock(*clients)


@pytest.fixture(scope="session")
def redis_alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    need(redis_missing())
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def redis_tls(
    tmp_path_factory: pytest.TempPathFactory, certificates: Path
) -> Iterator[RedisServer]:
    need(redis_missing())
    with redis_server(tmp_path_factory.mktemp("redis-tls"), tls=certificates) as server:
        yield server


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerGroup]:
    """Three primaries with a replica each; tests that kill some start their own."""
    need(redis_missing())
    folder = tmp_path_factory.mktemp("cluster")
    with redis_cluster(redis_binary(), folder, node_timeout_ms=NOBODY_DIES_MS) as group:
        yield group


@pytest.fixture
def mortal_cluster(tmp_path: Path) -> Iterator[ServerGroup]:
    need(redis_missing())
    with redis_cluster(redis_binary(), tmp_path / "cluster") as group:
        yield group


@pytest.fixture
def sentinel(tmp_path: Path) -> Iterator[ServerGroup]:
    """A primary, a replica and three Sentinels, which a test may kill."""
    need(redis_missing())
    with redis_sentinel(redis_binary(), tmp_path / "sentinel") as group:
        yield group


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    need(ceph_missing())
    with ceph_radosgw(tmp_path_factory.mktemp("ceph") / "data") as server:
        access = open_s3_access(s3_config(server))
        access.client.create_bucket(Bucket=BUCKET)
        access.close()
        yield server


def s3_config(server: S3Server, **changes: Any) -> Config:
    values: dict[str, Any] = {
        "s3_endpoint_url": server.endpoint_url,
        "s3_addressing": "path",
        "s3_access_key_id": server.access_key,
        "s3_secret_access_key": server.secret_key,
        # An attempt that seems to take too long is repeated, and a put may find what it has put
        # itself: not on a machine that is merely busy.
        "load_deadline_ms": 300_000,
    }
    return Config(**values | changes)


@pytest.fixture(scope="session")
def s3_prefixes() -> Iterator[str]:
    """Endless prefixes that no other test uses."""
    return (f"test/{number}" for number in itertools.count())
