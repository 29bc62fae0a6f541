"""The values in a payload's header: claim, layers, frames and provenance. Plain values."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import isfinite, prod
from typing import TYPE_CHECKING, Final, NamedTuple

import xxhash

from objkv.codec.compress import Buffer
from objkv.errors import PayloadError
from objkv.keys.chunk import CHUNK_CHARS, ChunkKey
from objkv.keys.prefix import PREFIX_HASH_BYTES

if TYPE_CHECKING:
    from objkv.codec.seal import AesFrames

_NUMBER = r"[0-9]{1,20}\.[0-9]{1,20}(?:e[+-][0-9]{1,3})?|[0-9]{1,20}e[+-][0-9]{1,3}"
_SCALES = re.compile(rf"({_NUMBER}) ({_NUMBER})")


def scales_text(k_scale: float, v_scale: float) -> str:
    """Return the scales of K and V of a quantised layer as ``<k> <v>``, each number in its shortest
    form: text makes equality exact. A value is the stored number times the scale. Raises ValueError
    unless both are finite and positive."""
    for scale in (k_scale, v_scale):
        if not (isfinite(scale) and scale > 0):
            raise ValueError(f"{scale!r} is not a finite positive scale")
    return f"{float(k_scale)!r} {float(v_scale)!r}"


def is_scales(text: str) -> bool:
    """Whether ``scales_text`` could have written ``text``."""
    match = _SCALES.fullmatch(text)
    if match is None:
        return False
    numbers = tuple(map(float, match.groups()))
    return all(isfinite(n) and n > 0 for n in numbers) and scales_text(*numbers) == text


METADATA_NAME: Final = "__metadata__"
LAYER_BYTES_MAX: Final = 1 << 30
"""Limit for the pages of one layer in one payload; lz4 and blosc2 fail just below 2 GiB."""
RAW_BYTES_MAX: Final = 4 << 30
"""Limit for the pages of all layers in one payload. S3 takes at most 5 GiB in one request."""
NAME_CHARS_MAX: Final = 512
WRITER_CHARS_MAX: Final = 256
ENCRYPTED: Final = "+aes256gcm"
"""Suffix of an encrypted frame's codec, so that readers without the key refuse it."""
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
"""Bytes per element of the dtypes that every safetensors reader supports."""
DTYPE_BYTES: Final = TYPED_BYTES | {"F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "F8_E8M0": 1}
"""Bytes per element of all dtypes a layer may have; those not typed are stored as ``U8``."""


def digest(content: Buffer) -> str:
    """Return the checksum of payloads: xxh3_128 (seed 0), canonical, as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(content)


@dataclass(frozen=True, slots=True)
class Claim:
    """The chunk that a payload claims to hold; readers compare the whole claim."""

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
    """The pages of one layer before compression."""

    name: str
    dtype: str
    """A safetensors dtype name, one of ``DTYPE_BYTES``."""
    shape: tuple[int, ...]
    """``[blocks, heads, block_size, content]``."""
    scales: str | None = ""
    """The divisors of K and V before quantisation, as ``scales_text`` writes them; empty if not
    quantised. None in a layer that a reader expects matches any scales."""

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
        """Size of all pages of the layer."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def shape_text(self) -> str:
        """The shape, as headers have it."""
        return "x".join(map(str, self.shape))


class Frame(NamedTuple):
    """Position of one layer's bytes in the payload, and their encoding."""

    layer: LayerSpec
    codec: str
    offset: int
    """Counted from the payload's first byte."""
    nbytes: int
    """Size as stored."""
    checksum: str
    """xxh3_128 of the bytes as stored, 32 hex digits."""
    raw_checksum: str
    """xxh3_128 of the pages, blinded if encrypted. Equals ``checksum`` if not compressed."""
    proof: str = ""
    """What a signature covers: an encrypted frame's tag, 32 hex digits, or else the SHA-256 of the
    bytes as stored, 64 hex digits. Empty if the payload is not sealed."""


@dataclass(frozen=True, slots=True)
class Frames:
    """The frames of a payload in forward order of the layers, in columns for those who read
    thousands of payloads per second. A ``Frame`` is built only on demand."""

    layers: tuple[LayerSpec, ...]
    codecs: tuple[str, ...]
    starts: tuple[int, ...]
    """Counted from the payload's first byte."""
    ends: tuple[int, ...]
    checksums: tuple[str, ...]
    raw_checksums: tuple[str, ...]
    proofs: tuple[str, ...]

    @classmethod
    def of(cls, frames: Iterable[Frame]) -> "Frames":
        """Return the columns of ``frames``, which must not be empty."""
        layers, codecs, starts, sizes, checksums, raw_checksums, proofs = zip(*frames, strict=True)
        ends = tuple(start + size for start, size in zip(starts, sizes, strict=True))
        return cls(layers, codecs, starts, ends, checksums, raw_checksums, proofs)

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, index: int) -> Frame:
        start, end = self.starts[index], self.ends[index]
        sums = self.checksums[index], self.raw_checksums[index], self.proofs[index]
        return Frame(self.layers[index], self.codecs[index], start, end - start, *sums)

    def __iter__(self) -> Iterator[Frame]:
        return map(self.__getitem__, range(len(self)))


