"""objkv's own prefix hash: a chain over chunks of token ids and of other inputs to their KV.

    h_(-1) = SHA-256(field("objkv-prefix-1") field(namespace))[:20]
    h_i    = SHA-256(field(h_(i-1)) field(tokens_i) field(extra_i))[:20]

``field(x)`` is the length of ``x`` as 8 bytes little-endian, then ``x``. Tokens are 4 bytes each,
little-endian. ``extra_i`` is a sequence of ``Extra`` values, with each field length-prefixed, so no
two distinct inputs encode alike. The hash depends on no block size, vLLM version,
``PYTHONHASHSEED`` or pickle, so any tool can compute it. ``docs/keyspace.md`` specifies it.
"""

import hashlib
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from sys import byteorder
from typing import Literal, TypeGuard

PREFIX_HASH_BYTES = 20
_SCHEME = b"objkv-prefix-1"
_TOKEN_BYTES = 4
_PARENT_LENGTH = PREFIX_HASH_BYTES.to_bytes(8, "little")
_NO_EXTRAS = bytes(8)
_PIECE_CHUNKS = 16
"""Chunks encoded at once. Converting each chunk separately costs a quarter more; converting a long
prompt at once would block other threads until it ends."""

ExtraKind = Literal["lora", "salt", "mm", "embeds"]


def is_token(value: object) -> TypeGuard[int]:
    """Whether a value of JSON can be hashed as a token id. ``True``, an int in Python, cannot."""
    return type(value) is int and 0 <= value < 1 << 8 * _TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class Extra:
    """An input besides token ids that changes the KV of a chunk.

    * ``lora``: (content digest of the adapter,); in chunk 0, and the chain carries it on.
    * ``salt``: (cache_salt as UTF-8, with lone surrogates encoded like any code point,); in chunk
      0.
    * ``mm``: (identifier of the item, its start relative to the chunk's start as 8 bytes signed
      little-endian, its length in tokens as 8 bytes); in every chunk that it overlaps.
    * ``embeds``: (SHA-256 of the prompt embeddings of this chunk's tokens,).
    """

    kind: ExtraKind
    fields: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class MultimodalItem:
    """One image, sound or video in a prompt: tokens ``[start, start + length)``."""

    identifier: bytes
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class PromptExtras:
    """The inputs besides token ids that identify a prompt's KV."""

    lora_digest: bytes | None = None
    salt: str | None = None
    items: tuple[MultimodalItem, ...] = ()
    embeds: Mapping[int, bytes] = field(default_factory=dict)
    """SHA-256 of the embeddings of chunk ``i``'s tokens, for chunks given by embeddings."""

    def __post_init__(self) -> None:
        # Sorted once here, so that equal prompts compare equal whatever the order of their items.
        ordered = sorted(self.items, key=lambda item: (item.start, item.identifier, item.length))
        object.__setattr__(self, "items", tuple(ordered))

    def of_chunk(self, chunk: int, chunk_tokens: int) -> tuple[Extra, ...]:
        """Return the extras of chunk ``chunk``, in their fixed order."""
        if chunk and not self.items and not self.embeds:
            return ()
        start, end = chunk * chunk_tokens, (chunk + 1) * chunk_tokens
        extras = []
        if chunk == 0 and self.lora_digest is not None:
            extras.append(Extra("lora", (self.lora_digest,)))
        if chunk == 0 and self.salt is not None:
            # A salt is any text from a client: none may raise here, and no two may encode alike.
            extras.append(Extra("salt", (self.salt.encode("utf-8", "surrogatepass"),)))
        for item in self.items:
            if item.start >= end:
                break
            if item.start + item.length > start:
                relative = (item.start - start).to_bytes(8, "little", signed=True)
                length = item.length.to_bytes(8, "little")
                extras.append(Extra("mm", (item.identifier, relative, length)))
        if chunk in self.embeds:
            extras.append(Extra("embeds", (self.embeds[chunk],)))
        return tuple(extras)


def root_hash(namespace: str) -> bytes:
    """Return the hash before the first chunk: the parent of chunk 0."""
    return field_digest(_SCHEME, namespace.encode("ascii"))


def next_hash(parent: bytes, tokens: bytes, extras: Collection[Extra] = ()) -> bytes:
    """Return the hash of the chunk whose encoded tokens are ``tokens``, 20 bytes."""
    assert len(parent) == PREFIX_HASH_BYTES
    # As ``field_digest`` of the three, in half the time for short chunks.
    length = len(tokens).to_bytes(8, "little")
    encoded = _field(encode_extras(extras)) if extras else _NO_EXTRAS  # most chunks have none
    fields = (_PARENT_LENGTH, parent, length, tokens, encoded)
    return hashlib.sha256(b"".join(fields)).digest()[:PREFIX_HASH_BYTES]


