"""Payload format 1: one chunk of one shard as one immutable, self-describing safetensors file.

Pure: values in, bytes out, and back. Nothing that comes out of here was not verified: length,
header checksum, claim and layers by ``open_payload``, each frame by ``frame_pages``. Whatever the
bytes are, reading raises ``PayloadError`` and nothing else. Specified in ``docs/format.md``.
"""

import ctypes
from bisect import bisect_right
from collections.abc import Sequence
from itertools import islice, pairwise

import numpy as np

from objkv.codec.compress import CODECS, Buffer, compress, decompress_into
from objkv.codec.expected import Form, form_of, parse_expected
from objkv.codec.header import (
    ALIGNMENT,
    HEADER_BYTES_MAX,
    bytes_max,
    bytes_needed,
    checksum_of,
    digest,
    parse,
)
from objkv.codec.header import render as _render
from objkv.codec.values import (
    DTYPE_BYTES,
    LAYER_BYTES_MAX,
    Claim,
    Frame,
    Frames,
    Header,
    LayerSpec,
    Provenance,
    check_layers,
)
from objkv.errors import PayloadError

__all__ = [
    "ALIGNMENT",
    "CODECS",
    "DTYPE_BYTES",
    "HEADER_BYTES_MAX",
    "LAYER_BYTES_MAX",
    "Buffer",
    "Claim",
    "Frame",
    "Frames",
    "Header",
    "LayerSpec",
    "Provenance",
    "check_frames",
    "check_layers",
    "encode",
    "encode_in_place",
    "frame_pages",
    "header_bytes_needed",
    "header_room",
    "open_payload",
    "payload_bytes_max",
    "read_claimed",
    "read_expected",
    "read_header",
]


def encode(
    claim: Claim,
    layers: Sequence[LayerSpec],
    pages: Sequence[Buffer],
    *,
    codec: str,
    provenance: Provenance,
) -> memoryview:
    """The whole payload, contiguous, in memory of its own.

    ``pages[i]`` are the ``layers[i].nbytes`` raw bytes of that layer, C-contiguous; they are not
    kept. A frame that ``codec`` would make less than 10 % smaller is stored as ``none``. Raises
    ``PayloadError`` if a layer or the header would exceed the format's bounds.
    """
    assert len(layers) == len(pages)
    start = header_room(layers, tokens=len(provenance.tokens or ()))
    # numpy copies without the GIL, and leaves fresh memory as it is; bytearray does neither, and
    # stalled every other thread for 78 ms per 32 MiB (2 cores, 2026-11).
    buffer = np.empty(start + sum(layer.nbytes for layer in layers), dtype=np.uint8)
    offset = start
    for layer, page in zip(layers, pages, strict=True):
        raw = np.frombuffer(_view(page), dtype=np.uint8)
        assert raw.nbytes == layer.nbytes
        np.copyto(buffer[offset : offset + layer.nbytes], raw)
        offset += layer.nbytes
    payload, _ = encode_in_place(claim, layers, buffer.data, codec=codec, provenance=provenance)
    return payload


