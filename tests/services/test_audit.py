"""``objkv audit`` on real servers: Valkey, and Ceph's S3."""

from collections.abc import Iterator

import pytest

from objkv.assembly.backends import open_backends
from objkv.config import load_config
from objkv.keys.chunk import ChunkKey
from objkv.telemetry import NullRecorder
from tests.cli.conftest import Run, home, run
from tests.contracts.damage import DamagedStore, Defects
from tests.support.servers.ceph import S3Server
from tests.support.servers.fixtures import use_servers
from tests.support.servers.redis import RedisServer

__all__ = ["home", "run"]

pytestmark = [pytest.mark.service, pytest.mark.xdist_group("ceph")]


def test_a_bucket_and_redis_are_joined_and_both_are_left_as_they_were(
    run: Run,
    s3_server: S3Server,
    s3_prefixes: Iterator[str],
    own_valkey: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_servers(monkeypatch, s3_server, next(s3_prefixes), own_valkey)
    defects = Defects(good=24, orphan=2, ghost=3, old_epoch=2, stranger=2, short=1, hot=2)
    with open_backends(load_config({}), NullRecorder()) as ends:
        planted = DamagedStore(ends).plant(defects)
        ends.index.usage()  # so that this process keeps back nothing of what it has added
        used = ChunkKey.parse(planted["good"][0])
        ends.index.touch(used.namespace, [used.prefix_hash], ttl_s=3_600)

        def state() -> object:
            records = {one.prefix_hash: one for one in ends.index.scan(planted.namespace)}
            return [entry.key for entry in ends.bulk.scan("")], records

        before = state()
        audited = run("audit", "--json")
        assert state() == before
    assert audited.code == 1
    document = audited.document
    found = {one["kind"]: one["count"] for one in document["findings"]["counts"] if one["count"]}
    assert found == {"orphan": 2, "ghost": 3, "old_epoch": 2, "stranger": 2, "corrupt": 1}
    for kind in ("orphan", "ghost", "stranger"):
        named = [one["key"] for one in document["findings"]["first"] if one["kind"] == kind]
        assert sorted(named) == planted[kind]
    totals = document["totals"]
    assert totals["payloads"] == 24 + 2 + 2 + 2 + 1 + 2
    assert (totals["hits"], totals["used_chunks"]) == (1, 1)
    assert totals["hot_payloads"] == 2
