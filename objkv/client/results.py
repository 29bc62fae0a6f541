"""Results of the client: plain, frozen values.

Hashes are hex digits, times are seconds since the epoch, and token ranges are ``[start, end)``.
"""

from dataclasses import dataclass
from typing import Literal

MatchEnd = Literal["complete", "short", "missing", "gap", "incomplete"]


@dataclass(frozen=True, slots=True)
class Namespace:
    """One namespace: a model with everything else that changes its KV."""

    name: str
    """32 hex digits."""
    model: str | None = None
    """None, like the other values, if its identity document cannot be used."""
    tenant: str | None = None
    kv_dtype: str | None = None
    chunk_tokens: int | None = None
    """Tokens of a chunk. A shorter rest of a prompt is never stored."""
    weights_epoch: int | None = None
    problem: str | None = None
    """Why it cannot be matched, e.g. because it stores encoder outputs; None if it can."""


@dataclass(frozen=True, slots=True)
class Match:
    """The stored prefix of a prompt, according to the index."""

    namespace: str
    model: str
    chunk_tokens: int
    prompt_tokens: int
    tokens: int
    """Tokens of the longest prefix that a replica of any TP and PP size can load."""
    hot_tokens: int
    """Those of ``tokens`` whose payloads also have copies in the hot store."""
    chunks: int
    """Chunks of the stored prefix."""
    prompt_chunks: int
    """Whole chunks of the prompt."""
    end: MatchEnd
    """Why ``tokens`` is no larger. ``complete``: every whole chunk of the prompt is stored.
    ``short``: the prompt is shorter than one chunk. ``missing``: the next chunk is not stored.
    ``gap``: the same, although a later chunk is stored. ``incomplete``: of the next chunk, some
    layers, heads or groups are not stored."""

    @property
    def bulk_tokens(self) -> int:
        """Those of ``tokens`` that only the bulk store has."""
        return self.tokens - self.hot_tokens

    @property
    def why(self) -> str:
        """``end`` as a sentence."""
        size, start = self.chunk_tokens, self.tokens
        rest = self.prompt_tokens - self.prompt_chunks * size
        where = f"tokens {start:,}-{start + size:,}"
        match self.end:
            case "short":
                return f"the prompt is shorter than a chunk of {size:,} tokens"
            case "missing":
                return f"{where} are not stored"
            case "gap":
                return f"{where} are not stored, although a later chunk is"
            case "incomplete":
                return f"only part of the KV of {where} is stored"
        left = f"; its last {rest:,} do not fill a chunk" if rest else ""
        return f"every whole chunk of the prompt is stored{left}"


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk of the index."""

    namespace: str
    prefix_hash: str
    parent_hash: str
    """Prefix hash of the chunk before it; that of the namespace's root for a first chunk."""
    token_start: int
    token_end: int
    payloads: int
    """Stored payloads, one per group and shard."""
    nbytes: int
    """Bytes of its payloads in the bulk store."""
    raw_bytes: int
    """Bytes of its KV before compression."""
    hot: bool
    """Whether all of its payloads have copies in the hot store."""
    hits: int
    created_s: int
    """When its newest payload was written."""
    touched_s: int
    """When a replica last loaded it; 0 if never."""
    pinned_until_s: int
    """When its pin ends; 0 without a pin."""
