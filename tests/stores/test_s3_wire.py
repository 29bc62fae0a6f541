"""What is read and written on our own connections to S3, whatever the server does."""

import select
import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from objkv.errors import ConfigError, StoreDenied, StoreError, StoreUnavailable, ValueTooLong
from objkv.stores.base import PruneStore
from objkv.stores.s3.http import (
    STEP_BYTES,
    VALUE_BYTES_MAX,
    ConnectionFailed,
    Connections,
    HttpConnection,
    HttpResponse,
)
from objkv.stores.s3.read import PART_STEP_BYTES
from objkv.stores.s3.store import S3Store
from tests.contracts.store_contract import StoreContract, Unwilling, refuse
from tests.support.servers.certificates import make_certificates
from tests.support.servers.listener import Scripted, hasty
from tests.support.servers.quick_s3 import Answer, QuickS3, Request, failure, quick_s3_process
from tests.support.servers.s3_stores import MIB, pattern, s3_access, s3_store

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

    store._client.meta.events.register("before-call.s3", look)
    return seen


def test_values_go_past_the_client(store: S3Store) -> None:
    value, buffer = pattern(2 * MIB), memoryview(bytearray(2 * MIB))
    by_client = of_the_client(store)
    store.put_if_absent("first", b"")
    store.put("k", value)
    assert store.get("first") == b""
    assert store.get("k", 5, 9) == value[5:9]
    assert store.get_into("k", buffer) == len(value)
    assert buffer == value
    assert store.get_into("k", buffer[:9], start=5) == 9
    assert buffer[:9] == value[5:14]
    assert store.put_if_absent("new", value) is True
    assert store.put_if_absent("k", b"other") is False
    assert store.get_into("absent", buffer) is None
    assert store.get_into("absent", buffer, start=0) is None
    assert by_client == ["GetObject"], "built, and not sent"


def test_neither_get_nor_put_of_32_mib_takes_memory_or_copies() -> None:
    """The server is another process: tracemalloc sees what this one takes."""
    value = pattern(32 * MIB)
    buffer = memoryview(bytearray(32 * MIB))
    options = {"range_bytes": 4 * MIB, "ranges_max": 2}
    with quick_s3_process() as server, s3_store(server.url, **options) as store:
        for key, part in (("half", value[: 16 * MIB]), ("all", value)):
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


@pytest.mark.parametrize("ranges_max", [0, 3])
def test_what_arrived_raises_ends_the_get_and_nobody_writes_any_more(
    server: QuickS3, ranges_max: int
) -> None:
    value = pattern(12 * MIB)
    with s3_store(server.url, range_bytes=MIB, ranges_max=ranges_max) as store:
        store.put("k", value)
        buffers = [bytearray(12 * MIB) for _ in range(4)]
        for buffer in buffers:
            with pytest.raises(Unwilling):
                store.get_into("k", memoryview(buffer), refuse)
            buffer[:] = bytes(len(buffer))
            assert store.get_into("k", memoryview(bytearray(len(value)))) == len(value)
            assert not any(buffer)
    for buffer in buffers:
        buffer.clear()  # would raise BufferError if a view were still held


@pytest.mark.parametrize("ranges_max", [0, 3])
@pytest.mark.parametrize(("start", "step_bytes"), [(None, STEP_BYTES), (0, PART_STEP_BYTES)])
def test_a_part_is_reported_more_often_than_a_whole_value(
    server: QuickS3, start: int | None, step_bytes: int, ranges_max: int
) -> None:
    """A step waits for its layers; every report costs a message and a wake-up."""
    value, told = pattern(13 * MIB), list[int]()
    buffer = memoryview(bytearray(len(value)))
    with s3_store(server.url, range_bytes=5 * MIB, ranges_max=ranges_max) as store:
        store.put("k", value)
        assert store.get_into("k", buffer, told.append, start=start) == len(value)
    assert told[-1] == len(value)
    assert all(later - earlier >= step_bytes for earlier, later in pairwise(told[:-1]))
    if ranges_max == 0 and start is not None:
        assert max(later - earlier for earlier, later in pairwise(told)) <= 2 * step_bytes


