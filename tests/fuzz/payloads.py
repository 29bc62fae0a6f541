"""Targets: payloads, as codecs and loaders read them. Checksums are put right after every change,
as an attacker would."""

import json
from random import Random
from typing import Any

from hypothesis import strategies as st

from objkv.codec.compress import CODECS, compress, decompress_into
from objkv.codec.header import digest, load_object, parse
from objkv.codec.known_header import parse_known
from objkv.codec.payload import check_layers, frame_pages, header_bytes_needed, open_payload
from objkv.codec.values import CHECKSUM_AT, CHECKSUM_END, is_scales, scales_text
from objkv.errors import PayloadError
from tests.codec.payloads import CLAIM, LAYERS, join, sample, split
from tests.fuzz.mutation import change_document, changed_bytes, spoiled
from tests.fuzz.target import Target, outcome, require

_PAYLOADS = {codec: bytes(sample(codec)) for codec in CODECS}
_HEADERS = [payload[: header_bytes_needed(payload)] for payload in _PAYLOADS.values()]
_PAGES = [bytes(4096), bytes(i // 64 % 256 for i in range(65536)), bytes(range(256)) * 64]
_FRAMES = [
    (used, bytes(frame), len(pages))
    for codec in CODECS
    for pages in _PAGES
    for item in (1, 2, 4)
    for used, frame in [compress(codec, memoryview(pages), item)]
]
_TEXTS = [header[8:].rstrip() for header in _HEADERS]
_GUARD = b"\xa5" * 64


def mended(header: bytes) -> bytes:
    """``header`` with its own length and checksum put right."""
    raw = bytearray(header)
    raw += b" " * (-len(raw) % 4096)
    raw[:8] = (len(raw) - 8).to_bytes(8, "little")
    raw[CHECKSUM_AT:CHECKSUM_END] = b"0" * 32
    raw[CHECKSUM_AT:CHECKSUM_END] = digest(raw).encode()
    return bytes(raw)


def _both_ways(payload: bytes) -> str:
    """The quick reader and the thorough one agree, whatever they are given."""
    ends = []
    for read in (parse, lambda view: parse_known(view, CLAIM, LAYERS)):
        try:
            ends.append(read(memoryview(payload)))
        except PayloadError as exc:
            ends.append(str(exc))
    require(ends[0] == ends[1], ends)
    if isinstance(ends[0], str):
        return "refused"
    try:
        check_layers(ends[0].frames.layers, LAYERS)
    except PayloadError:
        return "another's"
    return "read"


@st.composite
def _headers(draw: st.DrawFn) -> bytes:
    header = draw(changed_bytes(_HEADERS, near=1500))
    return mended(header) if draw(st.integers(0, 9)) else header


@st.composite
def whole_payloads(draw: st.DrawFn) -> bytes:
    """A payload whose header's JSON was changed, and then every checksum made right."""
    document, frames = split(_PAYLOADS[draw(st.sampled_from(CODECS))])
    if draw(st.booleans()):
        frames = draw(changed_bytes([frames]))
    mend = draw(st.booleans())
    if mend:
        _mend_frames(document, frames)
    change_document(draw, document)
    text = json.dumps(document, separators=(",", ":")).encode()
    return join(text, frames)


def _mend_frames(document: dict[str, Any], frames: bytes) -> None:
    for number, layer in enumerate(LAYERS):
        name = f"frame.{number}"
        start, end = document[layer.name]["data_offsets"]
        words = document["__metadata__"][name].split(" ")
        words[3] = digest(frames[start:end])
        document["__metadata__"][name] = " ".join(words)


@outcome(PayloadError)
def _load(payload: bytes) -> str:
    """What a loader does: nothing but verified pages comes out."""
    header = open_payload(payload, CLAIM, LAYERS)
    scratch = memoryview(bytearray(max(layer.nbytes for layer in LAYERS)))
    for index in range(len(LAYERS)):
        pages = frame_pages(header, index, payload, scratch)
        require(len(pages) == LAYERS[index].nbytes, "pages of another length")
        require(digest(pages) == header.frames.raw_checksums[index], "unverified pages")
    return "read"


@outcome(PayloadError)
def _decode(example: tuple[str, bytes, int]) -> str:
    """No byte is written beyond the buffer, whatever a frame says."""
    codec, frame, nbytes = example
    out = memoryview(bytearray(nbytes) + _GUARD)
    try:
        decompress_into(codec, memoryview(frame), out[:nbytes])
    finally:
        require(out[nbytes:] == _GUARD, "written beyond the buffer")
    return "read"


@st.composite
def _frames(draw: st.DrawFn) -> tuple[str, bytes, int]:
    codec, frame, nbytes = draw(st.sampled_from(_FRAMES))
    value = bytearray(draw(changed_bytes([frame], near=64)))
    if codec.startswith("blosc") and len(value) >= 32 and draw(st.integers(0, 4)):
        value[12:16] = len(value).to_bytes(4, "little")
        value[4:8] = nbytes.to_bytes(4, "little")
    return codec, bytes(value), nbytes


def _fast_frame(random: Random) -> tuple[str, bytes, int]:
    codec, frame, nbytes = random.choice(_FRAMES)
    value = bytearray(spoiled(random, [frame], near=64))
    if codec.startswith("blosc") and len(value) >= 32 and random.random() < 0.9:
        value[12:16] = len(value).to_bytes(4, "little")
        value[4:8] = nbytes.to_bytes(4, "little")
    return codec, bytes(value), nbytes


def _fast_payload(random: Random) -> bytes:
    """Frames are spoiled, and their checksums put right."""
    document, frames = split(random.choice(list(_PAYLOADS.values())))
    frames = spoiled(random, [frames])
    _mend_frames(document, frames)
    return join(json.dumps(document, separators=(",", ":")).encode(), frames)


@outcome(PayloadError)
def _json(text: bytes) -> str:
    document = load_object(text)
    require(isinstance(document, dict), "no object")
    return "read"


@outcome(())
def _scales(text: str) -> str:
    if not is_scales(text):
        return "refused"
    require(scales_text(*map(float, text.split(" "))) == text, "written otherwise")
    return "read"


TARGETS = (
    Target(
        "payload header, both readers",
        _headers() | whole_payloads(),
        _both_ways,
        lambda random: mended(spoiled(random, _HEADERS, near=1500)),
    ),
    Target("payload", whole_payloads(), _load, _fast_payload),
    Target("frame", _frames(), _decode, _fast_frame),
    Target(
        "header JSON",
        changed_bytes(_TEXTS) | changed_bytes([b'{"a":[1,{"b":"c"}]}']),
        _json,
        lambda random: spoiled(random, _TEXTS),
    ),
    Target(
        "scales",
        st.text("0123456789.e+- naif", max_size=50)
        | st.builds(scales_text, *[st.floats(1e-300, 1e300)] * 2),
        _scales,
    ),
)
