"""Reading with the layers known is reading, only sooner: the same values, the same refusals."""

import json
import re
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objkv.codec import header
from objkv.codec.header import (
    FORMS_MAX,
    claim_in,
    form_of,
    parse_known,
    plain_frames,
    read_header,
    render,
)
from objkv.codec.payload import CODECS, Claim, Header, LayerSpec, Provenance
from objkv.errors import PayloadError
from objkv.keys.chunk import ChunkKey
from objkv.keys.topology import Shard
from tests.codec.payloads import CLAIM, LAYERS, PROVENANCE, join, layer_lists, rechecked, sample
from tests.support.payloads import open_payload

hex_digits = st.binary(min_size=16, max_size=16).map(bytes.hex)
ranges = st.lists(st.integers(0, 2**40), min_size=2, max_size=2, unique=True).map(sorted)
claims = st.builds(
    lambda namespace, hashes, group, shard, tokens: Claim(
        ChunkKey(namespace, hashes[:20], group, Shard(*shard[0], *shard[1])), hashes[20:], *tokens
    ),
    hex_digits,
    st.binary(min_size=40, max_size=40),
    st.integers(0, 99),
    st.tuples(ranges, ranges),
    ranges,
)
provenances = st.builds(
    Provenance,
    token_digest=st.binary(min_size=32, max_size=32).map(bytes.hex),
    writer=st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=256),
    created_s=st.integers(0, 2**62),
    tokens=st.none() | st.lists(st.integers(0, 2**31), max_size=5).map(tuple),
)


def rendered(
    layers: list[LayerSpec] | tuple[LayerSpec, ...],
    claim: Claim = CLAIM,
    provenance: Provenance = PROVENANCE,
) -> bytes:
    """The header of an uncompressed payload; its frames' checksums are made up."""
    sums = [Random(number).randbytes(16).hex() for number in range(len(layers))]
    return render(claim, plain_frames(layers, sums), provenance)


def outcome(read: Callable[[memoryview], Header], payload: bytes | bytearray) -> object:
    """The header, or the words of its refusal."""
    try:
        return read(memoryview(payload))
    except PayloadError as exc:
        return str(exc)


def with_layers(
    payload: bytes | bytearray, layers: tuple[LayerSpec, ...] = LAYERS, claim: Claim = CLAIM
) -> Header | str | object:
    """Return the outcome for ``payload``, after a check that it is the same whatever is known."""
    result = outcome(lambda view: parse_known(view, claim, layers), payload)
    assert result == outcome(read_header, payload)
    return result


def text_of(payload: bytes | bytearray) -> bytes:
    """The header's JSON without its padding."""
    return bytes(payload[8:]).rstrip(b" ")


