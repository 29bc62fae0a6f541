"""What a payload says: the claim, its layers and frames, where it comes from. Plain values."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import isfinite, prod
from typing import Final, NamedTuple, Protocol

from objkv.codec.compress import Buffer
from objkv.errors import PayloadError
from objkv.keys.chunk import ChunkKey
from objkv.keys.prefix import PREFIX_HASH_BYTES

_NUMBER = r"[0-9]{1,20}\.[0-9]{1,20}(?:e[+-][0-9]{1,3})?|[0-9]{1,20}e[+-][0-9]{1,3}"
_SCALES = re.compile(rf"({_NUMBER}) ({_NUMBER})")


def scales_text(k_scale: float, v_scale: float) -> str:
    """The scales of K and V of a quantised layer as ``<k> <v>``, each number in its shortest form;
    raises ValueError unless both are finite and positive.

    Pages of such a layer mean nothing without them: a value is the page's number times the scale.
    They are text so that two are equal exactly when their numbers are: no floats are compared.
    """
    for scale in (k_scale, v_scale):
        if not (isfinite(scale) and scale > 0):
            raise ValueError(f"{scale!r} is no scale")
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
"""Bound on the pages of one layer in one payload; lz4 and blosc2 end shortly below 2 GiB."""
RAW_BYTES_MAX: Final = 16 << 30
"""Bound on the pages of all layers in one payload, however few bytes store them."""
NAME_CHARS_MAX: Final = 512
"""Of a layer's name."""
WRITER_CHARS_MAX: Final = 256
ENCRYPTED: Final = "+aes256gcm"
"""Ends the codec's name of an encrypted frame, so that readers without the key refuse it."""
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
    where nothing was. None in a layer that a reader expects: any scales match."""

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
    """xxh3_128 of the decoded pages, of an encrypted frame blinded; equal to ``checksum`` where
    nothing was compressed."""
    proof: str = ""
    """What a signature vouches for: of an encrypted frame its tag, 32 hex digits; else SHA-256 of
    the bytes as stored, 64; empty where nothing is sealed."""


@dataclass(frozen=True, slots=True)
class Frames:
    """The frames of a payload in forward order of the layers, by columns: readers of thousands of
    payloads a second use columns, and a ``Frame`` is made only on demand."""

    layers: tuple[LayerSpec, ...]
    codecs: tuple[str, ...]
    starts: tuple[int, ...]
    """From the payload's first byte."""
    ends: tuple[int, ...]
    checksums: tuple[str, ...]
    raw_checksums: tuple[str, ...]
    proofs: tuple[str, ...]

    @classmethod
    def of(cls, frames: Iterable[Frame]) -> "Frames":
        """The columns of ``frames``, at least one."""
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
    """The chunk's token ids, only with ``store_tokens``: they are the prompt."""

    def __post_init__(self) -> None:
        assert len(self.token_digest) == 64
        assert self.writer.isascii()
        assert self.writer.isprintable()
        assert len(self.writer) <= WRITER_CHARS_MAX
        assert self.created_s >= 0


class Marks(NamedTuple):
    """What a header says about its seal: only a claim until a ``Seal`` has verified it."""

    signed_by: str = ""
    """Id of the key; empty where nothing is signed."""
    encrypted_by: str = ""
    """The same; what is encrypted is signed as well."""
    salt: str = ""
    """That the key of this payload alone was derived with, 64 hex digits; empty where nothing is
    encrypted."""


UNSEALED: Final = Marks()


class FramePlace(NamedTuple):
    """Which frame of its payload something is, and what it holds: an encrypted frame can be
    decrypted at no other place."""

    number: int
    codec: str
    """As it stands in the header."""
    layer: LayerSpec


class FrameCipher(Protocol):
    """The frames of one payload, encrypted with its own key. Safe from many threads."""

    def encrypt(self, place: FramePlace, source: Buffer, target: memoryview) -> str:
        """``source`` into ``target`` of the same length, which may be the same memory, but must not
        overlap otherwise; the tag, 32 hex digits."""

    def decrypt(self, place: FramePlace, stored: memoryview, out: memoryview, tag: str) -> None:
        """``stored`` into ``out`` of the same length, elsewhere. Raises ``PayloadError`` if it is
        not what was encrypted for this claim and place; what ``out`` holds then is undefined."""

    def blinded(self, number: int, checksum: str) -> str:
        """What a header may reveal of the ``checksum`` of decoded pages, 32 hex digits each."""


class Opened(NamedTuple):
    """Of a header whose signature was verified: its frames are what their proofs say."""

    cipher: FrameCipher | None
    """None where nothing is encrypted."""


@dataclass(frozen=True, slots=True)
class Header:
    """Everything a payload says about itself."""

    claim: Claim
    frames: Frames
    checksum: str
    """xxh3_128 of the header itself, which holds every frame's: 32 hex digits that stand for the
    whole payload."""
    provenance: Provenance
    marks: Marks = UNSEALED
    opened: Opened | None = field(default=None, repr=False, compare=False)
    """None if it was read without a seal."""

    @property
    def data_start(self) -> int:
        """Bytes before the first frame: the length of the header."""
        return self.frames.starts[0]

    @property
    def nbytes(self) -> int:
        """Of the whole payload."""
        return self.frames.ends[-1]

    @property
    def raw_bytes(self) -> int:
        """Of all pages before compression."""
        return sum(layer.nbytes for layer in self.frames.layers)

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


# Places in a header that are read before its JSON is.

LENGTH_BYTES: Final = 8
OPENING: Final = f'{{"{METADATA_NAME}":{{"checksum":"'.encode()
CHECKSUM_AT: Final = LENGTH_BYTES + len(OPENING)
CHECKSUM_END: Final = CHECKSUM_AT + 32
SIGNATURE_OPENING: Final = b'","signature":"'
SIGNATURE_AT: Final = CHECKSUM_END + len(SIGNATURE_OPENING)
"""Of a signed payload."""
SIGNATURE_END: Final = SIGNATURE_AT + 64
