"""URLs that lead to the wrong kind of server, or to none: one clear sentence, in every command."""

import socket

import pytest
from typer.testing import CliRunner

from objkv.assembly.redis import connect_redis
from objkv.cli.app import app
from objkv.config import Config
from objkv.errors import StoreDenied, StoreUnavailable
from objkv.index.redis.index import RedisIndex
from objkv.stores.redis import RedisStore
from tests.support.servers.ceph import S3Server
from tests.support.servers.fixtures import BUCKET, use_servers
from tests.support.servers.redis import RedisServer

pytestmark = pytest.mark.service
KINDS = [("", ""), ("+cluster", ""), ("+sentinel", "/0?service=objkv")]


@pytest.fixture(autouse=True)
def _the_machine_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("objkv.net.transport.TRY_S", 60.0)


def index_of(url: str) -> RedisIndex:
    return RedisIndex(connect_redis(url, Config(index_url=url)))


@pytest.mark.parametrize(("kind", "end"), KINDS)
def test_tls_to_a_port_without_it(valkey: RedisServer, kind: str, end: str) -> None:
    url = f"rediss{kind}://127.0.0.1:{valkey.port}{end}"
    with pytest.raises(StoreDenied, match="does not use TLS: write redis instead of rediss"):
        index_of(url).check()


@pytest.mark.parametrize(("kind", "end"), KINDS)
def test_no_tls_to_a_port_that_requires_it(redis_tls: RedisServer, kind: str, end: str) -> None:
    url = f"redis{kind}://127.0.0.1:{redis_tls.port}{end}"
    with pytest.raises(StoreDenied, match="requires TLS: write rediss in index_url"):
        index_of(url).check()


def test_the_hot_store_says_the_same(redis_tls: RedisServer) -> None:
    url = f"redis://127.0.0.1:{redis_tls.port}"
    store = RedisStore(connect_redis(url, Config(index_url=url)), prefix="p:", ttl_s=9)
    with pytest.raises(StoreDenied, match="requires TLS"):
        store.get("k")


def test_a_server_that_hangs_up_is_only_unavailable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(StoreUnavailable):
        index_of(f"redis://127.0.0.1:{port}").check()


def test_sentinels_that_do_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(StoreUnavailable, match="no Sentinel in index_url answers") as caught:
        index_of(f"redis+sentinel://127.0.0.1:{port}/0?service=kv").check()
    assert "ConnectionPool" not in str(caught.value)


@pytest.mark.xdist_group("ceph")
@pytest.mark.parametrize("command", [("ls",), ("ls", "--prefixes"), ("audit",), ("doctor",)])
def test_a_bucket_that_does_not_exist(
    monkeypatch: pytest.MonkeyPatch, s3_server: S3Server, own_valkey: RedisServer,
    command: tuple[str, ...],
) -> None:  # fmt: skip
    use_servers(monkeypatch, s3_server, "wrong", own_valkey)
    ran = CliRunner().invoke(app, [*command, "--bulk-url", "s3://no-such-bucket"])
    assert ran.exit_code == 2
    assert "NoSuchBucket: the bucket does not exist: create it" in " ".join(ran.output.split())
    ran = CliRunner().invoke(app, ["ls", "--bulk-url", f"s3://{BUCKET}/empty"])
    assert ran.exit_code == 0
