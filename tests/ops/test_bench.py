"""What a bench gets is verified, or it would measure how fast nothing is read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objkv.errors import PayloadError
from objkv.ops.bench.measure import at_once, percentile
from objkv.ops.bench.sample import Shape, get_verified, make_samples
from tests.contracts.memory_store import MemoryStore

SAMPLE, OTHER = make_samples(Shape("64 KiB", layers=4, layer_bytes=16 << 10), 2)


def get(stored: bytes | None) -> None:
    store = MemoryStore()
    if stored is not None:
        store.put(SAMPLE.key, stored)
    get_verified(store, SAMPLE, memoryview(bytearray(2 * len(SAMPLE.payload))))


@given(st.integers(0, len(SAMPLE.payload) * 8 - 1))
def test_no_flipped_bit_passes(bit: int) -> None:
    stored = bytearray(SAMPLE.payload)
    stored[bit // 8] ^= 1 << (bit % 8)
    with pytest.raises(PayloadError):
        get(bytes(stored))


@pytest.mark.parametrize(
    "stored",
    [None, b"", bytes(SAMPLE.payload)[:7], bytes(SAMPLE.payload)[:-1], bytes(OTHER.payload)],
)
def test_nothing_else_passes(stored: bytes | None) -> None:
    with pytest.raises(PayloadError):
        get(stored)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 1))
def test_a_percentile_is_one_of_the_values_and_enough_do_not_exceed_it(
    values: list[float], share: float
) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) - 1e-6


def test_works_run_at_once_and_an_error_is_raised() -> None:
    assert len(at_once([lambda: None] * 3, 4)) == 4
    with pytest.raises(ZeroDivisionError):
        at_once([lambda: None, lambda: 1 / 0], 1)
