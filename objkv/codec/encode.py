"""Makes payloads: raw pages in, one contiguous payload out, sealed where a seal is given."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from objkv.codec.compress import CODECS, Buffer, compress
from objkv.codec.expected import Form, form_of
from objkv.codec.header import bytes_max, checksum_of, digest, render
from objkv.codec.seal import Seal
from objkv.codec.sealing import Sealing
from objkv.codec.values import (
    LAYER_BYTES_MAX,
    Claim,
    Frame,
    Frames,
    Header,
    LayerSpec,
    Place,
    Provenance,
)
from objkv.errors import PayloadError


def encode(
    claim: Claim,
    layers: Sequence[LayerSpec],
    pages: Sequence[Buffer],
    *,
    codec: str,
    provenance: Provenance,
    seal: Seal | None = None,
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
    payload, _ = encode_in_place(
        claim, layers, buffer.data, codec=codec, provenance=provenance, seal=seal
    )
    return payload


def encode_in_place(
    claim: Claim,
    layers: Sequence[LayerSpec],
    buffer: memoryview,
    *,
    codec: str,
    provenance: Provenance,
    seal: Seal | None = None,
) -> tuple[memoryview, Header]:
    """The payload made where its pages lie, and its header as ``read_header`` would read it.

    ``buffer`` (writable, contiguous, format ``B``, owned by the caller) holds the raw pages of all
    layers, one after the other, from byte ``header_room(layers, tokens=...)`` on. They are
    overwritten, and the payload is a view of ``buffer`` that need not begin at its beginning. At
    most one frame at a time is in memory of its own, and none with codec ``none``. What is written
    is what ``encode`` returns for the same pages, but for the salt where ``seal`` encrypts; token
    ids must not be in ``provenance`` then. Raises ``PayloadError`` as ``encode`` does.
    """
    assert codec in CODECS
    assert layers
    sealing = Sealing(claim, provenance, len(layers), seal)
    if codec == "none" and isinstance(layers, tuple):
        form = form_of(layers, sealing.marks)
        if form is not None and (told := form.told(sealing.provenance)) is not None:
            return _encode_plain(claim, form, buffer, sealing, told)
    assert len({layer.name for layer in layers}) == len(layers)
    start = header_room(layers, tokens=len(provenance.tokens or ()))
    assert buffer.nbytes >= start + sum(layer.nbytes for layer in layers)
    frames: list[Frame] = []
    # A frame is never longer than its pages, so the frames up to here end before the pages of the
    # next layer begin: nothing is overwritten that was not read.
    source = target = start
    for number, layer in enumerate(layers):
        if layer.nbytes > LAYER_BYTES_MAX:
            raise PayloadError(f"layer {layer.name!r}: {layer.nbytes} bytes")
        raw = buffer[source : source + layer.nbytes]
        used, content = compress(codec, raw, layer.item_bytes)
        raw_checksum = None if used == "none" else digest(raw)
        room = buffer[target : target + len(content)]
        frame = sealing.store(Place(number, used, layer), content, raw_checksum, room)
        frames.append(frame._replace(offset=target - start))
        source += layer.nbytes
        target += len(content)
    text = render(claim, frames, sealing.provenance, sealing.marks, seal)
    assert len(text) <= start
    buffer[start - len(text) : start] = text
    payload = buffer[start - len(text) : target]
    return payload, _header(claim, frames, sealing, text)


def _encode_plain(
    claim: Claim, form: Form, buffer: memoryview, sealing: Sealing, told: bytes
) -> tuple[memoryview, Header]:
    """``encode_in_place`` where nothing moves but the header comes."""
    start = form.room
    assert buffer.nbytes >= start + form.ends[-1]
    pages = buffer[start : start + form.ends[-1]]
    spans = [pages[begin:end] for begin, end in pairwise(form.ends)]
    sums = sealing.store_pages(form.layers, spans)
    text, header = form.write(claim, told, sums, sealing)
    assert len(text) <= start
    buffer[start - len(text) : start] = text
    return buffer[start - len(text) : start + len(pages)], header


def header_room(layers: Sequence[LayerSpec], *, tokens: int = 0) -> int:
    """Where the pages begin in a buffer for ``encode_in_place``: a multiple of ``ALIGNMENT``, and
    an upper bound of the header of a payload that carries ``tokens`` token ids."""
    if not tokens and isinstance(layers, tuple) and (form := form_of(layers)) is not None:
        return form.room
    return bytes_max(layers, tokens)


def payload_bytes_max(layers: Sequence[LayerSpec], *, tokens: int = 0) -> int:
    """Upper bound of a payload of ``layers`` in any codec, with ``tokens`` token ids in its
    provenance: what a slab must hold."""
    return bytes_max(layers, tokens) + sum(layer.nbytes for layer in layers)


def _header(claim: Claim, frames: Sequence[Frame], sealing: Sealing, text: bytes) -> Header:
    placed = Frames.of(frame._replace(offset=frame.offset + len(text)) for frame in frames)
    return Header(
        claim=claim,
        frames=placed,
        data_start=len(text),
        nbytes=placed.ends[-1],
        raw_bytes=sum(layer.nbytes for layer in placed.layers),
        checksum=checksum_of(text),
        provenance=sealing.provenance,
        marks=sealing.marks,
        opened=sealing.opened,
    )


def _view(buffer: Buffer) -> memoryview:
    view = memoryview(buffer)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")
