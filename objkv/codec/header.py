"""The safetensors header of a payload: written canonically, read with distrust.

It is written here rather than by ``safetensors.serialize`` because the library sorts tensors by
dtype and name, which puts ``layers.10`` before ``layers.2``, and knows neither our alignment nor
our checksum. Specified in ``docs/format.md``.
"""

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import xxhash

from objkv.codec.compress import CODECS, Buffer
from objkv.codec.scales import is_scales
from objkv.codec.strict_json import load_object
from objkv.codec.values import (
    DTYPE_BYTES,
    LAYER_BYTES_MAX,
    METADATA_NAME,
    NAME_CHARS_MAX,
    TYPED_BYTES,
    WRITER_CHARS_MAX,
    Claim,
    Frame,
    Frames,
    Header,
    LayerSpec,
    Provenance,
    VerifiedText,
)
from objkv.errors import PayloadError
from objkv.keys.chunk import ChunkKey

FORMAT_NAME: Final = "objkv/1"
ALIGNMENT: Final = 4096
"""Data starts at a multiple of this, so that pages can be mapped and read directly."""
HEADER_BYTES_MAX: Final = 4 << 20

LENGTH_BYTES: Final = 8
OPENING: Final = f'{{"{METADATA_NAME}":{{"checksum":"'.encode()
_CHECKSUM_AT = LENGTH_BYTES + len(OPENING)
_DATA_AT = _CHECKSUM_AT + 32
_BLANK = b"0" * 32
_TENSOR = frozenset(("dtype", "shape", "data_offsets"))
_ONLY_INT = frozenset((int,))
_FIXED_BYTES_MAX = 4096
"""Of JSON besides layers, writer and tokens."""
_FRAME_BYTES_MAX = 640
"""Of JSON per layer besides its name."""

