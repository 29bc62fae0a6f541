"""Building blocks for payloads in the tests of the codec."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from hypothesis import strategies as st

from objkv.codec.payload import Claim, LayerSpec, Provenance, encode, frame_pages
from objkv.codec.seal import Seal
from objkv.codec.values import CHECKSUM_AT, CHECKSUM_END, DTYPE_BYTES, digest, scales_text
from objkv.errors import PayloadError
from objkv.keys.chunk import ChunkKey
from objkv.keys.topology import Shard
from tests.support.payloads import open_payload

CLAIM = Claim(ChunkKey("ab" * 16, b"\x01" * 20, 0, Shard(0, 3, 0, 2)), b"\x02" * 20, 256, 512)
PROVENANCE = Provenance("cd" * 32, "tests", 1_700_000_000)
LAYERS = tuple(LayerSpec(f"model.layers.{i}.attn", "BF16", (2, 2, 16, 32)) for i in (2, 9, 10))

layer_lists = st.lists(
    st.builds(
        LayerSpec,
        name=st.text(min_size=1, max_size=12).filter(lambda name: name != "__metadata__"),
        dtype=st.sampled_from(sorted(DTYPE_BYTES)),
        shape=st.tuples(*[st.integers(1, 5)] * 4),
        scales=st.just("") | st.builds(scales_text, *[st.floats(1e-300, 1e300)] * 2),
    ),
    min_size=1,
    max_size=4,
    unique_by=lambda layer: layer.name,
)


def claims_unlike(claim: Claim) -> list[Claim]:
    """Claims that differ from ``claim`` in one thing each."""
    keys: list[dict[str, Any]] = [
        {"namespace": "ba" * 16},
        {"prefix_hash": b"\x03" * 20},
        {"group": 1},
        {"shard": Shard(0, 3, 2, 4)},
    ]
    others: list[dict[str, Any]] = [{"key": replace(claim.key, **other)} for other in keys]
    others += [{"parent_hash": b"\x03" * 20}, {"token_start": 255}, {"token_end": 513}]
    return [replace(claim, **other) for other in others]


def smooth(nbytes: int, seed: int = 0) -> bytes:
    """Bytes that every codec makes smaller, different for every seed."""
    return bytes((i // 64 + seed) % 256 for i in range(nbytes))


def noise(nbytes: int, seed: int = 0) -> bytes:
    """Bytes that no codec makes smaller."""
    return Random(seed).randbytes(nbytes)


def pages_of(layers: Sequence[LayerSpec]) -> list[bytes]:
    """Smooth pages for every layer."""
    return [smooth(layer.nbytes, seed) for seed, layer in enumerate(layers)]


def sample(
    codec: str = "none",
    layers: Sequence[LayerSpec] = LAYERS,
    *,
    claim: Claim = CLAIM,
    pages: Sequence[bytes] | None = None,
    provenance: Provenance = PROVENANCE,
    seal: Seal | None = None,
) -> bytes:
    """A payload; with the default pages all frames are stored in ``codec``."""
    pages = pages_of(layers) if pages is None else pages
    return bytes(encode(claim, layers, pages, codec=codec, provenance=provenance, seal=seal))


def pages_read(
    payload: bytes | bytearray,
    seal: Seal | None = None,
    claim: Claim = CLAIM,
    layers: Sequence[LayerSpec] = LAYERS,
) -> list[bytes]:
    """Everything a loader does with a payload."""
    header = open_payload(payload, claim, tuple(layers), seal=seal)
    scratch = memoryview(bytearray(max(layer.nbytes for layer in layers)))
    return [bytes(frame_pages(header, i, payload, scratch)) for i in range(len(layers))]


def is_refused(
    payload: bytes | bytearray,
    seal: Seal | None = None,
    claim: Claim = CLAIM,
    layers: Sequence[LayerSpec] = LAYERS,
) -> bool:
    """Whether reading ends in a PayloadError; any other exception is the test's failure."""
    try:
        pages_read(payload, seal, claim, layers)
    except PayloadError:
        return True
    return False


def split(payload: bytes | bytearray) -> tuple[dict[str, Any], bytes]:
    end = 8 + int.from_bytes(payload[:8], "little")
    return json.loads(bytes(payload[8:end])), bytes(payload[end:])


def join(header: bytes, frames: bytes = b"") -> bytes:
    """A payload with any JSON text as its header, padded, and its checksum put right."""
    header = header.ljust(-(-(len(header) + 8) // 4096) * 4096 - 8)
    return rechecked(len(header).to_bytes(8, "little") + header) + frames


def reworked(header: Mapping[str, Any], frames: bytes = b"") -> bytes:
    """What can be made without a key: any JSON and any frames, the header's checksum right."""
    return join(json.dumps(header, separators=(",", ":")).encode(), frames)


def rechecked(header: bytes | bytearray) -> bytes:
    """A whole header with its checksum put right."""
    head = bytearray(header)
    head[CHECKSUM_AT:CHECKSUM_END] = b"0" * 32
    head[CHECKSUM_AT:CHECKSUM_END] = digest(head).encode()
    return bytes(head)
