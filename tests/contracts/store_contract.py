"""Contract tests for ``objkv.stores.base``, one test per promise.

Subclass ``StoreContract``, or ``ValuesContract`` for a store that lists nothing, in a test file and
add a fixture ``store`` that is empty for each test.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from objkv.errors import StoreError, ValueTooLong
from objkv.stores.base import KEY_BYTES_MAX, Buffer, Entry, HotStore, PruneStore

T = TypeVar("T")
READERS = 8
WRITERS = 12


def at_once(count: int, call: Callable[[int], T]) -> list[T]:
    """Run ``call(0)`` … ``call(count - 1)`` at the same moment, each on its own thread."""
    barrier = threading.Barrier(count)

    def run(number: int) -> T:
        barrier.wait(timeout=60)
        return call(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


_LARGE = bytes(range(256)) * (5 << 12)


class Unwilling(Exception):
    """Raised by ``refuse``."""


def refuse(_: int) -> None:
    raise Unwilling


class Arrivals:
    """Records the reported byte counts, and whether each was true at that moment."""

    def __init__(self, buffer: memoryview, expected: bytes) -> None:
        self.reported: list[int] = []
        self.true = True
        self._buffer = buffer
        self._expected = expected

    def __call__(self, nbytes: int) -> None:
        seen = self.reported[-1] if self.reported else 0
        self.true &= self._buffer[seen:nbytes] == self._expected[seen:nbytes]
        self.reported.append(nbytes)


CHUNK = "0" * 32 + "/ab/ab" + "1" * 38 + "/0.L0-32_H0-8.safetensors"
ODD_KEYS = (
    "a",
    "UPPER/lower",
    "-leading-dash/_x",
    ".hidden/..double/...",
    "dots..within/a.b.c",
    CHUNK,
    "c" * 200,
    "/".join(["k" * 99] * 9),
)
NOT_KEYS = (
    "",
    "/",
    "/absolute",
    "trailing/",
    "double//slash",
    "..",
    ".",
    "../escape",
    "a/../b",
    "a/./b",
    "a/..",
    "space here",
    "new\nline",
    "a\n",
    "nul\0",
    "ünicode",
    "glob*",
    "back\\slash",
    "~tmp-1",
    "c" * 201,
    "/".join(["k" * 99] * 10),
)


class ValuesContract:
    @pytest.fixture
    def store(self) -> HotStore:
        raise NotImplementedError

    def test_absence_is_none_for_every_way_of_reading(self, store: HotStore) -> None:
        assert store.get("no/such") is None
        assert store.get("no/such", 0, 10) is None
        assert store.get("no/such", 5, 5) is None
        arrivals = Arrivals(memoryview(b""), b"")
        assert store.get_into("no/such", memoryview(bytearray(8)), arrivals) is None
        assert store.get_into("no/such", memoryview(bytearray(8)), arrivals, start=3) is None
        assert arrivals.reported == []
        assert store.head("no/such") is None

    def test_a_key_that_names_a_folder_of_keys_is_absent(self, store: HotStore) -> None:
        store.put("folder/a", b"1")
        assert store.get("folder") is None
        assert store.get_into("folder", memoryview(bytearray(8))) is None
        assert store.head("folder") is None
        assert store.get("folder/a/below") is None
        assert store.head("folder/a/below") is None
        assert store.get("folder/a") == b"1"

    def test_the_first_value_stays_until_another_is_put(self, store: HotStore) -> None:
        assert store.put_if_absent("k", b"first, and longer") is True
        assert store.put_if_absent("k", b"second") is False
        assert store.get("k") == b"first, and longer"
        store.put("k", b"second")
        assert store.get("k") == b"second"

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_any_buffer_can_be_put_and_reused_at_once(
        self, store: HotStore, kind: Callable[[bytearray], Buffer]
    ) -> None:
        buffer = bytearray(b"value")
        assert store.put_if_absent("absent", kind(buffer)) is True
        store.put("replaced", kind(buffer))
        buffer[:] = b"XXXXX"
        assert store.get("absent") == store.get("replaced") == b"value"
        buffer.clear()  # would raise BufferError if the store still held a view

    def test_an_empty_value_is_a_value(self, store: HotStore) -> None:
        assert store.put_if_absent("empty", b"") is True
        assert store.put_if_absent("empty", b"x") is False
        assert store.get("empty") == b""
        assert store.get("empty", 0, 10) == b""
        assert store.get_into("empty", memoryview(bytearray(4))) == 0
        head = store.head("empty")
        assert head is not None
        assert head.nbytes == 0

    def test_a_value_of_5_mib_and_parts_of_it_are_read_back(self, store: HotStore) -> None:
        assert store.put_if_absent("large", _LARGE) is True
        assert store.get("large") == _LARGE
        assert store.get("large", 3_000_001, 3_000_011) == _LARGE[3_000_001:3_000_011]
        buffer = memoryview(bytearray(3_000_000))
        arrivals = Arrivals(buffer, _LARGE[1_000_001:4_000_001])
        assert store.get_into("large", buffer, arrivals, start=1_000_001) == 3_000_000
        assert arrivals.true
        assert buffer == _LARGE[1_000_001:4_000_001]

    @pytest.mark.parametrize(("start", "end"), [(0, 8), (0, 5), (3, 9), (5, 10)])
    def test_get_into_writes_the_value_and_nothing_beside_it(
        self, store: HotStore, start: int, end: int
    ) -> None:
        store.put("k", b"value")
        outside = bytearray(b"." * 10)
        assert store.get_into("k", memoryview(outside)[start:end]) == 5
        assert outside == b"." * start + b"value" + b"." * (5 - start)
        outside.clear()  # would raise BufferError if the store still held a view

    def test_a_value_longer_than_the_buffer_is_an_error(self, store: HotStore) -> None:
        store.put("k", b"value")
        outside, arrivals = bytearray(b"." * 8), Arrivals(memoryview(b""), b"")
        for told in (None, arrivals):
            with pytest.raises(ValueTooLong):
                store.get_into("k", memoryview(outside)[2:6], told)
        assert arrivals.reported == []
        assert outside[:2] == b".."
        assert outside[6:] == b".."
        assert store.get("k") == b"value"

    @pytest.mark.parametrize(
        ("start", "end", "expected"),
        [
            (0, 10, b"0123456789"),
            (2, 5, b"234"),
            (0, 1, b"0"),
            (9, 10, b"9"),
            (5, 100, b"56789"),
            (10, 20, b""),
            (50, 60, b""),
            (3, 3, b""),
        ],
    )
    def test_ranges_are_half_open_end_with_the_value_and_go_to_the_beginning_of_a_buffer(
        self, store: HotStore, start: int, end: int, expected: bytes
    ) -> None:
        store.put("k", b"0123456789")
        assert store.get("k", start, end) == expected
        size = end - start
        outside = bytearray(b"." * (size + 4))
        inside = memoryview(outside)[2 : 2 + size]
        arrivals = Arrivals(inside, expected)
        assert store.get_into("k", inside, arrivals, start=start) == len(expected)
        assert outside == b".." + expected.ljust(size, b".") + b".."
        assert arrivals.true
        assert arrivals.reported[-1] == len(expected)

    def test_head_tells_size_and_age(self, store: HotStore) -> None:
        before = time.time()
        store.put("k", b"value")
        head = store.head("k")
        assert head is not None
        assert (head.key, head.nbytes) == ("k", 5)
        assert before - 120 < head.modified_s < time.time() + 120

    def test_delete_removes_one_value_which_can_be_put_again(self, store: HotStore) -> None:
        store.put("d/a", b"1")
        store.put("d/b", b"2")
        assert store.delete("d/a") is True
        assert store.get("d/a") is None
        store.delete("d/a")
        assert store.get("d/b") == b"2"
        assert store.put_if_absent("d/a", b"3") is True
        assert store.get("d/a") == b"3"

    @pytest.mark.parametrize("key", ODD_KEYS)
    def test_odd_keys_are_keys(self, store: HotStore, key: str) -> None:
        assert len(key) <= KEY_BYTES_MAX
        assert store.put_if_absent(key, b"value") is True
        assert store.get(key) == b"value"
        store.delete(key)
        assert store.get(key) is None

    @pytest.mark.parametrize("key", NOT_KEYS)
    def test_what_is_no_key_is_refused_by_every_verb(self, store: HotStore, key: str) -> None:
        calls: list[Callable[[], object]] = [
            lambda: store.get(key),
            lambda: store.get(key, 0, 1),
            lambda: store.get_into(key, memoryview(bytearray(1))),
            lambda: store.head(key),
            lambda: store.put_if_absent(key, b""),
            lambda: store.put(key, b""),
            lambda: store.delete(key),
        ]
        for call in calls:
            with pytest.raises(StoreError):
                call()

    def test_the_place_can_be_checked_and_closed_twice(self, store: HotStore) -> None:
        store.check()
        store.close()
        store.close()

    # Progress reports of ``get_into``

    @pytest.mark.parametrize("value", [b"value", _LARGE, b""], ids=["small", "large", "empty"])
    def test_what_has_arrived_is_told_truly_and_at_rising_numbers(
        self, store: HotStore, value: bytes
    ) -> None:
        store.put("k", value)
        buffer = memoryview(bytearray(len(value) + 3))
        arrivals = Arrivals(buffer, value)
        assert store.get_into("k", buffer, arrivals) == len(value)
        assert arrivals.true
        assert arrivals.reported == sorted(arrivals.reported)
        assert arrivals.reported[-1] == len(value)
        assert buffer[: len(value)] == value

    @pytest.mark.parametrize("value", [b"value", _LARGE], ids=["small", "large"])
    def test_whoever_watches_may_end_the_get_and_the_store_lives_on(
        self, store: HotStore, value: bytes
    ) -> None:
        store.put("k", value)
        buffer = bytearray(len(value))
        for _ in range(3):
            with pytest.raises(Unwilling):
                store.get_into("k", memoryview(buffer), refuse)
            with pytest.raises(Unwilling):
                store.get_into("k", memoryview(buffer)[1:], refuse, start=1)
        assert store.get("k") == value
        assert store.get_into("k", memoryview(buffer)) == len(value)
        assert buffer == value
        buffer.clear()  # would raise BufferError if the store still held a view

    # Races: the outcome must not depend on which thread is first

    def test_of_many_writers_exactly_one_wins(self, store: HotStore) -> None:
        for turn in range(3):
            key = f"race/{turn}"

            def write(number: int, key: str = key) -> bool:
                return store.put_if_absent(key, b"%02d" % number * 50_000)

            won = at_once(WRITERS, write)
            assert won.count(True) == 1
            assert store.get(key) == b"%02d" % won.index(True) * 50_000

    def test_readers_see_a_whole_value_or_none(self, store: HotStore) -> None:
        values = [bytes([number]) * 300_000 for number in range(4)]
        done = threading.Event()

        def read(_: int) -> int:
            torn = 0
            while not done.is_set():
                value = store.get("k")
                torn += value is not None and value not in values
            return torn

        with ThreadPoolExecutor(3) as pool:
            readers = [pool.submit(read, number) for number in range(3)]
            try:
                for value in values * 2:
                    store.put("k", value)
                store.delete("k")
                store.put_if_absent("k", values[0])
            finally:
                done.set()
            assert [reader.result() for reader in readers] == [0, 0, 0]

    def test_many_threads_do_not_mix_up_values(self, store: HotStore) -> None:
        def work(number: int) -> None:
            for turn in range(5):
                key, value = f"t{number}/{turn}", b"%d-%d" % (number, turn)
                assert store.put_if_absent(key, value)
                buffer = bytearray(32)
                assert store.get_into(key, memoryview(buffer)) == len(value)
                assert buffer.startswith(value)
                assert store.get(key) == value
                assert store.delete(key)

        at_once(WRITERS, work)


class StoreContract(ValuesContract):
    """Every store whose keys can be listed passes these, too."""

    page_keys = 1000
    """Most keys in one answer of a server. Fewer, if a test asks for smaller pages."""

    @pytest.fixture
    def store(self) -> PruneStore:
        raise NotImplementedError

    def test_scan_lists_what_is_there(self, store: PruneStore) -> None:
        assert list(store.scan("d/")) == []
        for key in ODD_KEYS:
            store.put(key, b"value")
            assert [entry.key for entry in store.scan(key)] == [key]
            store.delete(key)
            assert list(store.scan(key)) == []

    def test_scan_tells_keys_and_sizes_under_a_prefix(self, store: PruneStore) -> None:
        sizes = {"ns1/aa/x": 1, "ns1/ab/y": 2, "ns1/ab/z": 3, "ns10/aa/x": 4, "ns2/aa/x": 5}
        for key, nbytes in sizes.items():
            store.put(key, b"." * nbytes)

        def scanned(prefix: str) -> dict[str, int]:
            return {entry.key: entry.nbytes for entry in store.scan(prefix)}

        assert scanned("") == sizes
        assert scanned("ns1/") == {"ns1/aa/x": 1, "ns1/ab/y": 2, "ns1/ab/z": 3}
        assert scanned("ns1/a") == scanned("ns1/")
        assert scanned("ns1") == {key: n for key, n in sizes.items() if key.startswith("ns1")}
        assert scanned("ns1/ab/z") == {"ns1/ab/z": 3}
        assert scanned("ns1/ab/zz") == {}

    def test_scan_passes_page_boundaries(self, store: PruneStore) -> None:
        keys = [f"many/{number:04}" for number in range(self.page_keys * 6 // 5 + 5)]
        with ThreadPoolExecutor(READERS) as pool:
            list(pool.map(lambda key: store.put(key, b""), keys))
        found = [entry.key for entry in store.scan("many/")]
        assert sorted(set(found)) == keys
        assert len(found) == len(keys)

    def test_scan_is_in_key_order(self, store: PruneStore) -> None:
        keys = ["b/1", "a/x/1", "a.b", "a-b", "a/x.y", "a/x-y", "c", "B", "a0"]
        for key in keys:
            store.put(key, b"")
        assert [entry.key for entry in store.scan("")] == sorted(keys)

    @pytest.mark.parametrize("prefix", ["/", "a//b", "../", "a/../", "gl*b", "a b"])
    def test_what_begins_no_key_cannot_be_scanned(self, store: PruneStore, prefix: str) -> None:
        with pytest.raises(StoreError):
            list(store.scan(prefix))

    def test_folders_are_named_once_and_values_are_none(self, store: PruneStore) -> None:
        for key in ("top", "ns1/aa/x", "ns1/ab/y", "ns1/ab/z", "ns1/file", "ns2/a/b/c", "ns10/a"):
            store.put(key, b"1")
        assert store.folders("") == ["ns1", "ns10", "ns2"]
        assert store.folders("ns1") == ["aa", "ab"]
        assert store.folders("ns2/a") == ["b"]
        assert store.folders("ns1/aa") == store.folders("no/such") == store.folders("top") == []
        with pytest.raises(StoreError):
            store.folders("../x")

    def test_what_is_finished_is_not_unfinished(self, store: PruneStore) -> None:
        store.put("a/b", b"1")
        store.put_if_absent("a/c", b"1")
        assert list(store.unfinished()) == []

    def test_an_abandoned_scan_is_no_error(self, store: PruneStore) -> None:
        for number in range(3):
            store.put(f"a/{number}", b"")
        assert isinstance(next(store.scan("a/")), Entry)
        store.put("a/3", b"")
