"""A bucket on Ceph and a Valkey, as the settings of what runs in a test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.services.s3_fixtures import BUCKET, S3Server
from tests.support.servers.redis import RedisServer, valkey_server


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[RedisServer]:
    """Of this test alone."""
    with valkey_server(tmp_path / "valkey") as server:
        yield server


def use_servers(
    monkeypatch: pytest.MonkeyPatch, s3_server: S3Server, prefix: str, valkey: RedisServer
) -> None:
    """Both ends, for commands and for ``load_config``; patient, because the machine may be busy."""
    settings = {
        "BULK_URL": f"s3://{BUCKET}/{prefix}",
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
