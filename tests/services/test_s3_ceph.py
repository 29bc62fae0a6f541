"""``S3Store`` against a real S3 server: what moto cannot show."""

from pathlib import Path
from typing import Any

import pytest

from objkv.errors import StoreDenied, StoreUnavailable
from objkv.stores.s3.client import open_s3_client
from objkv.stores.s3.store import S3Store
from tests.contracts.store_contract import WRITERS, StoreContract, at_once
from tests.support.servers.ceph import S3Server, ceph_missing, ceph_radosgw
from tests.support.servers.certificates import make_certificates
from tests.support.servers.fixtures import BUCKET, PART_BYTES, OpenS3Store, need, s3_config

pytestmark = [pytest.mark.service, pytest.mark.xdist_group("ceph")]


@pytest.fixture
def store(open_s3_store: OpenS3Store) -> S3Store:
    return open_s3_store()


@pytest.fixture(scope="module")
def client(s3_server: S3Server) -> Any:
    return open_s3_client(s3_config(s3_server))


class TestS3StoreOnCeph(StoreContract):
    @pytest.fixture
    def store(self, client: Any, s3_prefixes: Any) -> S3Store:
        prefix = next(s3_prefixes)
        return S3Store(client, bucket=BUCKET, prefix=prefix, multipart_bytes=PART_BYTES)


def test_the_server_decides_among_writers_of_many_processes(open_s3_store: OpenS3Store) -> None:
    """A store for each, as replicas have; the first put of each also tries the condition out."""
    stores = [open_s3_store() for _ in range(WRITERS)]

    def write(number: int) -> bool:
        return stores[number].put_if_absent("k", b"%02d" % number * 500_000)

    won = at_once(WRITERS, write)
    assert won.count(True) == 1
    assert stores[0].get("k") == b"%02d" % won.index(True) * 500_000
    assert stores[won.index(True)].conditional_puts is True


def test_large_values_go_up_in_parts_and_leave_none_behind(
    store: S3Store, s3_server: S3Server
) -> None:
    value = bytes(range(256)) * (13 << 12)
    assert store.put_if_absent("k", memoryview(value)) is True
    assert store.put_if_absent("k", b"x" * len(value)) is False
    buffer = memoryview(bytearray(len(value)))
    assert store.get_into("k", buffer) == len(value)
    assert buffer == value
    client = open_s3_client(s3_config(s3_server))
    client.meta.events.register("before-call.s3.CompleteMultipartUpload", _interrupt)
    interrupted = S3Store(client, bucket=BUCKET, prefix="parts", multipart_bytes=PART_BYTES)
    with pytest.raises(KeyboardInterrupt):
        interrupted.put("k", value)
    assert "Uploads" not in client.list_multipart_uploads(Bucket=BUCKET)
    interrupted.close()


def test_ranges_and_parts_go_past_the_client(client: Any, s3_prefixes: Any) -> None:
    """This server checks signatures, also those of a prefix with characters that are escaped."""
    prefix = f"{next(s3_prefixes)}/a b+c%/ü&=?"
    store = S3Store(
        client, bucket=BUCKET, prefix=prefix, multipart_bytes=PART_BYTES,
        range_bytes=3 << 20, ranges_max=4,
    )  # fmt: skip
    assert store.put_if_absent("first", b"1") is True
    assert store.put_if_absent("first", b"2") is False
    by_client: list[str] = []

    def look(model: Any, **_: object) -> None:
        by_client.append(model.name)

    client.meta.events.register("before-call.s3", look)
    try:
        value = bytes(range(256)) * (13 << 12)
        store.put("parts", value)
        store.put("k", value[:100])
        assert store.put_if_absent("k", b"x") is False
        buffer = memoryview(bytearray(len(value)))
        assert store.get_into("parts", buffer) == len(value)
        assert buffer == value
        assert store.get_into("parts", buffer, start=7) == len(value) - 7
        assert buffer[:-7] == value[7:]
        assert store.get_into("absent", buffer) is None
    finally:
        client.meta.events.unregister("before-call.s3", look)
    assert by_client == ["CreateMultipartUpload", "CompleteMultipartUpload"]


def _interrupt(**_: object) -> None:
    raise KeyboardInterrupt


def test_a_killed_server_is_unavailable_and_found_again(
    open_s3_store: OpenS3Store, s3_server: S3Server
) -> None:
    store = open_s3_store()
    store.put_if_absent("k", b"value")
    buffer = memoryview(bytearray(8))
    s3_server.kill()
    try:
        for call in (
            store.check,
            lambda: store.get("k"),
            lambda: store.get_into("k", buffer),
            lambda: store.put_if_absent("new", b""),
            lambda: list(store.scan("")),
        ):
            with pytest.raises(StoreUnavailable, match="the connection was refused"):
                call()
    finally:
        s3_server.restart()
    assert store.get("k") == b"value"
    assert store.get_into("k", buffer) == 5
    assert store.put_if_absent("new", b"") is True


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"s3_secret_access_key": "wrong"}, "s3_secret_access_key"),
        ({"s3_access_key_id": "nobody"}, "s3_access_key_id"),
        ({"bucket": "no-such-bucket"}, "the bucket does not exist"),
    ],
)
def test_what_the_operator_got_wrong_is_denied_with_what_to_do(
    open_s3_store: OpenS3Store, changes: dict[str, str], words: str
) -> None:
    store = open_s3_store(**changes)
    for call in (store.check, lambda: store.get("k"), lambda: store.put_if_absent("k", b"")):
        with pytest.raises(StoreDenied, match=words):
            call()


def test_https_with_an_authority_of_ones_own(tmp_path: Path) -> None:
    need(ceph_missing())
    certificates = make_certificates(tmp_path / "certificates")
    with ceph_radosgw(tmp_path / "ceph", tls=certificates) as server:
        trusting = _store(server, s3_ca_bundle=certificates / "ca.pem")
        trusting._client.create_bucket(Bucket=BUCKET)
        value = bytes(range(256)) * (6 << 12)
        assert trusting.put_if_absent("k", value) is True
        buffer = memoryview(bytearray(len(value)))
        assert trusting.get_into("k", buffer) == len(value)
        assert buffer == value
        for distrusting in (
            _store(server),
            _store(server, s3_ca_bundle=certificates / "other-ca.pem"),
        ):
            with pytest.raises(StoreDenied, match="s3_ca_bundle"):
                distrusting.check()


def _store(server: S3Server, **changes: Any) -> S3Store:
    client = open_s3_client(s3_config(server, **changes))
    return S3Store(client, bucket=BUCKET, prefix="", multipart_bytes=PART_BYTES)
