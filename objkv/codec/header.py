"""The safetensors header of a payload, written canonically and parsed defensively.

``safetensors.serialize`` is not used, because it sorts tensors by dtype and name, which puts
``layers.10`` before ``layers.2``, and supports neither objkv's alignment nor its checksum.
``docs/format.md`` specifies the header.
"""

import json
import re
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import accumulate, chain
from operator import attrgetter
from threading import Lock
from typing import Any, Final

from objkv.codec.compress import CODECS, Buffer
from objkv.codec.seal import Seal, read_marks, seal_metadata
from objkv.codec.values import (
    CHECKSUM_AT,
    CHECKSUM_END,
    CHUNK_AT,
    CHUNK_END,
    CHUNK_OPENING,
    DTYPE_BYTES,
    ENCRYPTED,
    LAYER_BYTES_MAX,
    LENGTH_BYTES,
    METADATA_NAME,
    NAME_CHARS_MAX,
    OPENING,
    RAW_BYTES_MAX,
    TYPED_BYTES,
    UNSEALED,
    WRITER_CHARS_MAX,
    Claim,
    Frame,
    Frames,
    Header,
    LayerSpec,
    Marks,
    Provenance,
    VerifiedText,
    digest,
    is_scales,
)
from objkv.errors import PayloadError
from objkv.keys.chunk import ChunkKey

FORMAT_NAME: Final = "objkv/2"
ALIGNMENT: Final = 4096
"""Data starts at a multiple of this, so that pages can be mapped and read directly."""
HEADER_BYTES_MAX: Final = 4 << 20
TOKENS_MAX: Final = HEADER_BYTES_MAX // 11
"""Maximum number of token ids in a payload: this many ids of ten digits fit in a header."""
PARTS_MAX: Final = 1 << 17
"""Maximum number of values in one document, of 200 bytes of memory each. A layer has twelve."""
_FIXED_BYTES_MAX = 4096
"""JSON outside layers, writer and tokens."""
_FRAME_BYTES_MAX = 640
"""JSON per layer, without its name."""
_BLANK = b"0" * 32

# The metadata of a valid header, for both readers and both writers: names in the order in which
# they are written, each with its form.
_DIGEST = re.compile("[0-9a-f]{64}")
_INT = re.compile("(?:0|[1-9][0-9]{0,18})")
CLAIM_FORMS: Final = {
    "shard": re.compile("[A-Za-z0-9_-]{0,200}"),
    "parent": re.compile("[0-9a-f]{40}"),
    "token_start": _INT,
    "token_end": _INT,
}
PROVENANCE_FORMS: Final = {
    "token_digest": _DIGEST,
    "writer": re.compile(rf"[ -~]{{0,{WRITER_CHARS_MAX}}}"),
    "created_s": _INT,
}
_TOKENS = re.compile(f"{_INT.pattern}(?: {_INT.pattern})*")
_FRAME = re.compile(
    r"(?P<codec>[a-z0-9]{1,16})(?P<encrypted>\+aes256gcm)? (?P<dtype>[A-Z0-9_]{1,16}) "
    r"(?P<shape>[1-9][0-9]{0,18}(?:x[1-9][0-9]{0,18}){3}) "
    r"(?P<sums>[0-9a-f]{32}(?: [0-9a-f]{32}){0,2})"
)
_TENSOR = frozenset(("dtype", "shape", "data_offsets"))
_ONLY_INT = frozenset((int,))
_provenance_values = attrgetter(*PROVENANCE_FORMS)


def _claim_values(claim: Claim) -> tuple[str, str, int, int]:
    shard = str(claim.key.shard or "")
    return shard, claim.parent_hash.hex(), claim.token_start, claim.token_end


def _frame_metadata(number: int, frame: Frame) -> dict[str, str]:
    parts = [frame.codec, frame.layer.dtype, frame.layer.shape_text, frame.checksum]
    encrypted = frame.codec.endswith(ENCRYPTED)
    if frame.codec.removesuffix(ENCRYPTED) != "none":
        parts.append(frame.raw_checksum)
    if encrypted:
        parts.append(frame.proof)
    metadata = {f"frame.{number}": " ".join(parts)}
    if frame.proof and not encrypted:
        metadata[f"sha256.{number}"] = frame.proof
    if frame.layer.scales:
        metadata[f"scales.{number}"] = frame.layer.scales
    return metadata


