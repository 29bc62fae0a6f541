"""Calls of ``S3Store`` and of its client end within their deadline, answered or not."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from botocore.exceptions import ClientError

from objkv.errors import StoreBusy, StoreError, StoreUnavailable
from objkv.stores.s3 import client as s3_client_module
from objkv.stores.s3 import helpers as s3_crew
from objkv.stores.s3.body import read_exactly
from objkv.stores.s3.client import begun_by
from objkv.stores.s3.helpers import Helper, HelperPool, Piece, Team
from objkv.stores.s3.http import HttpConnection, WireFailed
from objkv.stores.s3.store import S3Store
from tests.support.servers.listener import Listener
from tests.support.servers.quick_s3 import Answer, QuickS3, Request, failure
from tests.support.servers.s3_stores import BUCKET, MIB, pattern, s3_client, s3_store

FAR_S = 3600.0


class Silent(Listener):
    """Takes requests and never answers."""

    def serve(self, connection: socket.socket) -> None:
        """Until the client is gone."""
        while connection.recv(1 << 20):
            pass


@pytest.fixture
def silent() -> Iterator[Silent]:
    with Silent() as server:
        yield server


CALLS: dict[str, Callable[[S3Store], object]] = {
    "get": lambda store: store.get("k"),
    "get_range": lambda store: store.get_range("k", 1, 2),
    "get_into": lambda store: store.get_into("k", memoryview(bytearray(9))),
    "get_range_into": lambda store: store.get_into("k", memoryview(bytearray(9)), start=1),
    "in ranges": lambda store: store.get_into("k", memoryview(bytearray(4 * MIB))),
    "head": lambda store: store.head("k"),
    "scan": lambda store: list(store.scan("")),
    "put": lambda store: store.put("k", b"value"),
    "put_if_absent": lambda store: store.put_if_absent("k", b"value"),
    "in parts": lambda store: store.put("k", bytes(4 * MIB)),
    "in parts if absent": lambda store: store.put_if_absent("k", bytes(4 * MIB)),
    "delete": lambda store: store.delete("k"),
    "check": lambda store: store.check(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_what_a_server_does_not_answer_is_asked_twice_at_most(
    silent: Silent, call: Callable[[S3Store], object]
) -> None:
    """Each attempt takes up to a quarter of the deadline. The client alone makes three, and waits
    for up to three seconds in between."""
    options = {"deadline_s": 0.8, "client": {"load_deadline_ms": 800}, "multipart_bytes": MIB}
    url = f"http://127.0.0.1:{silent.address[1]}"
    with s3_store(url, **options, range_bytes=MIB, ranges_max=2) as store:
        store._writer.conditional = True
        with pytest.raises(StoreUnavailable):
            call(store)
    assert silent.connections <= 2


def test_the_client_begins_nothing_when_it_is_too_late(silent: Silent) -> None:
    client = s3_client(f"http://127.0.0.1:{silent.address[1]}")
    with begun_by(time.monotonic()), pytest.raises(StoreUnavailable, match="too little time left"):
        client.get_object(Bucket=BUCKET, Key="k")
    assert silent.connections == 0


@pytest.fixture
def sleepless(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's waits take no time."""
    monkeypatch.setattr("botocore.endpoint.time", SimpleNamespace(sleep=lambda _: None))


