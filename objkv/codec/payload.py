"""Payload format 2: one chunk of one group, or a part of it, as one immutable, self-describing
safetensors file.

Pure functions. Everything returned was verified: ``read_claimed`` checks header checksum and claim,
and ``frame_pages`` each frame. The caller compares length and layers. For any bytes, reading raises
``PayloadError`` and nothing else. ``docs/format.md`` specifies the format.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from objkv.codec.compress import CODECS, Buffer, compress, decompress_into
from objkv.codec.header import (
    bytes_max,
    checksum_of,
    form_of,
    parse_known,
    plain_frames,
    read_header,
    render,
)
from objkv.codec.seal import Seal, Sealing, proof_of
from objkv.codec.values import (
    ENCRYPTED,
    LAYER_BYTES_MAX,
    Claim,
    Frame,
    FramePosition,
    Frames,
    Header,
    LayerSpec,
    Provenance,
    digest,
)
from objkv.errors import PayloadError

# What other programs may use, see docs/operations/upgrade.md.
__all__ = ["Claim", "LayerSpec", "Provenance", "encode", "read_header"]


def encode(
    claim: Claim,
    layers: Sequence[LayerSpec],
    pages: Sequence[Buffer],
    *,
    codec: str,
    provenance: Provenance,
    seal: Seal | None = None,
) -> memoryview:
    """Return the whole payload, contiguous, in newly allocated memory. ``pages[i]`` has the raw
    bytes of ``layers[i]``, C-contiguous; no reference is kept. See ``encode_in_place``."""
    assert [_view(page).nbytes for page in pages] == [layer.nbytes for layer in layers]
    return _encoded(claim, tuple(layers), pages, codec, provenance, seal)[0]


def recode(payload: memoryview, *, codec: str, seal: Seal | None) -> tuple[memoryview, Header]:
    """Return an uncompressed, unsealed payload in another form, and its header."""
    header = read_header(payload)
    pages = payload[header.data_start : header.nbytes]
    return _encoded(header.claim, header.frames.layers, [pages], codec, header.provenance, seal)


def _encoded(
    claim: Claim,
    layers: tuple[LayerSpec, ...],
    pages: Sequence[Buffer],
    codec: str,
    provenance: Provenance,
    seal: Seal | None,
) -> tuple[memoryview, Header]:
    import numpy as np  # imported late: commands that only print do not need it

    start = bytes_max(layers, len(provenance.tokens or ()))
    # numpy copies without the GIL and does not initialize new memory. bytearray does neither, and
    # stalled every other thread for 78 ms per 32 MiB (2 cores, 2026-11).
    buffer = np.empty(start + sum(layer.nbytes for layer in layers), np.uint8)
    np.concatenate([np.frombuffer(_view(piece), np.uint8) for piece in pages], out=buffer[start:])
    return encode_in_place(
        claim, layers, buffer.data, codec=codec, provenance=provenance, seal=seal
    )


def encode_in_place(
    claim: Claim,
    layers: tuple[LayerSpec, ...],
    buffer: memoryview,
    *,
    codec: str,
    provenance: Provenance,
    seal: Seal | None = None,
) -> tuple[memoryview, Header]:
    """Build the payload in the buffer that holds its pages. Return it, and its header as read.

    ``buffer`` (writable, contiguous, format ``B``, owned by the caller) holds the raw pages of all
    layers in order, from byte ``header_room(layers, tokens=...)`` on. They are overwritten. The
    payload is a view of ``buffer`` that may start after its first byte. At most one frame at a time
    is in separate memory, and none with codec ``none``. A frame that ``codec`` would shrink by less
    than 10 % is stored as ``none``. If ``seal`` encrypts, ``provenance`` must not have token ids.
    Raises ``PayloadError`` if a layer or the header would exceed the format's limits.
    """
    assert codec in CODECS
    assert layers
    is_plain = codec == "none" and seal is None and provenance.tokens is None
    if is_plain and (form := form_of(layers)) is not None:
        pages = buffer[form.room : form.room + form.ends[-1]]
        assert len(pages) == form.ends[-1]
        sums = tuple([digest(pages[begin:end]) for begin, end in pairwise(form.ends)])
        if (written := form.write(claim, provenance, sums)) is not None:
            text, header = written
            buffer[form.room - len(text) : form.room] = text
            return buffer[form.room - len(text) : form.room + len(pages)], header
    sealing = Sealing(claim, provenance, len(layers), seal)
    assert len({layer.name for layer in layers}) == len(layers)
    start = bytes_max(layers, len(provenance.tokens or ()))
    assert buffer.nbytes >= start + sum(layer.nbytes for layer in layers)
    frames: list[Frame] = []
    # A frame is never longer than its pages, so the frames so far end before the next layer's pages
    # begin. No page is overwritten before it is read.
    source = target = start
    for number, layer in enumerate(layers):
        if layer.nbytes > LAYER_BYTES_MAX:
            raise PayloadError(
                f"layer {layer.name!r} has {layer.nbytes} bytes, allowed are {LAYER_BYTES_MAX}"
            )
        raw = buffer[source : source + layer.nbytes]
        used, content = compress(codec, raw, layer.item_bytes)
        raw_checksum = None if used == "none" else digest(raw)
        room = buffer[target : target + len(content)]
        frame = sealing.store(FramePosition(number, used, layer), content, raw_checksum, room)
        frames.append(frame._replace(offset=target - start))
        source += layer.nbytes
        target += len(content)
    text = render(claim, frames, sealing.provenance, sealing.marks, seal)
    assert len(text) <= start
    buffer[start - len(text) : start] = text
    placed = Frames.of(frame._replace(offset=frame.offset + len(text)) for frame in frames)
    return buffer[start - len(text) : target], sealing.header(placed, checksum_of(text))


def plain_header(header: Header, checksums: Sequence[str]) -> bytes:
    """Return the header of the same chunk with its pages uncompressed and not sealed.
    ``checksums``: of the pages of each layer; the length depends on none of them. Raises
    ``PayloadError`` if the header would exceed the format's limits."""
    return render(header.claim, plain_frames(header.frames.layers, checksums), header.provenance)