def test_connections_are_used_again(server: QuickS3) -> None:
    """By the client, too."""
    buffer = memoryview(bytearray(MIB))
    with s3_store(server.url) as store:
        store.put("empty", b"")
        for turn in range(5):
            store.put(f"k{turn}", pattern(MIB))
            assert store.get_into(f"k{turn}", buffer) == MIB
            assert store.get_into("empty", buffer) == 0
            assert store.get_into("absent", buffer) is None
            assert store.get_into(f"k{turn}", buffer[:7], start=7) == 7
            assert store.head(f"k{turn}") is not None
            assert len(list(store.scan(""))) == turn + 2
    assert server.connections == 1


def test_a_connection_that_the_server_closed_is_replaced_unseen(
    server: QuickS3, store: S3Store
) -> None:
    buffer = memoryview(bytearray(MIB))
    store.put("k", b"1")
    for _ in range(3):
        server.hang_up()
        assert store.get_into("k", buffer) == 1
        server.hang_up()
        store.put("k", b"1")
        server.hang_up()
        assert store.head("k") is not None


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


def without_later_ranges(request: Request) -> None:
    if (part := asked_range(request)) and part[0]:
        request.headers.pop("range")


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
    "ranges are ignored later": (without_later_ranges, "did not return the requested range"),
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


@pytest.mark.parametrize("tag", ["", 'ETag: "v"\r\n'])
@pytest.mark.parametrize("place", ["0-4/3", "0-4/-7", "0-4/*", "1-5/6", "1-5/9", "0-4/x", ""])
def test_a_range_that_cannot_be_is_refused(place: str, tag: str) -> None:
    def lie(request: Request) -> bytes:
        head = f"HTTP/1.1 206 OK\r\nContent-Range: bytes {place}\r\n{tag}Content-Length: 5\r\n\r\n"
        return head.encode() + b"value"

    with QuickS3(intercept=lie) as server, s3_store(server.url) as store:
        for start in (None, 0):
            with pytest.raises(StoreUnavailable, match="range"):
                store.get_into("k", memoryview(bytearray(7)), start=start)
        with pytest.raises(StoreUnavailable, match="range"):
            store.get("k")


CHUNKS = b"3\r\nval\r\n2;x=y\r\nue\r\n0\r\n\r\n"


def test_a_body_in_chunks_is_read() -> None:
    asked: list[Request] = []

    def answer(request: Request) -> Answer:
        asked.append(request)
        return Answer(200, {"Transfer-Encoding": "chunked", "ETag": "v"}, (memoryview(CHUNKS),))

    with QuickS3(intercept=answer) as server, s3_store(server.url) as store:
        buffer, told = bytearray(7), list[int]()
        assert store.get_into("k", memoryview(buffer), told.append) == 5
        assert (buffer, told) == (b"value\0\0", [5])
        assert store.get("k") == b"value"
        assert store.get("k", 0, 5) == b"value"
        with pytest.raises(StoreUnavailable, match="ignores ranges"):
            store.get("k", 1, 3)
        with pytest.raises(ValueTooLong):
            store.get_into("k", memoryview(bytearray(4)))
        assert len(asked) > 4
        assert server.connections <= 2


IN_CHUNKS = b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "rest",
    [
        b"Content-Length: 100\r\n\r\nhalf",
        *(IN_CHUNKS + body for body in (b"3\r\nval\r\n", b"3\r\nva", b"3", b"")),
        IN_CHUNKS + b"-3\r\nval\r\n0\r\n\r\n",
        IN_CHUNKS + b"x\r\n\r\n",
        IN_CHUNKS + b"3\r\nvalue\r\n0\r\n\r\n",
        *(IN_CHUNKS + body for body in (b"f" * 70_000, b"%x\r\n" % (VALUE_BYTES_MAX + 1))),
    ],
    ids=lambda rest: rest[:50].decode(),
)
def test_a_body_or_chunks_that_end_early_or_are_none_are_no_value(rest: bytes) -> None:
    with Scripted(hasty(b"HTTP/1.1 200 OK\r\n" + rest)) as server, s3_store(server.url) as store:
        with pytest.raises(StoreUnavailable, match="get k"):
            store.get("k")
        with pytest.raises(StoreUnavailable, match="get_into k"):
            store.get_into("k", memoryview(bytearray(100)))


HUGE = VALUE_BYTES_MAX + 1


