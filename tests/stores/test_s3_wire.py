"""The short way between a server and the caller's buffer."""

import contextlib
import os
import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator
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
from hypothesis import given, settings
from hypothesis import strategies as st

from objkv.errors import StoreDenied, StoreUnavailable, ValueTooLong
from objkv.stores.base import PruneStore
from objkv.stores.s3.client import CallDeadline
from objkv.stores.s3.http import HttpConnection, HttpResponse, KeptConnections, WireFailed
from objkv.stores.s3.signing import S3Endpoint, find_endpoint
from objkv.stores.s3.store import S3Store
from objkv.stores.s3.write import Put
from tests.contracts.store_contract import StoreContract
from tests.support.servers.certificates import make_certificates
from tests.support.servers.listener import Listener
from tests.support.servers.quick_s3 import Answer, QuickS3, Request, quick_s3_process
from tests.support.servers.s3_stores import BUCKET, MIB, pattern, s3_client, s3_store


@pytest.fixture
def server() -> Iterator[QuickS3]:
    with QuickS3() as server:
        yield server


@pytest.fixture
def store(server: QuickS3) -> Iterator[S3Store]:
    with s3_store(server.url) as store:
        yield store


class TestS3StoreInRanges(StoreContract):
    """Values of the contract are read by up to six ranges."""

    @pytest.fixture
    def store(self, server: QuickS3) -> Iterator[PruneStore]:
        with s3_store(server.url, range_bytes=MIB - 1, ranges_max=4) as store:
            yield store

    test_scan_passes_page_boundaries = None  # slow, and no other than without ranges


def open_sockets() -> int:
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the folder's own is closed by now
            count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return count


def test_closing_leaves_no_connection_open() -> None:
    with quick_s3_process() as server:
        before = open_sockets()
        with s3_store(server.url) as store:
            store.put("k", pattern(MIB))
            assert store.get_into("k", memoryview(bytearray(MIB))) == MIB
            assert open_sockets() > before
            store.close()
            assert open_sockets() == before  # the store itself still exists


def of_the_client(store: S3Store) -> list[str]:
    """The operations that the client does, from now on."""
    seen: list[str] = []

    def look(model: Any, **_: object) -> None:
        seen.append(model.name)

    store._client.meta.events.register("before-call.s3", look)  # type: ignore[arg-type]
    return seen


def test_large_bodies_go_past_the_client(store: S3Store) -> None:
    """Fails when a version of the client hides what the short way needs."""
    value, buffer = pattern(2 * MIB), memoryview(bytearray(2 * MIB))
    store.put_if_absent("first", b"")
    assert store.conditional_puts is True
    assert store._wire.is_found
    by_client = of_the_client(store)
    store.put("k", value)
    assert store.get_into("k", buffer) == len(value)
    assert buffer == value
    assert store.get_into("k", buffer[:9], start=5) == 9
    assert buffer[:9] == value[5:14]
    assert store.put_if_absent("new", value) is True
    assert store.put_if_absent("k", b"other") is False
    assert store.get_into("absent", buffer) is None
    assert store.get_into("absent", buffer, start=0) is None
    assert by_client == []


