"""``objkv verify``, ``sweep`` and ``rebuild`` on real servers: Valkey, and Ceph's S3."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from objkv.assembly.backends import open_backends
from objkv.config import load_config
from objkv.telemetry import NullRecorder
from objkv.testing.servers.ceph import S3Server
from objkv.testing.servers.redis import RedisServer, valkey_server
from tests.cli.conftest import Run, home, run
from tests.cli.upkeep_story import (
    check_that_a_wiped_index_is_restored,
    check_that_all_is_found_and_mended,
)
from tests.services.s3_fixtures import BUCKET

__all__ = ["home", "run"]

pytestmark = [pytest.mark.service, pytest.mark.xdist_group("ceph")]


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[RedisServer]:
    with valkey_server(tmp_path / "valkey") as server:
        yield server


def test_all_defects_are_found_and_mended_on_real_servers(
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
    with open_backends(load_config({}), NullRecorder()) as ends:
        check_that_all_is_found_and_mended(run, ends)
        check_that_a_wiped_index_is_restored(run, ends)
