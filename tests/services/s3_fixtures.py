"""A real S3 server as fixtures, one per test process: run these in one (``--dist loadgroup``)."""

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from objkv.config import Config
from objkv.stores.s3.client import open_s3_client
from objkv.stores.s3.store import S3Store
from tests.support.servers.ceph import S3Server, ceph_missing, ceph_radosgw

BUCKET = "kv-cache"
PART_BYTES = 5 << 20

OpenS3Store = Callable[..., S3Store]


def need_ceph() -> None:
    """Skip the test where Ceph is missing; fail it in CI, where nothing may be skipped."""
    if missing := ceph_missing():
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One radosgw with the bucket ``BUCKET``. A test that kills it starts it again."""
    need_ceph()
    with ceph_radosgw(tmp_path_factory.mktemp("ceph") / "data") as server:
        client = open_s3_client(s3_config(server))
        client.create_bucket(Bucket=BUCKET)
        client.close()
        yield server


def s3_config(server: S3Server, **changes: Any) -> Config:
    """Settings that lead to ``server``."""
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


@pytest.fixture
def open_s3_store(s3_server: S3Server, s3_prefixes: Iterator[str]) -> Iterator[OpenS3Store]:
    """Opens stores under a prefix of this test; keywords change the settings, ``bucket`` too."""
    prefix, opened = next(s3_prefixes), []

    def open_store(*, bucket: str = BUCKET, **changes: Any) -> S3Store:
        client = open_s3_client(s3_config(s3_server, **changes))
        opened.append(S3Store(client, bucket=bucket, prefix=prefix, multipart_bytes=PART_BYTES))
        return opened[-1]

    yield open_store
    for store in opened:
        store.close()
