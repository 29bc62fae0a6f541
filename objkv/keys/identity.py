"""The identity document: everything that changes the stored bytes or their meaning.

Two replicas share KV if and only if their documents are equal. A document contains no TP size, PP
size or rank (the shard has those), and nothing that only one rank has. ``docs/keyspace.md``
specifies it.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from objkv.errors import ConfigError

FORMAT = 2
HASH_SCHEME = "sha256-chain-1"
NAMESPACE_HEX = 32

SEALS_NAME = "payloads"
"""Name of a pair in ``extra``."""
SEALS = ("signed", "encrypted")

FIRST_DRAFT_GROUP = 1 << 16
"""Groups of drafts have numbers from this one on. They are not in the identity of their target, see
``docs/keyspace.md``."""
GroupKind = Literal["full", "mla", "sliding_window", "chunked_local", "mamba"]
_WINDOWED = ("sliding_window", "chunked_local")


@dataclass(frozen=True, slots=True)
class GroupIdentity:
    """One KV cache group of the model, over all ranks."""

    kind: GroupKind
    window: int | None
    """``sliding_window``: number of tokens that a layer attends to, including the current one.
    ``chunked_local``: tokens of one attention chunk. None for all others."""
    layers: tuple[str, ...]
    """In forward order."""
    heads: int
    """KV heads over all TP ranks; 1 for MLA. ``mamba``: number of units of a ``SplitState``. If the
    split is not known, the number of ranks, so that only replicas with as many share it, or 1 if
    each rank has all of it."""
    content: int
    """Elements per head and token, K and V fused. ``mamba``: bytes of a unit, or rank's state."""
    block_size: int
    state: str | None = None
    """``mamba``: a ``SplitState``, or a rank's structure. Other kinds' documents omit it."""
    page: int | None = None
    """Bytes of one layer's block, for caches that cannot be divided by token: compressed states,
    and sparse attention with an indexer. ``content`` repeats it. Omitted if None."""

    def __post_init__(self) -> None:
        assert (self.window is not None) == (self.kind in _WINDOWED)
        assert (self.state is not None) == (self.kind == "mamba")
        assert self.window is None or self.window > 0
        assert self.layers
        assert self.heads > 0
        assert self.content > 0
        assert self.block_size > 0
        assert self.page in (None, self.content)


@dataclass(frozen=True, slots=True)
class NamespaceIdentity:
    """Everything that replicas must have in common to share what is in a namespace."""

    scheme: ClassVar[str]
    """Names the hashes, and distinguishes identities of one kind from those of others."""
    model: str
    """A hub id, or the last component of a local path."""
    weights: str
    """Digest of the weights, or the revision if no weights can be read."""
    weights_epoch: int
    tenant: str
    extra: tuple[tuple[str, str], ...] = field(default=(), kw_only=True)
    """Sorted (name, value) pairs of further settings that change the stored bytes."""

    def __post_init__(self) -> None:
        assert self.weights_epoch >= 0
        assert tuple(sorted(self.extra)) == self.extra

    def document(self) -> dict[str, Any]:
        """Return the document as plain JSON values, including format and hash scheme."""
        return {"format": FORMAT, "hash": self.scheme, **asdict(self)}

    def canonical(self) -> bytes:
        """Return the document's canonical encoding, see ``canonical_json``."""
        return canonical_json(self.document())

    def namespace(self) -> str:
        """Return the first 16 bytes of the SHA-256 of the canonical document, as 32 hex digits."""
        return hashlib.sha256(self.canonical()).hexdigest()[:NAMESPACE_HEX]


@dataclass(frozen=True, slots=True)
class Identity(NamespaceIdentity):
    """The identity behind a namespace of KV."""

    scheme: ClassVar[str] = HASH_SCHEME
    quantization: str | None
    kv_dtype: str
    """As configured (``fp8_e5m2``), not as stored (``uint8``)."""
    groups: tuple[GroupIdentity, ...]
    page_layout: str
    """``canonical``, or ``opaque:<isa>`` if only the kernel can interpret the bytes of a block."""
    chunk_tokens: int
    """Effective chunk size: a multiple of every group's block size."""

    def __post_init__(self) -> None:
        NamespaceIdentity.__post_init__(self)
        assert self.groups
        assert all(self.chunk_tokens % group.block_size == 0 for group in self.groups)

    def document(self) -> dict[str, Any]:
        """See ``NamespaceIdentity``."""
        document = NamespaceIdentity.document(self)
        for group in document["groups"]:
            for name in ("state", "page"):
                if group[name] is None:
                    del group[name]
        return document


def name_model(model: str, model_id: str | None) -> str:
    """Return the name of a model in identities: ``model_id``, the last component of a local path,
    or the hub id. ``.`` and ``..`` are called as the folder is. Raises ``ConfigError`` if the
    folder has no name, which is true of ``/``."""
    if model_id or not (path := Path(model)).is_dir():
        return model_id or model
    name = path.resolve().name if path.name in ("", "..") else path.name
    if not name:
        raise ConfigError(f"the folder {model!r} has no name for its model: set model_id")
    return name


def sealed_extra(
    extra: tuple[tuple[str, str], ...], seals: tuple[str, ...]
) -> tuple[tuple[str, str], ...]:
    """Return ``extra`` for replicas that seal payloads in these ways, and share only with such
    replicas. The keys are not included, so they can be replaced."""
    if not seals:
        return extra
    return tuple(sorted({**dict(extra), SEALS_NAME: " ".join(seals)}.items()))


def seals_of(extra: object) -> tuple[str, ...]:
    """Return the ways given to ``sealed_extra``, from a document's ``extra`` of any content."""
    pairs = extra if isinstance(extra, list) else []
    found = [pair[1] for pair in pairs if isinstance(pair, list) and pair[:1] == [SEALS_NAME]]
    ways = found[0].split(" ") if len(found) == 1 and isinstance(found[0], str) else []
    return tuple(ways) if set(ways) <= set(SEALS) else ()


def canonical_json(document: Any) -> bytes:
    """Return JSON with sorted keys, no spaces, ASCII only. Raises ValueError on NaN."""
    text = json.dumps(
        document, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )
    return text.encode("ascii")


def identity_path(namespace: str) -> str:
    """Return the path of the document in the bulk store, by which an audit explains why two
    replicas do not share."""
    return f"{namespace}/identity.json"
