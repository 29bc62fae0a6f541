"""Stores that are far, slow or faulty: a right value or an error in time, never wrong bytes."""

import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from objkv.errors import StoreError, StoreUnavailable
from objkv.stores.s3.store import S3Store
from objkv.stores.s3.wire import LATE_MIN_S, SAMPLES_MIN, Hedge
from objkv.telemetry import MemoryRecorder
from tests.support.servers.far import Distance, Far
from tests.support.servers.quick_s3 import QuickS3, Request
from tests.support.servers.s3_stores import BUCKET, MIB, pattern, s3_store

IMPATIENT = {"load_deadline_ms": 4_000}


@pytest.fixture
def near() -> Iterator[QuickS3]:
    with QuickS3() as server:
        yield server


class Checked:
    """A buffer that is compared with the value as its bytes are reported."""

    def __init__(self, value: bytes) -> None:
        self.buffer = memoryview(bytearray(len(value)))
        self._value = value
        self.at = 0

    def arrived(self, nbytes: int) -> None:
        assert self.buffer[self.at : nbytes] == self._value[self.at : nbytes]
        assert nbytes > self.at
        self.at = nbytes


@pytest.mark.parametrize(
    "faults",
    [
        Distance(reset_share=0.3),
        Distance(unavailable_share=0.3),
        Distance(stall_share=0.1),
        Distance(reset_share=0.1, unavailable_share=0.1, stall_share=0.05, ttfb_ms=1),
    ],
    ids=["reset", "unavailable", "stall", "all"],
)
@pytest.mark.parametrize("ranges_max", [0, 3])
def test_a_fault_is_a_right_value_or_an_error_never_wrong_bytes(
    near: QuickS3, faults: Distance, ranges_max: int
) -> None:
    value = pattern(4 * MIB + 17)
    with s3_store(near.url) as store:
        store.put("k", value)
    whole = 0
    with (
        Far(near.address, faults, seed=7) as far,
        s3_store(
            far.url, client=IMPATIENT, deadline_s=4, range_bytes=MIB, ranges_max=ranges_max
        ) as store,
    ):
        for _ in range(6):
            checked = Checked(value)
            try:
                nbytes = store.get_into("k", checked.buffer, checked.arrived)
            except StoreError:
                continue
            assert nbytes == checked.at == len(value)
            assert checked.buffer == value
            whole += 1
    assert whole


@pytest.mark.parametrize("ranges_max", [0, 3])
def test_what_was_put_through_faults_is_whole(near: QuickS3, ranges_max: int) -> None:
    faults = Distance(reset_share=0.15, unavailable_share=0.15)
    put = 0
    with (
        s3_store(near.url) as right,
        Far(near.address, faults, seed=3) as far,
        s3_store(far.url, client=IMPATIENT, multipart_bytes=MIB, ranges_max=ranges_max) as store,
    ):
        for number, nbytes in enumerate([100, MIB, 3 * MIB + 1] * 3):
            value = pattern(nbytes, number)
            try:
                store.put(f"k{number}", value)
                put += 1
            except StoreError:
                assert right.get(f"k{number}") in (None, value)
            else:
                assert right.get(f"k{number}") == value
    assert put


@pytest.mark.parametrize("is_client_needed", [False, True])
def test_what_broke_off_goes_on_where_it_was(is_client_needed: bool) -> None:
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
        return b"HTTP/1.1 500 No\r\n\r\n" if len(asked) == 2 and is_client_needed else None

    with QuickS3(intercept=break_off) as server, s3_store(server.url) as store:
        store.put("k", value)
        etag = store._client.head_object(Bucket=BUCKET, Key="p/k")["ETag"]
        checked = Checked(value)
        assert store.get_into("k", checked.buffer, checked.arrived) == checked.at == len(value)
        assert checked.buffer == value
    rest = f"bytes={MIB}-{3 * MIB - 1}"
    assert asked == ["all", rest, rest][: 3 if is_client_needed else 2]


