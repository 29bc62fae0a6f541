"""Targets: payloads, as codecs and loaders read them. Checksums are put right after every change,
as an attacker would."""

from random import Random
from typing import Any

from objkv.codec.compress import CODECS, compress, decompress_into
from objkv.codec.header import (
    HEADER_BYTES_MAX,
    claim_in,
    header_bytes_needed,
    load_object,
    parse_known,
    read_header,
)
from objkv.codec.join import Join, PartPosition
from objkv.codec.payload import frame_pages
from objkv.codec.values import RAW_BYTES_MAX, check_layers, digest
from objkv.errors import PayloadError
from tests.codec.parts import Grid, Piece, joined
from tests.codec.payloads import CLAIM, LAYERS, rechecked, reworked, sample, split
from tests.fuzz.mutation import NUMBERS, change_document, spoiled
from tests.fuzz.target import Target, outcome, require
from tests.support.payloads import open_payload

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
_TEXTS = [*(header[8:].rstrip() for header in _HEADERS), b'{"a":[1,{"b":"c"}]}']
_GUARD = b"\xa5" * 64


def mended(header: bytes) -> bytes:
    """``header`` with its own length and checksum put right."""
    raw = bytearray(header)
    raw += b" " * (-len(raw) % 4096)
    raw[:8] = (len(raw) - 8).to_bytes(8, "little")
    return rechecked(raw)


def _both_ways(payload: bytes) -> str:
    """The quick reader and the thorough one agree, whatever they are given."""
    ends = []
    for read in (read_header, lambda view: parse_known(view, CLAIM, LAYERS)):
        try:
            ends.append(read(memoryview(payload)))
        except PayloadError as exc:
            ends.append(str(exc))
    require(ends[0] == ends[1], ends)
    claim = claim_in(payload)
    if isinstance(ends[0], str):
        return "refused"
    require(claim in (None, ends[0].claim), "another claim at its place than in the JSON")
    try:
        check_layers(ends[0].frames.layers, LAYERS)
    except PayloadError:
        return "another's"
    return "read"


def _header(random: Random) -> bytes:
    if random.random() < 0.3:
        return whole_payload(random)
    header = spoiled(random, _HEADERS, near=1500)
    return mended(header) if random.randrange(10) else header


def whole_payload(random: Random) -> bytes:
    """A payload whose header's JSON was changed, or its frames, or both, and then every checksum
    made right."""
    document, frames = split(_PAYLOADS[random.choice(CODECS)])
    if random.random() < 0.5:
        frames = spoiled(random, [frames])
    if random.random() < 0.75:
        _mend_frames(document, frames)
    if random.random() < 0.5:
        change_document(random, document)
    return reworked(document, frames)


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


def _frame(random: Random) -> tuple[str, bytes, int]:
    codec, frame, nbytes = random.choice(_FRAMES)
    value = bytearray(spoiled(random, [frame], near=64))
    if codec.startswith("blosc") and len(value) >= 32 and random.random() < 0.9:
        value[12:16] = len(value).to_bytes(4, "little")
        value[4:8] = nbytes.to_bytes(4, "little")
    return codec, bytes(value), nbytes


@outcome(PayloadError)
def _json(written: bytes) -> str:
    document = load_object(written)
    require(isinstance(document, dict), "no object")
    return "read"


_PARTS = Grid((1, 2)).pieces()


def _some_parts(random: Random) -> list[Piece]:
    """All parts in any order, one or none of them changed."""
    first, *others = random.sample(_PARTS, len(_PARTS))
    change = random.randrange(4)
    if change == 1:
        document, frames = split(first.payload)
        change_document(random, document)
        first = first._replace(payload=reworked(document, frames))
    elif change == 2:
        name = random.choice(tuple(PartPosition.__annotations__))
        near = getattr(first.position, name) + random.choice((-1, 1, 2, 4096))
        wrong = {name: random.choice([near, *NUMBERS])}
        first = first._replace(position=first.position._replace(**wrong))
    elif change == 3:
        first = random.choice(others)
    return random.sample([first, *others], len(_PARTS))


@outcome(PayloadError)
def _join(parts: list[Piece]) -> str:
    """A payload of exactly these frames, which a reader verifies, or none."""
    headers = [read_header(part.payload) for part in parts]
    nbytes = Join(headers[0], parts[0].position).nbytes
    require(nbytes <= RAW_BYTES_MAX + HEADER_BYTES_MAX, "too large")
    sizes = [len(part.payload) for part in parts]
    if nbytes > 1 << 20 or sizes != [header.nbytes for header in headers]:
        return "another's"  # an agent refuses both before it copies
    memory = joined(parts)
    whole = read_header(memory)
    require(whole.nbytes == len(memory), "another length")
    for number in range(len(whole.frames)):
        frame_pages(whole, number, memory, None)
    given = sorted(layer.name for header in headers for layer in header.frames.layers)
    require(sorted(layer.name for layer in whole.frames.layers) == given, "other frames")
    return "read"


TARGETS = (
    Target("payload header, both readers", _header, _both_ways),
    Target("payload", whole_payload, _load),
    Target("frame", _frame, _decode),
    Target("header JSON", lambda random: spoiled(random, _TEXTS), _json),
    Target("parts of a payload", _some_parts, _join),
)
