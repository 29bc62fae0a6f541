"""The identity document: everything that changes the stored bytes or their meaning.

Two replicas share exactly when their documents are equal. No TP, PP or rank is in it (those are in
the shard), nor anything that only one rank knows. Specified in ``docs/keyspace.md``.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

FORMAT = 1
HASH_SCHEME = "sha256-chain-1"
NAMESPACE_HEX = 32

SEALS_NAME = "payloads"
"""Of a pair in ``extra``."""
SEALS = ("signed", "encrypted")
"""Ways in which payloads can be sealed."""

GroupKind = Literal["full", "mla", "sliding_window", "chunked_local", "mamba"]
_WINDOWED = ("sliding_window", "chunked_local")


@dataclass(frozen=True, slots=True)
class GroupIdentity:
    """One KV cache group of the model, over all ranks."""

    kind: GroupKind
    window: int | None
    """``sliding_window``: tokens that a layer attends to, itself included. ``chunked_local``:
    tokens of one attention chunk. None for all others."""
    layers: tuple[str, ...]
    """In forward order."""
    heads: int
    """KV heads over all TP ranks; 1 for MLA. ``mamba``: ranks that a state is split over, in the
    model's own way, so that only replicas with as many ranks share it; 1 if each has all of it."""
    content: int
    """Elements per head and token, K and V fused. ``mamba``: bytes of one rank's state."""
    block_size: int
    """Tokens per block."""
    state: str | None = None
    """``mamba``: what a rank's state is made of, which its bytes alone do not tell; not in the
    document of any other kind."""

    def __post_init__(self) -> None:
        assert (self.window is not None) == (self.kind in _WINDOWED)
        assert (self.state is not None) == (self.kind == "mamba")
        assert self.window is None or self.window > 0
        assert self.layers
        assert self.heads > 0
        assert self.content > 0
        assert self.block_size > 0


@dataclass(frozen=True, slots=True)
class Identity:
    """What a namespace stands for."""

    model: str
    """A hub id, or the last component of a local path."""
    weights: str
    """Digest of the weights, or the revision where no weights can be read."""
    quantization: str | None
    kv_dtype: str
    """As configured (``fp8_e5m2``), not as stored (``uint8``)."""
    groups: tuple[GroupIdentity, ...]
    page_layout: str
    """``canonical``, or ``opaque:<isa>`` where the bytes inside a block are the kernel's own."""
    chunk_tokens: int
    """Effective chunk: a multiple of every group's block size."""
    weights_epoch: int
    tenant: str
    extra: tuple[tuple[str, str], ...] = ()
    """Sorted (name, value) pairs of further settings that change KV, e.g. rope overrides."""

    def __post_init__(self) -> None:
        assert self.groups
        assert all(self.chunk_tokens % group.block_size == 0 for group in self.groups)
        assert self.weights_epoch >= 0
        assert tuple(sorted(self.extra)) == self.extra

    def document(self) -> dict[str, Any]:
        """The document as plain JSON values, format and hash scheme included."""
        document = {"format": FORMAT, "hash": HASH_SCHEME, **asdict(self)}
        for group in document["groups"]:
            if group["state"] is None:
                del group["state"]
        return document

    def canonical(self) -> bytes:
        """The document's one encoding: JSON, keys sorted, no spaces, ASCII, no floats."""
        return canonical_json(self.document())

    def namespace(self) -> str:
        """First 16 bytes of the SHA-256 of the canonical document, as 32 hex digits."""
        return hashlib.sha256(self.canonical()).hexdigest()[:NAMESPACE_HEX]


def sealed_extra(
    extra: tuple[tuple[str, str], ...], seals: tuple[str, ...]
) -> tuple[tuple[str, str], ...]:
    """``extra`` of replicas whose payloads are sealed in these ways: they share with those of the
    same ways only. Which keys they use is not in it, so that those can be exchanged."""
    if not seals:
        return extra
    return tuple(sorted({**dict(extra), SEALS_NAME: " ".join(seals)}.items()))


def seals_of(extra: object) -> tuple[str, ...]:
    """The ways that ``sealed_extra`` was given, from a document's ``extra``, whatever that is."""
    pairs = extra if isinstance(extra, list) else []
    found = [pair[1] for pair in pairs if isinstance(pair, list) and pair[:1] == [SEALS_NAME]]
    ways = found[0].split(" ") if len(found) == 1 and isinstance(found[0], str) else []
    return tuple(ways) if set(ways) <= set(SEALS) else ()


def canonical_json(document: Any) -> bytes:
    """JSON with sorted keys, no spaces, ASCII only; raises ValueError on NaN."""
    text = json.dumps(
        document, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )
    return text.encode("ascii")


def identity_path(namespace: str) -> str:
    """Where the bulk store keeps the document, so that an audit can say why two do not share."""
    return f"{namespace}/identity.json"