def encode_in_place(
    claim: Claim,
    layers: Sequence[LayerSpec],
    buffer: memoryview,
    *,
    codec: str,
    provenance: Provenance,
) -> tuple[memoryview, Header]:
    """The payload made where its pages lie, and its header as ``read_header`` would read it.

    ``buffer`` (writable, contiguous, format ``B``, owned by the caller) holds the raw pages of all
    layers, one after the other, from byte ``header_room(layers, tokens=...)`` on. They are
    overwritten, and the payload is a view of ``buffer`` that need not begin at its beginning. At
    most one frame at a time is in memory of its own, and none with codec ``none``. What is written
    is what ``encode`` returns for the same pages. Raises ``PayloadError`` as ``encode`` does.
    """
    assert codec in CODECS
    assert layers
    if codec == "none" and isinstance(layers, tuple) and (form := form_of(layers)) is not None:
        made = _encode_plain(claim, form, buffer, provenance)
        if made is not None:
            return made
    assert len({layer.name for layer in layers}) == len(layers)
    start = header_room(layers, tokens=len(provenance.tokens or ()))
    assert buffer.nbytes >= start + sum(layer.nbytes for layer in layers)
    frames: list[Frame] = []
    # A frame is never longer than its pages, so the frames up to here end before the pages of the
    # next layer begin: nothing is overwritten that was not read.
    source = target = start
    for layer in layers:
        if layer.nbytes > LAYER_BYTES_MAX:
            raise PayloadError(f"layer {layer.name!r}: {layer.nbytes} bytes")
        raw = buffer[source : source + layer.nbytes]
        used, content = compress(codec, raw, layer.item_bytes)
        checksum = digest(content)
        raw_checksum = checksum if used == "none" else digest(raw)
        frames.append(Frame(layer, used, target - start, len(content), checksum, raw_checksum))
        _move(content, buffer[target : target + len(content)])
        source += layer.nbytes
        target += len(content)
    text = _render(claim, frames, provenance)
    assert len(text) <= start
    buffer[start - len(text) : start] = text
    payload = buffer[start - len(text) : target]
    return payload, _header(claim, frames, provenance, text)


def _encode_plain(
    claim: Claim, form: Form, buffer: memoryview, provenance: Provenance
) -> tuple[memoryview, Header] | None:
    """``encode_in_place`` where nothing moves but the header comes; None if its form is another."""
    start = form.room
    assert buffer.nbytes >= start + form.ends[-1]
    pages = buffer[start : start + form.ends[-1]]
    checksums = tuple([digest(pages[begin:end]) for begin, end in pairwise(form.ends)])
    made = form.write(claim, checksums, provenance)
    if made is None:
        return None
    text, header = made
    assert len(text) <= start
    buffer[start - len(text) : start] = text
    return buffer[start - len(text) : start + len(pages)], header


def header_room(layers: Sequence[LayerSpec], *, tokens: int = 0) -> int:
    """Where the pages begin in a buffer for ``encode_in_place``: a multiple of ``ALIGNMENT``, and
    an upper bound of the header of a payload that carries ``tokens`` token ids."""
    if not tokens and isinstance(layers, tuple) and (form := form_of(layers)) is not None:
        return form.room
    return bytes_max(layers, tokens)


def header_bytes_needed(prefix: Buffer) -> int:
    """How many bytes ``read_header`` needs, from the payload's first 8.

    At most ``HEADER_BYTES_MAX``; raises ``PayloadError`` if the number is absurd.
    """
    return bytes_needed(_view(prefix))


def read_header(payload: Buffer) -> Header:
    """The header of ``payload``, of which the beginning is enough.

    The header's own checksum is verified, nothing is compared with what the reader expects. Raises
    ``PayloadError``.
    """
    return parse(_view(payload))


def read_claimed(payload: Buffer, claim: Claim, layers: tuple[LayerSpec, ...]) -> Header:
    """``read_header`` for who knows the claim, and what the layers most probably are: much sooner
    if they are, uncompressed. ``layers`` should be the same object every time, and is kept. Length
    and layers remain to be compared. Raises ``PayloadError``, also for another claim."""
    header = parse_expected(_view(payload), claim, layers)
    if header.claim is not claim and header.claim != claim:
        raise PayloadError(f"claims to be {header.claim}, expected {claim}")
    return header


def read_expected(payload: Buffer, claim: Claim, layers: tuple[LayerSpec, ...]) -> Header:
    """``read_claimed`` that compares the layers too; the length remains to be compared. Raises
    ``PayloadError``, also one that names the first difference."""
    header = read_claimed(payload, claim, layers)
    check_layers(header.frames.layers, layers)
    return header