def test_where_the_client_hides_its_connections_it_does_everything(
    server: QuickS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3_store(server.url, range_bytes=MIB, ranges_max=4) as store:
        monkeypatch.delattr(type(store._client._endpoint.http_session), "_setup_ssl_cert")
        assert not store._wire.is_found


@pytest.mark.parametrize("shown", [None, SimpleNamespace(get_auth_instance=lambda: None)])
def test_where_the_client_hides_its_credentials_it_does_everything(
    server: QuickS3, monkeypatch: pytest.MonkeyPatch, shown: object
) -> None:
    with s3_store(server.url) as store:
        monkeypatch.setattr(store._client, "_request_signer", shown)
        assert not store._wire.is_found
        store.put("k", b"value")
        assert store.get_into("k", memoryview(bytearray(5))) == 5


def test_credentials_that_change_are_used_from_then_on(server: QuickS3) -> None:
    """Those of a role do so every hour; and every day has a key of its own."""
    client = s3_client(server.url)
    place = find_endpoint(client, BUCKET, "p/")
    assert place is not None
    heads = []
    for secret in ("one", "two"):
        credentials = Credentials("access", secret, f"token-{secret}")
        client._request_signer._credentials = credentials
        heads.append(place.signed(client, "GET", "k", {}))
        assert f"x-amz-security-token: token-{secret}".encode() in heads[-1]
    signatures = {head.partition(b"Signature=")[2].split()[0] for head in heads}
    assert len(signatures) == 2


def test_what_the_client_signs_otherwise_it_does_itself(server: QuickS3) -> None:
    client = s3_client(server.url)
    assert find_endpoint(client, BUCKET, "p/") is not None
    unsigned = client.meta.config.merge(ClientConfig(signature_version=botocore.UNSIGNED))
    anonymous = boto3.session.Session().client(
        "s3", endpoint_url=server.url, config=unsigned, region_name="x"
    )
    assert find_endpoint(anonymous, BUCKET, "p/") is None


@pytest.mark.parametrize("prefix", ["", "p/", "a b/ü%/+&?/"])
@pytest.mark.parametrize("addressing", ["path", "virtual"])
def test_the_place_is_where_the_client_would_ask(prefix: str, addressing: str) -> None:
    client = s3_client(
        "http://s3.test:99",
        s3_addressing=addressing,
        s3_region="eu-test-1",
        allow_plaintext=True,
    )
    sent: list[str] = []

    def stop(request: Any, **_: object) -> None:
        sent.append(request.url)
        raise InterruptedError

    place = find_endpoint(client, BUCKET, prefix)
    client.meta.events.register("before-send.s3.GetObject", stop)
    with pytest.raises(InterruptedError):
        client.get_object(Bucket=BUCKET, Key=prefix + "ns/ab/k.x")
    assert place is not None
    assert sent == [place.url + place.path + "ns/ab/k.x"]
    assert place.region == "eu-test-1"
    assert place.host == sent[0].split("/")[2]


@settings(deadline=None)
@given(
    method=st.sampled_from(["GET", "PUT"]),
    key=st.from_regex(r"[A-Za-z0-9._/-]{1,40}", fullmatch=True),
    query=st.sampled_from(["", "?partNumber=7&uploadId=2~a-b.c_d%2F"]),
    range_end=st.none() | st.integers(0, 1 << 40),
    token=st.none() | st.from_regex(r"[A-Za-z0-9+/=]{8,80}", fullmatch=True),
)
def test_signatures_are_those_of_the_clients_signer(
    method: str, key: str, query: str, range_end: int | None, token: str | None
) -> None:
    credentials = Credentials("access", "secret", token)
    auth = S3SigV4Auth(credentials, "s3", "eu-test-1")
    client: Any = type("Client", (), {"_request_signer": type("Signer", (), {})()})()
    client._request_signer.get_auth_instance = lambda *_: auth
    place = S3Endpoint("http://h:1", "h:1", "/b/p%20q/", "eu-test-1", "s3", "agent")
    extra = {} if range_end is None else {"range": f"bytes=0-{range_end}", "if-none-match": "*"}
    head = place.signed(client, method, key + query, extra).decode()
    first, *lines = head.rstrip().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    signed = headers.pop("authorization")
    assert first == f"{method} /b/p%20q/{key}{query} HTTP/1.1"
    request = AWSRequest(method, f"{place.url}{first.split()[1]}", headers=headers)
    request.context["timestamp"] = headers["x-amz-date"]
    canonical = auth.canonical_request(request)
    expected = auth.signature(auth.string_to_sign(request, canonical), request)
    assert signed.endswith(f"Signature={expected}")
    assert f"SignedHeaders={auth.signed_headers(auth.headers_to_sign(request))}," in signed
    assert f"Credential={auth.scope(request)}," in signed


def test_neither_get_nor_put_of_32_mib_takes_memory_or_copies() -> None:
    """The server is another process: tracemalloc sees what this one takes."""
    value = pattern(32 * MIB)
    buffer = memoryview(bytearray(32 * MIB))
    options = {"multipart_bytes": 16 * MIB, "range_bytes": 4 * MIB, "ranges_max": 2}
    with quick_s3_process() as server, s3_store(server.url, **options) as store:
        for key, part in (("one", value[: 16 * MIB]), ("parts", value)):
            store.put(key, part)
            assert store.get_into(key, buffer) == len(part)
            tracemalloc.start()
            try:
                store.put(key, part)
                assert store.get_into(key, buffer) == len(part)
                assert store.get_into(key, buffer[:-5], start=5) == len(part) - 5
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            assert buffer[: len(part) - 5] == part[5:]
            assert peak < MIB


def test_what_arrived_is_told_while_the_rest_is_on_its_way(server: QuickS3) -> None:
    value = pattern(9 * MIB + 5)
    for options in ({}, {"range_bytes": 2 * MIB, "ranges_max": 3}):
        buffer = memoryview(bytearray(10 * MIB))
        told: list[int] = []

        def arrived(nbytes: int, buffer: memoryview = buffer, told: list[int] = told) -> None:
            assert buffer[(told or [0])[-1] : nbytes] == value[(told or [0])[-1] : nbytes]
            assert threading.current_thread() is threading.main_thread()
            told.append(nbytes)

        with s3_store(server.url, **options) as store:
            store.put("k", value)
            assert store.get_into("k", buffer, arrived) == len(value)
            assert told == sorted(set(told))
            assert told[-1] == len(value)
            assert told[0] < len(value) / 2


class Enough(Exception):
    pass


@pytest.mark.parametrize("ranges_max", [0, 3])
def test_what_arrived_raises_ends_the_get_and_nobody_writes_any_more(
    server: QuickS3, ranges_max: int
) -> None:
    value = pattern(12 * MIB)

    def enough(_: int) -> None:
        raise Enough

    with s3_store(server.url, range_bytes=MIB, ranges_max=ranges_max) as store:
        store.put("k", value)
        buffers = [bytearray(12 * MIB) for _ in range(4)]
        for buffer in buffers:
            with pytest.raises(Enough):
                store.get_into("k", memoryview(buffer), enough)
            buffer[:] = bytes(len(buffer))
            assert store.get_into("k", memoryview(bytearray(len(value)))) == len(value)
            assert not any(buffer)
    for buffer in buffers:
        buffer.clear()  # would raise BufferError if a view were still held


def test_connections_are_used_again(server: QuickS3, store: S3Store) -> None:
    buffer = memoryview(bytearray(MIB))
    for turn in range(5):
        store.put(f"k{turn}", pattern(MIB))
        assert store.get_into(f"k{turn}", buffer) == MIB
        assert store.get_into("absent", buffer) is None
        assert store.get_into(f"k{turn}", buffer[:7], start=7) == 7
    assert server.connections == 1


def test_a_connection_that_still_carries_something_is_not_used_again(
    server: QuickS3, store: S3Store
) -> None:
    store.put("long", pattern(3 * MIB))
    store.put("k", b"value")
    for _ in range(3):
        with pytest.raises(ValueTooLong):
            store.get_into("long", memoryview(bytearray(10)))
        buffer = bytearray(10)
        assert store.get_into("k", memoryview(buffer)) == 5
        assert buffer[:5] == b"value"


def test_a_connection_that_the_server_closed_is_replaced_unseen(
    server: QuickS3, store: S3Store
) -> None:
    buffer = memoryview(bytearray(MIB))
    store.put("k", b"1")
    by_client = of_the_client(store)
    for _ in range(3):
        server.hang_up()
        assert store.get_into("k", buffer) == 1
        server.hang_up()
        store.put("k", b"1")
    assert by_client == []


def test_a_value_that_is_replaced_between_ranges_is_not_mixed() -> None:
    """Every range except the first is of another version, and as long as requested."""
    newer = memoryview(pattern(MIB, 1))

    def replaced(request: Request) -> Answer | None:
        asked = request.headers.get("range", "bytes=0-").removeprefix("bytes=")
        if asked.startswith("0-"):
            return None
        headers = {"ETag": '"newer"', "Content-Range": f"bytes {asked}/{8 * MIB}"}
        return Answer(206, headers, (newer,))

    with (
        QuickS3(intercept=replaced) as server,
        s3_store(server.url, range_bytes=MIB, ranges_max=2) as store,
    ):
        store.put("k", pattern(8 * MIB))
        buffer = memoryview(bytearray(8 * MIB))
        with pytest.raises(StoreUnavailable, match="replaced during the read"):
            store.get_into("k", buffer)


def test_another_range_than_the_requested_one_is_refused() -> None:
    """Every range except the first is of the same version and length, but begins a byte late."""
    value = pattern(4 * MIB)

    def shifted(request: Request) -> Answer | None:
        if request.method != "GET":
            return None
        first, _, last = request.headers["range"].removeprefix("bytes=").partition("-")
        start, end = int(first), int(last) + 1
        by = 1 if start else 0
        headers = {
            "ETag": '"same"',
            "Content-Range": f"bytes {start + by}-{end - 1 + by}/{4 * MIB}",
        }
        return Answer(206, headers, (memoryview(value)[start:end],))

    with (
        QuickS3(intercept=shifted) as server,
        s3_store(server.url, range_bytes=MIB, ranges_max=2) as store,
    ):
        store.put("k", value)
        buffer = memoryview(bytearray(4 * MIB))
        with pytest.raises(StoreUnavailable, match="did not return the requested range"):
            store.get_into("k", buffer)


@pytest.mark.parametrize("etag", [None, 'W/"same"'])
def test_where_no_version_is_named_ranges_are_not_put_together(etag: str | None) -> None:
    """Each request for a range is answered from a newer version of the value."""
    asked: list[str | None] = []
    headers = {} if etag is None else {"ETag": etag}

    def answer(request: Request) -> Answer | None:
        if request.method != "GET":
            return None
        asked.append(request.headers.get("range"))
        value = memoryview(pattern(4 * MIB, len(asked)))
        if asked[-1] is None:
            return Answer(200, headers, (value,))
        start, end = (int(text) for text in asked[-1].removeprefix("bytes=").split("-"))
        place = {"Content-Range": f"bytes {start}-{end}/{len(value)}"}
        return Answer(206, headers | place, (value[start : end + 1],))

    with (
        QuickS3(intercept=answer) as server,
        s3_store(server.url, range_bytes=MIB, ranges_max=2) as store,
    ):
        buffer = memoryview(bytearray(4 * MIB))
        assert store.get_into("k", buffer) == len(buffer)
        assert buffer == pattern(4 * MIB, len(asked))
        assert store.get_into("k", buffer[1:], start=1) == len(buffer) - 1
        assert buffer[1:] == pattern(4 * MIB, len(asked))[1:]


def test_what_broke_off_is_not_gone_on_with_where_no_version_is_named() -> None:
    def break_off(request: Request) -> bytes:
        if "range" in request.headers:
            head = f"HTTP/1.1 206 OK\r\nContent-Range: {request.headers['range']}/5\r\n"
            head = head.replace("bytes=", "bytes ")
            return head.encode() + b"Content-Length: 3\r\n\r\nNEW"
        return b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nol"

    with QuickS3(intercept=break_off) as server, s3_store(server.url) as store:
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match="no version"):
                store.get_into("k", memoryview(bytearray(5)))


