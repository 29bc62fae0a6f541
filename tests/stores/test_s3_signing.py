"""What requests to S3 are signed with: credentials, regions, demands of buckets, sessions of S3
Express; and what is said where a server does not take them."""

import base64
import hashlib
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
import botocore
import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.client import Config as ClientConfig
from botocore.credentials import Credentials
from hypothesis import given
from hypothesis import strategies as st

from objkv.assembly.backends import open_backends
from objkv.assembly.fetchers import open_s3
from objkv.config import Config, load_config
from objkv.errors import ConfigError, StoreDenied, StoreUnavailable
from objkv.stores.base import PruneStore
from objkv.stores.s3.bucket import S3Endpoint, find_endpoint
from objkv.stores.s3.client import open_s3_access
from objkv.stores.s3.http import ConnectionFailed
from objkv.stores.s3.store import S3Store, put_headers
from objkv.telemetry import NullRecorder
from tests.contracts.store_contract import StoreContract
from tests.support.samples import save, save_identity
from tests.support.servers.quick_s3 import Answer, QuickS3, Request, failure
from tests.support.servers.s3_stores import BUCKET, MIB, pattern, s3_access, s3_store, store_of


def test_credentials_that_change_are_used_from_then_on() -> None:
    """Those of a role do so every hour; and every day has a key of its own."""
    client: Any = s3_access("http://s3.test:99", allow_plaintext="bulk").client
    place = find_endpoint(client, BUCKET, "p/")
    heads = []
    for secret in ("one", "two"):
        credentials = Credentials("access", secret, f"token-{secret}")
        client._request_signer._credentials = credentials
        heads.append(place.signed("GET", "k", {}))
        assert f"x-amz-security-token: token-{secret}".encode() in heads[-1]
    signatures = {head.partition(b"Signature=")[2].split()[0] for head in heads}
    assert len(signatures) == 2


@pytest.mark.parametrize("version", [botocore.UNSIGNED, "s3"])
def test_another_signature_than_version_4_is_refused_with_what_to_do(version: Any) -> None:
    access = s3_access("http://s3.test:99", allow_plaintext="bulk")
    settings = access.client.meta.config.merge(ClientConfig(signature_version=version))
    client: Any = boto3.session.Session().client(
        "s3", endpoint_url="http://s3.test:99", config=settings, region_name="x",
        aws_access_key_id="a", aws_secret_access_key="b",
    )  # fmt: skip
    store = store_of(replace(access, client=client), bucket=BUCKET, prefix="p")
    with pytest.raises(StoreDenied, match="remove signature_version from the AWS profile"):
        store.check()


@pytest.mark.parametrize("prefix", ["", "p/", "a b/ü%/+&?/"])
@pytest.mark.parametrize("addressing", ["path", "virtual"])
def test_the_place_is_where_the_client_would_ask(prefix: str, addressing: str) -> None:
    client: Any = s3_access(
        "http://s3.test:99", s3_addressing=addressing, s3_region="eu-test-1", allow_plaintext="bulk"
    ).client
    sent: list[str] = []

    def stop(request: Any, **_: object) -> None:
        sent.append(request.url)
        raise InterruptedError

    place = find_endpoint(client, BUCKET, prefix)
    client.meta.events.register_first("before-send.s3", stop)
    with pytest.raises(InterruptedError):
        client.get_object(Bucket=BUCKET, Key=prefix + "ns/ab/k.x")
    assert sent == [place.url + place.path + "ns/ab/k.x"]
    assert place.region == "eu-test-1"
    assert place.host == sent[0].split("/")[2]


