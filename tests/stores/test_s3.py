"""``S3Store`` keeps what every store promises, against moto; faults come from a server in this
process."""

import hashlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from botocore.exceptions import (
    ClientError,
    ConnectTimeoutError,
    EndpointConnectionError,
    NoCredentialsError,
    ReadTimeoutError,
    SSLError,
)
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.s3.models import s3_backends
from werkzeug.serving import make_server

from objkv.config import Config
from objkv.errors import ConfigError, StoreBusy, StoreDenied, StoreError, StoreUnavailable
from objkv.stores.s3 import client as s3_client
from objkv.stores.s3.bucket import Bucket
from objkv.stores.s3.client import Retrier, S3Access, open_s3_access
from objkv.stores.s3.errors import translated
from objkv.stores.s3.store import S3Store
from tests.contracts.store_contract import StoreContract
from tests.support.servers.quick_s3 import Answer, QuickS3, Request
from tests.support.servers.quick_s3 import failure as refusal
from tests.support.servers.s3_stores import s3_store, store_of

BUCKET = "kv-cache"
SMALL_PAGE = 50
Handler = Callable[[Request], Answer | bytes | None]
KEYS = {"s3_access_key_id": "test", "s3_secret_access_key": "testsecret"}
PATIENT: dict[str, Any] = {"s3_addressing": "path", "load_deadline_ms": 900_000, **KEYS}
"""An attempt that seems to take too long is repeated, and a put may find what it has put itself."""


@pytest.fixture(scope="module")
def endpoint_url() -> Iterator[str]:
    """Moto, one request at a time: its check for a key and its put are separate steps, and
    replacing a key during a read is an internal error. Neither applies to S3."""
    with make_server("127.0.0.1", 0, DomainDispatcherApplication(create_backend_app)) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
    s3_backends.reset()  # its files of large keys


@pytest.fixture(scope="module")
def access(endpoint_url: str) -> Iterator[S3Access]:
    """One for all tests, since making one takes 0.2 s; each test has a prefix of its own."""
    access = open_s3_access(Config(s3_endpoint_url=endpoint_url, **PATIENT))
    access.client.create_bucket(Bucket=BUCKET)
    events = access.client.meta.events
    events.register("before-parameter-build.s3.ListObjectsV2", _ask_for_small_pages)
    yield access
    access.close()


def _ask_for_small_pages(params: dict[str, Any], **_: object) -> None:
    params.setdefault("MaxKeys", SMALL_PAGE)


@pytest.fixture(scope="module")
def client(access: S3Access) -> Any:
    return access.client


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    return f"fleet/{hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:8]}"


@pytest.fixture
def store(access: S3Access, prefix: str) -> S3Store:
    return store_of(access, bucket=BUCKET, prefix=prefix)


class TestS3Store(StoreContract):
    page_keys = SMALL_PAGE
    """Each key costs moto 4 ms."""

    @pytest.fixture
    def store(self, access: S3Access, prefix: str) -> S3Store:
        return store_of(access, bucket=BUCKET, prefix=prefix)


class Faulty(QuickS3):
    """A server whose answers to a method can be replaced."""

    def __init__(self) -> None:
        self.asked: list[Request] = []
        self.handlers: dict[str, Handler] = {}
        super().__init__(intercept=self._look)

    def _look(self, request: Request) -> Answer | bytes | None:
        self.asked.append(request)
        return self.handlers.get(request.method, lambda _: None)(request)


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[Faulty]:
    """Pauses before repetitions take no time."""
    monkeypatch.setattr(s3_client.time, "sleep", lambda _: None)
    with Faulty() as server:
        yield server


@pytest.fixture
def spoiled(faulty: Faulty) -> Iterator[S3Store]:
    with s3_store(faulty.url, client=PATIENT, load_deadline_ms=900_000) as store:
        yield store


def failure(status: int, code: str, operation: str = "GetObject") -> ClientError:
    answer: Any = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(answer, operation)


def test_values_are_kept_under_the_prefix(store: S3Store, client: Any, prefix: str) -> None:
    store.put("k", b"1")
    assert (
        client.list_objects_v2(Bucket=BUCKET, Prefix=prefix)["Contents"][0]["Key"] == f"{prefix}/k"
    )
    assert store.head("k") is not None
    store.delete("k")
    assert "Contents" not in client.list_objects_v2(Bucket=BUCKET, Prefix=prefix)