@pytest.mark.parametrize("tag", ["", 'ETag: "v"\r\n'])
@pytest.mark.parametrize("place", ["0-4/3", "0-4/-7", "0-4/*", "1-5/6", "1-5/9", "0-4/x", ""])
def test_a_range_that_cannot_be_is_left_to_the_client(place: str, tag: str) -> None:
    def lie(request: Request) -> bytes:
        head = f"HTTP/1.1 206 OK\r\nContent-Range: bytes {place}\r\n{tag}Content-Length: 5\r\n\r\n"
        return head.encode() + b"value"

    with QuickS3(intercept=lie) as server, s3_store(server.url) as store:
        buffer = bytearray(7)
        by_client = of_the_client(store)
        assert store.get_into("k", memoryview(buffer)) == 5
        assert buffer == b"value\0\0"
        assert by_client == ["GetObject"] * len(by_client)
        assert by_client


@pytest.mark.parametrize("is_direct", [True, False])
def test_a_body_in_chunks_is_read(is_direct: bool) -> None:
    chunks = (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nval\r\n2\r\nue\r\n0\r\n\r\n"
    )
    with (
        QuickS3(intercept=lambda _: chunks) as server,
        s3_store(server.url, is_direct=is_direct) as store,
    ):
        buffer, told = bytearray(7), []
        assert store.get_into("k", memoryview(buffer), told.append) == 5
        assert buffer == b"value\0\0"
        assert told == [5]
        assert store.get("k") == b"value"
        with pytest.raises(ValueTooLong):
            store.get_into("k", memoryview(bytearray(4)))