def open_payload(payload: Buffer, claim: Claim, layers: tuple[LayerSpec, ...]) -> Header:
    """``read_expected`` for a complete payload: its length is compared too.

    The frames are not read: ``frame_pages`` verifies each.
    """
    header = read_expected(payload, claim, layers)
    nbytes = memoryview(payload).nbytes
    if header.nbytes != nbytes:
        raise PayloadError(f"{nbytes} bytes where the header says {header.nbytes}")
    return header


def frame_pages(
    header: Header, index: int, payload: Buffer, scratch: memoryview | None
) -> memoryview:
    """The raw pages of layer ``index``: exactly ``layer.nbytes`` verified bytes.

    ``payload`` starts with the payload's first byte and reaches at least to the end of this frame.
    Codec ``none``: a view of ``payload``, nothing is copied and ``scratch`` may be None. Otherwise
    the frame is decoded into the beginning of ``scratch`` (writable, contiguous, at least
    ``layer.nbytes`` long, owned by the caller) and a view of that is returned. Raises
    ``PayloadError``; what ``scratch`` holds then is undefined.
    """
    frames = header.frames
    start, end = frames.starts[index], frames.ends[index]
    stored = _view(payload)[start:end]
    if len(stored) != end - start:
        raise PayloadError(f"cut short in layer {frames.layers[index].name!r}")
    if digest(stored) != frames.checksums[index]:
        raise _mismatch(header, index)
    codec = frames.codecs[index]
    if codec == "none":
        return stored
    layer = frames.layers[index]
    if scratch is None or scratch.nbytes < layer.nbytes:
        raise PayloadError(
            f"layer {layer.name!r} needs a buffer of {layer.nbytes} bytes to decode into"
        )
    pages = _view(scratch)[: layer.nbytes]
    decompress_into(codec, stored, pages)
    if digest(pages) != frames.raw_checksums[index]:
        raise PayloadError(f"layer {layer.name!r} was decoded wrongly")
    return pages


def check_frames(header: Header, payload: Buffer, first: int = 0) -> int:
    """Compare the checksums of all frames from ``first`` on that lie in ``payload`` whole; nothing
    is decoded.

    ``payload`` starts with the payload's first byte. Returns the first frame that was not looked
    at, because it is not all there. Raises ``PayloadError``.
    """
    whole, frames = _view(payload), header.frames
    until = bisect_right(frames.ends, len(whole))
    columns = zip(frames.starts, frames.ends, frames.checksums, strict=True)
    for index, (start, end, checksum) in enumerate(islice(columns, first, until), first):
        if digest(whole[start:end]) != checksum:
            raise _mismatch(header, index)
    return max(first, until)


def _mismatch(header: Header, index: int) -> PayloadError:
    name = header.frames.layers[index].name
    return PayloadError(f"the checksum of layer {name!r} does not match")


def payload_bytes_max(layers: Sequence[LayerSpec], *, tokens: int = 0) -> int:
    """Upper bound of a payload of ``layers`` in any codec, with ``tokens`` token ids in its
    provenance: what a slab must hold."""
    return bytes_max(layers, tokens) + sum(layer.nbytes for layer in layers)


def _header(claim: Claim, frames: Sequence[Frame], provenance: Provenance, text: bytes) -> Header:
    placed = Frames.of(frame._replace(offset=frame.offset + len(text)) for frame in frames)
    return Header(
        claim=claim,
        frames=placed,
        data_start=len(text),
        nbytes=placed.ends[-1],
        raw_bytes=sum(layer.nbytes for layer in placed.layers),
        checksum=checksum_of(text),
        provenance=provenance,
    )


def _move(source: Buffer, target: memoryview) -> None:
    """Copy bytes that may overlap, without the GIL."""
    content, place = np.frombuffer(source, np.uint8), np.frombuffer(target, np.uint8)
    if content.ctypes.data != place.ctypes.data:
        ctypes.memmove(place.ctypes.data, content.ctypes.data, content.nbytes)


def _view(buffer: Buffer) -> memoryview:
    view = memoryview(buffer)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")
