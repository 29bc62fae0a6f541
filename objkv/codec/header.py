"""The safetensors header of a payload: written canonically, read with distrust.

It is written here rather than by ``safetensors.serialize`` because the library sorts tensors by
dtype and name, which puts ``layers.10`` before ``layers.2``, and knows neither our alignment nor
our checksum. Specified in ``docs/format.md``.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import xxhash

from objkv.codec.compress import Buffer
from objkv.codec.frames import frame_metadata, read_frames, tensor_of
from objkv.codec.layout import CHECKSUM_AT, CHECKSUM_END, LENGTH_BYTES, OPENING
from objkv.codec.seal import Seal, read_marks, seal_metadata
from objkv.codec.strict_json import check_parts, load_object
from objkv.codec.values import (
    METADATA_NAME,
    RAW_BYTES_MAX,
    UNSEALED,
    WRITER_CHARS_MAX,
    Claim,
    Frame,
    Header,
    LayerSpec,
    Marks,
    Provenance,
    VerifiedText,
)
from objkv.errors import PayloadError
from objkv.keys.chunk import ChunkKey

FORMAT_NAME: Final = "objkv/1"
ALIGNMENT: Final = 4096
"""Data starts at a multiple of this, so that pages can be mapped and read directly."""
HEADER_BYTES_MAX: Final = 4 << 20

_BLANK = b"0" * 32
TOKENS_MAX: Final = HEADER_BYTES_MAX // 11
"""Token ids that a payload may carry: so many of ten digits fit into a header."""
_FIXED_BYTES_MAX = 4096
"""Of JSON besides layers, writer and tokens."""
_FRAME_BYTES_MAX = 640
"""Of JSON per layer besides its name."""

_INT = re.compile(r"0|[1-9][0-9]{0,18}")
_INTS = re.compile(r"(?:0|[1-9][0-9]{0,18})(?: (?:0|[1-9][0-9]{0,18}))*")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_KEY = re.compile(r"[ -~]{1,900}")
_HASH = re.compile(r"[0-9a-f]{40}")
_WRITER = re.compile(rf"[ -~]{{0,{WRITER_CHARS_MAX}}}")


def digest(content: Buffer) -> str:
    """The checksum used everywhere in a payload: xxh3_128 (seed 0), canonical, as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(content)


def render(
    claim: Claim,
    frames: Sequence[Frame],
    provenance: Provenance,
    marks: Marks = UNSEALED,
    seal: Seal | None = None,
) -> bytes:
    """The header, length and padding included; ``Frame.offset`` counts from the first frame here,
    because where that starts is known only afterwards. Raises ``PayloadError`` if too long.

    ``marks`` and ``frames`` are as ``seal`` made them; it signs.
    """
    metadata = {"checksum": _BLANK.decode(), **seal_metadata(marks)}
    metadata |= {
        "format": FORMAT_NAME,
        "key": claim.key.path(),
        "parent": claim.parent_hash.hex(),
        "token_start": str(claim.token_start),
        "token_end": str(claim.token_end),
        "token_digest": provenance.token_digest,
        "writer": provenance.writer,
        "created_s": str(provenance.created_s),
    }
    if sum(frame.layer.nbytes for frame in frames) > RAW_BYTES_MAX:
        raise PayloadError(f"more than {RAW_BYTES_MAX} bytes of pages")
    if provenance.tokens is not None:
        if len(provenance.tokens) > TOKENS_MAX:
            raise PayloadError(f"{len(provenance.tokens)} token ids; at most {TOKENS_MAX} fit")
        metadata["tokens"] = " ".join(map(str, provenance.tokens))
    document: dict[str, Any] = {METADATA_NAME: metadata}
    for number, frame in enumerate(frames):
        metadata |= frame_metadata(number, frame)
        document[frame.layer.name] = tensor_of(frame)
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=True).encode("ascii")
    return finished(text, seal)[0]


