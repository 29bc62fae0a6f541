"""What an audit says of prefixes: by namespace, tenant, root and depth, and as a tree.

The conventions are those of ``objkv.ops.audit_report``, through which all of these are imported.
"""

from dataclasses import dataclass
from typing import Literal

NodeKind = Literal["chunks", "other"]


@dataclass(frozen=True, slots=True)
class Totals:
    """All that was seen."""

    namespaces: int
    tenants: int
    roots: int
    """Chunks at which a prefix begins."""
    chunks: int
    """Chunks of which a payload is in the bulk store; each counted once."""
    payloads: int
    """In the bulk store; a chunk has one for each of its shards."""
    tokens: int | None
    """Of all chunks whose length is known."""
    nbytes: int
    """Of the payloads in the bulk store."""
    raw_bytes: int | None
    """Of the pages of those that have records, before compression."""
    recorded_bytes: int | None
    """Of the payloads that ``raw_bytes`` counts, as stored."""
    hot_payloads: int | None
    hot_bytes: int | None
    records: int | None
    """None where the bulk store is its own index, as for all that only an index counts."""
    pinned: int | None
    hits: int | None
    """Of all records since each was made; one for each chunk of each match that was loaded."""
    used_chunks: int | None
    """Chunks that were hit at least once."""
    unused_bytes: int | None
    """Of the payloads of chunks that have a record and no hit."""
    oldest_s: int | None
    newest_s: int | None
    last_used_s: int | None


@dataclass(frozen=True, slots=True)
class NamespaceAudit:
    """One namespace."""

    namespace: str
    model: str | None
    """None, as all that its document says, where that cannot be read."""
    tenant: str | None
    kv_dtype: str | None
    chunk_tokens: int | None
    weights_epoch: int | None
    is_known: bool
    """Whether its identity document is there and is its own; else its payloads are strangers."""
    problem: str | None
    """What is wrong with the document, in a sentence."""
    roots: int
    chunks: int
    payloads: int
    tokens: int | None
    nbytes: int
    hits: int | None
    used_chunks: int | None
    unused_bytes: int | None
    pinned: int | None
    oldest_s: int | None
    newest_s: int | None
    last_used_s: int | None
    ghosts: int
    orphans: int
    """Expired ones too."""
    corrupt: int
    strangers: int
    expired: int

    @property
    def to_mend(self) -> int:
        """Findings in it that should not be there; all others go with the next sweep."""
        return self.ghosts + self.orphans - self.expired + self.corrupt + self.strangers


@dataclass(frozen=True, slots=True)
class TenantAudit:
    """All namespaces of one tenant."""

    tenant: str | None
    """None: of namespaces whose document cannot be read."""
    namespaces: int
    roots: int
    chunks: int
    payloads: int
    tokens: int | None
    nbytes: int
    quota_bytes: int | None
    """What the settings here allow it, None for no limit."""
    hits: int | None
    used_chunks: int | None
    unused_bytes: int | None
    oldest_s: int | None
    newest_s: int | None
    last_used_s: int | None


@dataclass(frozen=True, slots=True)
class DepthAudit:
    """The chunks of a namespace that lie ``[depth, depth_end)`` chunks behind the first."""

    namespace: str
    depth: int
    """0: the first chunk of a prompt."""
    depth_end: int
    """Depths are told one by one up to 63, then in ranges that double."""
    chunks: int
    tokens: int
    nbytes: int
    hits: int | None
    used_chunks: int | None
    branches: int
    """Of these chunks, those after which prompts go on in more than one way."""
    leaves: int
    """Of these chunks, those after which nothing more is stored."""


@dataclass(frozen=True, slots=True)
class RootAudit:
    """One prefix's beginning and all that goes on from it."""

    namespace: str
    tenant: str | None
    hash: str
    """Prefix hash of the first chunk that is stored, hex."""
    token_start: int
    """0; more where the beginning is gone: then nobody can use what follows."""
    token_end_max: int
    """Where the longest chain ends."""
    chunks: int
    nbytes: int
    shared_chunks: int
    """From the root to the first branch: what every prompt below has in common."""
    shared_tokens: int
    branches: int
    """Chunks after which there is more than one way on."""
    leaves: int
    """Ends of chains: at least so many different prompts were saved."""
    depth_max: int
    """Chunks of the longest chain."""
    hits: int | None
    """Of all its chunks."""
    hits_max: int | None
    """Of the chunk that was hit most."""
    used_chunks: int | None
    reuse: float | None
    """``nbytes`` that the hits loaded, by ``nbytes`` that are stored; 1 is "each byte once"."""
    oldest_s: int | None
    newest_s: int | None
    last_used_s: int | None
    label: str | None
    """Beginning of its text, if texts were asked for and tokens are stored."""


@dataclass(frozen=True, slots=True)
class TreeNode:
    """Successive chunks without a branch between them, or what there was no room to show.

    A node's numbers are its own; those of what is below it are its children's.
    """

    id: int
    """Unique; parents have lower ones than their children."""
    parent: int | None
    """None: begins a tree."""
    kind: NodeKind
    """``other``: smaller siblings and all below them, folded into one."""
    namespace: str
    hash: str
    """Prefix hash of the last of its chunks, hex; empty for ``other``."""
    depth: int
    """Chunks before it in its chain; for ``other``, before its folded nodes."""
    token_start: int
    token_end: int
    """For ``other``, where the longest folded chain ends."""
    chunks: int
    nbytes: int
    hits: int | None
    """Of all its chunks."""
    hits_max: int | None
    """Of the chunk that was hit most: how often prompts came by here, at least."""
    last_used_s: int | None
    newest_s: int | None
    leaves: int
    """Ends of chains at and below it."""
    children: int
    """Ways on from its end, shown or folded; 0 for a leaf and for ``other``."""
    folded: int
    """For ``other``: how many siblings it stands for; else 0."""
    label: str | None
    """A few words for people."""
    text: str | None
    """The beginning of its tokens' text, redacted unless asked otherwise; None without."""
