"""Buckets that enforce what they demand: every put works with the setting, none without it."""

from collections.abc import Iterator
from typing import Any

import pytest

from objkv.assembly.backends import open_backends
from objkv.config import Config
from objkv.errors import StoreDenied
from objkv.telemetry import NullRecorder
from tests.support.samples import save, save_identity
from tests.support.servers.demanding_s3 import Demand, DemandingS3
from tests.support.servers.s3_stores import PART, pattern

DEMANDS: list[tuple[Demand, dict[str, Any]]] = [
    ("sse", {"s3_sse": "AES256"}),
    ("kms", {"s3_sse": "aws:kms", "s3_sse_kms_key_id": "key-1"}),
    ("acl", {"s3_acl": "bucket-owner-full-control"}),
    ("crc32", {"s3_checksum": "crc32"}),
    ("sha256", {"s3_checksum": "sha256"}),
    ("signed", {"s3_signed_payloads": True}),
]


@pytest.fixture(params=DEMANDS, ids=lambda demand: demand[0])
def demand(request: pytest.FixtureRequest) -> Iterator[tuple[DemandingS3, dict[str, Any]]]:
    wanted, settings = request.param
    with DemandingS3(wanted) as server:
        yield server, settings


def config_of(server: DemandingS3, **settings: Any) -> Config:
    given = {
        "bulk_url": "s3://kv-cache/p",
        "index_url": "memory:",
        "s3_endpoint_url": server.url,
        "s3_addressing": "path",
        "s3_access_key_id": "test",
        "s3_secret_access_key": "testsecret",
        "s3_multipart_bytes": PART,
        "load_deadline_ms": 60_000,
    }
    return Config(**given | settings)


def test_with_the_setting_every_put_works(demand: tuple[DemandingS3, dict[str, Any]]) -> None:
    server, settings = demand
    large = pattern(PART + 9)
    with open_backends(config_of(server, **settings), NullRecorder()) as backends:
        store = backends.bulk
        for key in ("first", "second"):  # the second one skips the client
            assert store.put_if_absent(key, b"value")
            assert not store.put_if_absent(key, b"value")
        store.put("pins/a", b"document")
        store.put("large", large)
        assert store.put_if_absent("quarantine/large", large)
        save_identity(store)
        save(store, backends.index)
        assert store.get("large") == store.get("quarantine/large") == large
        buffer = bytearray(8)
        assert store.get_into("pins/a", memoryview(buffer)) == 8
        assert bytes(buffer) == b"document"
        assert store.head("second") is not None
    assert server.refused == 0


def test_without_it_the_error_names_the_settings(
    demand: tuple[DemandingS3, dict[str, Any]],
) -> None:
    server, settings = demand
    name = next(iter(settings))
    with open_backends(config_of(server), NullRecorder()) as backends:
        with pytest.raises(StoreDenied, match=name):
            backends.bulk.put_if_absent("k", b"value")
        with pytest.raises(StoreDenied, match=name):
            backends.bulk.put("k", b"value")
        with pytest.raises(StoreDenied, match=name):
            backends.bulk.put("k", pattern(PART + 9))
