"""Payload format 1: one chunk of one shard as one immutable, self-describing safetensors file.

Pure: values in, bytes out, and back. Nothing that comes out of here was not verified: length,
header checksum, claim and layers by ``open_payload``, each frame by ``frame_pages``. Whatever the
bytes are, reading raises ``PayloadError`` and nothing else. Specified in ``docs/format.md``.
"""

from collections.abc import Sequence

import numpy as np

from objkv.codec.compress import CODECS, Buffer, compress, decompress_into
from objkv.codec.header import ALIGNMENT, HEADER_BYTES_MAX, bytes_max, bytes_needed, digest, parse
from objkv.codec.header import render as _render
from objkv.codec.values import (
    DTYPE_BYTES,
    LAYER_BYTES_MAX,
    Claim,
    Frame,
    Header,
    LayerSpec,
    Provenance,
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
    "Header",
    "LayerSpec",
    "Provenance",
    "encode",
    "frame_pages",
    "header_bytes_needed",
    "open_payload",
    "payload_bytes_max",
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
    assert codec in CODECS
    assert layers
    assert len(layers) == len(pages)
    assert len({layer.name for layer in layers}) == len(layers)
    frames: list[Frame] = []
    stored: list[Buffer] = []
    offset = 0
    for layer, page in zip(layers, pages, strict=True):
        raw = memoryview(page).cast("B")
        assert raw.nbytes == layer.nbytes
        if layer.nbytes > LAYER_BYTES_MAX:
            raise PayloadError(f"layer {layer.name!r}: {layer.nbytes} bytes")
        used, content = compress(codec, raw, layer.item_bytes)
        checksum = digest(content)
        raw_checksum = checksum if used == "none" else digest(raw)
        frames.append(Frame(layer, used, offset, len(content), checksum, raw_checksum))
        stored.append(content)
        offset += len(content)
    header = _render(claim, frames, provenance)
    # numpy copies without the GIL, and leaves fresh memory as it is; bytearray does neither, and
    # stalled every other thread for 78 ms per 32 MiB (2 cores, 2026-11).
    payload = np.empty(len(header) + offset, dtype=np.uint8)
    payload[: len(header)] = np.frombuffer(header, dtype=np.uint8)
    for frame, content in zip(frames, stored, strict=True):
        start = len(header) + frame.offset
        np.copyto(payload[start : start + frame.nbytes], np.frombuffer(content, dtype=np.uint8))
    return payload.data


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


def open_payload(payload: Buffer, claim: Claim, layers: Sequence[LayerSpec]) -> Header:
    """The header of a complete payload that is exactly what the reader expects.

    Raises ``PayloadError`` that names the first difference: length, header, claim or layers. The
    frames are not read: ``frame_pages`` verifies each.
    """
    header = read_header(payload)
    nbytes = memoryview(payload).nbytes
    if header.nbytes != nbytes:
        raise PayloadError(f"{nbytes} bytes where the header says {header.nbytes}")
    if header.claim != claim:
        raise PayloadError(f"claims to be {header.claim}, expected {claim}")
    if len(header.frames) != len(layers):
        raise PayloadError(f"has {len(header.frames)} layers, expected {len(layers)}")
    for frame, layer in zip(header.frames, layers, strict=True):
        if frame.layer != layer:
            raise PayloadError(f"has {frame.layer}, expected {layer}")
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
    frame = header.frames[index]
    name, nbytes = frame.layer.name, frame.layer.nbytes
    stored = _view(payload)[frame.offset : frame.offset + frame.nbytes]
    if len(stored) != frame.nbytes:
        raise PayloadError(f"cut short in layer {name!r}")
    if digest(stored) != frame.checksum:
        raise PayloadError(f"the checksum of layer {name!r} does not match")
    if frame.codec == "none":
        return stored
    if scratch is None or scratch.nbytes < nbytes:
        raise PayloadError(f"layer {name!r} needs a buffer of {nbytes} bytes to decode into")
    pages = _view(scratch)[:nbytes]
    decompress_into(frame.codec, stored, pages)
    if digest(pages) != frame.raw_checksum:
        raise PayloadError(f"layer {name!r} was decoded wrongly")
    return pages


def payload_bytes_max(layers: Sequence[LayerSpec], *, tokens: int = 0) -> int:
    """Upper bound of a payload of ``layers`` in any codec, with ``tokens`` token ids in its
    provenance: what a slab must hold."""
    return bytes_max(layers, tokens) + sum(layer.nbytes for layer in layers)


def _view(buffer: Buffer) -> memoryview:
    return memoryview(buffer).cast("B")
