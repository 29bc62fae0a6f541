"""What every store promises of bytes that arrive in a buffer; part of ``StoreContract``."""

import pytest

from objkv.errors import ValueTooLong
from objkv.stores.base import PruneStore

_LARGE = bytes(range(256)) * (5 << 12)


class Unwilling(Exception):
    """What a caller raises who does not like what arrives."""


class Arrivals:
    """Keeps what it is told, and sees whether it was true at that moment."""

    def __init__(self, buffer: memoryview, expected: bytes) -> None:
        self.told: list[int] = []
        self.true = True
        self._buffer = buffer
        self._expected = expected

    def __call__(self, nbytes: int) -> None:
        seen = self.told[-1] if self.told else 0
        self.true &= self._buffer[seen:nbytes] == self._expected[seen:nbytes]
        self.told.append(nbytes)


class StoreArrivals:
    """``get_into`` and ``get_range_into`` with somebody who watches the bytes arrive."""

    @pytest.mark.parametrize("value", [b"value", _LARGE, b""], ids=["small", "large", "empty"])
    def test_what_has_arrived_is_told_truly_and_at_rising_numbers(
        self, store: PruneStore, value: bytes
    ) -> None:
        store.put("k", value)
        buffer = memoryview(bytearray(len(value) + 3))
        arrivals = Arrivals(buffer, value)
        assert store.get_into("k", buffer, arrivals) == len(value)
        assert arrivals.true
        assert arrivals.told == sorted(arrivals.told)
        assert arrivals.told[-1] == len(value)
        assert buffer[: len(value)] == value

    def test_nothing_arrives_of_what_is_not_there(self, store: PruneStore) -> None:
        arrivals = Arrivals(memoryview(b""), b"")
        assert store.get_into("none", memoryview(bytearray(8)), arrivals) is None
        assert store.get_range_into("none", 3, memoryview(bytearray(8)), arrivals) is None
        assert arrivals.told == []

    @pytest.mark.parametrize("value", [b"value", _LARGE], ids=["small", "large"])
    def test_whoever_watches_may_end_the_get_and_the_store_lives_on(
        self, store: PruneStore, value: bytes
    ) -> None:
        store.put("k", value)

        def refuse(_: int) -> None:
            raise Unwilling

        buffer = memoryview(bytearray(len(value)))
        for _ in range(3):
            with pytest.raises(Unwilling):
                store.get_into("k", buffer, refuse)
            with pytest.raises(Unwilling):
                store.get_range_into("k", 1, buffer[1:], refuse)
        assert store.get("k") == value
        assert store.get_into("k", buffer) == len(value)
        assert buffer == value

    @pytest.mark.parametrize(
        ("start", "size", "expected"),
        [
            (0, 10, b"0123456789"),
            (0, 4, b"0123"),
            (3, 4, b"3456"),
            (8, 4, b"89"),
            (10, 4, b""),
            (99, 4, b""),
            (2, 0, b""),
        ],
    )
    def test_a_range_goes_to_the_beginning_of_the_buffer(
        self, store: PruneStore, start: int, size: int, expected: bytes
    ) -> None:
        store.put("k", b"0123456789")
        outside = bytearray(b"." * (size + 4))
        inside = memoryview(outside)[2 : 2 + size]
        arrivals = Arrivals(inside, expected)
        assert store.get_range_into("k", start, inside, arrivals) == len(expected)
        assert outside == b".." + expected.ljust(size, b".") + b".."
        assert arrivals.true
        assert arrivals.told[-1] == len(expected)

    def test_a_large_range_is_exactly_what_was_asked_for(self, store: PruneStore) -> None:
        store.put("k", _LARGE)
        buffer = memoryview(bytearray(3_000_000))
        arrivals = Arrivals(buffer, _LARGE[1_000_001:4_000_001])
        assert store.get_range_into("k", 1_000_001, buffer, arrivals) == 3_000_000
        assert arrivals.true
        assert buffer == _LARGE[1_000_001:4_000_001]

    def test_too_long_a_value_is_told_to_nobody(self, store: PruneStore) -> None:
        store.put("k", b"value")
        arrivals = Arrivals(memoryview(b""), b"")
        with pytest.raises(ValueTooLong):
            store.get_into("k", memoryview(bytearray(4)), arrivals)
        assert arrivals.told == []
        assert store.get("k") == b"value"

    def test_the_buffer_is_let_go_whatever_happens(self, store: PruneStore) -> None:
        store.put("k", b"value")
        buffer = bytearray(8)

        def refuse(_: int) -> None:
            raise Unwilling

        with pytest.raises(Unwilling):
            store.get_into("k", memoryview(buffer), refuse)
        store.get_range_into("k", 1, memoryview(buffer))
        buffer.clear()  # would raise BufferError if the store still held a view
