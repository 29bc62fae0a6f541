"""Matches a prompt against a namespace: which chunks are stored, and how much would be served."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from objkv.cache.match import covered, shards_to_read, usable_chunks
from objkv.errors import ConfigError
from objkv.index.base import ReadIndex, Record
from objkv.keys.identity import Identity
from objkv.keys.prefix import PromptExtras, is_token, prefix_hashes

_SEPARATORS = re.compile(r"[\s,]+")
_WRITTEN = re.compile(r"[0-9]{1,20}")


def parse_tokens(text: str) -> list[int]:
    """Parse token ids from a JSON list, or separated by spaces, commas or lines.

    Raises ``ConfigError`` naming the first thing that is not a token id.

    >>> parse_tokens("[1, 2, 3]") == parse_tokens("1 2,3")
    True
    """
    if text.lstrip().startswith("["):
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as exc:
            raise ConfigError(f"the token ids are not a JSON list: {exc}") from exc
    else:
        values = [word for word in _SEPARATORS.split(text) if word]
    return [_token(value) for value in values]


def _token(value: object) -> int:
    if isinstance(value, str) and _WRITTEN.fullmatch(value):
        value = int(value)
    if not is_token(value):
        shown = repr(value)[:80]
        raise ConfigError(f"{shown} is not a token id; token ids are integers below 2**32")
    return value


@dataclass(frozen=True, slots=True)
class ChunkMatch:
    """One chunk of the prompt, tokens ``[token_start, token_end)``."""

    token_start: int
    token_end: int
    prefix_hash: bytes
    payloads: tuple[str, ...]
    """Fields of the stored payloads, ``<group>`` or ``<group>.<shard>``; empty without one."""
    groups_missing: tuple[int, ...]
    """Groups with a layer or head that is not stored."""
    usable: bool
    """Whether the chunk is part of the prefix that would be served."""
    nbytes: int
    created_s: int | None
    hits: int
    pinned: bool


@dataclass(frozen=True, slots=True)
class MatchReport:
    """One prompt against one namespace."""

    namespace: str
    model: str
    chunk_tokens: int
    prompt_tokens: int
    usable_tokens: int
    """Tokens of the longest prefix for which every group can be loaded, whatever the TP shape."""
    stored_chunks: int
    """Chunks with at least one stored payload."""
    chunks: tuple[ChunkMatch, ...]
    """The whole chunks of the prompt. A last partial chunk is never stored."""


def look_up(
    index: ReadIndex, identity: Identity, hashes: Sequence[bytes]
) -> tuple[list[Record | None], int]:
    """Return the records of whole chunks, in one round trip, and how many would be served."""
    records = index.lookup(identity.namespace(), hashes) if hashes else []
    found = [shards_to_read(record, len(identity.groups)) for record in records]
    return records, usable_chunks(found, identity.groups, identity.chunk_tokens)


def match_prompt(
    index: ReadIndex, identity: Identity, tokens: Sequence[int], extras: PromptExtras
) -> MatchReport:
    """Look the prompt up in one round trip and return which chunks are stored."""
    namespace, size = identity.namespace(), identity.chunk_tokens
    hashes = prefix_hashes(namespace, tokens, size, extras)
    records, usable = look_up(index, identity, hashes)
    chunks = tuple(
        _chunk(number, prefix_hash, record, identity, number < usable)
        for number, (prefix_hash, record) in enumerate(zip(hashes, records, strict=True))
    )
    return MatchReport(
        namespace=namespace,
        model=identity.model,
        chunk_tokens=size,
        prompt_tokens=len(tokens),
        usable_tokens=usable * size,
        stored_chunks=sum(bool(chunk.payloads) for chunk in chunks),
        chunks=chunks,
    )


def _chunk(
    number: int, prefix_hash: bytes, record: Record | None, identity: Identity, usable: bool
) -> ChunkMatch:
    size, groups = identity.chunk_tokens, identity.groups
    shards = {} if record is None else record.shards
    read = shards_to_read(record, len(groups)) or {}
    missing = tuple(n for n, group in enumerate(groups) if not covered(read, n, group))
    return ChunkMatch(
        token_start=number * size,
        token_end=(number + 1) * size,
        prefix_hash=prefix_hash,
        payloads=tuple(sorted(shards)),
        groups_missing=missing,
        usable=usable,
        nbytes=sum(shard.nbytes for shard in shards.values()),
        created_s=min((shard.created_s for shard in shards.values()), default=None),
        hits=record.hits if record else 0,
        pinned=record.pinned if record else False,
    )