def base64_of(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


DEMANDS: list[tuple[dict[str, Any], Callable[[Any], dict[str, str]]]] = [
    ({"s3_sse": "AES256"}, lambda _: {"x-amz-server-side-encryption": "AES256"}),
    (
        {"s3_sse": "aws:kms", "s3_sse_kms_key_id": "key-1"},
        lambda _: {
            "x-amz-server-side-encryption": "aws:kms",
            "x-amz-server-side-encryption-aws-kms-key-id": "key-1",
        },
    ),
    ({"s3_acl": "bucket-owner-full-control"}, lambda _: {"x-amz-acl": "bucket-owner-full-control"}),
    (
        {"s3_checksum": "crc32"},
        lambda body: {"x-amz-checksum-crc32": base64_of(zlib.crc32(body).to_bytes(4, "big"))},
    ),
    (
        {"s3_checksum": "sha256"},
        lambda body: {"x-amz-checksum-sha256": base64_of(hashlib.sha256(body).digest())},
    ),
    (
        {"s3_signed_payloads": True},
        lambda body: {"x-amz-content-sha256": hashlib.sha256(body).hexdigest()},
    ),
]
"""Settings, and the headers that the bucket demands of a request by its body: of every one for
signed payloads, else of each put. Ceph 16 enforces only the ACL of these."""


EVERY_DEMAND = {name: value for given, _ in DEMANDS for name, value in given.items()}


@given(
    method=st.sampled_from(["GET", "PUT"]),
    key=st.from_regex(r"[A-Za-z0-9._/-]{1,40}", fullmatch=True),
    range_end=st.none() | st.integers(0, 1 << 40),
    token=st.none() | st.from_regex(r"[A-Za-z0-9+/=]{8,80}", fullmatch=True),
    demands=st.booleans(),
)
def test_signatures_are_those_of_the_clients_signer(
    method: str, key: str, range_end: int | None, token: str | None, demands: bool
) -> None:
    credentials = Credentials("access", "secret", token)
    auth = S3SigV4Auth(credentials, "s3", "eu-test-1")
    signer = SimpleNamespace(get_auth_instance=lambda *_: auth)
    place = S3Endpoint("http://h:1", "h:1", "/b/p%20q/", "eu-test-1", "s3", "agent", signer)
    extra = {} if range_end is None else {"range": f"bytes=0-{range_end}", "if-none-match": "*"}
    if demands:
        extra |= put_headers(Config(**EVERY_DEMAND), memoryview(b"payload"))
    head = place.signed(method, key, extra).decode()
    first, *lines = head.rstrip().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    signed = headers.pop("authorization")
    assert first == f"{method} /b/p%20q/{key} HTTP/1.1"
    request = AWSRequest(method, f"{place.url}{first.split()[1]}", headers=headers)
    request.context["timestamp"] = headers["x-amz-date"]
    canonical = auth.canonical_request(request)
    expected = auth.signature(auth.string_to_sign(request, canonical), request)
    assert signed.endswith(f"Signature={expected}")
    assert f"SignedHeaders={auth.signed_headers(auth.headers_to_sign(request))}," in signed
    assert f"Credential={auth.scope(request)}," in signed


@pytest.mark.parametrize(("demanded", "headers"), DEMANDS, ids=[str(one) for one, _ in DEMANDS])
def test_a_bucket_that_demands_something_gets_it_with_every_put_or_the_setting_is_named(
    demanded: dict[str, Any], headers: Callable[[Any], dict[str, str]], tmp_path: Path
) -> None:
    refused: list[Request] = []

    def check(request: Request) -> Answer | None:
        is_free = request.method != "PUT" and "s3_signed_payloads" not in demanded
        if is_free or headers(request.body).items() <= request.headers.items():
            return None
        refused.append(request)
        return failure(403, "AccessDenied")

    with QuickS3(intercept=check) as server:
        given = {
            "bulk_url": "s3://kv-cache/p",
            "index_url": f"sqlite://{tmp_path}/i",
            "s3_endpoint_url": server.url,
            "s3_addressing": "path",
            "s3_access_key_id": "test",
            "s3_secret_access_key": "testsecret",
            "load_deadline_ms": 60_000,
        }
        buffer = bytearray(8)
        with open_backends(Config(**given | demanded), NullRecorder()) as backends:
            store = backends.bulk
            for key in ("first", "second"):
                assert store.put_if_absent(key, b"value")
                assert not store.put_if_absent(key, b"value")
            store.put("pins/a", b"document")
            save_identity(store)
            save(store, backends.index)
            assert store.get_into("pins/a", memoryview(buffer)) == 8
            assert buffer == b"document"
            assert store.head("second") is not None
        assert refused == []
        with open_backends(Config(**given), NullRecorder()) as backends:
            for put in (
                lambda: backends.bulk.put_if_absent("k", b"value"),
                lambda: backends.bulk.put("k", b"value"),
            ):
                with pytest.raises(StoreDenied, match=next(iter(demanded))):
                    put()


def test_an_empty_key_of_kms_is_the_accounts() -> None:
    headers = put_headers(Config(s3_sse="aws:kms", s3_sse_kms_key_id=""), memoryview(b""))
    assert headers == {"content-length": "0", "x-amz-server-side-encryption": "aws:kms"}


_SCOPE = re.compile(r"(?i)Credential=[^/]*/[^/]*/([^/]*)/s3/aws4_request,")


def of_one_region(region: str) -> Callable[[Request], Answer | None]:
    """Refuses requests whose signature names another region."""

    def check(request: Request) -> Answer | None:
        signed = _SCOPE.search(request.headers.get("authorization", ""))
        fits = signed is not None and signed[1] == region
        return None if fits else failure(400, "AuthorizationHeaderMalformed")

    return check


def check(**settings: Any) -> None:
    given = {"bulk_url": "s3://bucket/p", "s3_addressing": "path", "load_deadline_ms": 60_000}
    store = open_s3(load_config(given | settings, environ={}))
    try:
        store.check()
    finally:
        store.close()


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file of AWS's profiles; no variable of this machine applies."""
    for name in ("REGION", "DEFAULT_REGION", "PROFILE", "SESSION_TOKEN"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-key")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    return tmp_path


@pytest.mark.parametrize(
    ("environ", "profile", "setting", "region"),
    [
        ({}, "", None, "us-east-1"),
        ({}, "eu-north-1", None, "eu-north-1"),
        ({"AWS_DEFAULT_REGION": "eu-west-2"}, "eu-north-1", None, "eu-west-2"),
        ({"AWS_REGION": "eu-west-1", "AWS_DEFAULT_REGION": "x-1"}, "eu-north-1", None, "eu-west-1"),
        ({"AWS_REGION": "eu-west-1\n"}, "", None, "eu-west-1"),
        ({"AWS_REGION": "", "AWS_DEFAULT_REGION": "eu-west-2\n"}, "", None, "eu-west-2"),
        ({"AWS_REGION": "eu-west-1"}, "eu-north-1", "ap-south-1", "ap-south-1"),
    ],
)
def test_the_region_of_a_signature_is_that_of_the_setting_then_awss(
    environ: dict[str, str],
    profile: str,
    setting: str | None,
    region: str,
    aws: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    if profile:
        (aws / "config").write_text(f"[default]\nregion = {profile}\n")
    with QuickS3(intercept=of_one_region(region)) as server:
        check(s3_region=setting, s3_endpoint_url=server.url)
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.url)
        check(s3_region=setting)
        with pytest.raises(StoreDenied, match="another region"):
            check(s3_region="us-west-2")


@pytest.mark.usefixtures("aws")
@pytest.mark.parametrize(
    "name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"]
)
@pytest.mark.parametrize("value", ["secret-one\n", "secret-one\r\n", "secret one", "sécret-one"])
def test_malformed_credentials_of_aws_are_named_and_not_shown(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"^{name} contains a space, a line break") as caught:
        check(s3_endpoint_url="http://127.0.0.1:9")
    assert "one" not in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("s3_access_key_id", "secret one"),
        ("s3_secret_access_key", "secret\none"),
        ("s3_secret_access_key", "sécret-one"),
        *((name, "secret\none") for name in ("redis_password", "redis_username")),
        ("sentinel_password", "secret\none"),
    ],
)
def test_malformed_credentials_of_settings_are_named_and_not_shown(
    setting: str, value: str
) -> None:
    what = "printable ASCII" if setting.startswith("s3") else "a line break"
    with pytest.raises(ConfigError, match=f"{setting} .*{what}") as caught:
        load_config({setting: value}, environ={})
    assert "one" not in str(caught.value)