def header_room(layers: tuple[LayerSpec, ...], *, tokens: int = 0) -> int:
    """Return the position of the pages in a buffer for ``encode_in_place``: a multiple of
    ``ALIGNMENT``, and an upper bound of the header's length with ``tokens`` token ids."""
    form = None if tokens else form_of(layers)
    return bytes_max(layers, tokens) if form is None else form.room


def payload_bytes_max(layers: Sequence[LayerSpec], *, tokens: int = 0) -> int:
    """Return an upper bound of a payload's length in any codec: the size of a slab."""
    return bytes_max(layers, tokens) + sum(layer.nbytes for layer in layers)


def _view(buffer: Buffer) -> memoryview:
    view = memoryview(buffer)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def read_claimed(
    payload: Buffer, claim: Claim, layers: tuple[LayerSpec, ...], *, seal: Seal | None = None
) -> Header:
    """Return the header of a payload whose claim, and most probably its layers, are known. The
    caller compares length and layers. Pass the same ``layers`` object each time; it is kept. Raises
    ``PayloadError``, also for another claim."""
    view = _view(payload)
    header = parse_known(view, claim, layers) if seal is None else read_header(view, seal=seal)
    if header.claim is not claim and header.claim != claim:
        raise PayloadError(f"the payload claims to be {header.claim}, expected {claim}")
    return header


def frame_pages(
    header: Header, index: int, payload: Buffer, scratch: memoryview | None
) -> memoryview:
    """Return the raw pages of layer ``index``: exactly ``layer.nbytes`` verified bytes.

    ``payload`` starts with the payload's first byte and extends at least to the end of this frame.
    With codec ``none``, not encrypted, the result is a view of it, and ``scratch`` may be None.
    Otherwise the frame is decoded into the start of ``scratch`` (writable, contiguous, at least
    ``layer.nbytes`` long, owned by the caller), and the result is a view of that. Raises
    ``PayloadError``; the content of ``scratch`` is then undefined.
    """
    frames, cipher = header.frames, header.cipher
    start, end, layer = frames.starts[index], frames.ends[index], frames.layers[index]
    stored = _view(payload)[start:end]
    if len(stored) != end - start:
        raise PayloadError(f"the payload is truncated in layer {layer.name!r}")
    codec = frames.codecs[index].removesuffix(ENCRYPTED)
    if cipher is None:
        _check_stored(header, index, stored)
        if codec != frames.codecs[index]:
            raise PayloadError(f"layer {layer.name!r} is encrypted, but this process has no key")
        if codec == "none":
            return stored
    if scratch is None or scratch.nbytes < layer.nbytes:
        raise PayloadError(
            f"layer {layer.name!r} needs a buffer of {layer.nbytes} bytes to decode into"
        )
    pages = _view(scratch)[: layer.nbytes]
    if cipher is not None:  # the tag verifies the stored bytes
        place, tag = FramePosition(index, frames.codecs[index], layer), frames.proofs[index]
        if codec == "none":
            cipher.decrypt(place, stored, pages, tag)
            return pages
        import numpy as np  # imported late: commands that only print do not need it

        frame = np.empty(len(stored), np.uint8).data
        cipher.decrypt(place, stored, frame, tag)
        stored = frame
    decompress_into(codec, stored, pages)
    found = digest(pages) if cipher is None else cipher.blinded(index, digest(pages))
    if found != frames.raw_checksums[index]:
        raise PayloadError(
            f"layer {layer.name!r}: the checksum of the decoded pages does not match"
        )
    return pages


def _check_stored(header: Header, index: int, stored: memoryview) -> None:
    """Raise ``PayloadError`` unless the frame's bytes, as stored, match the header. If the header
    is signed and the frame is not encrypted, this also excludes forgery."""
    frames = header.frames
    if header.is_sealed and header.cipher is None:
        matches = proof_of(stored) == frames.proofs[index]
    else:
        matches = digest(stored) == frames.checksums[index]
    if not matches:
        raise PayloadError(f"the checksum of layer {frames.layers[index].name!r} does not match")


def check_frames(header: Header, payload: Buffer, first: int = 0) -> int:
    """Compare the checksums of all complete frames in the start of a payload, from ``first`` on,
    without decoding. Return the first frame that is incomplete. Raises ``PayloadError``."""
    whole, frames = _view(payload), header.frames
    until = bisect_right(frames.ends, len(whole))
    for index in range(first, until):
        _check_stored(header, index, whole[frames.starts[index] : frames.ends[index]])
    return max(first, until)