def encode_tokens(tokens: Sequence[int]) -> bytes:
    """Return tokens as 4 bytes each, little-endian. OverflowError unless each ``is_token``."""
    encoded = array("I", tokens)
    assert encoded.itemsize == _TOKEN_BYTES
    if byteorder == "big":
        encoded.byteswap()
    return encoded.tobytes()


def encode_extras(extras: Iterable[Extra]) -> bytes:
    """Return, per extra, field(kind), the number of fields as 8 bytes, and each field as such."""
    return b"".join(
        _field(extra.kind.encode("ascii"))
        + len(extra.fields).to_bytes(8, "little")
        + b"".join(map(_field, extra.fields))
        for extra in extras
    )


def prefix_hashes(
    namespace: str, tokens: Sequence[int], chunk_tokens: int, extras: PromptExtras | None = None
) -> list[bytes]:
    """Return the hash of every whole chunk of ``tokens``; a partial last chunk has none.

    Prompts with the same beginning have the same first hashes, whatever follows:

    >>> [one.hex()[:8] for one in prefix_hashes("0" * 32, range(600), 256)]
    ['67aa94dd', '75f6e94c']
    >>> [one.hex()[:8] for one in prefix_hashes("0" * 32, [*range(256), *range(256)], 256)][0]
    '67aa94dd'
    """
    chain = PrefixChain(namespace, chunk_tokens, extras or PromptExtras())
    return chain.extend(tokens, len(tokens))


class PrefixChain:
    """The hashes of one growing prompt, each computed once, with ``digests`` also the chunks' token
    digests. One thread at a time may extend it; any thread may read the existing hashes."""

    def __init__(
        self, namespace: str, chunk_tokens: int, extras: PromptExtras, *, digests: bool = False
    ) -> None:
        assert chunk_tokens > 0
        self._root = root_hash(namespace)
        self._chunk_tokens = chunk_tokens
        self._extras = extras
        self._hashes: list[bytes] = []
        self._digests: list[bytes] | None = [] if digests else None

    def __len__(self) -> int:
        """Return the number of chunks so far."""
        return len(self._hashes)

    def extend(self, tokens: Sequence[int], known: int) -> list[bytes]:
        """Return the hashes of all whole chunks of ``tokens[:known]``, which must only grow. The
        list belongs to the chain, and grows with the next call."""
        assert known <= len(tokens)
        size, whole = self._chunk_tokens, known // self._chunk_tokens
        while (first := len(self._hashes)) < whole:
            until = min(first + _PIECE_CHUNKS, whole)
            encoded = encode_tokens(tokens[first * size : until * size])
            for chunk in range(first, until):
                at = (chunk - first) * size * _TOKEN_BYTES
                piece = encoded[at : at + size * _TOKEN_BYTES]
                extras = self._extras.of_chunk(chunk, size)
                if self._digests is not None:
                    self._digests.append(hashlib.sha256(piece).digest())
                # Last, so that another thread that sees the hash also finds the rest.
                self._hashes.append(next_hash(self.parent(chunk), piece, extras))
        return self._hashes

    def hashes(self, start: int, end: int) -> list[bytes]:
        """Return the hashes of chunks ``[start, end)``, which must exist."""
        assert end <= len(self._hashes)
        return self._hashes[start:end]

    def find(self, wanted: Set[bytes]) -> list[int]:
        """Return the existing chunks whose hashes are in ``wanted``."""
        if wanted.isdisjoint(self._hashes):
            return []
        return [chunk for chunk, one in enumerate(self._hashes) if one in wanted]

    def hash(self, chunk: int) -> bytes:
        """Return the hash of an existing chunk."""
        return self._hashes[chunk]

    def parent(self, chunk: int) -> bytes:
        """Return the hash that precedes chunk ``chunk``."""
        return self._hashes[chunk - 1] if chunk else self._root

    def token_digest(self, chunk: int) -> str:
        """Return the token digest of an existing chunk. Only for a chain with ``digests``."""
        assert self._digests is not None
        return self._digests[chunk].hex()


def token_digest(tokens: Sequence[int]) -> str:
    """Return the SHA-256 of the encoded tokens as hex: an audit can compare prompts with it."""
    return hashlib.sha256(encode_tokens(tokens)).hexdigest()


def _field(value: bytes) -> bytes:
    return len(value).to_bytes(8, "little") + value


def field_digest(*fields: bytes) -> bytes:
    """Return the SHA-256 of the length-prefixed fields, shortened to ``PREFIX_HASH_BYTES``."""
    return hashlib.sha256(b"".join(map(_field, fields))).digest()[:PREFIX_HASH_BYTES]
