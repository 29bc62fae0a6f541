"""objkv's own prefix hash: a chain over chunks of token ids, and of what else changes their KV.

    h_(-1) = SHA-256(field("objkv-prefix-1") field(namespace))[:20]
    h_i    = SHA-256(field(h_(i-1)) field(tokens_i) field(extra_i))[:20]

``field(x)`` is the length of ``x`` as 8 bytes little-endian, then ``x``; tokens are 4 bytes each,
little-endian; ``extra_i`` is a sequence of ``Extra`` values, each field length-prefixed, so no
two distinct inputs encode alike. It depends on no block size, no version of vLLM, no
``PYTHONHASHSEED`` and no pickle: any tool can compute it. Specified in ``docs/keyspace.md``.
"""

import hashlib
from array import array
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from sys import byteorder
from typing import Literal

PREFIX_HASH_BYTES = 20
_SCHEME = b"objkv-prefix-1"
_TOKEN_BYTES = 4
_PARENT_LENGTH = PREFIX_HASH_BYTES.to_bytes(8, "little")
_PIECE_CHUNKS = 16
"""Encoded at once: a conversion for each chunk costs a quarter more, one for all of a long prompt
would not let another thread run before it ends."""

ExtraKind = Literal["lora", "salt", "mm", "embeds"]


@dataclass(frozen=True, slots=True)
class Extra:
    """Something besides token ids that changes the KV of a chunk.

    ``lora``: (content digest of the adapter,); in chunk 0, the chain carries it on.
    ``salt``: (cache_salt as UTF-8, lone surrogates encoded like any code point,); in chunk 0.
    ``mm``: (identifier of the item, its start relative to the chunk's start as 8 bytes signed
    little-endian, its length in tokens as 8 bytes); in every chunk that it overlaps.
    ``embeds``: (SHA-256 of the prompt embeddings of this chunk's tokens,).
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
    """What besides token ids identifies a prompt's KV."""

    lora_digest: bytes | None = None
    salt: str | None = None
    items: tuple[MultimodalItem, ...] = ()
    embeds: Mapping[int, bytes] = field(default_factory=dict)
    """SHA-256 of the embeddings of chunk ``i``'s tokens, for chunks given by embeddings."""

    def __post_init__(self) -> None:
        # Sorted once here, so that two equal prompts are equal whatever order the items came in.
        ordered = sorted(self.items, key=lambda item: (item.start, item.identifier, item.length))
        object.__setattr__(self, "items", tuple(ordered))

    def of_chunk(self, chunk: int, chunk_tokens: int) -> tuple[Extra, ...]:
        """The extras of chunk ``chunk``, in their one order."""
        if chunk and not self.items and not self.embeds:
            return ()
        start, end = chunk * chunk_tokens, (chunk + 1) * chunk_tokens
        extras = []
        if chunk == 0 and self.lora_digest is not None:
            extras.append(Extra("lora", (self.lora_digest,)))
        if chunk == 0 and self.salt is not None:
            # A salt is whatever a client sent: no text may raise here, or two encode alike.
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
    """The hash before the first chunk: the parent of chunk 0."""
    return field_digest(_SCHEME, namespace.encode("ascii"))


def next_hash(parent: bytes, tokens: bytes, extras: Iterable[Extra] = ()) -> bytes:
    """The hash of the chunk whose encoded tokens are ``tokens``, 20 bytes."""
    assert len(parent) == PREFIX_HASH_BYTES
    length = len(tokens).to_bytes(8, "little")
    fields = (_PARENT_LENGTH, parent, length, tokens, _field(encode_extras(extras)))
    return hashlib.sha256(b"".join(fields)).digest()[:PREFIX_HASH_BYTES]


def encode_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as 4 bytes each, little-endian. Raises OverflowError outside ``[0, 2**32)``."""
    encoded = array("I", tokens)
    assert encoded.itemsize == _TOKEN_BYTES
    if byteorder == "big":
        encoded.byteswap()
    return encoded.tobytes()


def encode_extras(extras: Iterable[Extra]) -> bytes:
    """Per extra: field(kind), number of fields as 8 bytes, each field length-prefixed."""
    out = bytearray()
    for extra in extras:
        out += _field(extra.kind.encode("ascii"))
        out += len(extra.fields).to_bytes(8, "little")
        for value in extra.fields:
            out += _field(value)
    return bytes(out)


def prefix_hashes(
    namespace: str, tokens: Sequence[int], chunk_tokens: int, extras: PromptExtras | None = None
) -> list[bytes]:
    """The hash of every whole chunk of ``tokens``; a partial last chunk has none.

    Prompts that begin alike have the same first hashes, whatever follows:

    >>> [one.hex()[:8] for one in prefix_hashes("0" * 32, range(600), 256)]
    ['67aa94dd', '75f6e94c']
    >>> [one.hex()[:8] for one in prefix_hashes("0" * 32, [*range(256), *range(256)], 256)][0]
    '67aa94dd'
    """
    chain = PrefixChain(namespace, chunk_tokens, extras or PromptExtras())
    return chain.extend(tokens, len(tokens))


class PrefixChain:
    """The hashes of one growing prompt, computed once each.

    One thread at a time may extend it; any may read what has been reached. ``digests``: whether it
    computes the chunks' token digests along with them.
    """

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
        """How many chunks ``extend`` has reached."""
        return len(self._hashes)

    def extend(self, tokens: Sequence[int], known: int) -> list[bytes]:
        """Hashes of all whole chunks of ``tokens[:known]``, which only ever grows.

        The list is the chain's own: it grows with the next call, and the caller must not change it.
        """
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
                # Last: who sees the hash, on another thread, finds the rest.
                self._hashes.append(next_hash(self.parent(chunk), piece, extras))
        return self._hashes

    def hashes(self, start: int, end: int) -> list[bytes]:
        """The hashes of chunks ``[start, end)`` that ``extend`` has reached."""
        assert end <= len(self._hashes)
        return self._hashes[start:end]

    def find(self, wanted: Set[bytes]) -> list[int]:
        """The chunks that ``extend`` has reached and whose hashes are among ``wanted``; looks at
        each hash once, however many are wanted."""
        if wanted.isdisjoint(self._hashes):
            return []
        return [chunk for chunk, one in enumerate(self._hashes) if one in wanted]

    def hash(self, chunk: int) -> bytes:
        """The hash of a chunk that ``extend`` has reached."""
        return self._hashes[chunk]

    def parent(self, chunk: int) -> bytes:
        """The hash that chunk ``chunk`` continues."""
        return self._hashes[chunk - 1] if chunk else self._root

    def token_digest(self, chunk: int) -> str:
        """``token_digest`` of a chunk that ``extend`` has reached, of a chain with ``digests``."""
        assert self._digests is not None
        return self._digests[chunk].hex()


def token_digest(tokens: Sequence[int]) -> str:
    """SHA-256 of the encoded tokens, hex: lets an audit compare prompts without storing them."""
    return hashlib.sha256(encode_tokens(tokens)).hexdigest()


def _field(value: bytes) -> bytes:
    return len(value).to_bytes(8, "little") + value


def field_digest(*fields: bytes) -> bytes:
    """SHA-256 of the length-prefixed fields, shortened to ``PREFIX_HASH_BYTES``."""
    digest = hashlib.sha256()
    for value in fields:
        digest.update(_field(value))
    return digest.digest()[:PREFIX_HASH_BYTES]
