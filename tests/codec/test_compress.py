"""Codecs alone: hostile frames, bombs, many threads at once."""

import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objkv.codec.compress import CODECS, compress, decompress_into
from objkv.codec.payload import read_header
from objkv.codec.values import is_scales, scales_text
from objkv.errors import PayloadError
from tests.codec.payloads import CLAIM, LAYERS, noise, reworked, sample, smooth, split
from tests.support.payloads import open_payload

COMPRESSED = [codec for codec in CODECS if codec != "none"]
PAGES = smooth(1 << 16)
FRAMES = {codec: bytes(compress(codec, memoryview(PAGES), 2)[1]) for codec in COMPRESSED}


def decoded(codec: str, frame: bytes, nbytes: int) -> bytes | None:
    """The decoded frame, or None where it was refused."""
    guarded = memoryview(bytearray(b"\xaa" * (nbytes + 64)))
    out = guarded[:nbytes]
    try:
        decompress_into(codec, memoryview(frame), out)
    except PayloadError:
        return None
    finally:
        assert bytes(guarded[nbytes:]) == b"\xaa" * 64
    return bytes(out)


@pytest.mark.parametrize("codec", COMPRESSED)
def test_a_frame_decodes_to_its_pages(codec: str) -> None:
    assert len(FRAMES[codec]) < 0.9 * len(PAGES)
    assert decoded(codec, FRAMES[codec], len(PAGES)) == PAGES


@pytest.mark.parametrize("codec", COMPRESSED)
@pytest.mark.parametrize("nbytes", [1, (1 << 16) - 1, (1 << 16) + 1, 1 << 20])
def test_a_frame_of_another_length_is_refused(codec: str, nbytes: int) -> None:
    assert decoded(codec, FRAMES[codec], nbytes) is None


@given(st.sampled_from(COMPRESSED), st.data())
def test_a_truncated_frame_is_refused(codec: str, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(FRAMES[codec]) - 1))
    assert decoded(codec, FRAMES[codec][:cut], len(PAGES)) is None


OTHERS = [
    *((at, bytes([value])) for at, value in ((0, 6), (2, 5), (22, 2), (22, 200), (30, 1), (31, 8))),
    *((at, bytes([value])) for at, value in ((16, 2), (17, 32), (18, 160), (31, 1))),
    *((8, n.to_bytes(4, "little")) for n in (0, len(PAGES) + 1, 1 << 29, 2**31, 2**32 - 1)),
]


@pytest.mark.parametrize(("at", "value"), OTHERS)
@pytest.mark.parametrize("codec", ["blosc", "blosclz4"])
def test_a_blosc_chunk_that_our_encoder_would_not_write_is_refused(
    codec: str, at: int, value: bytes
) -> None:
    frame = bytearray(FRAMES[codec])
    frame[at : at + len(value)] = value
    assert decoded(codec, bytes(frame), len(PAGES)) is None
    if at == 8:  # the decoder would get as much memory
        with pytest.raises(PayloadError, match="a block length of"):
            decompress_into(codec, memoryview(frame), memoryview(bytearray(len(PAGES))))


@pytest.mark.parametrize("codec", ["blosc", "blosclz4"])
@pytest.mark.parametrize("compressor", [0, 2, 3, 5, 6, 7])
def test_a_blosc_chunk_whose_flags_name_another_compressor_never_reaches_the_decoder(
    codec: str, compressor: int
) -> None:
    frame = bytearray(FRAMES[codec])
    frame[2] = frame[2] & 0b11111 | compressor << 5
    with pytest.raises(PayloadError, match="not a chunk of shuffled"):
        decompress_into(codec, memoryview(frame), memoryview(bytearray(len(PAGES))))


def test_a_chunk_of_one_blosc_codec_is_refused_as_the_other() -> None:
    for codec, other in (("blosc", "blosclz4"), ("blosclz4", "blosc")):
        assert decoded(codec, FRAMES[other], len(PAGES)) is None


def test_lz4_decodes_without_memory_of_its_own() -> None:
    pages = smooth(4 << 20)
    frame = memoryview(compress("lz4", memoryview(pages), 2)[1])
    out = memoryview(bytearray(len(pages)))
    decompress_into("lz4", frame, out)
    tracemalloc.start()
    try:
        decompress_into("lz4", frame, out)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 * 1024
    assert out == pages


