"""Payloads from values and back, by objkv, in place too, and by the safetensors library."""

import struct
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from objkv.codec.compress import CODECS, compress
from objkv.codec.header import HEADER_BYTES_MAX, header_bytes_needed, read_header, render
from objkv.codec.payload import (
    check_frames,
    encode,
    encode_in_place,
    frame_pages,
    header_room,
    payload_bytes_max,
)
from objkv.codec.seal import Seal, SealKey
from objkv.codec.values import Claim, Frame, Header, LayerSpec, Provenance, digest, scales_text
from objkv.errors import PayloadError
from objkv.keys.topology import Shard
from tests.codec.payloads import (
    CLAIM,
    LAYERS,
    PROVENANCE,
    claims_unlike,
    layer_lists,
    noise,
    pages_of,
    sample,
    smooth,
)
from tests.codec.seals import SEALS
from tests.support.payloads import open_payload


@pytest.mark.parametrize(
    ("codec", "kind"), [*((codec, "") for codec in CODECS), *(("none", kind) for kind in SEALS)]
)
def test_every_payload_opens_with_safetensors(codec: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(sample(codec, seal=SEALS.get(kind)))
    with safetensors.safe_open(path, "np") as file:
        assert set(file.keys()) == {layer.name for layer in LAYERS}
        assert file.metadata()["chunk"] == CLAIM.key.chunk_text
        assert file.metadata()["shard"] == str(CLAIM.key.shard)
        if kind and SEALS[kind].encrypter:
            shapes = [file.get_slice(layer.name).get_shape() for layer in LAYERS]
            assert shapes == [[layer.nbytes] for layer in LAYERS]


def test_frames_without_codec_are_views_of_the_payload() -> None:
    payload = bytearray(sample())
    header = read_header(payload)
    pages = frame_pages(header, 1, payload, None)
    payload[header.frames[1].offset] ^= 0xFF
    assert pages[0] == payload[header.frames[1].offset]
    assert pages.nbytes == LAYERS[1].nbytes


@pytest.mark.parametrize("codec", ["lz4", "blosc", "blosclz4"])
def test_only_as_much_of_the_scratch_buffer_is_touched_as_the_layer_needs(codec: str) -> None:
    payload = sample(codec)
    nbytes = LAYERS[0].nbytes
    scratch = memoryview(bytearray(b"\xaa" * (nbytes + 64)))
    pages = frame_pages(read_header(payload), 0, payload, scratch)
    assert pages.nbytes == nbytes
    assert bytes(scratch[nbytes:]) == b"\xaa" * 64
    for short in (None, scratch[: nbytes - 1]):
        with pytest.raises(PayloadError, match="buffer"):
            frame_pages(read_header(payload), 0, payload, short)


def test_a_header_can_be_read_from_the_beginning_alone() -> None:
    payload = sample("none")
    needed = header_bytes_needed(payload[:8])
    assert read_header(payload[:needed]) == read_header(payload)
    assert needed == read_header(payload).data_start
    with pytest.raises(PayloadError, match="is truncated"):
        read_header(payload[: needed - 1])


def test_a_frame_can_be_read_before_the_later_ones_have_arrived() -> None:
    payload = sample("none")
    header = read_header(payload)
    arrived = payload[: header.frames[0].offset + header.frames[0].nbytes]
    assert bytes(frame_pages(header, 0, arrived, None)) == pages_of(LAYERS)[0]
    with pytest.raises(PayloadError, match="is truncated"):
        frame_pages(header, 1, arrived, None)


@pytest.mark.parametrize("length", [0, 1, 4087, 4089, HEADER_BYTES_MAX + 4088, 2**63, 2**64 - 8])
def test_an_absurd_header_length_is_refused(length: int) -> None:
    with pytest.raises(PayloadError, match="announces an invalid length"):
        header_bytes_needed(struct.pack("<Q", length))


@pytest.mark.parametrize("claim", claims_unlike(CLAIM))
def test_a_payload_that_claims_something_else_is_refused(claim: Claim) -> None:
    with pytest.raises(PayloadError, match="claims to be"):
        open_payload(sample("none"), claim, LAYERS)


@pytest.mark.parametrize(
    "layers",
    [
        LAYERS[:2],
        LAYERS[::-1],
        (*LAYERS[:2], replace(LAYERS[2], dtype="F16")),
        (*LAYERS[:2], replace(LAYERS[2], shape=(2, 2, 32, 16))),
        (*LAYERS[:2], replace(LAYERS[2], name="model.layers.3.attn")),
    ],
)
@pytest.mark.parametrize("codec", ["none", "lz4"])
def test_a_payload_of_other_layers_is_refused(layers: tuple[LayerSpec, ...], codec: str) -> None:
    with pytest.raises(PayloadError, match="expected"):
        open_payload(sample(codec), CLAIM, layers)


LONG_NAMES = ["\x7f\x01" * 255 + str(i) for i in range(9)], [f"{i:0>512}" for i in range(1001)]


@pytest.mark.parametrize("names", LONG_NAMES, ids=["escaped", "many"])
@pytest.mark.parametrize("tokens", [None, (2**32 - 1,) * 1000], ids=["digest", "tokens"])
@pytest.mark.parametrize("kind", ["", *SEALS])
def test_the_bound_on_a_payload_holds_for_the_longest_of_everything(
    kind: str, tokens: tuple[int, ...] | None, names: list[str]
) -> None:
    scales = scales_text(1.2345678901234567e-300, 1.2345678901234567e-300)
    layers = tuple(LayerSpec(name, "F8_E4M3FNUZ", (1, 1, 1, 1), scales) for name in names)
    key = replace(CLAIM.key, group=10**10 - 1, shard=Shard(2**61, 2**62, 2**61, 2**62))
    claim = Claim(key, CLAIM.parent_hash, 2**62, 2**62 + 1)
    long, is_encrypted = SealKey("k" * 64, "*", bytes(32)), bool(kind and SEALS[kind].encrypter)
    seal = Seal([long], [long] if is_encrypted else []) if kind else None
    told = Provenance("ef" * 32, '"' * 256, 2**62, None if is_encrypted else tokens)
    count = len(told.tokens or ())
    nbytes, room = payload_bytes_max(layers, tokens=count), header_room(layers, tokens=count)
    buffer, how = np.zeros(nbytes, np.uint8), {"codec": "none", "provenance": told, "seal": seal}
    payload, header = encode_in_place(claim, layers, buffer.data, **how)  # type: ignore[arg-type]
    assert header.data_start <= room
    assert open_payload(payload, claim, layers, seal=seal) == header
    assert is_encrypted or header.provenance == told


def test_a_header_beyond_the_bound_is_not_written() -> None:
    told = replace(PROVENANCE, tokens=(2**32 - 1,) * (HEADER_BYTES_MAX // 11))
    with pytest.raises(PayloadError, match="the header has"):
        sample(provenance=told)


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
    layers: Sequence[LayerSpec], pages: Sequence[bytes], codec: str, seal: Seal | None = None
) -> tuple[memoryview, Header]:
    """The payload made in a buffer as long as a slab may be, at most."""
    buffer = np.full(payload_bytes_max(layers), 0xAA, dtype=np.uint8)
    own = tuple(layers)
    buffer[header_room(own) :] = np.frombuffer(b"".join(pages), dtype=np.uint8)
    return encode_in_place(CLAIM, own, buffer.data, codec=codec, provenance=PROVENANCE, seal=seal)


@settings(max_examples=150)
@given(layer_lists, st.sampled_from(CODECS), st.sampled_from([None, None, *SEALS]), st.data())
def test_made_in_place_a_payload_is_the_same_byte_for_byte_and_what_went_in_comes_out(
    layers: list[LayerSpec], codec: str, kind: str | None, data: st.DataObject
) -> None:
    """But for what is random in a sealed one."""
    make = st.sampled_from([smooth, noise])
    pages = [data.draw(make)(layer.nbytes, i) for i, layer in enumerate(layers)]
    seal = SEALS[kind] if kind else None
    payload, header = in_place(layers, pages, codec, seal)
    if seal is None:
        expected = concatenated(layers, pages, codec)
        assert payload == expected
        assert encode(CLAIM, layers, pages, codec=codec, provenance=PROVENANCE) == expected
        assert (header.claim, header.provenance) == (CLAIM, PROVENANCE)
    found = open_payload(payload, CLAIM, tuple(layers), seal=seal)
    assert header == found == read_header(payload, seal=seal)
    assert header.raw_bytes == sum(map(len, pages)) >= header.nbytes - header.data_start
    assert header.nbytes == len(payload) <= payload_bytes_max(layers)
    for i, layer in enumerate(layers):
        scratch = memoryview(bytearray(layer.nbytes))
        assert bytes(frame_pages(found, i, payload, scratch)) == pages[i]


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
    payload = bytearray(sample("blosc"))
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
