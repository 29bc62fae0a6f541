"""What a benchmark gets is verified, or it would measure how fast nothing is read."""

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objkv.errors import PayloadError
from objkv.ops.bench.sample import FOLDER, Shape, Verifier, kv_like, make_samples
from objkv.stores.base import check_key

SHAPE = Shape("64 KiB", layers=4, layer_bytes=16 << 10)
SAMPLES = make_samples(SHAPE, 2)
SAMPLE = SAMPLES[0]


def test_samples_differ_and_their_keys_lie_below_one_folder() -> None:
    assert SAMPLES[0].payload != SAMPLES[1].payload
    assert SAMPLES[0].key != SAMPLES[1].key
    for sample in SAMPLES:
        check_key(sample.key)
        assert sample.key.startswith(f"{FOLDER}/")


@given(st.lists(st.integers(0, len(SAMPLE.payload)), max_size=6))
def test_a_payload_is_verified_in_whatever_steps_it_arrives(steps: list[int]) -> None:
    slab = memoryview(bytearray(len(SAMPLE.payload)))
    verifier, before = Verifier(SAMPLE, slab), 0
    for nbytes in sorted(steps):
        slab[before:nbytes] = SAMPLE.payload[before:nbytes]
        verifier.arrived(nbytes)
        before = max(before, nbytes)
    slab[before:] = SAMPLE.payload[before:]
    verifier.finish(len(SAMPLE.payload))
    assert verifier.frames == SHAPE.layers


def test_a_layer_is_verified_as_soon_as_it_is_there() -> None:
    slab = memoryview(bytearray(SAMPLE.payload))
    verifier = Verifier(SAMPLE, slab)
    verifier.arrived(len(slab) - SHAPE.layer_bytes - 1)
    assert verifier.frames == SHAPE.layers - 2
    verifier.arrived(len(slab) - SHAPE.layer_bytes)
    assert verifier.frames == SHAPE.layers - 1


@given(st.integers(0, len(SAMPLE.payload) * 8 - 1))
def test_no_flipped_bit_passes(bit: int) -> None:
    slab = bytearray(SAMPLE.payload)
    slab[bit // 8] ^= 1 << (bit % 8)
    with pytest.raises(PayloadError):
        Verifier(SAMPLE, memoryview(slab)).finish(len(slab))


@pytest.mark.parametrize("nbytes", [None, 0, 7, len(SAMPLE.payload) - 1])
def test_what_is_not_all_there_does_not_pass(nbytes: int | None) -> None:
    with pytest.raises(PayloadError):
        Verifier(SAMPLE, memoryview(bytearray(SAMPLE.payload))).finish(nbytes)


def test_another_payload_does_not_pass() -> None:
    slab = memoryview(bytearray(SAMPLES[1].payload))
    with pytest.raises(PayloadError, match="claims to be"):
        Verifier(SAMPLE, slab).finish(len(slab))


def test_made_up_kv_is_neither_noise_nor_empty() -> None:
    raw = kv_like(1 << 16)
    high = raw[1::2]
    assert 0.3 < len(zlib.compress(high)) / len(high) < 0.7
    assert len(zlib.compress(raw[::2])) / len(high) > 0.95