def test_a_server_that_says_go_on_is_not_misread() -> None:
    ours, theirs = socket.socketpair()
    line = HttpConnection(None, SimpleNamespace(sock=ours), timeout_s=60, kept=KeptConnections())
    sent = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nLink: x\r\n\r\n"
    sent += b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nvalue"
    answers = []
    reader = threading.Thread(target=lambda: answers.append(line.read_head(time.monotonic() + 60)))
    reader.start()
    for at in range(len(sent)):
        theirs.sendall(sent[at : at + 1])
    reader.join()
    buffer = bytearray(5)
    answers[0].fill(memoryview(buffer), time.monotonic() + 60)
    assert (answers[0].status, buffer) == (200, b"value")
    ours.close()
    theirs.close()


def test_a_server_that_ignores_ranges_is_read_at_once() -> None:
    def ignore(request: Request) -> None:
        request.headers.pop("range", None)

    value = pattern(5 * MIB)
    with (
        QuickS3(intercept=ignore) as server,
        s3_store(server.url, range_bytes=MIB, ranges_max=2) as store,
    ):
        store.put("k", value)
        buffer = memoryview(bytearray(6 * MIB))
        assert store.get_into("k", buffer) == len(value)
        assert buffer[: len(value)] == value
        assert store.get_into("k", buffer[: 2 * MIB], start=3) == 2 * MIB
        assert buffer[: 2 * MIB] == value[3 : 3 + 2 * MIB]