def finished(text: bytes, seal: Seal | None = None) -> tuple[bytes, str]:
    """The header whose JSON is ``text``, with its length, its padding, its signature and its
    checksum; and that. Raises ``PayloadError`` if it is too long."""
    total = -(-(LENGTH_BYTES + len(text)) // ALIGNMENT) * ALIGNMENT
    if total > HEADER_BYTES_MAX:
        raise PayloadError(f"a header of {total} bytes; at most {HEADER_BYTES_MAX} are allowed")
    check_parts(text)
    header = bytearray((total - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little"))
    header += text.ljust(total - LENGTH_BYTES)
    if seal is not None:
        seal.sign(header)
    checksum = digest(header)
    header[CHECKSUM_AT:CHECKSUM_END] = checksum.encode()
    return bytes(header), checksum


def checksum_of(header: bytes) -> str:
    """The checksum that a rendered header carries, unverified."""
    return header[CHECKSUM_AT:CHECKSUM_END].decode("ascii")


def bytes_max(layers: Sequence[LayerSpec], tokens: int) -> int:
    """Upper bound of the header of a payload of ``layers`` that carries ``tokens`` token ids."""
    names = sum(len(json.dumps(layer.name)) + _FRAME_BYTES_MAX for layer in layers)
    text = _FIXED_BYTES_MAX + 2 * WRITER_CHARS_MAX + names + 11 * tokens
    return min(HEADER_BYTES_MAX, text + ALIGNMENT - text % ALIGNMENT)


def bytes_needed(prefix: Buffer) -> int:
    """How long the header is, from its first 8 bytes. Raises ``PayloadError`` if absurd."""
    if len(prefix) < LENGTH_BYTES:
        raise PayloadError(f"{len(prefix)} bytes are no payload")
    total = int.from_bytes(prefix[:LENGTH_BYTES], "little") + LENGTH_BYTES
    if total % ALIGNMENT or not 0 < total <= HEADER_BYTES_MAX:
        raise PayloadError(f"a header of {total} bytes")
    return total


def parse(payload: memoryview, seal: Seal | None = None) -> Header:
    """The header at the beginning of ``payload``, which may end anywhere after it.

    Raises ``PayloadError`` for anything but a header that ``render`` could have written, and for
    one that is not sealed as ``seal`` wants it.
    """
    text = verified_text(payload, seal)
    return opened(parse_verified(text), seal)


def opened(header: Header, seal: Seal | None) -> Header:
    """``header``, of a text that was verified with ``seal``, and what its frames are to be held
    against. Raises ``PayloadError`` if it is not sealed as ``seal`` wants it."""
    return header if seal is None else replace(header, opened=seal.open(header))


def verified_text(payload: memoryview, seal: Seal | None = None) -> VerifiedText:
    """A copy of the header's text. Raises ``PayloadError`` unless its checksum matches, and its
    signature where ``seal`` wants one."""
    total = bytes_needed(payload)
    if len(payload) < total:
        raise PayloadError(f"cut short: {len(payload)} bytes of a header of {total}")
    raw = bytearray(payload[:total])
    if raw[LENGTH_BYTES:CHECKSUM_AT] != OPENING:
        raise PayloadError("not a payload of objkv")
    checksum = bytes(raw[CHECKSUM_AT:CHECKSUM_END])
    raw[CHECKSUM_AT:CHECKSUM_END] = _BLANK
    if checksum != digest(raw).encode():
        raise PayloadError("the header's checksum does not match")
    if seal is not None:
        seal.verify(raw)
    return VerifiedText(raw, checksum.decode())


def parse_verified(text: VerifiedText) -> Header:
    """``parse`` for a text whose checksum was verified."""
    document = load_object(text.raw[LENGTH_BYTES:])
    metadata = _metadata(document.pop(METADATA_NAME, None))
    if metadata.pop("format", "") != FORMAT_NAME:
        raise PayloadError("not payload format 1")
    frames = read_frames(document, metadata, len(text.raw))
    return Header(
        claim=_claim(metadata),
        frames=frames,
        data_start=len(text.raw),
        nbytes=frames.ends[-1],
        raw_bytes=sum(layer.nbytes for layer in frames.layers),
        checksum=text.checksum,
        provenance=_provenance(metadata),
        marks=read_marks(metadata),
    )


def _metadata(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise PayloadError("metadata must be text to text")
    return value


def _text(metadata: dict[str, str], name: str, pattern: re.Pattern[str]) -> str:
    text = metadata.get(name, "")
    if name not in metadata or pattern.fullmatch(text) is None:
        raise PayloadError(f"metadata {name!r} is missing or malformed")
    return text


def _claim(metadata: dict[str, str]) -> Claim:
    try:
        key = ChunkKey.parse(_text(metadata, "key", _KEY))
    except ValueError as exc:
        raise PayloadError(f"metadata 'key': {exc}") from exc
    start = int(_text(metadata, "token_start", _INT))
    end = int(_text(metadata, "token_end", _INT))
    if start >= end:
        raise PayloadError(f"an empty token range {start}-{end}")
    return Claim(key, bytes.fromhex(_text(metadata, "parent", _HASH)), start, end)


def _provenance(metadata: dict[str, str]) -> Provenance:
    tokens = None
    if "tokens" in metadata:
        if metadata["tokens"].count(" ") >= TOKENS_MAX:
            raise PayloadError(f"more than {TOKENS_MAX} token ids")
        text = metadata["tokens"] and _text(metadata, "tokens", _INTS)
        tokens = tuple(map(int, text.split()))
    return Provenance(
        token_digest=_text(metadata, "token_digest", _DIGEST),
        writer=_text(metadata, "writer", _WRITER),
        created_s=int(_text(metadata, "created_s", _INT)),
        tokens=tokens,
    )
