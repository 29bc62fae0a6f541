"""Payload format 1: one chunk of one shard as one immutable, self-describing safetensors file.

Pure: values in, bytes out, and back. Nothing that comes out of here was not verified: length,
header checksum, claim and layers by ``open_payload``, each frame by ``frame_pages``. Whatever the
bytes are, reading raises ``PayloadError`` and nothing else. Specified in ``docs/format.md``.
"""

from bisect import bisect_right
from itertools import islice

from objkv.codec.compress import CODECS, Buffer, decompress_into
from objkv.codec.encode import encode, encode_in_place, header_room, payload_bytes_max
from objkv.codec.expected import parse_expected
from objkv.codec.header import ALIGNMENT, HEADER_BYTES_MAX, bytes_needed, digest, parse
from objkv.codec.seal import Seal
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


def header_bytes_needed(prefix: Buffer) -> int:
    """How many bytes ``read_header`` needs, from the payload's first 8.

    At most ``HEADER_BYTES_MAX``; raises ``PayloadError`` if the number is absurd.
    """
    return bytes_needed(_view(prefix))


def read_header(payload: Buffer, *, seal: Seal | None = None) -> Header:
    """The header of ``payload``, of which the beginning is enough.

    The header's own checksum is verified, nothing is compared with what the reader expects. Raises
    ``PayloadError``.
    """
    return parse(_view(payload))


def read_claimed(
    payload: Buffer, claim: Claim, layers: tuple[LayerSpec, ...], *, seal: Seal | None = None
) -> Header:
    """``read_header`` for who knows the claim, and what the layers most probably are: much sooner
    if they are, uncompressed. ``layers`` should be the same object every time, and is kept. Length
    and layers remain to be compared. Raises ``PayloadError``, also for another claim."""
    header = parse_expected(_view(payload), claim, layers)
    if header.claim is not claim and header.claim != claim:
        raise PayloadError(f"claims to be {header.claim}, expected {claim}")
    return header


def read_expected(
    payload: Buffer, claim: Claim, layers: tuple[LayerSpec, ...], *, seal: Seal | None = None
) -> Header:
    """``read_claimed`` that compares the layers too; the length remains to be compared. Raises
    ``PayloadError``, also one that names the first difference."""
    header = read_claimed(payload, claim, layers)
    check_layers(header.frames.layers, layers)
    return header


def open_payload(
    payload: Buffer, claim: Claim, layers: tuple[LayerSpec, ...], *, seal: Seal | None = None
) -> Header:
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


def _view(buffer: Buffer) -> memoryview:
    view = memoryview(buffer)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")
