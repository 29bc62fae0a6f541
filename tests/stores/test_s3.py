"""``S3Store`` keeps what every store promises, against moto; faults come from botocore's stubs."""

import hashlib
import threading
from collections.abc import Callable, Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

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
from objkv.stores.s3.absent import PROOF_S, Absence
from objkv.stores.s3.body import BodyLost, read_exactly
from objkv.stores.s3.client import open_s3_client, translated
from objkv.stores.s3.store import S3Store
from objkv.telemetry import MemoryRecorder
from tests.contracts.store_contract import StoreContract
from tests.support.servers.listener import Scripted, hasty

BUCKET = "kv-cache"
PART = 5 << 20
Register = Callable[[str, Any], None]
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
def client(endpoint_url: str) -> Any:
    """One for all tests, since making one takes 0.2 s; each test has a prefix of its own."""
    client = open_s3_client(Config(s3_endpoint_url=endpoint_url, **PATIENT))
    client.create_bucket(Bucket=BUCKET)
    return client


@pytest.fixture
def on(client: Any) -> Iterator[Register]:
    """Has a handler called before each request of an operation, until the test ends."""
    registered = []

    def register(operation: str, handler: Any) -> None:
        registered.append((f"before-call.s3.{operation}", handler))
        client.meta.events.register(*registered[-1])

    yield register
    for event, handler in registered:
        client.meta.events.unregister(event, handler)


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    return f"fleet/{hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:8]}"


@pytest.fixture
def recorder() -> MemoryRecorder:
    return MemoryRecorder()


@pytest.fixture
def store(client: Any, prefix: str, recorder: MemoryRecorder) -> S3Store:
    """Every request by the client, so that handlers see them."""
    return S3Store(
        client, bucket=BUCKET, prefix=prefix, multipart_bytes=PART, is_direct=False,
        recorder=recorder,
    )  # fmt: skip


class TestS3Store(StoreContract):
    @pytest.fixture
    def store(self, client: Any, prefix: str) -> S3Store:
        return S3Store(client, bucket=BUCKET, prefix=prefix, multipart_bytes=PART)


class TestS3StoreByTheClientAlone(StoreContract):
    """Unusual requests go this way; all do if the wire cannot be used."""

    @pytest.fixture
    def store(self, client: Any, prefix: str) -> S3Store:
        return S3Store(client, bucket=BUCKET, prefix=prefix, multipart_bytes=PART, is_direct=False)

    test_scan_passes_page_boundaries = None  # slow, and no other than above


def failure(status: int, code: str, operation: str = "GetObject") -> ClientError:
    answer: Any = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(answer, operation)


def test_values_are_kept_under_the_prefix(store: S3Store, client: Any, prefix: str) -> None:
    store.put("k", b"1")
    assert (
        client.list_objects_v2(Bucket=BUCKET, Prefix=prefix)["Contents"][0]["Key"] == f"{prefix}/k"
    )


def test_objects_that_are_no_keys_are_left_out_of_a_scan(
    store: S3Store, client: Any, prefix: str
) -> None:
    client.put_object(Bucket=BUCKET, Key=f"{prefix}/folder/", Body=b"")
    client.put_object(Bucket=BUCKET, Key=f"{prefix}/a b", Body=b"")
    store.put("k", b"1")
    assert [entry.key for entry in store.scan("")] == ["k"]


def test_a_server_that_honours_the_condition_is_asked_once(
    store: S3Store, recorder: MemoryRecorder, client: Any, on: Register
) -> None:
    puts = []
    on("PutObject", lambda params, **_: puts.append(params["headers"]))
    assert store.conditional_puts is None
    assert [store.put_if_absent(f"k{number}", b"") for number in range(3)] == [True] * 3
    assert store.conditional_puts is True
    assert len(puts) == 4
    assert recorder.value("s3_unconditional_puts") == 0


@pytest.mark.parametrize("code", ["NotImplemented", "InvalidArgument", ""])
def test_where_the_condition_is_refused_or_ignored_a_head_is_asked_for_instead(
    store: S3Store, recorder: MemoryRecorder, client: Any, code: str, on: Register
) -> None:
    asked = []

    def refuse(params: dict[str, Any], **_: object) -> None:
        if params["headers"].pop("If-None-Match", None):
            asked.append(1)
            if code:
                raise failure(501 if code == "NotImplemented" else 400, code)

    on("PutObject", refuse)
    assert store.put_if_absent("a", b"1") is True
    assert store.put_if_absent("a", b"2") is False
    assert store.put_if_absent("b", b"3") is True
    assert store.get("a") == b"1"
    assert store.conditional_puts is False
    assert len(asked) == (1 if code else 2)
    assert recorder.value("s3_unconditional_puts") == (3 if code else 2)