def test_objects_that_are_no_keys_are_left_out_of_a_scan(
    store: S3Store, client: Any, prefix: str
) -> None:
    client.put_object(Bucket=BUCKET, Key=f"{prefix}/folder/", Body=b"")
    client.put_object(Bucket=BUCKET, Key=f"{prefix}/a b", Body=b"")
    store.put("k", b"1")
    assert [entry.key for entry in store.scan("")] == ["k"]


def test_a_server_that_honours_the_condition_is_asked_once(
    spoiled: S3Store, faulty: Faulty
) -> None:
    assert [spoiled.put_if_absent("k", value) for value in (b"1", b"2")] == [True, False]
    assert spoiled.get("k") == b"1"
    assert [one.method for one in faulty.asked].count("PUT") == 2


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (501, "NotImplemented", "If-None-Match"),
        (501, "", "If-None-Match"),
        (403, "QuotaExceeded", "the quota is used up"),
        (400, "XMinioAdminBucketQuotaExceeded", "the quota is used up"),
        (507, "InsufficientStorage", "the quota is used up"),
    ],
)
def test_a_server_that_refuses_the_condition_or_has_a_quota_is_denied(
    spoiled: S3Store, faulty: Faulty, status: int, code: str, words: str
) -> None:
    faulty.handlers["PUT"] = lambda _: refusal(status, code)
    with pytest.raises(StoreDenied, match=words):
        spoiled.put_if_absent("k", b"1")
    assert len(faulty.asked) == 1


def test_a_conflict_with_another_writer_is_tried_again_but_not_for_ever(
    spoiled: S3Store, faulty: Faulty
) -> None:
    conflicts = iter([refusal(409, "ConditionalRequestConflict")] * 7)
    faulty.handlers["PUT"] = lambda _: next(conflicts, None)
    with pytest.raises(StoreUnavailable, match="5 conflicts"):
        spoiled.put_if_absent("k", b"1")
    assert spoiled.put_if_absent("k", b"1") is True


@pytest.mark.parametrize(
    "answer", [Answer(301), Answer(307), refusal(400, "AuthorizationHeaderMalformed")]
)
def test_a_bucket_in_another_region_is_denied_and_not_followed(
    spoiled: S3Store, faulty: Faulty, answer: Answer
) -> None:
    """The client would follow it, and values would not."""
    faulty.handlers |= dict.fromkeys(("GET", "PUT"), lambda _: answer)
    calls = (lambda: spoiled.get("k"), lambda: spoiled.put("k", b""), spoiled.check)
    for call in calls:
        with pytest.raises(StoreDenied, match="in another region: set s3_region"):
            call()
    assert len(faulty.asked) == len(calls)


def test_what_is_not_answered_with_200_or_206_is_no_value(spoiled: S3Store, faulty: Faulty) -> None:
    faulty.handlers["GET"] = lambda _: Answer(202, body=(memoryview(b"text"),))
    with pytest.raises(StoreUnavailable, match="HTTP 202"):
        spoiled.get("k")


def test_the_client_signs_the_host_that_is_sent(faulty: Faulty) -> None:
    with s3_store(faulty.url.replace("127.0.0.1", "LocalHost"), client=PATIENT) as store:
        store.head("k")
    assert faulty.asked[-1].headers["host"].startswith("localhost:")