def test_no_memory_is_taken_for_bytes_beyond_the_request() -> None:
    def lie(request: Request) -> bytes:
        if request.key.endswith("part"):
            status, nbytes, place = 206, 9, "Content-Range: bytes 0-8/9\r\n"
        else:
            status, nbytes, place = 200, HUGE, ""
        head = f"HTTP/1.1 {status} OK\r\n{place}Content-Length: {nbytes}\r\n\r\n"
        return head.encode() + b"123456789"

    with QuickS3(intercept=lie) as server, s3_store(server.url) as store:
        assert store.get("part", 0, 9) == b"123456789"
        with pytest.raises(StoreUnavailable, match="did not return the requested range"):
            store.get("part", 0, 8)
        with pytest.raises(StoreError, match=f"{HUGE} bytes, more than"):
            store.get("whole")
        assert store.get("whole", 0, 8) == b"12345678"


def test_a_server_that_says_go_on_is_not_misread() -> None:
    ours, theirs = socket.socketpair()
    line = HttpConnection(ours, timeout_s=60, keep=lambda _: None)
    sent = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nLink: x\r\n\r\n"
    sent += b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nvalue"
    answers = []
    reader = threading.Thread(target=lambda: answers.append(line.read_head()))
    reader.start()
    for at in range(len(sent)):
        theirs.sendall(sent[at : at + 1])
    reader.join()
    buffer = bytearray(5)
    answers[0].fill(memoryview(buffer))
    assert (answers[0].status, buffer) == (200, b"value")
    ours.close()
    theirs.close()


def test_a_thread_that_reads_is_ended_at_once_by_another() -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n")
    answer = HttpConnection(ours, timeout_s=600, keep=lambda _: None).read_head()
    threading.Timer(0.05, answer.shut).start()
    with pytest.raises(ConnectionFailed):
        answer.fill(memoryview(bytearray(5)))
    theirs.close()


