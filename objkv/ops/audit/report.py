"""The report of an audit as plain values, for the tables, for ``--json`` and for the HTML page.

Names, units and meanings are a promise to scripts (``docs/audit.md``): fields may be added, but no
field changes its meaning. ``None`` means unknown, never zero. Bytes are bytes in the bulk store,
times are seconds since the epoch, and token ranges are ``[start, end)``. Texts are untrusted: the
code that shows them masks or escapes them.
"""

from dataclasses import dataclass
from typing import Final, Literal

from objkv.config.prices import Prices
from objkv.ops.audit.answers import LifecycleAudit, PinAudit, SavingsAudit

NodeKind = Literal["chunks", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAudit:
    """The contents of a namespace, a tenant or the whole store."""

    roots: int
    """Chunks at which a prefix begins."""
    chunks: int
    """Chunks with at least one payload in the bulk store, each counted once."""
    payloads: int
    """Payloads in the bulk store; a chunk has one per shard."""
    tokens: int | None
    """Tokens of all chunks whose length is known."""
    nbytes: int
    """Bytes of the payloads in the bulk store."""
    hits: int | None
    """Hits of all records since each was created; every loaded match counts one hit per chunk."""
    used_chunks: int | None
    """Chunks that were hit at least once."""
    unused_bytes: int | None
    """Payload bytes of chunks that have a record but no hit."""
    oldest_s: int | None
    """When the oldest payload was written."""
    newest_s: int | None
    """When the newest payload was written."""
    last_used_s: int | None
    """When a chunk was last hit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditTotals(StoredAudit):
    """The sums over all namespaces."""

    namespaces: int
    tenants: int
    raw_bytes: int | None
    """Bytes of the pages before compression, for payloads with a record."""
    recorded_bytes: int | None
    """Stored bytes of the same payloads."""
    hot_payloads: int | None
    """Payloads with a copy in the hot store, according to their records."""
    hot_bytes: int | None
    """Bytes of these payloads."""
    records: int | None
    """Records in the index. This and all other values that only an index counts are None if the
    bulk store is its own index."""
    pinned: int | None
    """Pinned chunks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceAudit(StoredAudit):
    """One namespace."""

    namespace: str
    model: str | None
    """None, like the other values of the identity document, if that is unreadable."""
    tenant: str | None
    kv_dtype: str | None
    chunk_tokens: int | None
    weights_epoch: int | None
    is_known: bool
    """Whether its identity document exists and matches its name; otherwise its payloads are
    strangers."""
    problem: str | None
    """The problem with the identity document, in a sentence."""
    pinned: int | None
    """Pinned chunks."""
    ghosts: int
    """Records without a payload."""
    orphans: int
    """Payloads without a record, including expired ones."""
    corrupt: int
    """Payloads with a wrong length or header."""
    strangers: int
    """Payloads without a valid identity document."""
    expired: int
    """Orphans written more than ``ttl_s`` ago."""

    @property
    def faults(self) -> int:
        """Findings that should not exist. The next sweep removes all other findings."""
        return self.ghosts + self.orphans - self.expired + self.corrupt + self.strangers


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantAudit(StoredAudit):
    """All namespaces of one tenant."""

    tenant: str | None
    """None for namespaces whose identity document is unreadable."""
    namespaces: int
    quota_bytes: int | None
    """The quota in this command's settings; None for no limit."""


@dataclass(frozen=True, slots=True)
class DepthAudit:
    """The chunks of a namespace at ``[depth, depth_end)``, counted in chunks from the first."""

    namespace: str
    depth: int
    """0 for the first chunk of a prompt."""
    depth_end: int
    """End of the range. Depths up to 63 are separate; after that, ranges double."""
    chunks: int
    tokens: int
    nbytes: int
    hits: int | None
    used_chunks: int | None
    branches: int
    """Chunks with more than one stored continuation."""
    leaves: int
    """Chunks without a stored continuation."""


@dataclass(frozen=True, slots=True)
class RootAudit:
    """The first chunk of a prefix and all chunks that continue it."""

    namespace: str
    tenant: str | None
    hash: str
    """Prefix hash of the first stored chunk, hex."""
    token_start: int
    """0, or more if the first chunks are gone; then no reader can use the rest."""
    token_end_max: int
    """Token at which the longest chain ends."""
    chunks: int
    nbytes: int
    shared_chunks: int
    """Chunks from the root to the first branch, which all prompts below share."""
    shared_tokens: int
    """Tokens of these chunks."""
    branches: int
    """Chunks with more than one stored continuation."""
    leaves: int
    """Ends of chains; at least this many different prompts were saved."""
    depth_max: int
    """Chunks of the longest chain."""
    hits: int | None
    """Hits of all chunks."""
    hits_max: int | None
    """Hits of the most used chunk."""
    used_chunks: int | None
    """Chunks that were hit at least once."""
    reuse: float | None
    """Bytes loaded by hits per byte stored; 1 means that each byte was loaded once on average."""
    oldest_s: int | None
    newest_s: int | None
    last_used_s: int | None
    label: str | None
    """First words of its text, if texts were requested and token ids are stored."""


@dataclass(frozen=True, slots=True)
class TreeNode:
    """Successive chunks without a branch between them, or small siblings folded into one node.

    A node's numbers exclude its children, except that a folded node covers everything below it.
    """

    id: int
    """Unique; a parent's id is lower than its children's."""
    parent: int | None
    """None for the root of a tree."""
    kind: NodeKind
    """``other`` for smaller siblings and everything below them, folded into one node."""
    namespace: str
    hash: str
    """Prefix hash of the node's last chunk, hex; empty for ``other``."""
    depth: int
    """Chunks before the node in its chain; for ``other``, chunks before its folded nodes."""
    token_start: int
    token_end: int
    """End of the node's tokens; for ``other``, the end of the longest folded chain."""
    chunks: int
    nbytes: int
    hits: int | None
    """Hits of all its chunks."""
    hits_max: int | None
    """Hits of its most used chunk: at least this many prompts passed through the node."""
    last_used_s: int | None
    newest_s: int | None
    leaves: int
    """Ends of chains at the node and below it."""
    children: int
    """Continuations, shown or folded; 0 for a leaf and for ``other``."""
    folded: int
    """Number of siblings that an ``other`` node replaces; else 0."""
    label: str | None
    """A short name for people."""
    text: str | None
    """First words of its text, redacted unless requested; None if unavailable."""


JSON_FORMAT: Final = 1
"""Format number of the JSON document. It increases when a field changes its meaning."""
FindingKind = Literal["ghost", "orphan", "stranger", "corrupt", "expired", "old_epoch", "leftover"]
"""The next sweep removes the last three kinds; the others should not exist. ``expired``: not used
for ``ttl_s``, so its record ran out. ``old_epoch``: from weights or a format no longer served.
``leftover``: neither a payload nor a document, or in quarantine."""
Ending = Literal["complete", "interrupted", "deadline"]


@dataclass(frozen=True, slots=True)
class AgeBucket:
    """Chunks whose age is in ``[start_s, end_s)``."""

    start_s: int
    end_s: int | None
    """None for no upper bound."""
    chunks: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class AgesAudit:
    """Chunks by age and by last use; both have their buckets in the same order."""

    age: tuple[AgeBucket, ...]
    """By time since the chunk's newest payload was written."""
    last_use: tuple[AgeBucket, ...]
    """By time since the chunk's last hit; empty if hits are not counted."""
    never_used_chunks: int | None
    never_used_bytes: int | None


@dataclass(frozen=True, slots=True)
class TenantCost:
    """A tenant's share of the cost, by its bytes, payloads and hits."""

    tenant: str | None
    storage: float
    requests: float
    month: float


@dataclass(frozen=True, slots=True)
class CostAudit:
    """Monthly cost of the bulk store at today's size and use, in US dollars."""

    prices: Prices
    storage: float
    puts: float
    """Payloads written per month, if every day is like the last complete one."""
    gets: float | None
    """Payloads loaded from the bulk store per month, by each chunk's hits since it was saved;
    payloads with a hot copy are not counted."""
    requests: float
    """Cost of puts and of gets, if those are known."""
    month: float
    """Sum of ``storage`` and ``requests``."""
    unused: float | None
    """Part of ``storage`` for chunks that were never used."""
    tenants: tuple[TenantCost, ...]


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """One finding."""

    kind: FindingKind
    key: str
    """Path in the bulk store, also of a payload that is missing."""
    nbytes: int
    detail: str


@dataclass(frozen=True, slots=True)
class FindingCount:
    """The findings of one kind."""

    kind: FindingKind
    count: int
    nbytes: int
    young: int
    """Orphans written after the walk began or up to ``sweep_grace_s`` before; their records may
    still be published."""
    remedy: str
    """The command that fixes it, in a sentence."""


@dataclass(frozen=True, slots=True)
class FindingsAudit:
    """Findings by kind, in the order of ``FindingKind``, and the first few by name."""

    counts: tuple[FindingCount, ...]
    first: tuple[AuditFinding, ...]
    omitted: int
    """Findings that are counted but not in ``first``."""


AuditVerdict = Literal["corrupt", "faults", "interrupted", "deadline", "fine"]


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The whole report."""

    made_s: int
    """When the report was made."""
    begun_s: int
    """When the walk began; every observation is from then or later."""
    version: str
    """objkv's version."""
    bulk_url: str
    """Without secrets."""
    index_url: str
    """Without secrets."""
    ending: Ending
    """Unless ``complete``, all numbers cover only the parts that were read."""
    parts_done: int
    """Parts that were read."""
    parts: int
    """Parts of the whole walk: folders of the bulk store and namespaces of the index."""
    totals: AuditTotals
    namespaces: tuple[NamespaceAudit, ...]
    """Largest first."""
    tenants: tuple[TenantAudit, ...]
    """Largest first."""
    depths: tuple[DepthAudit, ...]
    """In the order of ``namespaces``, then by depth."""
    roots: tuple[RootAudit, ...]
    """Largest first, as many as requested."""
    roots_omitted: int
    tree: tuple[TreeNode, ...]
    """Parents before children; at most 2,000 nodes."""
    ages: AgesAudit
    cost: CostAudit
    findings: FindingsAudit
    namespace: str | None
    """The one namespace that was audited; None for all."""
    savings: SavingsAudit
    pins: tuple[PinAudit, ...]
    """Active pins, the next to end first; at most 1,000."""
    lifecycle: LifecycleAudit | None
    """None if the bulk store is not a bucket."""
    problems: tuple[str, ...]
    """Sentences that qualify the numbers, worst first."""


_FAULTS: Final[tuple[FindingKind, ...]] = ("ghost", "orphan", "stranger")


def verdict(report: AuditReport) -> AuditVerdict:
    """Return the worst finding, for headlines and exit codes. Young orphans are no
    faults: their records may still be published."""
    found = {one.kind: one.count - one.young for one in report.findings.counts}
    if found.get("corrupt"):
        return "corrupt"
    if any(found.get(kind) for kind in _FAULTS):
        return "faults"
    return "fine" if report.ending == "complete" else report.ending