def _stored_as(layer: LayerSpec, codec: str, nbytes: int) -> tuple[str, list[int]]:
    """Return dtype and shape of a frame's tensor, as any safetensors reader sees it."""
    if codec == "none" and layer.dtype in TYPED_BYTES:
        return layer.dtype, list(layer.shape)
    return "U8", [nbytes]


def _read_frames(tensors: dict[str, Any], metadata: dict[str, str], data_start: int) -> Frames:
    """Return the frames by their offsets. ``PayloadError`` if they overlap or leave a gap."""
    spans = sorted((_span(name, tensor), name) for name, tensor in tensors.items())
    if not spans:
        raise PayloadError("the payload has no layers")
    frames: list[Frame] = []
    expected = raw_bytes = 0
    for number, ((start, end), name) in enumerate(spans):
        if start != expected or end <= start:
            raise PayloadError(
                f"layer {name!r} has bytes {start}-{end}, expected a start at {expected}"
            )
        expected = end
        frames.append(_frame(name, number, metadata, data_start + start, end - start))
        raw_bytes += frames[-1].layer.nbytes
        if raw_bytes > RAW_BYTES_MAX:
            raise PayloadError(f"the pages exceed {RAW_BYTES_MAX} bytes")
        dtype, shape = _stored_as(frames[-1].layer, frames[-1].codec, end - start)
        tensor = tensors[name]
        if (tensor["dtype"], tensor["shape"]) != (dtype, shape):
            raise PayloadError(f"layer {name!r}: the tensor contradicts its frame")
    return Frames.of(frames)


def _span(name: str, tensor: Any) -> tuple[int, int]:
    if not 0 < len(name) <= NAME_CHARS_MAX:
        raise PayloadError(
            f"a layer's name has {len(name)} characters, allowed are 1 to {NAME_CHARS_MAX}"
        )
    if not isinstance(tensor, dict) or tensor.keys() != _TENSOR:
        raise PayloadError(f"layer {name!r} is not a tensor")
    span, shape = tensor["data_offsets"], tensor["shape"]
    # ``type`` instead of ``isinstance``: True is an int in Python, and 1 == 1.0 == True.
    are_lists = isinstance(span, list) and isinstance(shape, list)
    if not are_lists or not {*map(type, span), *map(type, shape)} <= _ONLY_INT:
        raise PayloadError(f"layer {name!r}: shape and offsets must be lists of integers")
    if len(span) != 2:
        raise PayloadError(f"layer {name!r} has {len(span)} offsets, expected 2")
    return span[0], span[1]


def _frame(name: str, number: int, metadata: dict[str, str], offset: int, nbytes: int) -> Frame:
    match = _FRAME.fullmatch(metadata.get(f"frame.{number}", ""))
    if match is None:
        raise PayloadError(f"layer {name!r}: the frame's metadata is missing or malformed")
    codec, dtype, encrypted = match["codec"], match["dtype"], match["encrypted"] or ""
    if codec not in CODECS or dtype not in DTYPE_BYTES:
        raise PayloadError(f"layer {name!r}: unknown codec {codec!r} or dtype {dtype!r}")
    scales = metadata.get(f"scales.{number}")
    if scales is not None and not is_scales(scales):
        raise PayloadError(f"layer {name!r} has malformed scales")
    layer, layer_bytes = _layer(name, dtype, match["shape"], scales or "")
    if layer_bytes > LAYER_BYTES_MAX:
        raise PayloadError(f"layer {name!r} has {layer_bytes} bytes, allowed are {LAYER_BYTES_MAX}")
    if nbytes != layer_bytes if codec == "none" else nbytes >= layer_bytes:
        raise PayloadError(f"layer {name!r} stores {nbytes} bytes for {layer_bytes} bytes of pages")
    sums = match["sums"].split(" ")
    if len(sums) != 1 + (codec != "none") + bool(encrypted):
        raise PayloadError(f"layer {name!r}: the frame's metadata is malformed")
    proof = sums[-1] if encrypted else metadata.get(f"sha256.{number}", "")
    if not encrypted and proof and _DIGEST.fullmatch(proof) is None:
        raise PayloadError(f"layer {name!r}: the frame's SHA-256 is malformed")
    raw_checksum = sums[0] if codec == "none" else sums[1]
    return Frame(layer, codec + encrypted, offset, nbytes, sums[0], raw_checksum, proof)