def check_layers(found: tuple[LayerSpec, ...], expected: tuple[LayerSpec, ...]) -> None:
    """Raise a ``PayloadError`` that names the first difference."""
    if found is expected:
        return
    if len(found) != len(expected):
        raise PayloadError(f"the payload has {len(found)} layers, expected {len(expected)}")
    for one, layer in zip(found, expected, strict=True):
        wanted = replace(layer, scales=one.scales) if layer.scales is None else layer
        if one != wanted:
            raise PayloadError(f"the payload has {one}, expected {layer}")


@dataclass(frozen=True, slots=True)
class Provenance:
    """Origin of a payload. For audits, never for decisions."""

    token_digest: str
    """SHA-256 of the chunk's encoded tokens, 64 hex digits."""
    writer: str
    """The writing process: printable ASCII, at most ``WRITER_CHARS_MAX``."""
    created_s: int
    """Seconds since the epoch, by the writer's clock."""
    tokens: tuple[int, ...] | None = None
    """The chunk's token ids, only with ``store_tokens``, because they are the prompt."""

    def __post_init__(self) -> None:
        assert len(self.token_digest) == 64
        assert self.writer.isascii()
        assert self.writer.isprintable()
        assert len(self.writer) <= WRITER_CHARS_MAX
        assert self.created_s >= 0


class Marks(NamedTuple):
    """A header's statement about its seal: only a claim until a ``Seal`` has verified it."""

    signed_by: str = ""
    """Id of the signing key; empty if the payload is not signed."""
    encrypted_by: str = ""
    """Id of the encryption key, empty if not encrypted. Encrypted payloads are signed too."""
    salt: str = ""
    """What this payload's own key was derived from, 64 hex digits; empty if not encrypted."""


UNSEALED: Final = Marks()


class FramePosition(NamedTuple):
    """A frame's position and content type. An encrypted frame can be decrypted only there."""

    number: int
    codec: str
    """As it appears in the header."""
    layer: LayerSpec


@dataclass(frozen=True, slots=True)
class Header:
    """All information in a payload's header."""

    claim: Claim
    frames: Frames
    checksum: str
    """xxh3_128 of the header, 32 hex digits: it covers the payload, by every frame's checksum."""
    provenance: Provenance
    marks: Marks = UNSEALED
    is_sealed: bool = field(default=False, repr=False, compare=False)
    """Whether a seal has verified the header: its frames match if their proofs match."""
    cipher: "AesFrames | None" = field(default=None, repr=False, compare=False)
    """Decrypts the frames, if they are encrypted and a seal has verified the header."""

    @property
    def data_start(self) -> int:
        """Length of the header: the bytes before the first frame."""
        return self.frames.starts[0]

    @property
    def nbytes(self) -> int:
        """Size of the whole payload."""
        return self.frames.ends[-1]

    @property
    def raw_bytes(self) -> int:
        """Size of all pages before compression."""
        if self.codec == "none":
            return self.nbytes - self.data_start
        return sum(layer.nbytes for layer in self.frames.layers)

    @property
    def codec(self) -> str:
        """The common codec of all frames, or ``mixed``."""
        codecs = set(self.frames.codecs)
        return codecs.pop() if len(codecs) == 1 else "mixed"


class VerifiedText(NamedTuple):
    """A header's text as written, with a verified checksum but unverified content."""

    raw: bytearray
    """From the payload's first byte, including padding, with zeros in place of its checksum."""
    checksum: str


# Positions in a header that are read before its JSON is parsed.

LENGTH_BYTES: Final = 8
OPENING: Final = f'{{"{METADATA_NAME}":{{"checksum":"'.encode()
CHECKSUM_AT: Final = LENGTH_BYTES + len(OPENING)
CHECKSUM_END: Final = CHECKSUM_AT + 32
CHUNK_OPENING: Final = b'","chunk":"'
CHUNK_AT: Final = CHECKSUM_END + len(CHUNK_OPENING)
CHUNK_END: Final = CHUNK_AT + CHUNK_CHARS
"""Between these is the identity of a payload's chunk and group, in every payload."""
SIGNATURE_OPENING: Final = b'","signature":"'
SIGNATURE_AT: Final = CHUNK_END + len(SIGNATURE_OPENING)
"""Only in a signed payload."""
SIGNATURE_END: Final = SIGNATURE_AT + 64