def resolve(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Let the name ``s3.test`` have these addresses."""
    real = socket.getaddrinfo

    def found(host: str, *args: Any, **options: Any) -> list[Any]:
        hosts = addresses if host == "s3.test" else (host,)
        return [one for name in hosts for one in real(name, *args, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", found)


def test_the_first_address_that_accepts_is_used(
    server: QuickS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve(monkeypatch, "127.0.0.9", "127.0.0.1")
    url = server.url.replace("127.0.0.1", "s3.test")
    with s3_store(url, client={"allow_plaintext": "bulk"}) as store:
        store.put("k", b"value")
        assert store.get("k") == b"value"


def test_a_proxy_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"only directly: add s3\.test to no_proxy"):
        s3_access("https://s3.test:1")
    s3_access("https://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "s3.test")
    s3_access("https://s3.test:1")


@pytest.mark.parametrize("ranges_max", [0, 2])
def test_over_tls_as_well(tmp_path: Path, ranges_max: int, monkeypatch: pytest.MonkeyPatch) -> None:
    certificates = make_certificates(tmp_path)
    value = pattern(11 * MIB)
    buffer = memoryview(bytearray(len(value)))
    trusting = {"s3_ca_bundle": certificates / "ca.pem"}
    with QuickS3(tls=certificates) as server:
        with s3_store(server.url, client=trusting, range_bytes=MIB, ranges_max=ranges_max) as store:
            assert store.put_if_absent("small", value[:MIB]) is True
            assert store.put_if_absent("small", value[:MIB]) is False
            assert store.get_into("small", buffer) == MIB
            assert [entry.key for entry in store.scan("")] == ["small"]
            assert store.put_if_absent("k", value) is True
            assert store.get_into("k", buffer) == len(value)
            assert buffer == value
        other = {"s3_ca_bundle": certificates / "other-ca.pem"}
        with s3_store(server.url, client=other) as store:
            for call in (lambda: store.get_into("k", buffer), store.check):
                with pytest.raises(StoreDenied, match="CA"):
                    call()
        resolve(monkeypatch, "127.0.0.1")
        named = server.url.replace("127.0.0.1", "s3.test")  # not in the certificate
        with s3_store(named, client=trusting) as store, pytest.raises(StoreDenied, match="match"):
            store.get("k")

    def clear(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with Scripted(clear) as plain:
        wrong = plain.url.replace("http:", "https:")
        with s3_store(wrong, client=trusting) as store, pytest.raises(StoreDenied, match="http://"):
            store.get("k")


def refusal(status: str, code: str) -> bytes:
    body = f"<Error><Code>{code}</Code></Error>"
    return (
        f"HTTP/1.1 {status}\r\nContent-Type: application/xml\r\nConnection: close\r\n"
        f"Content-Length: {len(body)}\r\n\r\n{body}"
    ).encode()


def test_an_answer_while_the_body_is_being_sent_is_what_counts() -> None:
    value = pattern(16 * MIB)
    exists = refusal("412 Precondition Failed", "PreconditionFailed")
    with Scripted(hasty(exists)) as server, s3_store(server.url) as store:
        assert store.put_if_absent("k", value) is False
    denied = refusal("403 Forbidden", "AccessDenied")
    with Scripted(hasty(denied)) as server, s3_store(server.url) as store:
        for put in (store.put, store.put_if_absent):
            with pytest.raises(StoreDenied, match="objkv access"):
                put("k", value)


def test_what_is_taken_before_all_of_it_was_sent_is_not_taken() -> None:
    taken = hasty(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
    options = {"load_deadline_ms": 2_000}
    with (
        Scripted(taken) as server,
        s3_store(server.url, **options) as store,
        pytest.raises(StoreUnavailable, match="before the whole body was sent"),
    ):
        store.put("k", pattern(32 * MIB))


LOST: dict[str, Answer | bytes] = {
    "in chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "not at all": b"",
    "unavailable": failure(503, "SlowDown"),
}


@pytest.mark.parametrize("instead", LOST.values(), ids=LOST)
def test_a_put_whose_answer_is_lost_has_written_and_finds_it(instead: Answer | bytes) -> None:
    """Callers take what exists for stored."""

    def lose(request: Request, answer: Answer) -> Answer | bytes | None:
        is_lost = request.key.endswith("/k") and request.method == "PUT" and answer.status == 200
        return instead if is_lost else None

    with QuickS3(after=lose) as server, s3_store(server.url) as store:
        assert store.put_if_absent("first", b"0")
        store.put_if_absent("k", b"value")
        assert store.get("k") == b"value"


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


def test_a_header_that_only_a_line_feed_ends_is_refused() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 5\nTransfer-Encoding: chunked\r\n\r\n"
    line: Any = None
    with pytest.raises(ValueError, match="unknown length"):
        HttpResponse(line, head)


class Ends:
    """Connections to a server of this test, which has their other ends."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self.connections = Connections(connect_s=60, read_s=60, ca=None)
        self._theirs: list[socket.socket] = []

    def take(self) -> HttpConnection:
        return self.connections.acquire(self.url)

    def connect(self) -> tuple[HttpConnection, socket.socket]:
        made = self.connections.acquire(self.url, is_fresh=True)
        self._theirs.append(self._listening.accept()[0])
        return made, self._theirs[-1]

    def close(self) -> None:
        self.connections.close()
        for one in (*self._theirs, self._listening):
            one.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


def keep(connection: HttpConnection) -> None:
    connection.release(is_clean=True)


@pytest.mark.parametrize("sent", [b"", b"x"])
def test_what_the_server_closed_or_still_speaks_on_is_closed(ends: Ends, sent: bytes) -> None:
    ours, theirs = ends.connect()
    keep(ours)
    theirs.sendall(sent) if sent else theirs.close()
    assert select.select([ours.socket], [], [], 60)[0]
    again = ends.take()
    assert (again is ours, ours.socket.fileno()) == (False, -1)
    again.close()


def test_kept_connections_are_used_last_first_and_closed_at_the_end(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first, _), (second, _), (third, _) = (ends.connect() for _ in range(3))
    for one in (first, second):
        keep(one)
    assert ends.take() is second
    assert second.is_used
    third.release()
    assert third.socket.fileno() == -1, "a response may still arrive on it"
    with monkeypatch.context() as patch:
        patch.setattr("os.getpid", lambda: -1)
        assert not first.is_quiet(), "it is the parent's"
    ends.connections.close()
    assert first.socket.fileno() == -1
    keep(second)
    assert second.socket.fileno() == -1, "once closed nothing is kept"
