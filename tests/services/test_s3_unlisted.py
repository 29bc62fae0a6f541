"""A role that may get but not list: S3 answers 403 for a missing key, and a miss is one request."""

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from objkv.errors import StoreDenied
from objkv.stores.s3.client import open_s3_client
from objkv.stores.s3.store import S3Store
from tests.support.servers.ceph import CephUsers, S3Server
from tests.support.servers.fixtures import BUCKET, PART_BYTES, s3_config
from tests.support.servers.spoil import SpoilS3

pytestmark = [pytest.mark.service, pytest.mark.xdist_group("ceph")]
PREFIX = "unlisted"
GETS: dict[str, Any] = {
    "Version": "2012-10-17",
    "Statement": [
        {"Effect": "Allow", "Action": "s3:GetObject", "Resource": f"arn:aws:s3:::{BUCKET}/*"}
    ],
}
CALLS: list[Callable[[S3Store, str], object]] = [
    lambda store, key: store.get(key),
    lambda store, key: store.get_range(key, 0, 4),
    lambda store, key: store.head(key),
]


@pytest.fixture(scope="module")
def users(s3_server: S3Server) -> CephUsers:
    users = CephUsers(s3_server)
    users.add("unlisted", GETS)
    client = open_s3_client(s3_config(s3_server))
    client.put_object(Bucket=BUCKET, Key=f"{PREFIX}/there", Body=b"abcd")
    client.close()
    return users


@pytest.fixture
def place(s3_server: S3Server, users: CephUsers) -> Iterator[tuple[S3Store, SpoilS3]]:
    users.allow("unlisted", GETS)
    found = urlsplit(s3_server.endpoint_url)
    with SpoilS3((str(found.hostname), int(found.port or 0))) as far:
        keys = {"s3_access_key_id": "unlisted-key", "s3_secret_access_key": "unlisted-secret"}
        client = open_s3_client(s3_config(s3_server, s3_endpoint_url=far.url, **keys))
        store = S3Store(client, bucket=BUCKET, prefix=PREFIX, multipart_bytes=PART_BYTES)
        yield store, far
        store.close()


@pytest.mark.parametrize("call", CALLS)
def test_a_miss_is_one_request(
    place: tuple[S3Store, SpoilS3], call: Callable[[S3Store, str], object]
) -> None:
    store, far = place
    assert store.get_into("there", memoryview(bytearray(4))) == 4
    assert call(store, "missing") is None  # finds out that listing is refused
    before = far.asked.total()
    for number in range(10):
        assert call(store, f"missing-{number}") is None
    assert far.asked.total() - before == 10
    assert call(store, "there") is not None


def test_a_payload_is_never_missing_because_others_can_be_read(
    place: tuple[S3Store, SpoilS3],
) -> None:
    """Its reader would forget the record, also while rights are revoked for a moment."""
    store, _ = place
    assert store.get("there") == b"abcd"
    assert store.get("missing") is None
    for call in (*CALLS, lambda one, key: one.get_into(key, memoryview(bytearray(4)))):
        with pytest.raises(StoreDenied, match="lack a permission"):
            call(store, "missing.safetensors")


@pytest.mark.parametrize("call", CALLS)
def test_a_role_without_any_right_gets_an_error(
    place: tuple[S3Store, SpoilS3], users: CephUsers, call: Callable[[S3Store, str], object]
) -> None:
    store, _ = place
    users.allow_nothing("unlisted")
    for key in ("there", "missing"):
        with pytest.raises(StoreDenied, match="lack a permission"):
            call(store, key)


def test_rights_that_are_taken_away_are_noticed(
    place: tuple[S3Store, SpoilS3], users: CephUsers, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = place
    assert store.get("there") == b"abcd"
    assert store.get("missing") is None
    users.allow_nothing("unlisted")
    monkeypatch.setattr("objkv.stores.s3.absent.PROOF_S", 0.0)
    with pytest.raises(StoreDenied, match="lack a permission"):
        store.get_into("there", memoryview(bytearray(4)))
