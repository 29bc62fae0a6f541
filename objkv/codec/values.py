"""What a payload says: the claim, its layers and frames, where it comes from. Plain values."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Final, NamedTuple

from objkv.codec.scales import is_scales
from objkv.errors import PayloadError
from objkv.keys.chunk import ChunkKey
from objkv.keys.prefix import PREFIX_HASH_BYTES

METADATA_NAME: Final = "__metadata__"
LAYER_BYTES_MAX: Final = 1 << 30
"""Bound on the pages of one layer in one payload; lz4 and blosc2 end shortly below 2 GiB."""
NAME_CHARS_MAX: Final = 512
"""Of a layer's name."""
WRITER_CHARS_MAX: Final = 256

TYPED_BYTES: Final = {
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}
"""Bytes per element of the dtypes that every safetensors reader knows."""
DTYPE_BYTES: Final = TYPED_BYTES | {"F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "F8_E8M0": 1}
"""Bytes per element of all dtypes a layer may have; those not typed are stored as ``U8``."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a payload says it is; compared whole on reading."""

    key: ChunkKey
    parent_hash: bytes
    token_start: int
    token_end: int
    """Tokens ``[token_start, token_end)`` of the prompt."""

    def __post_init__(self) -> None:
        assert len(self.parent_hash) == PREFIX_HASH_BYTES
        assert 0 <= self.token_start < self.token_end


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The pages of one layer, as they are before compression."""

    name: str
    dtype: str
    """A safetensors dtype name, one of ``DTYPE_BYTES``."""
    shape: tuple[int, ...]
    """``[blocks, heads, block_size, content]``."""
    scales: str | None = ""
    """What K and V were divided by before they were quantised, as ``scales_text`` writes it; empty
    where nothing was. None: not known to whoever expects this layer, which then may have any."""

    def __post_init__(self) -> None:
        assert self.name != METADATA_NAME
        assert 0 < len(self.name) <= NAME_CHARS_MAX
        assert self.dtype in DTYPE_BYTES
        assert len(self.shape) == 4
        assert all(size > 0 for size in self.shape)
        assert not self.scales or is_scales(self.scales)

    @property
    def item_bytes(self) -> int:
        """Bytes per element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of all pages of the layer."""
        return prod(self.shape) * self.item_bytes


class Frame(NamedTuple):
    """Where one layer's bytes are in the payload, and how they are stored."""

    layer: LayerSpec
    codec: str
    offset: int
    """From the payload's first byte."""
    nbytes: int
    """As stored."""
    checksum: str
    """xxh3_128 of the bytes as stored, 32 hex digits."""
    raw_checksum: str
    """xxh3_128 of the decoded pages; equal to ``checksum`` where the codec is ``none``."""


@dataclass(frozen=True, slots=True)
class Frames:
    """The frames of a payload in forward order of the layers, by columns: whoever reads thousands
    of payloads a second looks at columns, and no frame is made that nobody asked for."""

    layers: tuple[LayerSpec, ...]
    codecs: tuple[str, ...]
    starts: tuple[int, ...]
    """From the payload's first byte."""
    ends: tuple[int, ...]
    checksums: tuple[str, ...]
    raw_checksums: tuple[str, ...]

    @classmethod
    def of(cls, frames: Iterable[Frame]) -> "Frames":
        """The columns of ``frames``, at least one."""
        layers, codecs, starts, sizes, checksums, raw_checksums = zip(*frames, strict=True)
        ends = tuple(start + size for start, size in zip(starts, sizes, strict=True))
        return cls(layers, codecs, starts, ends, checksums, raw_checksums)

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, index: int) -> Frame:
        start, end = self.starts[index], self.ends[index]
        checksums = self.checksums[index], self.raw_checksums[index]
        return Frame(self.layers[index], self.codecs[index], start, end - start, *checksums)

    def __iter__(self) -> Iterator[Frame]:
        return map(self.__getitem__, range(len(self)))


def check_layers(found: tuple[LayerSpec, ...], expected: tuple[LayerSpec, ...]) -> None:
    """Raises ``PayloadError`` that names the first difference."""
    if found is expected:
        return
    if len(found) != len(expected):
        raise PayloadError(f"has {len(found)} layers, expected {len(expected)}")
    for one, layer in zip(found, expected, strict=True):
        wanted = replace(layer, scales=one.scales) if layer.scales is None else layer
        if one != wanted:
            raise PayloadError(f"has {one}, expected {layer}")


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a payload comes from: for audits, never for decisions."""

    token_digest: str
    """SHA-256 of the chunk's encoded tokens, 64 hex digits."""
    writer: str
    """Who wrote it, e.g. host and process: printable ASCII, at most ``WRITER_CHARS_MAX``."""
    created_s: int
    """Seconds since the epoch, by the writer's clock."""
    tokens: tuple[int, ...] | None = None
    """The chunk's token ids, only where the operator asked for them: they are the prompt."""

    def __post_init__(self) -> None:
        assert len(self.token_digest) == 64
        assert self.writer.isascii()
        assert self.writer.isprintable()
        assert len(self.writer) <= WRITER_CHARS_MAX
        assert self.created_s >= 0


@dataclass(frozen=True, slots=True)
class Header:
    """Everything a payload says about itself."""

    claim: Claim
    frames: Frames
    data_start: int
    """Bytes before the first frame: what ``read_header`` needs."""
    nbytes: int
    """Of the whole payload."""
    raw_bytes: int
    """Of all pages before compression."""
    checksum: str
    """xxh3_128 of the header itself, which holds every frame's: 32 hex digits that stand for the
    whole payload."""
    provenance: Provenance

    @property
    def codec(self) -> str:
        """The one codec of all frames, or ``mixed``."""
        codecs = set(self.frames.codecs)
        return codecs.pop() if len(codecs) == 1 else "mixed"


class VerifiedText(NamedTuple):
    """A header's text as its writer wrote it, whatever it says."""

    raw: bytearray
    """From the payload's first byte, padding included, with zeros where its checksum was."""
    checksum: str