@lru_cache(maxsize=4096)
def _layer(name: str, dtype: str, shape: str, scales: str) -> tuple[LayerSpec, int]:
    """Return a layer and its size. All payloads of a model have the same layers."""
    layer = LayerSpec(name, dtype, tuple(map(int, shape.split("x"))), scales)
    return layer, layer.nbytes


def check_parts(text: bytes | bytearray) -> None:
    """Raise ``PayloadError`` if ``text`` may have more than ``PARTS_MAX`` values."""
    parts = text.count(b",") + text.count(b"[") + text.count(b"{")
    if parts > PARTS_MAX:
        raise PayloadError(f"the header has {parts} parts, allowed are {PARTS_MAX}")


def load_object(text: bytes | bytearray) -> dict[str, Any]:
    """Parse ASCII ``text``, an object without duplicate names. Raises ``PayloadError``."""
    check_parts(text)
    try:
        document = json.loads(text.decode("ascii"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as exc:
        raise PayloadError(f"the header is not JSON: {exc}") from exc
    if not isinstance(document, dict):
        raise PayloadError("the header is not a JSON object")
    return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a name occurs twice")
    return out


def plain_frames(layers: Iterable[LayerSpec], checksums: Iterable[str]) -> list[Frame]:
    """Return uncompressed, unsealed frames, one after another from offset 0 on, of these sums."""
    frames, offset = list[Frame](), 0
    for layer, checksum in zip(layers, checksums, strict=True):
        frames.append(Frame(layer, "none", offset, layer.nbytes, checksum, checksum))
        offset += layer.nbytes
    return frames


def render(
    claim: Claim,
    frames: Sequence[Frame],
    provenance: Provenance,
    marks: Marks = UNSEALED,
    seal: Seal | None = None,
    room: int = 0,
) -> bytes:
    """Return the header, including length and padding. ``Frame.offset`` counts from the first
    frame. ``seal`` made ``marks`` and ``frames``, and signs the header. ``room``: the header's
    length, 0 for the least. Raises ``PayloadError`` if the header is too long."""
    metadata = {"checksum": _BLANK.decode(), "chunk": claim.key.chunk_text}
    metadata |= seal_metadata(marks)
    metadata["format"] = FORMAT_NAME
    metadata |= zip(CLAIM_FORMS, map(str, _claim_values(claim)), strict=True)
    metadata |= zip(PROVENANCE_FORMS, map(str, _provenance_values(provenance)), strict=True)
    if sum(frame.layer.nbytes for frame in frames) > RAW_BYTES_MAX:
        raise PayloadError(f"the pages exceed {RAW_BYTES_MAX} bytes")
    if provenance.tokens is not None:
        if len(provenance.tokens) > TOKENS_MAX:
            raise PayloadError(
                f"the payload has {len(provenance.tokens)} token ids, allowed are {TOKENS_MAX}"
            )
        metadata["tokens"] = " ".join(map(str, provenance.tokens))
    document: dict[str, Any] = {METADATA_NAME: metadata}
    for number, frame in enumerate(frames):
        metadata |= _frame_metadata(number, frame)
        dtype, shape = _stored_as(frame.layer, frame.codec, frame.nbytes)
        span = [frame.offset, frame.offset + frame.nbytes]
        document[frame.layer.name] = {"dtype": dtype, "shape": shape, "data_offsets": span}
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=True).encode("ascii")
    return finished(text, seal, room)


def finished(text: bytes, seal: Seal | None = None, room: int = 0) -> bytes:
    """Complete the JSON ``text`` with length, padding, signature and checksum. See ``render``."""
    total = -(-(LENGTH_BYTES + len(text)) // ALIGNMENT) * ALIGNMENT
    if total > (room or HEADER_BYTES_MAX):
        raise PayloadError(f"the header has {total} bytes, allowed are {room or HEADER_BYTES_MAX}")
    total = room or total
    check_parts(text)
    header = bytearray((total - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little"))
    header += text.ljust(total - LENGTH_BYTES)
    if seal is not None:
        seal.sign(header)
    header[CHECKSUM_AT:CHECKSUM_END] = digest(header).encode()
    return bytes(header)


def checksum_of(header: bytes) -> str:
    """Return the checksum in a rendered header, unverified."""
    return header[CHECKSUM_AT:CHECKSUM_END].decode("ascii")


def bytes_max(layers: Sequence[LayerSpec], tokens: int) -> int:
    """Return an upper bound of the header's length for ``layers`` and ``tokens`` token ids."""
    names = sum(len(json.dumps(layer.name)) + _FRAME_BYTES_MAX for layer in layers)
    text = _FIXED_BYTES_MAX + 2 * WRITER_CHARS_MAX + names + 11 * tokens
    return min(HEADER_BYTES_MAX, text + ALIGNMENT - text % ALIGNMENT)


def header_bytes_needed(prefix: Buffer) -> int:
    """Return how many bytes ``read_header`` needs, at most ``HEADER_BYTES_MAX``, from the payload's
    first 8 bytes. Raises ``PayloadError`` if the number is implausible."""
    if len(prefix) < LENGTH_BYTES:
        raise PayloadError(f"the payload has only {len(prefix)} bytes")
    total = int.from_bytes(prefix[:LENGTH_BYTES], "little") + LENGTH_BYTES
    if total % ALIGNMENT or not 0 < total <= HEADER_BYTES_MAX:
        raise PayloadError(f"the header announces an invalid length of {total} bytes")
    return total


def read_header(payload: Buffer, *, seal: Seal | None = None) -> Header:
    """Return the header of ``payload``, whose start is enough. Compares nothing with a reader's
    expectations. Raises ``PayloadError`` unless the header's checksum matches, ``render`` could
    have written it, and it is sealed as ``seal`` requires."""
    header = parse_verified(verified_text(payload, seal))
    return header if seal is None else seal.open(header)


def verified_text(payload: Buffer, seal: Seal | None = None) -> VerifiedText:
    """Return a copy of the header's text. ``PayloadError`` if checksum or signature are wrong."""
    total = header_bytes_needed(payload)
    if len(payload) < total:
        raise PayloadError(
            f"the payload is truncated: {len(payload)} bytes, the header alone has {total}"
        )
    raw = bytearray(payload[:total])
    if raw[LENGTH_BYTES:CHECKSUM_AT] != OPENING:
        raise PayloadError("the data is not an objkv payload")
    if raw[CHECKSUM_END:CHUNK_AT] != CHUNK_OPENING:
        raise PayloadError("the payload is not of format 2")
    checksum = bytes(raw[CHECKSUM_AT:CHECKSUM_END])
    raw[CHECKSUM_AT:CHECKSUM_END] = _BLANK
    if checksum != digest(raw).encode():
        raise PayloadError("the header's checksum does not match")
    if seal is not None:
        seal.verify(raw)
    return VerifiedText(raw, checksum.decode())


def parse_verified(text: VerifiedText) -> Header:
    """Parse a text whose checksum was verified."""
    document = load_object(text.raw[LENGTH_BYTES:])
    metadata: Any = document.pop(METADATA_NAME, None)
    if not isinstance(metadata, dict) or {*map(type, metadata.values())} - {str}:
        raise PayloadError("the header's metadata is not a map of strings")
    if metadata.pop("format", "") != FORMAT_NAME:
        raise PayloadError("the payload is not of format 2")
    if metadata.get("chunk", "").encode("utf-8", "replace") != text.raw[CHUNK_AT:CHUNK_END]:
        raise PayloadError("the chunk is not where readers compare it")
    frames = _read_frames(document, metadata, len(text.raw))
    claim = _claim(metadata["chunk"], *(_text(metadata, *item) for item in CLAIM_FORMS.items()))
    return Header(claim, frames, text.checksum, _provenance(metadata), read_marks(metadata))


def _text(metadata: dict[str, str], name: str, form: re.Pattern[str]) -> str:
    text = metadata.get(name)
    if text is None or form.fullmatch(text) is None:
        raise PayloadError(f"metadata {name!r} is missing or malformed")
    return text


def _claim(chunk: str, shard: str, parent: str, start: str, end: str) -> Claim:
    """Return the claim of these texts, which have their forms except for the chunk's."""
    if int(start) >= int(end):
        raise PayloadError(f"the token range {start}-{end} is empty")
    try:
        key = ChunkKey.read(chunk, shard)
    except ValueError as exc:
        raise PayloadError(f"the claim: {exc}") from exc
    return Claim(key, bytes.fromhex(parent), int(start), int(end))


def _provenance(metadata: dict[str, str]) -> Provenance:
    tokens = None
    if "tokens" in metadata:
        if metadata["tokens"].count(" ") >= TOKENS_MAX:
            raise PayloadError(f"the payload has more than {TOKENS_MAX} token ids")
        text = metadata["tokens"] and _text(metadata, "tokens", _TOKENS)
        tokens = tuple(map(int, text.split()))
    token_digest, writer, created_s = (_text(metadata, *item) for item in PROVENANCE_FORMS.items())
    return Provenance(token_digest, writer, int(created_s), tokens)


# Headers whose claim and layers are known, without JSON, in a fifteenth of the time. A loader knows
# both in advance, and nearly every header it reads matches them; only provenance and checksums are
# new. A header that equals the output of ``render`` byte for byte, uncompressed, not sealed and
# without token ids, is parsed at fixed positions. One that differs in a single byte goes to
# ``parse_verified``, which alone decides about validity. A saver writes at the same positions.

FORMS_MAX: Final = 512
"""Forms that are kept, of 10 KiB each. Shards of other shapes can be dozens."""


def _joined(names: Iterable[str], values: Iterable[str]) -> str:
    """Return metadata as JSON text, from the end of one value to the end of the last."""
    return "".join(f'","{name}":"{value}' for name, value in zip(names, values, strict=True))


_BEGINNING = OPENING + _BLANK + CHUNK_OPENING
_CLAIM_TEXT = "%s" + _joined(("format", *CLAIM_FORMS), (FORMAT_NAME, *["%s"] * len(CLAIM_FORMS)))
_CLAIM = re.compile(
    (
        "([0-9a-f]{72}[0-9]{10})"
        + _joined(
            ("format", *CLAIM_FORMS),
            (re.escape(FORMAT_NAME), *[f"({form.pattern})" for form in CLAIM_FORMS.values()]),
        )
        + '"'
    ).encode()
)
_PROVENANCE_TEXT = _joined(PROVENANCE_FORMS, ["%s"] * len(PROVENANCE_FORMS)) + '"'
# A writer's name is printable ASCII that JSON does not escape.
_PLAIN_WRITER = rf"[ !#-\[\]-~]{{0,{WRITER_CHARS_MAX}}}"
_PROVENANCE = re.compile(
    (
        _PROVENANCE_TEXT
        % tuple(
            f"({_PLAIN_WRITER if name == 'writer' else form.pattern})"
            for name, form in PROVENANCE_FORMS.items()
        )
    ).encode()
)
_HEX = b"0123456789abcdef"
_ANY = "f" * 32
"""Stands for a frame's checksum. It occurs nowhere else between claim and tensors."""
_SOME_CLAIM = Claim(ChunkKey("0" * 32, bytes(20), 0), bytes(20), 0, 1)


class Form:
    """The constant parts of the headers of uncompressed, unsealed payloads of ``layers``."""

    def __init__(self, layers: tuple[LayerSpec, ...]) -> None:
        """Raises ``PayloadError`` if no header can describe the layers, or only a different one."""
        self.layers = layers
        self.room = bytes_max(layers, 0)
        """Upper bound of the header's length."""
        self.ends = tuple(accumulate((layer.nbytes for layer in layers), initial=0))
        """Start of each layer's pages after the header, then the end of the last."""
        self._codecs, self._proofs = ("none",) * len(layers), ("",) * len(layers)
        # The frames' checksums come first: names, which may contain anything, follow all frames.
        self._fixed = tuple(self._example().split(_ANY.encode(), len(layers)))
        places = "32s".join(f"{len(piece)}s" for piece in self._fixed)
        self._tail = struct.Struct(f"={places}")

    def _example(self) -> bytes:
        """Return the output of ``render`` after the provenance, without padding."""
        frames = plain_frames(self.layers, [_ANY] * len(self.layers))
        rendered = render(_SOME_CLAIM, frames, Provenance("0" * 64, "", 0))
        text = verified_text(rendered)
        # JSON or a dict may merge names, and layers may exceed the format's limits.
        if parse_verified(text).frames.layers != self.layers:
            raise PayloadError("layers that a header cannot distinguish")
        opening = _opening(_SOME_CLAIM)
        assert text.raw.startswith(opening, LENGTH_BYTES)
        provenance = _PROVENANCE.match(text.raw, LENGTH_BYTES + len(opening))
        assert provenance is not None
        return rendered[provenance.end() :].rstrip(b" ")

    def read(self, text: VerifiedText, claim: Claim) -> Header | None:
        """Return the header in ``text``, None unless it has exactly this form and this claim."""
        raw, total = text.raw, len(text.raw)
        opening = _opening(claim)
        if not raw.startswith(opening, LENGTH_BYTES):
            return None
        written = _PROVENANCE.match(raw, LENGTH_BYTES + len(opening))
        if written is None:
            return None
        end = written.end() + self._tail.size
        if end > total or raw.count(b" ", end) != total - end:
            return None
        parts = self._tail.unpack_from(raw, written.end())
        if parts[::2] != self._fixed or b"".join(parts[1::2]).translate(None, _HEX):
            return None
        token_digest, writer, created_s = written.groups()
        provenance = Provenance(token_digest.decode(), writer.decode(), int(created_s))
        frames = self._frames(total, tuple(map(bytes.decode, parts[1::2])))
        return Header(claim, frames, text.checksum, provenance)

    def write(
        self, claim: Claim, provenance: Provenance, checksums: tuple[str, ...]
    ) -> tuple[bytes, Header] | None:
        """Return the output of ``render``, and the header it describes; None if the provenance does
        not fit the form. ``checksums``: of the frames."""
        written = (_PROVENANCE_TEXT % _provenance_values(provenance)).encode()
        if provenance.tokens is not None or _PROVENANCE.fullmatch(written) is None:
            return None
        holes = map(str.encode, checksums)
        tail = self._tail.pack(*chain(*zip(self._fixed, holes, strict=False)), self._fixed[-1])
        text = finished(_opening(claim) + written + tail)
        frames = self._frames(len(text), checksums)
        return text, Header(claim, frames, checksum_of(text), provenance)

    def _frames(self, total: int, checksums: tuple[str, ...]) -> Frames:
        """``total``: the header's length."""
        at = tuple([total + end for end in self.ends])
        sums = checksums, checksums, self._proofs
        return Frames(self.layers, self._codecs, at[:-1], at[1:], *sums)


def identities(
    namespace: str, fields: Sequence[str], rows: Iterable[tuple[bytes, bytes, int, int, int]]
) -> list[bytes]:
    """Return what headers of payloads have from ``CHUNK_AT`` on, up to the end of their claim, if
    they are not signed. A valid header with these bytes has this claim. One with others may have it
    too, so it must be read. ``fields``: see ``ChunkKey.field``. ``rows``: of each payload the
    prefix hash, the parent's, the tokens ``[start, end)``, and the position of its field."""
    forms = []
    for field in fields:
        group, _, shard = field.partition(".")
        chunk = f"{namespace}%s{int(group):010}"
        forms.append(_CLAIM_TEXT % (chunk, shard, "%s", "%s", "%s") + '"')
    return [
        (forms[field] % (prefix_hash.hex(), parent_hash.hex(), start, end)).encode()
        for prefix_hash, parent_hash, start, end, field in rows
    ]


def _opening(claim: Claim) -> bytes:
    """Return the output of ``render`` up to the provenance."""
    return _BEGINNING + (_CLAIM_TEXT % (claim.key.chunk_text, *_claim_values(claim))).encode()


_forms: dict[int, tuple[tuple[LayerSpec, ...], Form | None]] = {}
"""By the identity of the layers, which this keeps alive: hashing them takes longer than reading a
header. None for layers that can have no form."""
_making = Lock()


def claim_in(payload: Buffer) -> Claim | None:
    """Return an unsealed payload's claim, unverified, None unless written as by ``render``."""
    if (match := _CLAIM.match(payload, CHUNK_AT)) is None:
        return None
    with suppress(PayloadError):
        return _claim(*map(bytes.decode, match.groups()))
    return None


def parse_known(payload: memoryview, claim: Claim, layers: tuple[LayerSpec, ...]) -> Header:
    """Return or raise the same as ``read_header``, also for another claim or other layers. Faster
    if the header is of ``claim`` and ``layers``; these very objects are then in the result. Pass
    the same ``layers`` object each time; it is kept."""
    text, form = verified_text(payload), form_of(layers)
    header = None if form is None else form.read(text, claim)
    return parse_verified(text) if header is None else header


def form_of(layers: tuple[LayerSpec, ...]) -> Form | None:
    """Return the form of uncompressed payloads of ``layers``. None if no header can describe them,
    or only a different one. Pass the same ``layers`` object each time; it is kept."""
    if (known := _forms.get(id(layers))) is not None:
        return known[1]
    try:
        form = Form(layers) if layers else None
    except PayloadError:
        form = None
    with _making:
        while len(_forms) >= FORMS_MAX:
            del _forms[next(iter(_forms))]
        _forms[id(layers)] = layers, form
    return form