@pytest.mark.parametrize(
    "error",
    [
        failure(503, "SlowDown"),
        failure(400, "RequestTimeout"),
        ReadTimeoutError(endpoint_url="http://s3"),
        StoreUnavailable("the deadline is too near to ask"),
    ],
    ids=lambda error: type(error).__name__ + str(error)[:40],
)
def test_a_second_put_without_a_verdict_leaves_it_to_the_next_to_find_out(
    store: S3Store, recorder: MemoryRecorder, client: Any, error: Exception, on: Register
) -> None:
    puts: list[Any] = []

    def fail_second(params: dict[str, Any], **_: object) -> None:
        puts.append(params["headers"])
        if len(puts) == 2:
            raise error

    on("PutObject", fail_second)
    assert store.put_if_absent("a", b"1") is True
    assert store.conditional_puts is None
    assert store.put_if_absent("a", b"2") is False
    assert store.put_if_absent("b", b"2") is True
    assert store.conditional_puts is True
    assert recorder.value("s3_unconditional_puts") == 0
    assert store.get("a") == b"1"


def test_a_conflict_with_another_writer_is_tried_again_but_not_for_ever(
    store: S3Store, client: Any, on: Register
) -> None:
    conflicts = [failure(409, "ConditionalRequestConflict")] * 7

    def conflict(**_: object) -> None:
        if conflicts:
            raise conflicts.pop()

    on("PutObject", conflict)
    with pytest.raises(StoreUnavailable, match="5 conflicts"):
        store.put_if_absent("k", b"1")
    assert store.put_if_absent("k", b"1") is True


def test_large_values_go_up_in_parts(store: S3Store, client: Any, on: Register) -> None:
    parts = []
    on("UploadPart", lambda **_: parts.append(1))
    value = bytes(range(256)) * (12 << 12)
    assert store.put_if_absent("k", memoryview(value)) is True
    assert store.put_if_absent("k", b"x" * len(value)) is False
    assert len(parts) == 3
    assert store.get("k") == value
    store.put("k", value[::-1])
    assert store.get("k") == value[::-1]


def test_a_value_that_appears_during_an_upload_stays(
    store: S3Store, client: Any, prefix: str, on: Register
) -> None:
    def overtake(**_: object) -> None:
        client.put_object(Bucket=BUCKET, Key=f"{prefix}/k", Body=b"first")

    on("UploadPart", overtake)
    assert store.put_if_absent("k", bytes(PART + 1)) is False
    assert store.get("k") == b"first"
    assert "Uploads" not in client.list_multipart_uploads(Bucket=BUCKET)


@pytest.mark.parametrize("operation", ["UploadPart", "CompleteMultipartUpload"])
@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (failure(503, "SlowDown"), StoreBusy),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (MemoryError(), MemoryError),
    ],
)
def test_an_upload_that_fails_leaves_no_parts(
    store: S3Store,
    client: Any,
    operation: str,
    error: BaseException,
    expected: type[BaseException],
    on: Register,
) -> None:
    def fail(**_: object) -> None:
        raise error

    on(operation, fail)
    for put in (store.put, store.put_if_absent):
        with pytest.raises(expected):
            put("k", bytes(PART + 1))
    assert "Uploads" not in client.list_multipart_uploads(Bucket=BUCKET)
    assert store.get("k") is None


def test_a_body_that_ends_early_is_unavailable_every_way() -> None:
    half = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf"
    with Scripted(hasty(half)) as server:
        client = open_s3_client(Config(s3_endpoint_url=server.url, **PATIENT))
        for is_direct in (True, False):
            store = S3Store(
                client, bucket=BUCKET, prefix="", multipart_bytes=PART, is_direct=is_direct
            )
            with pytest.raises(StoreUnavailable, match="get k"):
                store.get("k")
            with pytest.raises(StoreUnavailable, match="get_into k"):
                store.get_into("k", memoryview(bytearray(100)))
        store.close()


@pytest.mark.parametrize("has_stream", [True, False])
def test_a_body_that_trickles_is_unavailable(has_stream: bool) -> None:
    def readinto(buffer: memoryview) -> int:
        buffer[:1] = b"x"
        return 1

    stream = SimpleNamespace(read1=lambda _: b"x")
    body = SimpleNamespace(_raw_stream=stream) if has_stream else SimpleNamespace(readinto=readinto)
    into, now_s = memoryview(bytearray(100)), count(1)
    with pytest.raises(BodyLost, match="deadline passed after 6 of 100"):
        read_exactly(body, into, 5, clock=lambda: float(next(now_s)))


