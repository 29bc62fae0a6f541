"""``S3Store`` keeps what every store promises, against moto; faults come from botocore's stubs."""

import hashlib
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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
from objkv.stores.s3 import body as s3_body
from objkv.stores.s3.client import open_s3_client, translated
from objkv.stores.s3.store import S3Store
from objkv.telemetry import MemoryRecorder
from tests.contracts.store_contract import StoreContract
from tests.support.servers.listener import Listener

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


class TestS3StoreWithoutConditions(StoreContract):
    """On a server that refuses ``If-None-Match``, which then does not decide between writers."""

    @pytest.fixture
    def store(self, client: Any, prefix: str, on: Register) -> S3Store:
        on("PutObject", _refuse)
        return S3Store(client, bucket=BUCKET, prefix=prefix, multipart_bytes=PART)

    test_of_many_writers_exactly_one_wins = None
    test_scan_passes_page_boundaries = None  # slow, and no other than above


def _refuse(params: dict[str, Any], **_: object) -> None:
    if "If-None-Match" in params["headers"]:
        raise failure(501, "NotImplemented", "PutObject")


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


@pytest.mark.parametrize(("status", "code"), [(501, "NotImplemented"), (400, "InvalidArgument")])
def test_a_server_that_refuses_the_condition_is_asked_for_a_head_instead(
    store: S3Store, recorder: MemoryRecorder, client: Any, status: int, code: str, on: Register
) -> None:
    asked = []

    def refuse(params: dict[str, Any], **_: object) -> None:
        if "If-None-Match" in params["headers"]:
            asked.append(1)
            raise failure(status, code)

    on("PutObject", refuse)
    assert store.put_if_absent("a", b"1") is True
    assert store.put_if_absent("a", b"2") is False
    assert store.put_if_absent("b", b"3") is True
    assert store.get("a") == b"1"
    assert store.conditional_puts is False
    assert len(asked) == 1
    assert recorder.value("s3_unconditional_puts") == 3


def test_a_server_that_ignores_the_condition_is_found_out(
    store: S3Store, client: Any, on: Register
) -> None:
    def ignore(params: dict[str, Any], **_: object) -> None:
        params["headers"].pop("If-None-Match", None)

    on("PutObject", ignore)
    assert store.put_if_absent("a", b"1") is True
    assert store.conditional_puts is False
    assert store.put_if_absent("a", b"2") is False
    assert store.get("a") == b"1"