@pytest.fixture
def stopped(sleepless: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the client it is always 0, and its waits take no time."""
    monkeypatch.setattr(s3_client_module, "time", SimpleNamespace(monotonic=lambda: 0.0))


@pytest.mark.usefixtures("stopped")
@pytest.mark.parametrize(("left_s", "attempts"), [(0.9, 1), (1, 2), (2, 3), (FAR_S, 3)])
@pytest.mark.parametrize("code", ["SlowDown", "InternalError"])
def test_the_client_tries_again_only_if_its_wait_is_over_in_time(
    left_s: float, attempts: int, code: str
) -> None:
    asked: list[str] = []

    def refuse(request: Request) -> Answer:
        asked.append(request.method)
        return failure(503, code)

    with QuickS3(intercept=refuse) as server:
        client = s3_client(server.url)
        with begun_by(left_s), pytest.raises(ClientError, match=code):
            client.get_object(Bucket=BUCKET, Key="k")
    assert len(asked) == attempts


@pytest.mark.usefixtures("stopped")
def test_what_is_not_tried_again_has_its_outcome_however_late() -> None:
    with QuickS3() as server:
        client = s3_client(server.url)
        with begun_by(0), pytest.raises(ClientError, match="NoSuchKey"):
            client.get_object(Bucket=BUCKET, Key="k")


def test_after_the_deadline_nobody_connects() -> None:
    with QuickS3() as server, s3_store(server.url) as store:
        assert store._wire.is_found
        with pytest.raises(WireFailed, match="deadline"):
            store._wire.ask("GET", "k", {}, time.monotonic())
        assert server.connections == 0


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

    with QuickS3(intercept=conflict) as server, s3_store(server.url, deadline_s=10) as store:
        assert store._wire.is_found
        store._writer.conditional = True
        real = time.monotonic
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "monotonic", lambda: real() + now_s)
            with pytest.raises(StoreUnavailable):
                store.put_if_absent("k", b"value")
    assert len(asked) <= 3


class Drops:
    """A stream of the client that has a byte more every second."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._raw_stream = self

    def read1(self, _size: int) -> bytes:
        self.now_s += 1
        return b"x"

    def clock(self) -> float:
        return self.now_s


def test_a_body_of_the_client_that_trickles_is_left_in_time() -> None:
    drops = Drops()
    with pytest.raises(StoreUnavailable, match="deadline passed after 6 of 100"):
        read_exactly(drops, memoryview(bytearray(100)), 5, clock=drops.clock)


def test_without_threads_a_get_reads_on_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Thread(threading.Thread):
        def start(self) -> None:
            if "objkv-range" in self.name:
                raise RuntimeError("can't start new thread")
            super().start()

    monkeypatch.setattr(s3_crew.threading, "Thread", Thread)
    value, buffer = pattern(4 * MIB), memoryview(bytearray(4 * MIB))
    with QuickS3() as server, s3_store(server.url, range_bytes=MIB, ranges_max=3) as store:
        store.put("k", value)
        assert store.get_into("k", buffer) == len(value)
        assert buffer == value
        assert repr(store._pool) == "<HelperPool 0/3 busy>"
    crew = HelperPool(1)
    assert not crew.offer(lambda: None)
    crew.close()


def test_an_upload_that_ran_out_of_time_is_aborted_all_the_same() -> None:
    now_s = 0.0

    def late(request: Request) -> Answer | None:
        nonlocal now_s
        if request.method == "PUT":
            now_s = 28  # of 30: the rest is for this call
            return failure(503, "SlowDown")
        return None

    with (
        QuickS3(intercept=late) as server,
        s3_store(server.url, multipart_bytes=MIB, is_direct=False) as store,
    ):
        real = time.monotonic
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "monotonic", lambda: real() + now_s)
            with pytest.raises(StoreError):
                store.put("k", bytes(2 * MIB))
        assert "Uploads" not in store._client.list_multipart_uploads(Bucket=BUCKET)


@pytest.mark.usefixtures("sleepless")
@pytest.mark.parametrize(("status", "code"), [(503, "SlowDown"), (503, ""), (429, "")])
def test_a_server_that_is_asked_too_much_is_busy(status: int, code: str) -> None:
    with (
        QuickS3(intercept=lambda _: failure(status, code)) as server,
        s3_store(server.url) as store,
        pytest.raises(StoreBusy),
    ):
        store.get("k")


def test_uploads_leave_half_of_the_threads_to_reads() -> None:
    crew, gate = HelperPool(4), threading.Event()
    offered = [crew.offer(gate.wait, writes=True) for _ in range(4)]  # type: ignore[arg-type]
    assert offered == [True, True, False, False]
    assert [crew.offer(gate.wait) for _ in range(3)] == [True, True, False]  # type: ignore[arg-type]
    gate.set()
    crew.close()
    assert repr(crew) == "<HelperPool 0/4 busy>"


def test_a_team_ends_when_no_helper_touches_the_buffer() -> None:
    crew, begun, gate, over = HelperPool(1), *(threading.Event() for _ in range(3))

    def work(piece: Piece, helper: Helper) -> None:
        helper.attach(Mock(spec=HttpConnection))
        begun.set()
        assert gate.wait(30)

    def call() -> None:
        with Team(crew, [Piece(0, 1)], work):
            assert begun.wait(30)
        over.set()

    caller = threading.Thread(target=call)
    caller.start()
    assert begun.wait(30)
    assert not over.wait(0.2)
    gate.set()
    assert over.wait(30)
    caller.join()
    crew.close()
