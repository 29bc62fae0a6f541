"""Buckets that demand encryption, an ACL, a checksum or signed bodies get them with every put."""

import base64
import hashlib
import zlib
from collections.abc import Iterator

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from objkv.config import Config
from objkv.stores.s3.demands import PutDemands
from objkv.stores.s3.signing import S3Endpoint, find_endpoint
from tests.support.servers.quick_s3 import QuickS3
from tests.support.servers.s3_stores import PART, pattern, s3_client, s3_store

SETTINGS = {
    "s3_sse": "aws:kms",
    "s3_sse_kms_key_id": "key-1",
    "s3_acl": "bucket-owner-full-control",
    "s3_checksum": "sha256",
    "s3_signed_payloads": True,
}


@pytest.fixture
def server() -> Iterator[QuickS3]:
    with QuickS3() as server:
        yield server


def test_a_direct_request_with_demands_has_the_signature_of_botocore(server: QuickS3) -> None:
    demands, body = PutDemands.of(Config(**SETTINGS)), memoryview(b"payload")
    client = s3_client(server.url, **SETTINGS)
    endpoint = find_endpoint(client, "kv-cache", "p/")
    assert isinstance(endpoint, S3Endpoint)
    extra = {**demands.headers(), **demands.body_headers(body)}
    assert extra["x-amz-content-sha256"] == hashlib.sha256(body).hexdigest()
    raw = endpoint.signed(client, "PUT", "k", extra).decode()
    lines = dict(line.split(": ", 1) for line in raw.strip().split("\r\n")[1:])
    signed = {name: lines[name] for name in [*extra, "x-amz-date", "host"]}
    request = AWSRequest("PUT", f"{server.url}/kv-cache/p/k", headers=signed)
    request.context["timestamp"] = lines["x-amz-date"]
    auth = S3SigV4Auth(Credentials("test", "testsecret"), endpoint.service, endpoint.region)
    text = auth.string_to_sign(request, auth.canonical_request(request))
    assert lines["authorization"].endswith(auth.signature(text, request))
    client.close()


def test_checksums() -> None:
    view = memoryview(b"payload")
    crc = base64.b64encode(zlib.crc32(view).to_bytes(4, "big")).decode()
    assert PutDemands(checksum="crc32").body_headers(view) == {"x-amz-checksum-crc32": crc}
    assert PutDemands().body_headers(view) == PutDemands().headers() == {}


def test_puts_of_every_kind_still_work(server: QuickS3) -> None:
    demands = PutDemands.of(Config(**SETTINGS))
    with s3_store(server.url, client=SETTINGS, demands=demands, ranges_max=2) as store:
        value = pattern(PART + 9)
        store.put("large", value)
        assert store.put_if_absent("small", b"1")
        assert not store.put_if_absent("small", b"1")
        assert store.get("large") == value
        assert store.get("small") == b"1"