def test_lz4_decodes_where_the_binding_does_not_show_its_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("objkv.codec.compress._lz4_decoder", lambda: None)
    assert decoded("lz4", FRAMES["lz4"], len(PAGES)) == PAGES
    assert decoded("lz4", FRAMES["lz4"], len(PAGES) + 1) is None
    assert decoded("lz4", FRAMES["lz4"][:-1], len(PAGES)) is None


@pytest.mark.parametrize("codec", COMPRESSED)
def test_pages_that_do_not_compress_are_handed_back_uncopied(codec: str) -> None:
    pages = memoryview(noise(4096))
    used, frame = compress(codec, pages, 2)
    assert used == "none"
    assert frame is pages


@pytest.mark.parametrize("item_bytes", [1, 2, 4, 8])
@pytest.mark.parametrize("pages", [bytes(8), bytes(1 << 16), smooth(40_000), b"\1" * 100_000])
def test_blosc_takes_every_item_size_and_length(item_bytes: int, pages: bytes) -> None:
    used, frame = compress("blosc", memoryview(pages), item_bytes)
    assert used == "none" or decoded("blosc", bytes(frame), len(pages)) == pages


@pytest.mark.parametrize("codec", COMPRESSED)
def test_many_threads_encode_and_decode_at_once(codec: str) -> None:
    def round_trip(seed: int) -> bool:
        pages = smooth(1 << 15, seed)
        used, frame = compress(codec, memoryview(pages), 2)
        return used == codec and decoded(codec, bytes(frame), len(pages)) == pages

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(round_trip, range(64)))


PLAIN = tuple(replace(layer, dtype="F8_E4M3") for layer in LAYERS)
SCALED = tuple(replace(layer, scales=scales_text(0.5, 2.0 + i)) for i, layer in enumerate(PLAIN))


@pytest.mark.parametrize(
    "text",
    [
        *("", "1", "1.0", "1.0 ", "1.0 nan", "1.0 1.0 ", "1.0  1.0", "1.0 1.0 1.0"),
        *("01.0 1.0", "1.00 1.0", "+1.0 1.0"),
        *("-1.0 1.0", "0.0 1.0", "inf 1.0", "nan 1.0", "1e999 1.0", "1 1", "1.0 1.0\n"),
        "\u0661.0 1.0",
    ],
)
def test_nothing_else_is_taken_for_scales(text: str) -> None:
    assert not is_scales(text)
    header, frames = split(sample(layers=SCALED))
    header["__metadata__"]["scales.1"] = text
    with pytest.raises(PayloadError, match="malformed scales"):
        read_header(reworked(header, frames))


@pytest.mark.parametrize("number", [0.0, -1.0, float("inf"), float("nan")])
def test_what_nothing_can_be_divided_by_is_no_scale(number: float) -> None:
    with pytest.raises(ValueError, match="not a finite positive scale"):
        scales_text(1.0, number)


@pytest.mark.parametrize("codec", ["none", "blosc"])
@pytest.mark.parametrize("layer", range(len(LAYERS)))
def test_pages_of_other_scales_are_refused(layer: int, codec: str) -> None:
    """Also if only one of them has scales: the divisor is then unknown."""
    for scaled in ("0.5 9.0", ""):
        other = replace(SCALED[layer], scales=scaled)
        others = (*SCALED[:layer], other, *SCALED[layer + 1 :])
        for written, expected in ((others, SCALED), (SCALED, others)):
            with pytest.raises(PayloadError, match="expected"):
                open_payload(sample(codec, written), CLAIM, expected)


def test_who_does_not_know_a_layers_scales_takes_any() -> None:
    """A rank of another shape: the layer is not its own, and it reads others along with it."""
    unknown = (SCALED[0], replace(SCALED[1], scales=None), SCALED[2])
    for written in (SCALED, (SCALED[0], PLAIN[1], SCALED[2])):
        assert open_payload(sample(layers=written), CLAIM, unknown).frames.layers == written
    with pytest.raises(PayloadError, match="expected"):
        open_payload(sample(layers=PLAIN), CLAIM, unknown)