def test_malformed_credentials_of_a_profile_are_denied_and_not_shown(
    aws: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    (aws / "credentials").write_text(
        "[default]\naws_access_key_id = sécret-one\naws_secret_access_key = x\n"
    )
    with pytest.raises(StoreDenied, match="correct them in the AWS profile") as caught:
        check(s3_endpoint_url="http://127.0.0.1:9")
    assert "one" not in str(caught.value)


ZONED = "kv--use1-az4--x-s3"
KEY, SECRET, TOKEN = "SESSIONKEY", "session-secret", "session-token"
SESSION = f"""<?xml version="1.0" encoding="UTF-8"?>
<CreateSessionResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Credentials>
<SessionToken>{TOKEN}</SessionToken><SecretAccessKey>{SECRET}</SecretAccessKey>
<AccessKeyId>{KEY}</AccessKeyId><Expiration>2099-01-01T00:00:00Z</Expiration>
</Credentials></CreateSessionResult>"""


class DirectoryBucket:
    """Accepts only what a directory bucket of S3 Express would.

    No server for them can be installed, so this is a simulation from the documentation: every
    request except the one for a session must carry its token, and be signed with its key for the
    service ``s3express``; a listing whose prefix is not a folder is refused.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.sessions = 0
        self.refused = ""
        """If not empty, the code of the answer to every request with a session."""

    def __call__(self, request: Request) -> Answer | None:
        if "session" in request.query:
            self.sessions += 1
            body = memoryview(SESSION.encode())
            return Answer(200, {"Content-Type": "application/xml"}, (body,))
        self.requests.append(request)
        if request.headers.get("x-amz-s3session-token") != TOKEN:
            return failure(403, "AccessDenied")
        if not is_signed(request):
            return failure(403, "SignatureDoesNotMatch")
        if self.refused:
            return failure(403, self.refused)
        is_listing = request.key.strip("/") == ZONED and request.method == "GET"
        if is_listing and not ("/" + request.query.get("prefix", "")).endswith("/"):
            return failure(400, "InvalidArgument")
        return None


def is_signed(request: Request) -> bool:
    told = request.headers["authorization"]
    scope, names = re.findall(r"(?:Credential|SignedHeaders)=([^,]+)", told)
    auth = S3SigV4Auth(Credentials(KEY, SECRET), "s3express", scope.split("/")[2])
    headers = {name: request.headers[name] for name in names.split(";")}
    again = AWSRequest(request.method, f"http://h{request.target}", headers=headers)
    again.context["timestamp"] = request.headers["x-amz-date"]
    text = auth.string_to_sign(again, auth.canonical_request(again))
    return scope == auth.scope(again) and told.endswith(f"={auth.signature(text, again)}")


@pytest.fixture
def bucket() -> DirectoryBucket:
    return DirectoryBucket()


@pytest.fixture
def store(bucket: DirectoryBucket) -> Iterator[S3Store]:
    with QuickS3(intercept=bucket) as server, s3_store(server.url, bucket=ZONED) as store:
        yield store


class TestDirectoryBucketStore(StoreContract):
    @pytest.fixture
    def store(self, store: S3Store) -> PruneStore:
        return store

    test_scan_passes_page_boundaries = None  # slow, and no other than in other buckets


def test_every_request_is_signed_with_the_session_and_one_session_serves_all(
    bucket: DirectoryBucket, store: S3Store
) -> None:
    large = pattern(6 * MIB)
    assert store.put_if_absent("ns/a", b"small")
    assert store.put_if_absent("ns/b", large)
    assert not store.put_if_absent("ns/a", b"other")
    buffer = memoryview(bytearray(len(large)))
    assert store.get_into("ns/b", buffer) == len(large)
    assert buffer == large
    assert store.get("ns/none") is None
    assert bucket.sessions == 1
    assert len(bucket.requests) == 5


def test_a_scan_asks_for_whole_folders_and_leaves_out_the_rest(
    bucket: DirectoryBucket, store: S3Store
) -> None:
    for key in ("ns/ab/abc", "ns/ab/abd", "ns/ab/b", "nt/x"):
        store.put(key, b"x")
    assert sorted(entry.key for entry in store.scan("ns/ab/ab")) == ["ns/ab/abc", "ns/ab/abd"]
    assert [entry.key for entry in store.scan("nt")] == ["nt/x"]
    asked = {one.query["prefix"] for one in bucket.requests if "list-type" in one.query}
    assert asked == {"p/ns/ab/", "p/"}


def test_a_refusal_is_no_absence_since_a_session_may_always_see_what_is_missing(
    bucket: DirectoryBucket, store: S3Store
) -> None:
    bucket.refused = "AccessDenied"
    with pytest.raises(StoreDenied):
        store.get("ns/a")
    assert not [one for one in bucket.requests if "list-type" in one.query]


def test_on_aws_the_zone_in_the_name_is_asked_by_tls_and_nothing_else() -> None:
    access = open_s3_access(
        Config(s3_region="us-east-1", s3_access_key_id="key", s3_secret_access_key="secret")
    )
    asked: list[tuple[str, str]] = []

    def answer(request: Any, **_: object) -> None:
        asked.append((request.method, request.url))
        raise ConnectionFailed("no network here")

    events: Any = access.client.meta.events
    events.register_first("before-send.s3", answer)
    store = store_of(access, bucket=ZONED, prefix="p", load_deadline_ms=1000)
    with pytest.raises(StoreUnavailable, match="no network here"):
        store.get_into("ns/a", memoryview(bytearray(1)))
    host = f"https://{ZONED}.s3express-use1-az4.us-east-1.amazonaws.com"
    assert set(asked) == {("GET", f"{host}/?session")}
    assert store._bucket.endpoint().url + store._bucket.endpoint().path == f"{host}/p/"
    store.close()
