"""S3 that is far, slow or faulty: a right value or an error, soon after the deadline at the latest.

Without deadlines each call would take more than a minute, so no test depends on this machine's
speed.
"""

import math
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
from botocore.exceptions import ClientError

from objkv import background
from objkv.errors import StoreError, StoreUnavailable
from objkv.net.deadline import EndsBy, ends_s
from objkv.stores.s3 import client as s3_client
from objkv.stores.s3 import http as s3_http
from objkv.stores.s3.bucket import Bucket
from objkv.stores.s3.client import last_s, one_call
from objkv.stores.s3.http import ConnectionFailed, HttpConnection, HttpResponse
from objkv.stores.s3.read import RangedGet
from objkv.stores.s3.store import S3Store
from tests.contracts.store_contract import Arrivals
from tests.stores.guards import assert_all_end
from tests.support.servers.listener import (
    Listener,
    Scripted,
    Serve,
    full_listener,
    reluctant,
    silent,
    trickling,
)
from tests.support.servers.quick_s3 import Answer, QuickS3, Request, failure
from tests.support.servers.s3_stores import BUCKET, MIB, pattern, s3_access, s3_store
from tests.support.servers.spoil import Spoil, SpoilS3
from tests.support.waiting import wait_until

FAR_S = 3600.0
DEADLINE_S = 0.3
IMPATIENT = {"load_deadline_ms": 4_000}
GETS = frozenset({"GET"})
Call = Callable[[S3Store], object]


@pytest.fixture
def mute() -> Iterator[Listener]:
    with Scripted(silent) as server:
        yield server


