"""Every call of ``S3Store`` ends soon after its deadline, whatever the server does.

Without deadlines each call would take more than a minute, so no test depends on this machine's
speed.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import pytest

from objkv.errors import StoreUnavailable
from objkv.net.deadline import EndsBy
from objkv.stores.s3.store import S3Store
from tests.stores.test_s3_time import CALLS, Silent
from tests.support.servers.quick_s3 import QuickS3
from tests.support.servers.s3_stores import MIB, s3_store
from tests.support.servers.slow import Reluctant, Trickle, full_listener

PATIENCE_S = 60.0
"""Far more than the deadline, but less than the calls would take without one."""
DEADLINE_S = 0.3

HEAD = b'HTTP/1.1 200 OK\r\nETag: "a"\r\nContent-Length: 100000\r\n\r\n'
SLOW = {
    "a head without end": b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 10_000,
    "a long body": HEAD + b"x" * 100_000,
    "not HTTP": b"x" * 100_000,
    "continue": b"HTTP/1.1 100 Continue\r\n\r\n" * 5_000,
}


Call = Callable[[S3Store], object]


def assert_ends(store: S3Store, calls: Mapping[str, Call]) -> None:
    """Each of ``calls``, all at once, raises ``StoreUnavailable``, and before long."""
    outcomes: dict[str, object] = {}

    def run(name: str, call: Call) -> None:
        try:
            outcomes[name] = call(store)
        except BaseException as exc:
            outcomes[name] = exc

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in calls.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert outcomes.keys() == calls.keys(), "some go on"
    wrong = {k: v for k, v in outcomes.items() if not isinstance(v, StoreUnavailable)}
    assert not wrong


@contextmanager
def opened(url: str, *, is_direct: bool) -> Iterator[S3Store]:
    """A store whose client alone would be patient for minutes."""
    with s3_store(
        url,
        deadline_s=DEADLINE_S,
        client={"load_deadline_ms": 600_000},
        multipart_bytes=MIB,
        range_bytes=MIB,
        ranges_max=2,
        is_direct=is_direct,
    ) as store:
        store._writer.conditional = True
        yield store


@pytest.mark.parametrize("is_direct", [True, False], ids=["direct", "client"])
@pytest.mark.parametrize("answer", SLOW.values(), ids=SLOW)
def test_an_answer_that_trickles_is_left(answer: bytes, is_direct: bool) -> None:
    with Trickle(answer) as server, opened(server.url, is_direct=is_direct) as store:
        assert_ends(store, CALLS)


@pytest.mark.parametrize("is_direct", [True, False], ids=["direct", "client"])
def test_a_server_that_never_answers_is_left(is_direct: bool) -> None:
    with Silent() as server:
        url = f"http://127.0.0.1:{server.address[1]}"
        with opened(url, is_direct=is_direct) as store:
            assert_ends(store, CALLS)


@pytest.mark.parametrize("is_direct", [True, False], ids=["direct", "client"])
def test_a_server_that_hardly_takes_anything_is_left(is_direct: bool) -> None:
    puts: dict[str, Call] = {
        "at once": lambda store: store.put_if_absent("k", bytes(MIB)),
        "in parts": lambda store: store.put_if_absent("l", bytes(64 * MIB)),
    }
    with Reluctant() as server, opened(server.url, is_direct=is_direct) as store:
        assert_ends(store, puts)


def test_a_server_that_lets_nobody_in_is_left() -> None:
    with full_listener() as (host, port), opened(f"http://{host}:{port}", is_direct=True) as store:
        assert_ends(store, CALLS)


def test_whoever_has_less_time_gets_less() -> None:
    def hurried(call: Call) -> Call:
        def run(store: S3Store) -> object:
            with EndsBy(time.monotonic() + DEADLINE_S):
                return call(store)

        return run

    calls = {name: hurried(CALLS[name]) for name in ("get_into", "head", "put")}
    with Silent() as server:
        url = f"http://127.0.0.1:{server.address[1]}"
        with s3_store(url, deadline_s=600, client={"load_deadline_ms": 600_000}) as store:
            assert_ends(store, calls)


def test_a_connection_that_was_hurried_is_patient_again() -> None:
    with QuickS3() as server, s3_store(server.url, is_direct=False) as store:
        with EndsBy(time.monotonic() + PATIENCE_S / 2):
            store.put("k", b"value")
        assert store.get("k") == b"value"
        assert server.connections == 1
        pool = store._client._endpoint.http_session._manager.connection_from_url(server.url)
        connection = pool._get_conn()
        assert connection.sock.gettimeout() is None or connection.sock.gettimeout() > 1
        connection.close()
