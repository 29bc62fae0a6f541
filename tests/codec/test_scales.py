"""Scales travel with the pages that mean nothing without them, and are compared before those."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objkv.codec.payload import LayerSpec, encode, open_payload, read_header
from objkv.codec.values import is_scales, scales_text
from objkv.errors import PayloadError
from tests.codec.payloads import CLAIM, LAYERS, PROVENANCE, join, pages_of, split

PLAIN = tuple(replace(layer, dtype="F8_E4M3") for layer in LAYERS)
SCALED = tuple(replace(layer, scales=scales_text(0.5, 2.0 + i)) for i, layer in enumerate(PLAIN))
scales = st.floats(min_value=0, exclude_min=True, allow_infinity=False)


def payload_of(layers: tuple[LayerSpec, ...], codec: str = "none") -> bytes:
    return bytes(encode(CLAIM, layers, pages_of(layers), codec=codec, provenance=PROVENANCE))


@given(scales, scales)
def test_numbers_come_back_exactly(k_scale: float, v_scale: float) -> None:
    text = scales_text(k_scale, v_scale)
    assert is_scales(text)
    assert tuple(map(float, text.split())) == (k_scale, v_scale)


@pytest.mark.parametrize(
    "text",
    [
        *("", "1", "1.0", "1.0 ", "1.0  1.0", "1.0 1.0 1.0", "01.0 1.0", "1.00 1.0", "+1.0 1.0"),
        *("-1.0 1.0", "0.0 1.0", "inf 1.0", "nan 1.0", "1e999 1.0", "1 1", "1.0 1.0\n"),
        "\u0661.0 1.0",
    ],
)
def test_nothing_else_is_taken_for_scales(text: str) -> None:
    assert not is_scales(text)


@pytest.mark.parametrize("number", [0.0, -1.0, float("inf"), float("nan")])
def test_what_nothing_can_be_divided_by_is_no_scale(number: float) -> None:
    with pytest.raises(ValueError, match="not a finite positive scale"):
        scales_text(1.0, number)


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_the_header_says_the_scales_of_each_layer(codec: str) -> None:
    payload = payload_of(SCALED, codec)
    assert open_payload(payload, CLAIM, SCALED).frames.layers == SCALED
    assert [layer.scales for layer in read_header(payload).frames.layers] == [
        "0.5 2.0",
        "0.5 3.0",
        "0.5 4.0",
    ]


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("layer", range(len(LAYERS)))
def test_pages_of_other_scales_are_refused(layer: int, codec: str) -> None:
    """Also if only one of them has scales: the divisor is then unknown."""
    for scaled in ("0.5 9.0", ""):
        other = replace(SCALED[layer], scales=scaled)
        others = (*SCALED[:layer], other, *SCALED[layer + 1 :])
        for written, expected in ((others, SCALED), (SCALED, others)):
            with pytest.raises(PayloadError, match="expected"):
                open_payload(payload_of(written, codec), CLAIM, expected)


def test_who_does_not_know_a_layers_scales_takes_any() -> None:
    """A rank of another shape: the layer is not its own, and it reads others along with it."""
    unknown = (SCALED[0], replace(SCALED[1], scales=None), SCALED[2])
    for written in (SCALED, (SCALED[0], PLAIN[1], SCALED[2])):
        assert open_payload(payload_of(written), CLAIM, unknown).frames.layers == written
    with pytest.raises(PayloadError, match="expected"):
        open_payload(payload_of(PLAIN), CLAIM, unknown)


def test_without_scales_a_header_is_what_it_was_before_there_were_any() -> None:
    header, _ = split(payload_of(PLAIN))
    metadata = header["__metadata__"]
    assert isinstance(metadata, dict)
    assert not [name for name in metadata if name.startswith("scales")]


@pytest.mark.parametrize("text", ["", "1.0", "1.0 nan", "1.0 1.0 "])
def test_malformed_scales_are_a_malformed_header(text: str) -> None:
    import json

    header, frames = split(payload_of(SCALED))
    metadata = header["__metadata__"]
    assert isinstance(metadata, dict)
    metadata["scales.1"] = text
    written = json.dumps(header, separators=(",", ":")).encode()
    with pytest.raises(PayloadError, match="malformed scales"):
        read_header(join(written, frames))