def test_many_connections_carry_more_than_one(near: QuickS3) -> None:
    """The cost of a payload on a store that limits each connection, in bytes instead of time."""
    value = pattern(8 * MIB)
    with (
        Far(near.address, Distance(connection_mb_s=200)) as far,
        s3_store(far.url, range_bytes=MIB, ranges_max=7) as store,
    ):
        store.put("k", value)
        buffer = memoryview(bytearray(8 * MIB))
        before = far.turns
        assert store.get_into("k", buffer) == len(value)
        assert buffer == value
        assert far.turns - before == 8
        assert far.connections > 2


class Slow:
    """Holds the first request for the key ``slow`` back."""

    def __init__(self) -> None:
        self.asked = 0
        self.let_go = threading.Event()
        self._lock = threading.Lock()

    def __call__(self, request: Request) -> None:
        if request.method != "GET" or not request.key.endswith("slow"):
            return
        with self._lock:
            self.asked += 1
            is_first = self.asked == 1
        if is_first:
            self.let_go.wait(120)


def warm_up(store: S3Store) -> None:
    buffer = memoryview(bytearray(10))
    store.put("k", b"quick")
    store.put("slow", b"slow")
    for _ in range(SAMPLES_MIN):
        assert store.get_into("k", buffer) == 5


def test_an_answer_that_is_late_is_asked_for_once_more() -> None:
    slow, recorder = Slow(), MemoryRecorder()
    with (
        QuickS3(intercept=slow) as server,
        s3_store(server.url, hedge_percent_max=5, recorder=recorder) as store,
    ):
        warm_up(store)
        buffer = bytearray(10)
        assert store.get_into("slow", memoryview(buffer)) == 4
        assert buffer[:4] == b"slow"
        assert slow.asked == 2
        assert recorder.value("s3_hedge_wins") == 1
        # The losing connection carries an unread response.
        for _ in range(5):
            assert store.get_into("k", memoryview(buffer)) == 5
            assert buffer[:5] == b"quick"
        slow.let_go.set()


def test_without_hedging_nothing_is_asked_twice(near: QuickS3) -> None:
    recorder = MemoryRecorder()
    with (
        Far(near.address, Distance(slow_share=0.5, slow_ms=20)) as far,
        s3_store(far.url, hedge_percent_max=0, recorder=recorder) as store,
    ):
        warm_up(store)
        assert recorder.value("s3_hedges") == 0


@given(
    percent=st.integers(0, 100),
    times=st.lists(st.floats(0, 10), min_size=1, max_size=600),
)
@example(percent=1, times=[0.1] * 100)
def test_hedges_are_a_bounded_share_of_requests(percent: int, times: list[float]) -> None:
    hedge, hedged = Hedge(percent), 0
    for number, first_byte_s in enumerate(times, 1):
        hedge.observe(first_byte_s)
        late_s = hedge.late_s()
        assert late_s is None or (number >= SAMPLES_MIN and percent)
        hedged += late_s is not None and hedge.take()
        assert hedged <= number * percent / 100
    if percent and len(times) >= SAMPLES_MIN:
        assert LATE_MIN_S <= (hedge.late_s() or 0) <= max(LATE_MIN_S, *times)


def test_late_is_later_than_95_of_100() -> None:
    hedge = Hedge(5)
    for number in range(100):
        hedge.observe(number / 1000)
    late_s = hedge.late_s()
    assert late_s is not None
    assert 0.085 <= late_s <= 0.096


def test_a_store_that_stalls_while_ranges_are_read_is_left_in_time(near: QuickS3) -> None:
    with (
        Far(near.address, Distance()) as far,
        s3_store(far.url, client=IMPATIENT, deadline_s=2, range_bytes=MIB, ranges_max=3) as store,
    ):
        store.put("k", pattern(8 * MIB))
        far.distance = Distance(stall_share=1.0)
        started_s = time.monotonic()
        with pytest.raises(StoreUnavailable):
            store.get_into("k", memoryview(bytearray(8 * MIB)))
        assert time.monotonic() - started_s < 60
