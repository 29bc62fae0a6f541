"""Payloads of given pages."""

from collections.abc import Sequence

import numpy as np

from objkv.codec.compress import Buffer
from objkv.codec.payload import (
    Claim,
    Header,
    LayerSpec,
    Provenance,
    check_layers,
    encode_in_place,
    header_room,
    read_claimed,
)
from objkv.codec.seal import Seal
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
    """The payload of ``pages``, the raw bytes of each layer, in memory of its own."""
    own = tuple(layers)
    start = header_room(own, tokens=len(provenance.tokens or ()))
    raw = [np.frombuffer(page, np.uint8) for page in pages]
    assert [page.nbytes for page in raw] == [layer.nbytes for layer in own]
    buffer = np.concatenate([np.empty(start, np.uint8), *raw])
    payload, _ = encode_in_place(
        claim, own, buffer.data, codec=codec, provenance=provenance, seal=seal
    )
    return payload


def open_payload(
    payload: Buffer, claim: Claim, layers: tuple[LayerSpec, ...], *, seal: Seal | None = None
) -> Header:
    """The header of a complete payload, compared as a reader does."""
    header = read_claimed(payload, claim, layers, seal=seal)
    check_layers(header.frames.layers, layers)
    nbytes = memoryview(payload).nbytes
    if header.nbytes != nbytes:
        raise PayloadError(f"the payload has {nbytes} bytes, its header announces {header.nbytes}")
    return header
