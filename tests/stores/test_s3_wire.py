"""The short way between an S3 server and the caller's buffer, whatever the server does."""

import contextlib
import hashlib
import io
import select
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objkv.errors import StoreDenied, StoreError, StoreUnavailable, ValueTooLong
from objkv.net.deadline import bound_waits, can_wait
from objkv.stores.base import PruneStore
from objkv.stores.s3 import http as s3_http
from objkv.stores.s3.body import VALUE_BYTES_MAX, read_all
from objkv.stores.s3.client import CallDeadline
from objkv.stores.s3.http import HttpConnection, HttpResponse, KeptConnections, WireFailed
from objkv.stores.s3.store import S3Store
from objkv.stores.s3.write import Put
from tests.contracts.store_contract import StoreContract
from tests.support.servers.certificates import make_certificates
from tests.support.servers.listener import Scripted, hasty
from tests.support.servers.quick_s3 import (
    Answer,
    QuickS3,
    Request,
    failure,
    quick_s3_process,
)
from tests.support.servers.s3_stores import MIB, pattern, s3_store

VALUE = pattern(4 * MIB)
IN_RANGES = {"range_bytes": MIB, "ranges_max": 2}


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


def test_where_the_client_hides_its_credentials_it_does_everything(
    server: QuickS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3_store(server.url) as store:
        monkeypatch.setattr(store._client, "_request_signer", None)
        assert not store._wire.is_found
        store.put("k", b"value")
        assert store.get_into("k", memoryview(bytearray(5))) == 5


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


@pytest.mark.parametrize("is_direct", [True, False])
def test_connections_are_used_again(server: QuickS3, is_direct: bool) -> None:
    buffer = memoryview(bytearray(MIB))
    with s3_store(server.url, is_direct=is_direct) as store:
        store.put("empty", b"")
        for turn in range(5):
            store.put(f"k{turn}", pattern(MIB))
            assert store.get_into(f"k{turn}", buffer) == MIB
            assert store.get_into("empty", buffer) == 0
            assert store.get_into("absent", buffer) is None
            assert store.get_into(f"k{turn}", buffer[:7], start=7) == 7
    assert server.connections == 1


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


def asked_range(request: Request) -> tuple[int, int] | None:
    """``[start, end)`` of a get that names it."""
    asked = request.headers.get("range")
    if request.method != "GET" or asked is None:
        return None
    first, last = asked.removeprefix("bytes=").split("-")
    return int(first), int(last) + 1


def part_of(value: bytes, start: int, end: int, *, late: int = 0, **headers: str) -> Answer:
    place = {"Content-Range": f"bytes {start + late}-{end - 1 + late}/{len(value)}"}
    return Answer(206, headers | place, (memoryview(value)[start:end],))


def newer_later(request: Request) -> Answer | None:
    part = asked_range(request)
    return part_of(pattern(len(VALUE), 1), *part, ETag='"newer"') if part and part[0] else None


def a_byte_late(request: Request) -> Answer | None:
    part = asked_range(request)
    return part and part_of(VALUE, *part, late=min(part[0], 1), ETag='"same"')


def without_ranges(request: Request) -> None:
    request.headers.pop("range", None)


def once_another_place() -> Callable[[Request], None]:
    lies: list[Request] = []

    def shift(request: Request) -> None:
        if asked_range(request) == (MIB, 2 * MIB) and not lies:
            request.headers["range"] = f"bytes=0-{MIB - 1}"
            lies.append(request)

    return shift


MISBEHAVES: dict[str, tuple[Any, str]] = {
    "the value is replaced between ranges": (newer_later, "replaced during the read"),
    "a range begins a byte late": (a_byte_late, "did not return the requested range"),
    "ranges are ignored": (without_ranges, ""),
    "one range is of another place": (once_another_place(), ""),
}


@pytest.mark.parametrize(("answer", "error"), MISBEHAVES.values(), ids=MISBEHAVES)
def test_ranges_make_the_value_or_an_error(answer: Any, error: str) -> None:
    with QuickS3(intercept=answer) as server, s3_store(server.url, **IN_RANGES) as store:
        store.put("k", VALUE)
        buffer = memoryview(bytearray(len(VALUE)))
        if error:
            with pytest.raises(StoreUnavailable, match=error):
                store.get_into("k", buffer)
            return
        assert store.get_into("k", buffer) == len(VALUE)
        assert buffer == VALUE
        assert store.get_into("k", buffer[: 2 * MIB], start=3) == 2 * MIB
        assert buffer[: 2 * MIB] == VALUE[3 : 3 + 2 * MIB]


@pytest.mark.parametrize("etag", [{}, {"ETag": 'W/"same"'}])
def test_where_no_version_is_named_ranges_are_not_put_together(etag: dict[str, str]) -> None:
    """Each request for a range is answered from a newer version of the value."""
    asked: list[tuple[int, int] | None] = []

    def answer(request: Request) -> Answer | None:
        if request.method != "GET":
            return None
        asked.append(asked_range(request))
        value = pattern(4 * MIB, len(asked))
        if asked[-1] is None:
            return Answer(200, etag, (memoryview(value),))
        return part_of(value, *asked[-1], **etag)

    with QuickS3(intercept=answer) as server, s3_store(server.url, **IN_RANGES) as store:
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
def test_a_body_in_chunks_is_read_and_only_the_first_is_asked_for_twice(is_direct: bool) -> None:
    asked: list[Request] = []
    chunks = (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nval\r\n2\r\nue\r\n0\r\n\r\n"
    )

    def answer(request: Request) -> bytes:
        asked.append(request)
        return chunks

    with QuickS3(intercept=answer) as server, s3_store(server.url, is_direct=is_direct) as store:
        for count in (1, 2, 3):
            buffer, told = bytearray(7), []
            assert store.get_into("k", memoryview(buffer), told.append) == 5
            assert (buffer, told) == (b"value\0\0", [5])
            assert len(asked) == count + is_direct
        assert store.get("k") == b"value"
        for _ in range(2):
            with pytest.raises(ValueTooLong):
                store.get_into("k", memoryview(bytearray(4)))


HUGE = VALUE_BYTES_MAX + 1


def test_no_memory_is_taken_for_bytes_beyond_the_request() -> None:
    def lie(request: Request) -> bytes:
        status, nbytes = (206, 9) if request.key.endswith("part") else (200, HUGE)
        return f"HTTP/1.1 {status} OK\r\nContent-Length: {nbytes}\r\n\r\n123456789".encode()

    with QuickS3(intercept=lie) as server, s3_store(server.url) as store:
        assert store.get_range("part", 0, 9) == b"123456789"
        with pytest.raises(StoreError, match="9 bytes, more than the limit of 8"):
            store.get_range("part", 0, 8)
        for read in (lambda: store.get("whole"), lambda: store.get_range("whole", 0, 8)):
            with pytest.raises(StoreError, match=f"{HUGE} bytes, more than the limit"):
                read()
    bound_s, body = time.monotonic() + 60, io.BytesIO(b"1234")
    assert read_all({"Body": io.BytesIO(b"123")}, bound_s, 3) == b"123"
    with pytest.raises(StoreError, match="4 bytes, more than the limit of 3"):
        read_all({"Body": body}, bound_s, 3)
    assert body.closed


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


def refusal(status: str, code: str) -> bytes:
    body = f"<Error><Code>{code}</Code></Error>"
    return (
        f"HTTP/1.1 {status}\r\nContent-Type: application/xml\r\nConnection: close\r\n"
        f"Content-Length: {len(body)}\r\n\r\n{body}"
    ).encode()


def test_an_answer_while_the_body_is_being_sent_is_what_counts() -> None:
    value = pattern(16 * MIB)
    exists = refusal("412 Precondition Failed", "PreconditionFailed")
    with Scripted(hasty(exists)) as server, s3_store(server.url, multipart_bytes=64 * MIB) as store:
        store._writer.conditional = True
        assert store.put_if_absent("k", value) is False
    denied = refusal("403 Forbidden", "AccessDenied")
    with Scripted(hasty(denied)) as server, s3_store(server.url, multipart_bytes=64 * MIB) as store:
        for put in (store.put, store.put_if_absent):
            with pytest.raises(StoreDenied, match="objkv access"):
                put("k", value)


def test_what_is_taken_before_all_of_it_was_sent_is_not_taken() -> None:
    taken = hasty(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
    put = Put({}, "k", memoryview(pattern(32 * MIB)), CallDeadline.of(60, 60))
    with Scripted(taken) as server, s3_store(server.url) as store, pytest.raises(WireFailed):
        store._writer.put_directly(put, if_absent=False)


LOST: dict[str, Answer | bytes] = {
    "in chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "not at all": b"",
    "unavailable": failure(503, "SlowDown"),
}


@pytest.mark.parametrize("has_md5", [True, False])
@pytest.mark.parametrize("instead", LOST.values(), ids=LOST)
def test_a_put_that_wrote_is_true_though_it_was_sent_twice(
    instead: Answer | bytes, has_md5: bool
) -> None:
    def lose(request: Request, answer: Answer) -> Answer | bytes | None:
        if has_md5 and request.method != "PUT":
            digest = hashlib.md5(b"".join(answer.body), usedforsecurity=False).hexdigest()
            answer.headers["ETag"] = f'"{digest}"'
        is_lost = request.key.endswith("/k") and request.method == "PUT" and answer.status == 200
        return instead if is_lost else None

    with QuickS3(after=lose) as server, s3_store(server.url) as store:
        assert store.put_if_absent("first", b"0")
        assert store.put_if_absent("k", b"value")
        assert store.get("k") == b"value"


@pytest.mark.parametrize("is_direct", [True, False])
def test_a_put_that_another_writer_beat_is_false(is_direct: bool) -> None:
    asked: list[str] = []

    def look(request: Request) -> None:
        asked.append(f"{request.method} {request.key}")

    with QuickS3(intercept=look) as server, s3_store(server.url, is_direct=is_direct) as store:
        assert store.put_if_absent("first", b"0")
        assert store.put_if_absent("k", b"other")
        asked.clear()
        assert not store.put_if_absent("k", b"value")
        assert asked == ["PUT kv-cache/p/k"]


@pytest.mark.parametrize("instead", [LOST["unavailable"], LOST["not at all"]])
def test_a_repeated_put_that_another_writer_beat_is_false(instead: Answer | bytes) -> None:
    others: list[S3Store] = []

    def beat(request: Request) -> Answer | bytes | None:
        if not others or request.method != "PUT":
            return None
        others.pop().put("k", b"other")
        return instead

    with (
        QuickS3(intercept=beat) as server,
        s3_store(server.url) as store,
        s3_store(server.url) as other,
    ):
        assert store.put_if_absent("first", b"0")
        others.append(other)
        assert not store.put_if_absent("k", b"value")
        assert store.get("k") == b"other"


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


def open_sockets() -> int:
    names = Path("/proc/self/fd").iterdir()
    return sum(name.is_symlink() and name.readlink().name.startswith("socket:") for name in names)


def test_closing_ends_threads_and_connections() -> None:
    """The server is another process, whose ends of connections do not count."""
    threads = set(threading.enumerate())
    with quick_s3_process() as server:
        sockets = open_sockets()
        with s3_store(server.url, range_bytes=MIB, ranges_max=3) as store:
            store.put("k", pattern(12 * MIB))
            store.get_into("k", memoryview(bytearray(12 * MIB)))
            names = [thread.name for thread in set(threading.enumerate()) - threads]
            assert 0 < sum("objkv-range" in name for name in names) <= 3
            assert open_sockets() > sockets
            store.close()
            assert open_sockets() == sockets  # the store itself still exists
            assert set(threading.enumerate()) == threads


def test_the_ranges_of_all_gets_share_the_threads(server: QuickS3) -> None:
    """More gets than threads: those that find none free read on by themselves."""
    value = pattern(6 * MIB)
    right: list[bool] = []
    with s3_store(server.url, **IN_RANGES) as store:
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
    connection = SimpleNamespace(sock=None)
    with pytest.raises(ValueError, match="unknown length"):
        HttpResponse(HttpConnection(None, connection, timeout_s=1, kept=KeptConnections()), head)


class Pool:
    """As much of urllib3's as is used."""

    def __init__(self) -> None:
        self.pool: Any = SimpleNamespace(full=lambda: False)
        self.back: list[Any] = []

    def _put_conn(self, connection: Any) -> None:
        self.back.append(connection)


@pytest.fixture
def connected() -> Iterator[Callable[[], tuple[Any, socket.socket]]]:
    """Makes connections with their other ends."""
    ends: list[socket.socket] = []

    def connect() -> tuple[Any, socket.socket]:
        ours, theirs = socket.socketpair()
        ends.extend((ours, theirs))
        connection = SimpleNamespace(sock=ours)

        def close() -> None:
            ours.close()
            connection.sock = None

        connection.close = close
        return connection, theirs

    yield connect
    for end in ends:
        end.close()


@pytest.mark.parametrize("sent", [b"", b"x"])
def test_what_the_server_closed_or_still_speaks_on_is_closed(
    connected: Callable[[], tuple[Any, socket.socket]], sent: bytes
) -> None:
    kept, pool = KeptConnections(), Pool()
    connection, server = connected()
    kept.keep(pool, connection, 60)
    server.sendall(sent) if sent else server.close()
    assert kept.take(pool) is None
    assert connection.sock is None
    assert pool.back == [None]  # its place in the pool is free


def test_kept_connections_go_back_to_their_pool(
    connected: Callable[[], tuple[Any, socket.socket]], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, pool, now = KeptConnections(), Pool(), [100.0]
    monkeypatch.setattr(s3_http, "time", SimpleNamespace(monotonic=lambda: now[0]))
    first, second = connected()[0], connected()[0]
    bound_waits(first.sock, 0.02)
    for one in (first, second):
        kept.keep(pool, one, 60)
    assert kept.take(pool) is second, "the last one first"
    assert kept.take(Pool()) is None
    assert (pool.back.pop(), first.sock.gettimeout()) == (first, 60), "as the client knows it"
    kept.keep(pool, first, 60)
    now[0] += s3_http.KEEP_S + 1
    kept.keep(pool, second, 60)
    assert pool.back.pop() is first, "it was not needed for a while"
    monkeypatch.setattr(s3_http, "os", SimpleNamespace(getpid=lambda: -1))
    assert kept.take(pool) is None, "it is the parent's"
    assert (pool.back, second.sock is None) == ([], False)
    kept.close()
    monkeypatch.undo()
    kept.keep(pool, first, 60)
    assert pool.back == [first], "once closed nothing is kept"


@pytest.mark.skipif(not can_wait(socket.socket()), reason="waits in the kernel are Linux's")
def test_a_call_waits_in_the_kernel_for_all_but_not_for_ever() -> None:
    (ours, server), buffer = socket.socketpair(), memoryview(bytearray(6))

    def receive_all() -> int:
        return int(ours.recv_into(buffer, 0, socket.MSG_WAITALL))

    bound_waits(ours, 0.02)
    with pytest.raises(BlockingIOError):
        receive_all()
    server.sendall(b"abc")
    assert receive_all() == 3  # what came until then
    server.sendall(b"def")
    server.shutdown(socket.SHUT_WR)
    assert receive_all() == 3
    assert receive_all() == 0
    poll = select.poll()
    poll.register(ours, select.POLLIN)
    assert poll.poll(0)
    ours.close()
    server.close()