CALLS: dict[str, Call] = {
    "get": lambda store: store.get("k"),
    "get_into": lambda store: store.get_into("k", memoryview(bytearray(9))),
    "a part": lambda store: store.get_into("k", memoryview(bytearray(9)), start=1),
    "in ranges": lambda store: store.get_into("k", memoryview(bytearray(4 * MIB))),
    "head": lambda store: store.head("k"),
    "scan": lambda store: list(store.scan("")),
    "put": lambda store: store.put("k", b"value"),
    "put_if_absent": lambda store: store.put_if_absent("k", b"value"),
    "large": lambda store: store.put("k", bytes(4 * MIB)),
    "large, if absent": lambda store: store.put_if_absent("k", bytes(4 * MIB)),
    "delete": lambda store: store.delete("k"),
    "check": lambda store: store.check(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_what_a_server_does_not_answer_is_asked_twice_at_most(mute: Listener, call: Call) -> None:
    """Each attempt takes up to a quarter of the deadline, and the pause before a third one may take
    a second."""
    options = {"load_deadline_ms": 800, "client": {"load_deadline_ms": 800}}
    with (
        s3_store(mute.url, **options, range_bytes=MIB, ranges_max=2) as store,
        pytest.raises(StoreUnavailable),
    ):
        call(store)
    assert mute.connections <= 2


HEAD = b'HTTP/1.1 200 OK\r\nETag: "a"\r\nContent-Length: 100000\r\n\r\n'
SLOW: dict[str, Any] = {
    "a head without end": trickling(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 10_000),
    "a body that trickles": trickling(HEAD + b"x" * 100_000),
    "not HTTP": trickling(b"x" * 100_000),
    "continue": trickling(b"HTTP/1.1 100 Continue\r\n\r\n" * 5_000),
    "nothing": silent,
    "hardly takes anything": pytest.param(reluctant, marks=pytest.mark.slow),
}


@contextmanager
def opened(url: str) -> Iterator[S3Store]:
    """A store whose connections alone would be patient for minutes."""
    with s3_store(
        url,
        load_deadline_ms=int(DEADLINE_S * 1000),
        client={"load_deadline_ms": 600_000},
        range_bytes=MIB,
        ranges_max=2,
    ) as store:
        yield store


@pytest.mark.parametrize("serve", SLOW.values(), ids=SLOW)
def test_a_server_that_is_slow_is_left(serve: Serve) -> None:
    with Scripted(serve) as server, opened(server.url) as store:
        assert_all_end({name: (call, store) for name, call in CALLS.items()}, StoreUnavailable)


def test_a_server_that_lets_nobody_in_is_left() -> None:
    with full_listener() as (host, port), opened(f"http://{host}:{port}") as store:
        assert_all_end({name: (call, store) for name, call in CALLS.items()}, StoreUnavailable)


@pytest.mark.parametrize("by_tls", [False, True])
def test_a_body_that_trickles_is_left_at_its_deadline(
    monkeypatch: pytest.MonkeyPatch, by_tls: bool
) -> None:
    """By TLS no call waits in the kernel, and each returns one record."""
    ours, theirs = socket.socketpair()
    line, now_s = HttpConnection(ours, timeout_s=60, keep=lambda _: None), count()
    monkeypatch.setattr(s3_http, "time", SimpleNamespace(monotonic=lambda: float(next(now_s))))
    theirs.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n")
    with EndsBy(9):
        response = line.read_head()
    trickle = SimpleNamespace(
        recv_into=lambda *_: 1, read=lambda *_: 1, settimeout=lambda _: None, pending=int
    )
    monkeypatch.setattr(line, "socket", trickle)
    monkeypatch.setattr(line, "_tls", trickle if by_tls else None)
    with EndsBy(9), pytest.raises(ConnectionFailed, match="deadline passed"):
        response.fill(memoryview(bytearray(100)))
    ours.close()
    theirs.close()


@contextmanager
def begun_by(last_s: float) -> Iterator[None]:
    """A call that starts no attempt after ``last_s``, and may take as long as it likes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(s3_client, "last_s", lambda: last_s)
        yield


def test_the_client_begins_nothing_when_it_is_too_late(mute: Listener) -> None:
    client = s3_access(mute.url).client
    with begun_by(0), pytest.raises(StoreUnavailable, match="too little time left"):
        client.get_object(Bucket=BUCKET, Key="k")
    assert mute.connections == 0


ASKS: dict[str, Call] = {
    "a value": lambda store: store._bucket.ask("GET", "k", {}),
    "the client": lambda store: store._client.get_object(Bucket=BUCKET, Key="k"),
}


@pytest.mark.parametrize(("left_s", "attempts"), [(0.9, 2), (1, 3), (2, 4), (FAR_S, 4)])
@pytest.mark.parametrize("code", ["SlowDown", "InternalError"])
@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
def test_another_attempt_is_made_only_if_its_pause_is_over_in_time(
    ask: Call, left_s: float, attempts: int, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer ones after SlowDown, and the first repetition needs none."""
    asked: list[str] = []
    pauses: list[float] = []

    def refuse(request: Request) -> Answer:
        asked.append(request.method)
        return failure(503 if code == "SlowDown" else 500, code)

    with QuickS3(intercept=refuse) as server, s3_store(server.url) as store:
        stopped = SimpleNamespace(monotonic=lambda: 0.0, sleep=pauses.append)
        monkeypatch.setattr(s3_client, "time", stopped)
        monkeypatch.setattr(s3_client.random, "random", lambda: 1.0)
        with begun_by(left_s), pytest.raises(ClientError, match=code):
            ask(store)
    assert len(asked) == attempts
    base_s = 1.0 if code == "SlowDown" else 0.05
    assert pauses == pytest.approx([0, base_s, 2 * base_s][: attempts - 1])


def test_a_server_that_fails_for_long_is_asked_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def refuse(request: Request) -> Answer:
        asked.append(request.method)
        return failure(500, "InternalError")

    monkeypatch.setattr(s3_client.time, "sleep", lambda _: None)
    with QuickS3(intercept=refuse) as server, s3_store(server.url) as store:
        for _ in range(60):
            with pytest.raises(StoreUnavailable):
                store.get("k")
    assert len(asked) < 60 * 2


def test_conflicts_share_one_deadline() -> None:
    """Another writer is at work at each request, and each response takes its time."""
    now_s = 0.0
    asked: list[str] = []

    def conflict(request: Request) -> Answer | None:
        nonlocal now_s
        if request.method != "PUT":
            return None
        asked.append(request.method)
        now_s += 4
        return failure(409, "ConditionalRequestConflict")

    with (
        QuickS3(intercept=conflict) as server,
        s3_store(server.url, load_deadline_ms=10_000) as store,
    ):
        store._bucket.endpoint()
        real = time.monotonic
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "monotonic", lambda: real() + now_s)
            with pytest.raises(StoreUnavailable):
                store.put_if_absent("k", b"value")
    assert len(asked) <= 3


def test_without_threads_a_get_reads_on_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Thread(threading.Thread):
        def start(self) -> None:
            if self.name == "objkv-range-1":
                raise RuntimeError("can't start new thread")
            super().start()

    monkeypatch.setattr(background, "Thread", Thread)
    value, buffer = pattern(4 * MIB), memoryview(bytearray(4 * MIB))
    with QuickS3() as server, s3_store(server.url, range_bytes=MIB, ranges_max=3) as store:
        store.put("k", value)
        for _ in range(3):
            assert store.get_into("k", buffer) == len(value)
            assert buffer == value
        wait_until(lambda: not [one for one in threading.enumerate() if "range" in one.name])


def faults(shares: dict[str, float], seed: int, verbs: frozenset[str] = frozenset()) -> list[Spoil]:
    rng = random.Random(seed)

    def rule(fault: str, share: float) -> Spoil:
        error = "503 SlowDown" if fault == "error" else ""
        return Spoil(fault, verbs, when=lambda _: rng.random() < share, lag_s=0.02, error=error)

    return [rule(*one) for one in shares.items()]


@pytest.mark.parametrize(
    "shares",
    [
        pytest.param({"reset": 0.15, "error": 0.15, "lag": 0.5}, id="quick"),
        pytest.param({"reset": 0.1, "stall": 0.1}, id="stall", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("ranges_max", [0, 3])
def test_a_fault_is_a_right_value_or_an_error_never_wrong_bytes(
    shares: dict[str, float], ranges_max: int
) -> None:
    value, whole = pattern(4 * MIB + 17), 0
    with (
        SpoilS3() as far,
        s3_store(
            far.url,
            client=IMPATIENT,
            load_deadline_ms=4_000,
            range_bytes=MIB,
            ranges_max=ranges_max,
        ) as store,
    ):
        store.put("k", value)
        far.spoil(*faults(shares, 7, GETS))
        for _ in range(6):
            buffer = memoryview(bytearray(len(value)))
            arrivals = Arrivals(buffer, value)
            with suppress(StoreError):
                assert store.get_into("k", buffer, arrivals) == arrivals.reported[-1] == len(value)
                assert buffer == value
                whole += 1
            assert arrivals.true
            assert arrivals.reported == sorted(set(arrivals.reported))
        assert far.spoiled
    assert whole


@pytest.mark.parametrize("is_repeated", [False, True])
def test_what_broke_off_goes_on_where_it_was(is_repeated: bool) -> None:
    """Reported bytes are not written again, because the caller may have verified them."""
    value = pattern(3 * MIB)
    asked: list[str] = []

    def break_off(request: Request) -> bytes | None:
        if request.method != "GET":
            return None
        asked.append(request.headers.get("range", "all"))
        if len(asked) == 1:
            head = f"HTTP/1.1 200 OK\r\nETag: {etag}\r\nContent-Length: {len(value)}\r\n\r\n"
            return head.encode() + value[:MIB]
        return b"HTTP/1.1 500 No\r\n\r\n" if len(asked) == 2 and is_repeated else None

    with QuickS3(intercept=break_off) as server, s3_store(server.url) as store:
        store.put("k", value)
        etag = store._client.head_object(Bucket=BUCKET, Key="p/k")["ETag"]
        buffer = memoryview(bytearray(len(value)))
        arrivals = Arrivals(buffer, value)
        assert store.get_into("k", buffer, arrivals) == arrivals.reported[-1] == len(value)
        assert buffer == value
        assert arrivals.true
        assert arrivals.reported == sorted(set(arrivals.reported))
    rest = f"bytes={MIB}-{3 * MIB - 1}"
    assert asked == ["all", rest, rest][: 3 if is_repeated else 2]


def test_a_call_ends_with_its_deadline_or_its_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_client, "time", SimpleNamespace(monotonic=lambda: 100.0))
    with one_call(40):
        assert (ends_s(), last_s()) == (140, pytest.approx(131))
        with EndsBy(120), one_call(40):
            assert (ends_s(), last_s()) == (120, pytest.approx(115.5))
        assert ends_s() == 140
    assert (ends_s(), last_s()) == (math.inf, math.inf)


def ranged(ask: Callable[..., Any]) -> RangedGet:
    """A get of two bytes in two ranges, whose requests ``ask`` answers."""
    bucket = Mock(spec=Bucket, ask=ask)
    return RangedGet(bucket, "k", None, memoryview(bytearray(2)), [0, 1, 2], "v", None)


def one_byte(fill: Callable[..., None]) -> Any:
    """A response with a range of one byte, which ``fill`` writes."""
    response = MagicMock(spec=HttpResponse, status=206, left=1, etag="v", fill=fill)
    response.__enter__.return_value = response
    return response


def test_a_get_ends_when_no_helper_touches_the_buffer() -> None:
    pool = background.Pool("ranges", 1, RangedGet.help)
    begun, gate, over = (threading.Event() for _ in range(3))

    def fill(*_: object) -> None:
        begun.set()
        assert gate.wait(30)

    def give_up(*_: object) -> None:
        assert begun.wait(30)
        raise InterruptedError

    response = one_byte(fill)
    get = ranged(lambda *_: response)

    def call() -> None:
        with pytest.raises(InterruptedError):
            get.run(one_byte(give_up))
        over.set()

    pool.put([get])
    caller = threading.Thread(target=call)
    caller.start()
    assert begun.wait(30)
    assert not over.wait(0.2)
    response.shut.assert_called_once()
    gate.set()
    assert over.wait(30)
    caller.join()
    pool.close()


def test_a_helper_that_comes_too_late_touches_nothing_and_asks_no_more() -> None:
    """Its answer arrives after the caller has left."""
    asked: list[object] = []

    def ask(*_: object) -> Any:
        asked.append(get)
        get._await_readers()
        return one_byte(lambda *_: pytest.fail("the buffer is the caller's"))

    get = ranged(ask)
    get.help()
    get.help()
    assert asked == [get]


def test_what_a_helper_raised_is_the_callers_error() -> None:
    get = ranged(Mock(side_effect=StoreUnavailable("no server")))
    get.help()
    with pytest.raises(StoreUnavailable, match="no server"):
        get.run(one_byte(lambda _, progress, __: progress(1)))


def test_helpers_keep_the_deadline_of_the_call() -> None:
    seen: list[float] = []

    def ask(*_: object) -> None:
        seen.append(ends_s())
        raise StoreUnavailable("no server")

    with EndsBy(7):
        get = ranged(ask)
    thread = threading.Thread(target=get.help)
    thread.start()
    thread.join()
    assert seen == [7]
