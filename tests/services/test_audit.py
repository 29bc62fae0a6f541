"""``objkv audit`` on real servers: Valkey, and Ceph's S3."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from objkv.assembly.backends import open_backends
from objkv.config import load_config
from objkv.keys.chunk import ChunkKey
from objkv.telemetry import NullRecorder
from objkv.testing.damage import DamagedStore, Defects
from objkv.testing.servers.ceph import S3Server
from objkv.testing.servers.redis import RedisServer, valkey_server
from tests.cli.conftest import Run, home, run
from tests.services.s3_fixtures import BUCKET

__all__ = ["home", "run"]

pytestmark = [pytest.mark.service, pytest.mark.xdist_group("ceph")]


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[RedisServer]:
    with valkey_server(tmp_path / "valkey") as server:
        yield server


def test_a_bucket_and_redis_are_joined_and_both_are_left_as_they_were(
    run: Run,
    s3_server: S3Server,
    s3_prefixes: Iterator[str],
    valkey: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {
        "BULK_URL": f"s3://{BUCKET}/{next(s3_prefixes)}",
        "INDEX_URL": f"{valkey.url}/0",
        "S3_ENDPOINT_URL": s3_server.endpoint_url,
        "S3_ADDRESSING": "path",
        "S3_REGION": "us-east-1",
        "S3_ACCESS_KEY_ID": s3_server.access_key,
        "S3_SECRET_ACCESS_KEY": s3_server.secret_key,
        "LOOKUP_DEADLINE_MS": "20000",
        "LOAD_DEADLINE_MS": "300000",
    }
    for name, value in settings.items():
        monkeypatch.setenv(f"OBJKV_{name}", value)
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