@pytest.fixture
def no_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slow way is closed."""

    def refuse(text: bytearray) -> None:
        raise AssertionError("JSON was parsed")

    for layers in (LAYERS, ODD):
        parse_known(memoryview(rendered(layers)), CLAIM, layers)
    monkeypatch.setattr(header, "load_object", refuse)


ODD = (
    LayerSpec("f" * 40, "F8_E8M0", (1, 2, 3, 4)),
    LayerSpec("quantised", "F8_E4M3", (1, 2, 3, 4), "1.0 0.5"),
    LayerSpec('a "q" \\ ä 🎈 \x00', "U8", (3, 1, 1, 7)),
    LayerSpec(" .*%s", "F64", (1, 1, 1, 1)),
)


@pytest.mark.parametrize("layers", [LAYERS, ODD])
@pytest.mark.usefixtures("no_json")
def test_an_uncompressed_header_of_known_layers_is_read_without_json(
    layers: tuple[LayerSpec, ...],
) -> None:
    found = parse_known(memoryview(rendered(layers)), CLAIM, layers)
    assert found.claim == CLAIM
    assert found.provenance == PROVENANCE
    assert all(frame.layer is layer for frame, layer in zip(found.frames, layers, strict=True))


@given(layer_lists, claims, provenances)
def test_the_same_header_is_read_and_written_both_ways(
    layers: list[LayerSpec], claim: Claim, provenance: Provenance
) -> None:
    text, form = rendered(layers, claim, provenance), form_of(tuple(layers))
    assert isinstance(with_layers(text, tuple(layers)), Header)
    found = with_layers(text, tuple(layers), claim)
    assert isinstance(found, Header)
    assert (found.claim, found.provenance) == (claim, provenance)
    assert hash(found) == hash(read_header(text))
    assert form is not None
    written = form.write(claim, provenance, found.frames.checksums)
    plain = provenance.tokens is None and not set(provenance.writer) & {'"', "\\"}
    assert written == ((text, found) if plain else None)


@given(layer_lists, layer_lists)
def test_a_header_of_other_layers_is_read_all_the_same(
    layers: list[LayerSpec], others: list[LayerSpec]
) -> None:
    assert isinstance(with_layers(rendered(layers), tuple(others)), Header)


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec != "none"])
def test_a_compressed_payload_is_read_all_the_same(codec: str) -> None:
    found = with_layers(sample(codec))
    assert isinstance(found, Header)
    assert open_payload(sample(codec), CLAIM, LAYERS) == found


def test_both_ways_agree_on_every_flipped_byte_and_wherever_a_header_is_cut() -> None:
    """Also if the checksum was put right after the flip."""
    payload = bytearray(rendered(LAYERS))
    for nbytes in (0, 7, 8, 100, 4095):
        assert isinstance(with_layers(payload[:nbytes]), str)
    end = 8 + len(text_of(payload))
    accepted = 0
    for at in [*range(end + 2), len(payload) - 1]:
        for flip in (1, 2, 4, 16, 32, 128):
            payload[at] ^= flip
            assert isinstance(with_layers(payload), str), at
            if 8 <= at <= end:
                accepted += isinstance(with_layers(rechecked(payload)), Header)
            payload[at] ^= flip
    assert accepted


CHUNK = CLAIM.key.chunk_text
CHUNKS = [CHUNK.upper(), CHUNK[:-1] + "x", CHUNK[:-1], CHUNK + "0", CHUNK + "\\n", ""]
CHUNKS += [f"\\u00{ord(CHUNK[0]):x}{CHUNK[1:]}", CHUNK[:-1] + '","chunk":"' + CHUNK[-1]]
SHARDS = ["L3-3_H0-2", "L00-3_H0-2", "L0-3_H0-2\\n", "L0-3", "l0-3_h0-2", "x" * 201, " "]


@pytest.mark.parametrize(
    ("written", "instead"),
    [*((CHUNK, chunk) for chunk in CHUNKS), *(("L0-3_H0-2", shard) for shard in SHARDS)],
)
def test_both_ways_refuse_a_chunk_or_a_shard_that_is_none(written: str, instead: str) -> None:
    text = text_of(rendered(LAYERS)).replace(written.encode(), instead.encode())
    assert isinstance(with_layers(join(text)), str)


def test_a_chunk_elsewhere_than_readers_compare_it_is_refused() -> None:
    text = text_of(rendered(LAYERS))
    own, other = f'"chunk":"{CHUNK}",'.encode(), f'"chunk":"{"f" * 72}0000000000",'.encode()
    for moved in (
        text.replace(own, b"").replace(b'"shard"', own + b'"shard"'),
        text.replace(own, other).replace(b'"shard"', own + b'"shard"'),
        text.replace(own, b'"more":"",' + own),
    ):
        assert moved != text
        assert isinstance(with_layers(join(moved)), str)


NUMBERS = ["", "0", "00", "01", "+1", "-1", "1.0", "1e3", " 1", "1_0", "９", "7"]
NUMBERS += ["9" * 19, "9" * 20]
CHANGES: list[Callable[[bytes], bytes]] = [
    *(
        lambda text, name=name, number=number: re.sub(  # type: ignore[misc]
            rf'"{name}":"[0-9]+"'.encode(), f'"{name}":"{number}"'.encode(), text
        )
        for name in ("token_start", "token_end", "created_s")
        for number in NUMBERS
    ),
    lambda text: json.dumps(json.loads(text), separators=(", ", ": ")).encode(),
    lambda text: text + b"\n",
    lambda text: text + b"\t  ",
    lambda text: text + b" " * 4096,
    lambda text: text + b"\0",
    lambda text: text + b" x",
    lambda text: text + b"}",
    lambda text: text[:-1] + b" }",
    *(
        lambda text, writer=writer: text.replace(b'"tests"', b'"' + writer + b'"')  # type: ignore[misc]
        for writer in (
            *(b"\\u0074ests", b"te\\\\sts", b'te\\"sts', b"te\x7fsts", b"x" * 256, b"x" * 257),
            *(b'a","more":"b', b'a","writer":"b', b'tests","tokens":"1 2'),
        )
    ),
    lambda text: text.replace(b'"writer":"tests",', b""),
    lambda text: text.replace(b"objkv/2", b"objkv/3"),
    lambda text: re.sub(rb'("token_start":"256"),("token_end":"512")', rb"\2,\1", text),
    lambda text: re.sub(rb'("frame.0":"[^"]*"),("frame.1":"[^"]*")', rb"\2,\1", text),
    lambda text: re.sub(rb'"frame.0":("[^"]*"),"frame.1"', rb'"frame.1":\1,"frame.0"', text),
    lambda text: re.sub(rb'(x32 )[0-9a-f]{32}"', rb'\1ABCDEFABCDEFABCDEFABCDEFABCDEFAB"', text),
    lambda text: re.sub(rb'(x32 )[0-9a-f]{32}"', rb'\1"', text),
    lambda text: re.sub(rb'("dtype":"BF16"),("shape":\[[^]]*\])', rb"\2,\1", text),
    lambda text: re.sub(rb'"data_offsets":\[0,', b'"data_offsets":[0.0,', text),
    lambda text: re.sub(rb'"data_offsets":\[0,', b'"data_offsets":[-0,', text),
    lambda text: text.replace(b"layers.10", b"layers.11"),
    lambda text: text.replace(b"BF16", b"F16"),
]


@pytest.mark.parametrize("change", CHANGES)
def test_both_ways_agree_on_a_header_that_is_written_otherwise(
    change: Callable[[bytes], bytes],
) -> None:
    text = text_of(rendered(LAYERS))
    changed = change(text)
    assert changed != text
    with_layers(join(changed))


@pytest.mark.parametrize(
    "layers",
    [
        (),
        tuple(LayerSpec(f"layers.{i}", "U8", (1, 1, 1, 1)) for i in range(99)),
        (LAYERS[0], LAYERS[0]),
        (LAYERS[0], LayerSpec(LAYERS[0].name, "F32", (1, 1, 1, 1))),
        (LayerSpec("\ud83c\udf88", "U8", (1, 1, 1, 1)),),
        (LayerSpec("big", "U8", (1 << 31, 1, 1, 1)),),
        (LayerSpec("true", "U8", (True, 1, 1, 1)),),
    ],
)
def test_headers_of_layers_that_it_does_not_tell_apart_or_of_fewer_are_read_all_the_same(
    layers: tuple[LayerSpec, ...],
) -> None:
    with_layers(rendered(layers), layers)
    assert isinstance(with_layers(rendered(LAYERS), layers), Header)


def test_the_layers_in_memory_are_bounded() -> None:
    payload = rendered(LAYERS)
    for _ in range(2 * FORMS_MAX):
        fresh = (*LAYERS,)
        assert isinstance(with_layers(payload, fresh), Header)
        assert len(header._forms) <= FORMS_MAX


@given(claims, provenances, st.booleans())
def test_what_a_payload_claims_is_seen_without_json(
    claim: Claim, provenance: Provenance, is_view: bool
) -> None:
    text = rendered(LAYERS, claim, provenance)
    assert claim_in(memoryview(text) if is_view else text) == claim
    assert claim_in(text[:200]) is None


@pytest.mark.parametrize(
    ("written", "instead"),
    [
        (b'"token_start":"', b'"token_start" :"'),
        (b'"format":"objkv/2"', b'"format":"objkv/3"'),
        (f'"token_end":"{CLAIM.token_end}"'.encode(), b'"token_end":"0"'),
        (f'"shard":"{CLAIM.key.shard or ""}"'.encode(), b'"shard":"L9-1"'),
    ],
)
def test_a_claim_in_another_form_is_not_seen(written: bytes, instead: bytes) -> None:
    text = rendered(LAYERS)
    assert text.count(written) == 1
    assert claim_in(text.replace(written, instead)) is None
