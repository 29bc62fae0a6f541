"""Nodes that a server on this machine names are not spoken to in clear if they are elsewhere."""

from pathlib import Path

import pytest
import redis
from redis import exceptions

from objkv.assembly.redis import ClearConnection, connect_redis
from objkv.config import Config
from objkv.errors import StoreUnavailable
from objkv.index.redis.index import RedisIndex
from tests.support.servers.ports import free_port
from tests.support.servers.redis import RedisServer, valkey_binary, valkey_server

pytestmark = pytest.mark.service

ELSEWHERE = "203.0.113.1"
"""An address reserved for documentation: no machine has it."""


def refused(url: str) -> None:
    with pytest.raises(
        StoreUnavailable, match=f"a server on this machine redirected to {ELSEWHERE}"
    ):
        RedisIndex(connect_redis(url, Config(index_url=url))).check()


def test_a_cluster_that_names_another_machine_is_refused(tmp_path: Path) -> None:
    args = ("--cluster-enabled", "yes", "--cluster-announce-ip", ELSEWHERE)
    with valkey_server(tmp_path, args=args) as server:
        server.client().execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16_383)
        refused(f"redis+cluster://127.0.0.1:{server.port}")


def test_a_sentinel_that_names_another_machine_is_refused(tmp_path: Path) -> None:
    port = free_port()
    conf = tmp_path / "sentinel.conf"
    conf.write_text(f"port {port}\nsentinel monitor objkv {ELSEWHERE} 6379 1\n")
    with RedisServer(valkey_binary(), tmp_path, port=port, args=(str(conf), "--sentinel")).start():
        refused(f"redis+sentinel://127.0.0.1:{port}/0?service=objkv")


def test_nothing_is_sent_before_the_host_was_judged() -> None:
    connection = ClearConnection(host=ELSEWHERE, port=1, password="hush", retry_on_error=[])
    with pytest.raises(exceptions.ConnectionError, match="allow_plaintext") as caught:
        connection.connect()
    assert "hush" not in str(caught.value)


def test_with_tls_or_leave_the_class_is_the_clients_own() -> None:
    for url, leave in (
        ("rediss+sentinel://h?service=s", False),
        ("redis+sentinel://h?service=s", True),
    ):
        client = connect_redis(url, Config(index_url=url, allow_plaintext=leave))
        assert isinstance(client, redis.Redis)
        assert not issubclass(client.connection_pool.connection_class, ClearConnection.__bases__)
