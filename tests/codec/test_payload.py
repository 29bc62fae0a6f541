"""Payloads from values and back, by objkv and by the safetensors library."""

import struct
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from objkv.codec.payload import (
    CODECS,
    HEADER_BYTES_MAX,
    Claim,
    LayerSpec,
    Provenance,
    encode,
    frame_pages,
    header_bytes_needed,
    open_payload,
    payload_bytes_max,
    read_header,
)
from objkv.errors import PayloadError
from objkv.keys.topology import Shard
from tests.codec.payloads import (
    CLAIM,
    LAYERS,
    PROVENANCE,
    layer_lists,
    noise,
    pages_of,
    sample,
    smooth,
)


@given(layer_lists, st.sampled_from(CODECS), st.data())
def test_what_goes_in_comes_out(layers: list[LayerSpec], codec: str, data: st.DataObject) -> None:
    make = st.sampled_from([smooth, noise])
    pages = [data.draw(make)(layer.nbytes, i) for i, layer in enumerate(layers)]
    payload = encode(CLAIM, layers, pages, codec=codec, provenance=PROVENANCE)
    header = open_payload(payload, CLAIM, tuple(layers))
    assert header.claim == CLAIM
    assert header.provenance == PROVENANCE
    assert header.raw_bytes == sum(map(len, pages))
    assert header.nbytes == len(payload) <= payload_bytes_max(layers)
    for i, layer in enumerate(layers):
        scratch = memoryview(bytearray(layer.nbytes))
        assert bytes(frame_pages(header, i, payload, scratch)) == pages[i]


@pytest.mark.parametrize("codec", CODECS)
def test_every_payload_opens_with_safetensors(codec: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(sample(codec))
    with safetensors.safe_open(path, "np") as file:
        assert set(file.keys()) == {layer.name for layer in LAYERS}
        assert file.metadata()["key"] == CLAIM.key.path()


@pytest.mark.parametrize("dtype", ["F16", "F32", "U8", "I8", "I64"])
def test_a_typed_tensor_reads_back_equal_with_safetensors(dtype: str, tmp_path: Path) -> None:
    layer = LayerSpec("layer", dtype, (2, 3, 4, 5))
    path = tmp_path / "x.safetensors"
    pages = smooth(layer.nbytes)
    path.write_bytes(encode(CLAIM, [layer], [pages], codec="none", provenance=PROVENANCE))
    with safetensors.safe_open(path, "np") as file:
        tensor = file.get_tensor("layer")
    assert tensor.shape == layer.shape
    assert tensor.tobytes() == pages


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "F8_E5M2"])
def test_a_tensor_of_a_type_only_torch_knows_reads_back_equal(dtype: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    layer = LayerSpec("layer", dtype, (2, 3, 4, 5))
    path = tmp_path / "x.safetensors"
    pages = smooth(layer.nbytes)
    path.write_bytes(encode(CLAIM, [layer], [pages], codec="none", provenance=PROVENANCE))
    with safetensors.safe_open(path, "pt") as file:
        tensor = file.get_tensor("layer")
    assert tuple(tensor.shape) == layer.shape
    assert tensor.element_size() == layer.item_bytes
    assert tensor.view(torch.uint8).numpy().tobytes() == pages


def test_frames_lie_in_the_order_given_without_gaps_behind_an_aligned_start() -> None:
    header = read_header(sample("zstd"))
    assert [frame.layer for frame in header.frames] == list(LAYERS)
    assert header.data_start % 4096 == 0
    offset = header.data_start
    for frame in header.frames:
        assert frame.offset == offset
        offset += frame.nbytes
    assert offset == header.nbytes


def test_frames_without_codec_are_views_of_the_payload() -> None:
    payload = sample("none")
    header = read_header(payload)
    pages = frame_pages(header, 1, payload, None)
    payload[header.frames[1].offset] ^= 0xFF
    assert pages[0] == payload[header.frames[1].offset]
    assert pages.nbytes == LAYERS[1].nbytes


def test_a_codec_that_gains_too_little_is_not_used() -> None:
    layers = LAYERS[:2]
    pages = [noise(layers[0].nbytes), smooth(layers[1].nbytes)]
    payload = encode(CLAIM, layers, pages, codec="lz4", provenance=PROVENANCE)
    header = open_payload(payload, CLAIM, layers)
    assert [frame.codec for frame in header.frames] == ["none", "lz4"]
    assert header.codec == "mixed"


@pytest.mark.parametrize("codec", CODECS)
def test_a_payload_of_one_codec_names_it(codec: str) -> None:
    assert read_header(sample(codec)).codec == codec


@pytest.mark.parametrize("codec", ["lz4", "zstd", "blosc", "blosclz4"])
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


@pytest.mark.parametrize("length", [0, 1, 4087, 4089, HEADER_BYTES_MAX, 2**63, 2**64 - 1])
def test_an_absurd_header_length_is_refused(length: int) -> None:
    with pytest.raises(PayloadError, match="announces an invalid length"):
        header_bytes_needed(struct.pack("<Q", length))


def other_claims() -> list[Claim]:
    key = CLAIM.key
    return [
        replace(CLAIM, key=replace(key, namespace="ba" * 16)),
        replace(CLAIM, key=replace(key, prefix_hash=b"\x03" * 20)),
        replace(CLAIM, key=replace(key, group=1)),
        replace(CLAIM, key=replace(key, shard=Shard(0, 3, 2, 4))),
        replace(CLAIM, parent_hash=b"\x03" * 20),
        replace(CLAIM, token_start=255),
        replace(CLAIM, token_end=513),
    ]


@pytest.mark.parametrize("claim", other_claims())
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


@given(
    st.integers(0, 2**63 - 1),
    st.none() | st.lists(st.integers(0, 2**32 - 1), max_size=50),
    st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=256),
)
def test_provenance_survives(created_s: int, tokens: list[int] | None, writer: str) -> None:
    held = None if tokens is None else tuple(tokens)
    provenance = Provenance("ef" * 32, writer, created_s, held)
    payload = encode(CLAIM, LAYERS, pages_of(LAYERS), codec="none", provenance=provenance)
    assert read_header(payload).provenance == provenance
    assert len(payload) <= payload_bytes_max(LAYERS, tokens=len(tokens or ()))