def raised(error: Exception) -> StoreError:
    with pytest.raises(StoreError) as caught, translated("get", "k"):
        raise error
    assert caught.value.__cause__ is error
    return caught.value


@pytest.mark.parametrize(
    ("error", "words"),
    [
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
)
def test_what_the_operator_mends_is_denied_with_what_to_do(error: Exception, words: str) -> None:
    translation = raised(error)
    assert type(translation) is StoreDenied
    assert words in str(translation)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (EndpointConnectionError(endpoint_url="e", error="Failed to resolve 'x'"), "DNS"),
        (
            EndpointConnectionError(endpoint_url="e", error="Connection refused"),
            "the connection was refused",
        ),
        (ConnectTimeoutError(endpoint_url="e", error=""), "timeout"),
        (ReadTimeoutError(endpoint_url="e", error=""), "timeout"),
        (SSLError(endpoint_url="e", error="UNEXPECTED_EOF_WHILE_READING"), "EOF"),
        *((failure(status, "Whatever"), "") for status in (429, 500, 502, 503, 504)),
    ],
)
def test_what_time_mends_is_unavailable(error: Exception, words: str) -> None:
    translation = raised(error)
    is_busy = any(status in str(translation) for status in ("HTTP 429", "HTTP 503"))
    assert type(translation) is (StoreBusy if is_busy else StoreUnavailable)
    assert words in str(translation)


def test_a_missing_bucket_is_denied(client: Any) -> None:
    store = S3Store(client, bucket="nowhere", prefix="", multipart_bytes=PART)
    calls = [store.check, lambda: store.get("k"), lambda: store.put_if_absent("k", b"")]
    calls.append(lambda: list(store.scan("")))
    for call in calls:
        with pytest.raises(StoreDenied, match="the bucket does not exist"):
            call()


def test_the_client_is_made_as_the_settings_say() -> None:
    given = {"bulk_calls_max": 7, "s3_ranges_max": 5, "load_deadline_ms": 20_000, **KEYS}
    config = open_s3_client(Config.model_validate(given)).meta.config
    assert config.max_pool_connections == 7 + 5
    # One attempt comes before the client's three.
    assert (1 + 3) * (config.connect_timeout + config.read_timeout) == pytest.approx(18)


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
        open_s3_client(Config(**settings, **KEYS))


PLACE = {"Bucket": "b", "Key": "p/k"}
HIDDEN = failure(403, "AccessDenied")


class Lists:
    """A client that may list ``keys``, or nothing."""

    def __init__(self, *keys: str, denied: bool = False) -> None:
        self._keys = keys
        self._denied = denied
        self.asked: list[dict[str, Any]] = []
        self.heads: list[dict[str, Any]] = []
        self.failure: ClientError | None = None

    def head_object(self, **place: Any) -> dict[str, Any]:
        self.heads.append(place)
        if self.failure is not None:
            raise self.failure
        return {}

    def list_objects_v2(self, **options: Any) -> dict[str, Any]:
        self.asked.append(options)
        if self._denied:
            raise failure(403, "AccessDenied")
        found = [{"Key": key} for key in self._keys if key.startswith(options["Prefix"])]
        return {"Contents": found[: options["MaxKeys"]]} if found else {}


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
    assert Absence(client).is_absent(PLACE, failure(403, code)) is absent
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
    client = Lists()
    assert Absence(client).is_absent(PLACE, failure(status, code)) is absent  # type: ignore[arg-type]
    assert client.asked == []


def test_a_read_proves_misses_until_it_is_old_and_fails_when_repeated() -> None:
    client: Any = Lists(denied=True)
    now_s, seen = [0.0], {"Bucket": "b", "Key": "p/seen"}
    absence = Absence(client, clock=lambda: now_s[0])
    absence.note_read(seen)
    assert absence.is_absent(PLACE, HIDDEN)
    payload = PLACE | {"Key": "p/k.safetensors"}
    assert not absence.is_absent(payload, HIDDEN)
    assert len(client.asked) == 1, "a refused listing is not repeated for each miss"
    now_s[0] += PROOF_S + 1
    assert absence.is_absent(PLACE, HIDDEN)
    assert client.heads == [seen]
    now_s[0] += PROOF_S + 1
    client.failure = failure(503, "SlowDown")  # which refutes nothing
    assert not absence.is_absent(PLACE, HIDDEN)
    client.failure = None
    assert absence.is_absent(PLACE, HIDDEN)
    now_s[0] += PROOF_S + 1
    client.failure = failure(403, "403")
    assert not absence.is_absent(PLACE, HIDDEN)
    assert not absence.is_absent(PLACE, HIDDEN)
    assert len(client.heads) == 4
