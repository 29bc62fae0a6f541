"""Names of encoder outputs: their own kind of identity, and a hash per image, sound or video.

    root = SHA-256(field("objkv-encoder-1") field(namespace))[:20]
    hash = SHA-256(field("objkv-encoder-1") field(namespace) field(identifier) field(extras))[:20]

``field(x)`` is the length of ``x`` as 8 bytes little-endian, then ``x``. An output is stored as a
chunk of group 0 with a single shard. ``docs/keyspace.md`` specifies these names.
"""

from dataclasses import dataclass
from typing import ClassVar

from objkv.keys.chunk import ChunkKey
from objkv.keys.identity import NamespaceIdentity
from objkv.keys.prefix import PromptExtras, encode_extras, field_digest

ENCODER_SCHEME = "objkv-encoder-1"
ENCODER_GROUP = 0


@dataclass(frozen=True, slots=True)
class EncoderIdentity(NamespaceIdentity):
    """The identity behind a namespace of encoder outputs, which depend on no blocks or chunks."""

    scheme: ClassVar[str] = ENCODER_SCHEME
    processor: str
    """Digest of the processor's files, or the revision if they cannot be read."""
    quantization: str | None
    dtype: str
    """The output's dtype, e.g. ``bfloat16``."""


def encoder_root(namespace: str) -> bytes:
    """Return the parent of every output in the namespace, 20 bytes."""
    return field_digest(ENCODER_SCHEME.encode("ascii"), namespace.encode("ascii"))


def encoder_hash(namespace: str, identifier: str, *, salt: str | None = None) -> bytes:
    """Return the hash of one item's output, 20 bytes. ``identifier`` is vLLM's and may contain any
    text from a client: none raises, and no two encode alike. ``salt`` is the request's."""
    extras = PromptExtras(salt=salt).of_chunk(0, 1)
    return field_digest(
        ENCODER_SCHEME.encode("ascii"),
        namespace.encode("ascii"),
        identifier.encode("utf-8", "surrogatepass"),
        encode_extras(extras),
    )


def encoder_key(namespace: str, item_hash: bytes) -> ChunkKey:
    """Return the key of the output's payload."""
    return ChunkKey(namespace, item_hash, ENCODER_GROUP)