_INT = re.compile(r"0|[1-9][0-9]{0,18}")
_INTS = re.compile(r"(?:0|[1-9][0-9]{0,18})(?: (?:0|[1-9][0-9]{0,18}))*")
_CHECKSUM = re.compile(r"[0-9a-f]{32}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_KEY = re.compile(r"[ -~]{1,900}")
_HASH = re.compile(r"[0-9a-f]{40}")
_WRITER = re.compile(rf"[ -~]{{0,{WRITER_CHARS_MAX}}}")
_FRAME = re.compile(
    r"(?P<codec>[a-z0-9]{1,16}) (?P<dtype>[A-Z0-9_]{1,16}) "
    r"(?P<shape>[1-9][0-9]{0,18}(?:x[1-9][0-9]{0,18}){3}) "
    r"(?P<checksum>[0-9a-f]{32})(?: (?P<raw>[0-9a-f]{32}))?"
)


def digest(content: Buffer) -> str:
    """The checksum used everywhere in a payload: xxh3_128 (seed 0), canonical, as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(content)


def render(claim: Claim, frames: Sequence[Frame], provenance: Provenance) -> bytes:
    """The header, length and padding included; ``Frame.offset`` counts from the first frame here,
    because where that starts is known only afterwards. Raises ``PayloadError`` if too long."""
    metadata = {
        "checksum": _BLANK.decode(),
        "format": FORMAT_NAME,
        "key": claim.key.path(),
        "parent": claim.parent_hash.hex(),
        "token_start": str(claim.token_start),
        "token_end": str(claim.token_end),
        "token_digest": provenance.token_digest,
        "writer": provenance.writer,
        "created_s": str(provenance.created_s),
    }
    if provenance.tokens is not None:
        metadata["tokens"] = " ".join(map(str, provenance.tokens))
    document: dict[str, Any] = {METADATA_NAME: metadata}
    for number, frame in enumerate(frames):
        metadata[f"frame.{number}"] = _frame_text(frame)
        if frame.layer.scales:
            metadata[f"scales.{number}"] = frame.layer.scales
        dtype, shape = _stored_as(frame.layer, frame.codec, frame.nbytes)
        document[frame.layer.name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [frame.offset, frame.offset + frame.nbytes],
        }
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=True).encode("ascii")
    return sealed(text)[0]


def sealed(text: bytes) -> tuple[bytes, str]:
    """The header whose JSON is ``text``, with its length, its padding and its checksum; and that.
    Raises ``PayloadError`` if it is too long."""
    total = -(-(LENGTH_BYTES + len(text)) // ALIGNMENT) * ALIGNMENT
    if total > HEADER_BYTES_MAX:
        raise PayloadError(f"a header of {total} bytes; at most {HEADER_BYTES_MAX} are allowed")
    header = bytearray((total - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little"))
    header += text.ljust(total - LENGTH_BYTES)
    checksum = digest(header)
    header[_CHECKSUM_AT:_DATA_AT] = checksum.encode()
    return bytes(header), checksum


def checksum_of(header: bytes) -> str:
    """The checksum that a rendered header carries, unverified."""
    return header[_CHECKSUM_AT:_DATA_AT].decode("ascii")


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


def parse(payload: memoryview) -> Header:
    """The header at the beginning of ``payload``, which may end anywhere after it.

    Raises ``PayloadError`` for anything but a header that ``render`` could have written.
    """
    return parse_verified(verified_text(payload))


def verified_text(payload: memoryview) -> VerifiedText:
    """A copy of the header's text. Raises ``PayloadError`` unless its checksum matches."""
    total = bytes_needed(payload)
    if len(payload) < total:
        raise PayloadError(f"cut short: {len(payload)} bytes of a header of {total}")
    raw = bytearray(payload[:total])
    if raw[LENGTH_BYTES:_CHECKSUM_AT] != OPENING:
        raise PayloadError("not a payload of objkv")
    checksum = bytes(raw[_CHECKSUM_AT:_DATA_AT])
    raw[_CHECKSUM_AT:_DATA_AT] = _BLANK
    if checksum != digest(raw).encode():
        raise PayloadError("the header's checksum does not match")
    return VerifiedText(raw, checksum.decode())


def parse_verified(text: VerifiedText) -> Header:
    """``parse`` for a text whose checksum was verified."""
    document = load_object(text.raw[LENGTH_BYTES:])
    metadata = _metadata(document.pop(METADATA_NAME, None))
    if metadata.pop("format", "") != FORMAT_NAME:
        raise PayloadError("not payload format 1")
    frames = _frames(document, metadata, len(text.raw))
    return Header(
        claim=_claim(metadata),
        frames=frames,
        data_start=len(text.raw),
        nbytes=frames.ends[-1],
        raw_bytes=sum(layer.nbytes for layer in frames.layers),
        checksum=text.checksum,
        provenance=_provenance(metadata),
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
        text = metadata["tokens"] and _text(metadata, "tokens", _INTS)
        tokens = tuple(map(int, text.split()))
    return Provenance(
        token_digest=_text(metadata, "token_digest", _DIGEST),
        writer=_text(metadata, "writer", _WRITER),
        created_s=int(_text(metadata, "created_s", _INT)),
        tokens=tokens,
    )


def _frame_text(frame: Frame) -> str:
    shape = "x".join(map(str, frame.layer.shape))
    text = f"{frame.codec} {frame.layer.dtype} {shape} {frame.checksum}"
    return text if frame.codec == "none" else f"{text} {frame.raw_checksum}"


def _stored_as(layer: LayerSpec, codec: str, nbytes: int) -> tuple[str, list[int]]:
    """Dtype and shape of the tensor that holds the frame, as any safetensors reader sees it."""
    if codec == "none" and layer.dtype in TYPED_BYTES:
        return layer.dtype, list(layer.shape)
    return "U8", [nbytes]


def _frames(tensors: dict[str, Any], metadata: dict[str, str], data_start: int) -> Frames:
    """Frames in the order of their offsets, with neither gap nor overlap."""
    spans = sorted((_span(name, tensor), name) for name, tensor in tensors.items())
    if not spans:
        raise PayloadError("a payload without layers")
    frames: list[Frame] = []
    expected = 0
    for number, ((start, end), name) in enumerate(spans):
        if start != expected or end <= start:
            raise PayloadError(f"layer {name!r}: bytes {start}-{end} where {expected} was due")
        expected = end
        text = metadata.get(f"frame.{number}", "")
        scales = metadata.get(f"scales.{number}")
        if scales is not None and not is_scales(scales):
            raise PayloadError(f"layer {name!r}: malformed scales")
        frames.append(_frame(name, text, scales or "", data_start + start, end - start))
        dtype, shape = _stored_as(frames[-1].layer, frames[-1].codec, end - start)
        tensor = tensors[name]
        if (tensor["dtype"], tensor["shape"]) != (dtype, shape):
            raise PayloadError(f"layer {name!r}: tensor and frame disagree")
    return Frames.of(frames)


def _span(name: str, tensor: Any) -> tuple[int, int]:
    if not 0 < len(name) <= NAME_CHARS_MAX:
        raise PayloadError(f"a layer's name of {len(name)} characters")
    if not isinstance(tensor, dict) or tensor.keys() != _TENSOR:
        raise PayloadError(f"layer {name!r}: not a tensor")
    span, shape = tensor["data_offsets"], tensor["shape"]
    # ``type`` and not ``isinstance``: True is an int to Python, and 1 == 1.0 == True.
    are_lists = isinstance(span, list) and isinstance(shape, list)
    if not are_lists or not {*map(type, span), *map(type, shape)} <= _ONLY_INT:
        raise PayloadError(f"layer {name!r}: shape and offsets must be lists of integers")
    if len(span) != 2:
        raise PayloadError(f"layer {name!r}: {len(span)} offsets")
    return span[0], span[1]


def _frame(name: str, text: str, scales: str, offset: int, nbytes: int) -> Frame:
    match = _FRAME.fullmatch(text)
    if match is None:
        raise PayloadError(f"layer {name!r}: its frame is missing or malformed")
    codec, dtype, checksum = match["codec"], match["dtype"], match["checksum"]
    if codec not in CODECS or dtype not in DTYPE_BYTES:
        raise PayloadError(f"layer {name!r}: unknown codec {codec!r} or dtype {dtype!r}")
    if (match["raw"] is None) != (codec == "none"):
        raise PayloadError(f"layer {name!r}: malformed frame")
    layer, layer_bytes = _layer(name, dtype, match["shape"], scales)
    if layer_bytes > LAYER_BYTES_MAX:
        raise PayloadError(f"layer {name!r}: {layer_bytes} bytes")
    if nbytes != layer_bytes if codec == "none" else nbytes >= layer_bytes:
        raise PayloadError(f"layer {name!r}: {nbytes} bytes stored for {layer_bytes}")
    return Frame(layer, codec, offset, nbytes, checksum, match["raw"] or checksum)


@lru_cache(maxsize=4096)
def _layer(name: str, dtype: str, shape: str, scales: str) -> tuple[LayerSpec, int]:
    """A layer and its bytes: the payloads of one model have the same ones over and over."""
    layer = LayerSpec(name, dtype, tuple(map(int, shape.split("x"))), scales)
    return layer, layer.nbytes