def test_the_bound_on_a_payload_holds_for_the_longest_of_everything() -> None:
    layers = [LayerSpec("\x7f\x01" * 255 + str(i), "U8", (1, 1, 1, 1)) for i in range(9)]
    key = replace(CLAIM.key, group=2**62, shard=Shard(2**61, 2**62, 2**61, 2**62))
    claim = Claim(key, CLAIM.parent_hash, 2**62, 2**62 + 1)
    told = Provenance("ef" * 32, '"' * 256, 2**62, (2**32 - 1,) * 1000)
    pages = [b"x"] * len(layers)
    payload = encode(claim, layers, pages, codec="none", provenance=told)
    assert len(payload) <= payload_bytes_max(layers, tokens=1000)
    assert open_payload(payload, claim, tuple(layers)).provenance == told


def test_a_header_beyond_the_bound_is_not_written() -> None:
    told = replace(PROVENANCE, tokens=(2**32 - 1,) * (HEADER_BYTES_MAX // 11))
    with pytest.raises(PayloadError, match="the header has"):
        encode(CLAIM, LAYERS, pages_of(LAYERS), codec="none", provenance=told)


def test_pages_may_be_any_contiguous_buffer() -> None:
    layer = LAYERS[0]
    array = np.frombuffer(smooth(layer.nbytes), np.uint16).reshape(layer.shape)
    assert prod(array.shape) * 2 == layer.nbytes
    expected = encode(CLAIM, [layer], [array.tobytes()], codec="zstd", provenance=PROVENANCE)
    for pages in (array.data, bytearray(array.tobytes())):
        assert encode(CLAIM, [layer], [pages], codec="zstd", provenance=PROVENANCE) == expected