def test_a_later_range_of_another_place_is_read_again() -> None:
    lies: list[Request] = []

    def shift(request: Request) -> None:
        if request.headers.get("range") == f"bytes={MIB}-{2 * MIB - 1}" and not lies:
            request.headers["range"] = f"bytes=0-{MIB - 1}"
            lies.append(request)

    value = pattern(3 * MIB)
    with (
        QuickS3(intercept=shift) as server,
        s3_store(server.url, range_bytes=MIB, ranges_max=2) as store,
    ):
        store.put("k", value)
        buffer = memoryview(bytearray(len(value)))
        assert store.get_into("k", buffer) == len(value)
        assert buffer == value
        assert lies


@pytest.mark.parametrize("ranges_max", [0, 2])
def test_over_tls_as_well(tmp_path: Path, ranges_max: int) -> None:
    certificates = make_certificates(tmp_path)
    value = pattern(11 * MIB)
    buffer = memoryview(bytearray(len(value)))
    trusting = {"s3_ca_bundle": certificates / "ca.pem"}
    with QuickS3(tls=certificates) as server:
        with s3_store(server.url, client=trusting, range_bytes=MIB, ranges_max=ranges_max) as store:
            store.put_if_absent("first", b"")
            assert store._wire.is_found
            by_client = of_the_client(store)
            assert store.put_if_absent("small", value[:MIB]) is True
            assert store.put_if_absent("small", value[:MIB]) is False
            assert store.get_into("small", buffer) == MIB
            assert by_client == []
            assert store.put_if_absent("k", value) is True
            assert store.get_into("k", buffer) == len(value)
            assert buffer == value
        other = {"s3_ca_bundle": certificates / "other-ca.pem"}
        with s3_store(server.url, client=other) as store, pytest.raises(StoreDenied, match="CA"):
            store.get_into("k", buffer)