@pytest.mark.parametrize(
    "error",
    [
        failure(503, "SlowDown"),
        failure(500, "InternalError"),
        failure(429, "TooManyRequests"),
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


def test_a_conflict_with_another_writer_is_tried_again(
    store: S3Store, client: Any, on: Register
) -> None:
    conflicts = [failure(409, "ConditionalRequestConflict")] * 2

    def conflict(**_: object) -> None:
        if conflicts:
            raise conflicts.pop()

    on("PutObject", conflict)
    assert store.put_if_absent("k", b"1") is True


def test_endless_conflicts_end(store: S3Store, client: Any, on: Register) -> None:
    def conflict(**_: object) -> None:
        raise failure(409, "ConditionalRequestConflict")

    on("PutObject", conflict)
    with pytest.raises(StoreUnavailable, match="5 conflicts"):
        store.put_if_absent("k", b"1")


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
        (failure(503, "SlowDown"), StoreUnavailable),
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


class Answers(BaseHTTPRequestHandler):
    """Keeps connections alive, as real servers do and moto does not; counts them."""

    protocol_version = "HTTP/1.1"
    connections = 0

    def setup(self) -> None:
        type(self).connections += 1
        super().setup()

    def do_GET(self) -> None:
        value = b"" if self.path.endswith("empty") else bytes(range(256)) * 20
        self.send_response(200)
        self.send_header("Content-Length", str(len(value)))
        self.end_headers()
        self.wfile.write(value)

    def log_message(self, *_: object) -> None:
        pass


def test_a_value_is_read_in_slices_and_the_connection_is_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(s3_body, "SLICE_BYTES", 1000)
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        client = open_s3_client(Config(s3_endpoint_url=url, **PATIENT))
        store = S3Store(client, bucket=BUCKET, prefix="", multipart_bytes=PART)
        try:
            for _ in range(3):
                buffer = bytearray(6000)
                assert store.get_into("empty", memoryview(buffer)) == 0
                assert store.get_into("k", memoryview(buffer)) == 5120
                assert buffer[:5120] == bytes(range(256)) * 20
        finally:
            store.close()
            server.shutdown()
            thread.join()
    assert Answers.connections == 1


class Body:
    """As much of botocore's StreamingBody as ``read_exactly`` sees."""

    def __init__(self, *steps: bytes) -> None:
        self._steps = list(steps)

    def readinto(self, buffer: memoryview) -> int:
        step = self._steps.pop(0)
        buffer[: len(step)] = step
        return len(step)


def test_a_body_that_ends_early_is_unavailable() -> None:
    with pytest.raises(StoreUnavailable, match="ended after 3 of 5"):
        s3_body.read_exactly(Body(b"abc", b""), memoryview(bytearray(5)), 1, clock=lambda: 0)


class Dying(Listener):
    """Returns half a body to every request."""

    def serve(self, connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")


def test_a_server_that_dies_in_a_body_is_unavailable_every_way() -> None:
    with Dying() as server:
        url = f"http://127.0.0.1:{server.address[1]}"
        client = open_s3_client(Config(s3_endpoint_url=url, **PATIENT))
        for is_direct in (True, False):
            store = S3Store(
                client, bucket=BUCKET, prefix="", multipart_bytes=PART, is_direct=is_direct
            )
            with pytest.raises(StoreUnavailable, match="get k"):
                store.get("k")
            with pytest.raises(StoreUnavailable, match="get_into k"):
                store.get_into("k", memoryview(bytearray(100)))
        store.close()


def test_a_body_that_trickles_past_the_deadline_is_unavailable() -> None:
    times = iter([0.5, 1.5])
    with pytest.raises(StoreUnavailable, match="deadline passed after 2 of 5"):
        s3_body.read_exactly(
            Body(b"a", b"b", b"c"), memoryview(bytearray(5)), 1, clock=lambda: next(times)
        )


def test_a_value_too_long_for_the_buffer_does_not_spoil_the_next_call(store: S3Store) -> None:
    store.put("long", bytes(PART))
    for _ in range(3):
        with pytest.raises(StoreError, match="exceeds the buffer"):
            store.get_into("long", memoryview(bytearray(10)))
    assert store.get_range("long", 0, 3) == bytes(3)


def raised(error: Exception) -> StoreError:
    with pytest.raises(StoreError) as caught, translated("get", "k"):
        raise error
    assert caught.value.__cause__ is error
    return caught.value


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_what_time_mends_is_unavailable(status: int) -> None:
    expected = StoreBusy if status in (429, 503) else StoreUnavailable
    assert type(raised(failure(status, "Whatever"))) is expected
    assert issubclass(expected, StoreUnavailable)


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
    ],
)
def test_what_the_network_does_is_unavailable(error: Exception, words: str) -> None:
    translation = raised(error)
    assert type(translation) is StoreUnavailable
    assert words in str(translation)


def test_a_missing_bucket_is_denied(client: Any) -> None:
    store = S3Store(client, bucket="nowhere", prefix="", multipart_bytes=PART)
    calls = [store.check, lambda: store.get("k"), lambda: store.put_if_absent("k", b"")]
    calls.append(lambda: list(store.scan("")))
    for call in calls:
        with pytest.raises(StoreDenied, match="the bucket does not exist"):
            call()


def test_nobody_listening_is_unavailable_and_says_so() -> None:
    client = open_s3_client(Config(s3_endpoint_url="http://127.0.0.1:1", **PATIENT))
    client.meta.events.register("needs-retry.s3", lambda **_: None)
    with pytest.raises(StoreUnavailable, match="the connection was refused"):
        S3Store(client, bucket=BUCKET, prefix="", multipart_bytes=PART).check()


def test_the_client_is_made_as_the_settings_say() -> None:
    client = open_s3_client(
        Config(
            s3_endpoint_url="https://s3.test:1", s3_addressing="path", bulk_calls_max=7,
            s3_ranges_max=5,
            load_deadline_ms=20_000, **KEYS,
        )
    )  # fmt: skip
    config = client.meta.config
    assert client.meta.region_name == "us-east-1"
    assert config.max_pool_connections == 7 + 5
    assert config.retries == {"mode": "standard", "total_max_attempts": 3}
    # One attempt comes before those of the client.
    assert (1 + 3) * (config.connect_timeout + config.read_timeout) == pytest.approx(18)
    assert config.s3 == {"addressing_style": "path", "payload_signing_enabled": False}
    assert "objkv/" in config.user_agent_extra


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


def test_repr_says_where(store: S3Store, prefix: str, endpoint_url: str) -> None:
    assert repr(store) == f"<S3Store s3://kv-cache/{prefix}/ at {endpoint_url}>"


def test_one_client_serves_many_threads(store: S3Store) -> None:
    values = {f"k{number}": bytes([number]) * 100_000 for number in range(16)}
    failures: list[str] = []

    def work(key: str) -> None:
        buffer = memoryview(bytearray(100_000))
        store.put(key, values[key])
        if store.get_into(key, buffer) != 100_000 or buffer != values[key]:
            failures.append(key)

    threads = [threading.Thread(target=work, args=(key,)) for key in values]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