ERRORS: dict[type[StoreError], list[tuple[Exception, str]]] = {
    StoreDenied: [
        (failure(403, "AccessDenied"), "objkv access"),
        (failure(403, "403"), "objkv access"),
        (failure(401, "Unauthorized"), "permission"),
        (failure(403, "InvalidAccessKeyId"), "s3_access_key_id"),
        (failure(403, "SignatureDoesNotMatch"), "s3_secret_access_key"),
        (failure(403, "RequestTimeTooSkewed"), "clock"),
        (failure(404, "NoSuchBucket"), "the bucket does not exist"),
        (failure(301, "PermanentRedirect"), "s3_region"),
        (failure(301, "301"), "s3_region"),
        (failure(400, "AuthorizationHeaderMalformed"), "s3_region"),
        (failure(400, "ExpiredToken"), "renew"),
        (NoCredentialsError(), "s3_access_key_id"),
        (SSLError(endpoint_url="e", error="CERTIFICATE_VERIFY_FAILED"), "s3_ca_bundle"),
        (SSLError(endpoint_url="e", error="WRONG_VERSION_NUMBER"), "http://"),
    ],
    StoreUnavailable: [
        (EndpointConnectionError(endpoint_url="e", error="Failed to resolve 'x'"), "DNS"),
        (
            EndpointConnectionError(endpoint_url="e", error="Connection refused"),
            "was refused; check",
        ),
        (ConnectTimeoutError(endpoint_url="e", error=""), "timeout"),
        (ReadTimeoutError(endpoint_url="e", error=""), "timeout"),
        (SSLError(endpoint_url="e", error="UNEXPECTED_EOF_WHILE_READING"), "EOF"),
        *((failure(status, "Whatever"), str(status)) for status in (500, 502, 504)),
    ],
    StoreBusy: [(failure(status, "Whatever"), str(status)) for status in (429, 503)],
}


@pytest.mark.parametrize(
    ("kind", "error", "words"), [(kind, *one) for kind, some in ERRORS.items() for one in some]
)
def test_errors_say_who_can_act(kind: type[StoreError], error: Exception, words: str) -> None:
    with pytest.raises(StoreError) as caught, translated("get", "k"):
        raise error
    assert type(caught.value) is kind
    assert words in str(caught.value)
    assert caught.value.__cause__ is error


def test_a_missing_bucket_is_denied(access: S3Access) -> None:
    store = store_of(access, bucket="nowhere", prefix="")
    calls = [store.check, lambda: store.get("k"), lambda: store.put_if_absent("k", b"")]
    calls.append(lambda: list(store.scan("")))
    for call in calls:
        with pytest.raises(StoreDenied, match="the bucket does not exist"):
            call()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"s3_region": "eu west"}, "eu west"),
        ({"s3_endpoint_url": "https://my_host"}, "s3_endpoint_url: the AWS client refuses it"),
        ({"s3_ca_bundle": "/no/such.pem"}, "/no/such.pem"),
    ],
)
def test_settings_that_cannot_work_are_a_config_error(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        open_s3_access(Config(**settings, **KEYS))
    for name, value in KEYS.items():
        with pytest.raises(ConfigError, match="set both s3_access_key_id and s3_secret_access_key"):
            open_s3_access(Config(**{name: value}))


class Lists:
    """A client that may list ``keys``, or nothing."""

    def __init__(self, *keys: str, denied: bool = False) -> None:
        self._keys = keys
        self._denied = denied
        self.asked: list[dict[str, Any]] = []

    def list_objects_v2(self, **options: Any) -> dict[str, Any]:
        self.asked.append(options)
        if self._denied:
            raise failure(403, "AccessDenied")
        found = [{"Key": key} for key in self._keys if key.startswith(options["Prefix"])]
        return {"Contents": found[: options["MaxKeys"]]} if found else {}


def bucket_of(client: Any) -> Bucket:
    return Bucket(S3Access(client, Mock(), Retrier()), "b", "p/")


@pytest.mark.parametrize("code", ["AccessDenied", "403"])
@pytest.mark.parametrize(
    ("keys", "denied", "absent"),
    [
        ((), False, True),
        (("p/k2", "p/kk"), False, True),
        (("p/k", "p/k2"), False, False),
        ((), True, False),
    ],
)
def test_a_listing_decides_what_a_refusal_means(
    keys: tuple[str, ...], denied: bool, absent: bool, code: str
) -> None:
    client: Any = Lists(*keys, denied=denied)
    assert bucket_of(client).is_absent("k", failure(403, code)) is absent
    assert client.asked[-1] == {"Bucket": "b", "Prefix": "p/k", "MaxKeys": 1}


@pytest.mark.parametrize(
    ("status", "code", "absent"),
    [
        (404, "NoSuchKey", True),
        (404, "NoSuchBucket", False),
        (403, "InvalidAccessKeyId", False),
        (403, "ExpiredToken", False),
        (500, "InternalError", False),
    ],
)
def test_other_answers_need_no_listing(status: int, code: str, absent: bool) -> None:
    client: Any = Lists()
    assert bucket_of(client).is_absent("k", failure(status, code)) is absent
    assert client.asked == []
