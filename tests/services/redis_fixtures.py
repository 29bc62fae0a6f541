"""Real Redis servers as fixtures; those that no test kills are started once per run."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from objkv.ops.doctor.access import acl_rights
from tests.support.servers.certificates import make_certificates
from tests.support.servers.redis import RedisServer, redis_binary, redis_missing, redis_server
from tests.support.servers.redis_groups import ServerGroup, redis_cluster, redis_sentinel

PATIENT = {"lookup_deadline_ms": 20_000}
"""A client that gives a server on a busy machine 40 s for an answer; for all tests but of that."""
NOBODY_DIES_MS = 120_000


def documented_rights() -> str:
    """The commands that ``objkv access`` tells operators to allow for everything in the index."""
    where = {"has_hot": False, "is_cluster": False, "has_database": False}
    return acl_rights("sweeper", "objkv", **where).removeprefix("~objkv:* ")


def need_redis() -> None:
    """Skip the test where redis-server is missing; fail it in CI, where nothing may be skipped."""
    if missing := redis_missing():
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)


@pytest.fixture(scope="session")
def redis_alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One plain redis-server."""
    need_redis()
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of ``make_certificates``."""
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def redis_tls(
    tmp_path_factory: pytest.TempPathFactory, certificates: Path
) -> Iterator[RedisServer]:
    """One redis-server that speaks TLS only."""
    need_redis()
    with redis_server(tmp_path_factory.mktemp("redis-tls"), tls=certificates) as server:
        yield server


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerGroup]:
    """Three primaries with a replica each; tests that kill some start their own."""
    need_redis()
    folder = tmp_path_factory.mktemp("cluster")
    with redis_cluster(redis_binary(), folder, node_timeout_ms=NOBODY_DIES_MS) as group:
        yield group


@pytest.fixture
def mortal_cluster(tmp_path: Path) -> Iterator[ServerGroup]:
    """A cluster that a test may kill."""
    need_redis()
    with redis_cluster(redis_binary(), tmp_path / "cluster") as group:
        yield group


@pytest.fixture
def sentinel(tmp_path: Path) -> Iterator[ServerGroup]:
    """A primary, a replica and three Sentinels, which a test may kill."""
    need_redis()
    with redis_sentinel(redis_binary(), tmp_path / "sentinel") as group:
        yield group