class Hasty(Listener):
    """Answers as soon as it has the head of a request, then closes: the body is not read."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        super().__init__()
        self.url = f"http://127.0.0.1:{self.address[1]}"

    def serve(self, connection: socket.socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            more = connection.recv(65536)
            if not more:
                return
            head += more
        connection.sendall(self._answer)


def refusal(status: str, code: str) -> bytes:
    body = f"<Error><Code>{code}</Code></Error>"
    return (
        f"HTTP/1.1 {status}\r\nContent-Type: application/xml\r\nConnection: close\r\n"
        f"Content-Length: {len(body)}\r\n\r\n{body}"
    ).encode()


def test_an_answer_while_the_body_is_being_sent_is_what_counts() -> None:
    value = pattern(16 * MIB)
    exists = refusal("412 Precondition Failed", "PreconditionFailed")
    with Hasty(exists) as server, s3_store(server.url, multipart_bytes=64 * MIB) as store:
        store._writer.conditional = True
        assert store.put_if_absent("k", value) is False
    denied = refusal("403 Forbidden", "AccessDenied")
    with Hasty(denied) as server, s3_store(server.url, multipart_bytes=64 * MIB) as store:
        for put in (store.put, store.put_if_absent):
            with pytest.raises(StoreDenied, match="objkv access"):
                put("k", value)


def test_what_is_taken_before_all_of_it_was_sent_is_not_taken() -> None:
    taken = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
    view = memoryview(pattern(32 * MIB))
    put = Put({}, "k", view, CallDeadline.of(60, 60))
    with Hasty(taken) as server, s3_store(server.url) as store, pytest.raises(WireFailed):
        store._writer.put_directly(put, if_absent=False)


def test_connections_that_the_client_closed_are_looked_for_again(
    server: QuickS3, store: S3Store
) -> None:
    buffer = memoryview(bytearray(5))
    store.put("k", b"value")
    store._client._endpoint.http_session.close()  # type: ignore[attr-defined]
    for _ in range(2):
        assert store.get_into("k", buffer) == 5
    by_client = of_the_client(store)
    assert store.get_into("k", buffer) == 5
    assert by_client == []


def test_closing_ends_the_threads(server: QuickS3) -> None:
    before = set(threading.enumerate())

    def ours() -> list[str]:
        new = set(threading.enumerate()) - before
        return [thread.name for thread in new if "objkv-range" in thread.name]

    with s3_store(server.url, range_bytes=MIB, ranges_max=3) as store:
        store.put("k", pattern(12 * MIB))
        store.get_into("k", memoryview(bytearray(12 * MIB)))
        assert 0 < len(ours()) <= 3
    assert ours() == []


def test_the_ranges_of_all_gets_share_the_threads(server: QuickS3) -> None:
    """More gets than threads: those that find none free read on by themselves."""
    value = pattern(6 * MIB)
    right: list[bool] = []
    with s3_store(server.url, range_bytes=MIB, ranges_max=2) as store:
        store.put("k", value)

        def work() -> None:
            buffer = memoryview(bytearray(6 * MIB))
            right.extend(
                store.get_into("k", buffer) == 6 * MIB and buffer == value for _ in range(3)
            )

        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert right == [True] * 18


_HEADS = st.lists(
    st.sampled_from(
        [
            *(b"HTTP/1.1 200 OK", b"HTTP/1.0 206", b"HTTP/1.1 100 Continue", b"abc", b"\xff\x00"),
            *(b"\r\n", b"\r\n\r\n", b":", b"Content-Range: bytes 0-2/*", b"Content-Length:"),
            *(b"Content-Length: 3", b"content-length: -1", b"Content-Length: 1_0"),
            b"Transfer-Encoding: chunked",
        ]
    ),
    max_size=12,
)


@given(parts=_HEADS)
def test_no_answer_however_odd_raises_anything_but_what_leads_to_the_client(
    parts: list[bytes],
) -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(b"".join(parts))
    theirs.close()
    connection = SimpleNamespace(sock=ours, close=ours.close)
    pool = SimpleNamespace(_put_conn=lambda _: None)
    buffer = bytearray(3)
    deadline_s = time.monotonic() + 5
    line = HttpConnection(pool, connection, timeout_s=5, kept=KeptConnections())
    with contextlib.suppress(WireFailed), line.read_head(deadline_s) as answer:
        answer.fill(memoryview(buffer)[: answer.left], deadline_s)
        assert answer.total >= 0
    ours.close()


def test_a_header_that_only_a_line_feed_ends_is_left_to_the_client() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 5\nTransfer-Encoding: chunked\r\n\r\n"
    with pytest.raises(ValueError, match="unknown length"):
        HttpResponse(
            HttpConnection(None, SimpleNamespace(sock=None), timeout_s=1, kept=KeptConnections()),
            head,
        )
