"""A payload made where its pages lie: the same bytes as made elsewhere, and no memory besides."""

import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from objkv.codec.compress import compress
from objkv.codec.header import digest, render
from objkv.codec.payload import (
    CODECS,
    HEADER_BYTES_MAX,
    Frame,
    Header,
    LayerSpec,
    Provenance,
    check_frames,
    encode,
    encode_in_place,
    frame_pages,
    header_room,
    open_payload,
    payload_bytes_max,
    read_header,
)
from objkv.errors import PayloadError
from tests.codec.payloads import CLAIM, LAYERS, PROVENANCE, layer_lists, noise, sample, smooth


def concatenated(layers: Sequence[LayerSpec], pages: Sequence[bytes], codec: str) -> bytes:
    """Return the payload as specified, made the obvious way."""
    frames, stored, offset = [], b"", 0
    for layer, page in zip(layers, pages, strict=True):
        used, content = compress(codec, memoryview(page), layer.item_bytes)
        content = bytes(content)
        frames.append(Frame(layer, used, offset, len(content), digest(content), digest(page)))
        stored += content
        offset += len(content)
    return render(CLAIM, frames, PROVENANCE) + stored


def in_place(
    layers: Sequence[LayerSpec], pages: Sequence[bytes], codec: str
) -> tuple[memoryview, Header]:
    """The payload made in a buffer as long as a slab may be, at most."""
    buffer = np.full(payload_bytes_max(layers), 0xAA, dtype=np.uint8)
    start = header_room(layers)
    buffer[start:] = np.frombuffer(b"".join(pages), dtype=np.uint8)
    return encode_in_place(CLAIM, layers, buffer.data, codec=codec, provenance=PROVENANCE)


@given(layer_lists, st.sampled_from(CODECS), st.data())
def test_made_in_place_a_payload_is_the_same_byte_for_byte(
    layers: list[LayerSpec], codec: str, data: st.DataObject
) -> None:
    make = st.sampled_from([smooth, noise])
    pages = [data.draw(make)(layer.nbytes, i) for i, layer in enumerate(layers)]
    expected = concatenated(layers, pages, codec)
    payload, header = in_place(layers, pages, codec)
    assert payload == expected
    assert in_place(tuple(layers), pages, codec) == (expected, header)
    assert encode(CLAIM, layers, pages, codec=codec, provenance=PROVENANCE) == expected
    assert header == read_header(payload) == open_payload(payload, CLAIM, tuple(layers))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("first_is_smooth", [True, False])
def test_frames_that_move_onto_themselves_arrive_whole(codec: str, first_is_smooth: bool) -> None:
    """Behind a frame that shrank by a little comes one that does not shrink, and is much longer
    than the way it moves."""
    sizes = [64, 1024, 640, 1024]
    layers = [LayerSpec(f"l{i}", "BF16", (1, 1, size, 512)) for i, size in enumerate(sizes)]
    pages = [
        (smooth if i % 2 != first_is_smooth else noise)(layer.nbytes, i)
        for i, layer in enumerate(layers)
    ]
    payload, header = in_place(layers, pages, codec)
    assert payload == concatenated(layers, pages, codec)
    for i, page in enumerate(pages):
        scratch = memoryview(bytearray(len(page)))
        assert frame_pages(header, i, payload, scratch) == page


def test_only_the_payload_is_written_to() -> None:
    buffer = np.full(payload_bytes_max(LAYERS) + 64, 0xAA, dtype=np.uint8)
    payload, _ = encode_in_place(CLAIM, LAYERS, buffer.data, codec="none", provenance=PROVENANCE)
    start = header_room(LAYERS) + sum(layer.nbytes for layer in LAYERS)
    assert set(buffer[start:]) == {0xAA}
    assert payload.nbytes < start


def test_a_header_that_carries_tokens_has_room_for_them() -> None:
    told = Provenance("ef" * 32, "tests", 1, (2**32 - 1,) * 4000)
    room = header_room(LAYERS, tokens=4000)
    buffer = np.zeros(room + sum(layer.nbytes for layer in LAYERS), dtype=np.uint8)
    payload, header = encode_in_place(CLAIM, LAYERS, buffer.data, codec="none", provenance=told)
    assert read_header(payload) == header
    assert header.provenance == told


def test_a_header_beyond_the_bound_is_refused_in_place_too() -> None:
    told = Provenance("ef" * 32, "tests", 1, (2**32 - 1,) * (HEADER_BYTES_MAX // 11))
    buffer = np.zeros(2 * HEADER_BYTES_MAX, dtype=np.uint8)
    with pytest.raises(PayloadError, match="the header has"):
        encode_in_place(CLAIM, LAYERS, buffer.data, codec="none", provenance=told)


BIG = [LayerSpec(f"layers.{i}", "BF16", (8, 8, 32, 64)) for i in range(32)]
"""32 layers of 256 KiB: 8 MiB."""


@pytest.mark.parametrize(("codec", "layers_max"), [("none", 0), ("lz4", 3), ("blosclz4", 3)])
def test_in_place_takes_no_memory_but_for_the_frame_it_works_on(
    codec: str, layers_max: int
) -> None:
    buffer = np.zeros(payload_bytes_max(BIG), dtype=np.uint8)
    buffer[:] = np.frombuffer(smooth(1 << 16) * (len(buffer) // (1 << 16) + 1), np.uint8)[
        : len(buffer)
    ]
    encode_in_place(CLAIM, BIG, buffer.data, codec=codec, provenance=PROVENANCE)
    tracemalloc.start()
    try:
        encode_in_place(CLAIM, BIG, buffer.data, codec=codec, provenance=PROVENANCE)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 256 * 1024 + layers_max * BIG[0].nbytes


def test_frames_are_checked_without_decoding_them() -> None:
    payload = sample("zstd")
    header = read_header(payload)
    count = len(header.frames)
    assert check_frames(header, payload) == count
    assert check_frames(header, payload[:-1]) == count - 1
    assert check_frames(header, payload[: header.data_start]) == 0
    assert check_frames(header, payload[: header.data_start], 1) == 1
    payload[-1] ^= 1
    assert check_frames(header, payload[:-1]) == check_frames(header, payload, count) - 1
    for first in range(count):
        with pytest.raises(PayloadError, match=LAYERS[-1].name):
            check_frames(header, payload, first)
