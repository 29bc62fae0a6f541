"""What an audit found, as plain values: the same for the table, for ``--json`` and for the page.

Names, units and meanings are a promise to scripts (``docs/audit.md``): a field may be added, none
changes its meaning. ``None`` is "cannot be told", never zero. Bytes are those of the bulk store,
times are seconds since the epoch, ranges of tokens are ``[start, end)``. Text in here may be what
others wrote: whoever shows it masks or escapes it.
"""

from dataclasses import dataclass
from typing import Final, Literal

NodeKind = Literal["chunks", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAudit:
    """What is stored, of a namespace, a tenant or everything."""

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
    hits: int | None
    """Of all records since each was made; one for each chunk of each match that was loaded."""
    used_chunks: int | None
    """Chunks that were hit at least once."""
    unused_bytes: int | None
    """Of the payloads of chunks that have a record and no hit."""
    oldest_s: int | None
    newest_s: int | None
    last_used_s: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditTotals(StoredAudit):
    """All that was seen."""

    namespaces: int
    tenants: int
    raw_bytes: int | None
    """Of the pages of those that have records, before compression."""
    recorded_bytes: int | None
    """Of the payloads that ``raw_bytes`` counts, as stored."""
    hot_payloads: int | None
    hot_bytes: int | None
    records: int | None
    """None where the bulk store is its own index, as for all that only an index counts."""
    pinned: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceAudit(StoredAudit):
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
    pinned: int | None
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantAudit(StoredAudit):
    """All namespaces of one tenant."""

    tenant: str | None
    """None: of namespaces whose document cannot be read."""
    namespaces: int
    quota_bytes: int | None
    """What the settings here allow it, None for no limit."""


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


JSON_FORMAT: Final = 1
"""Of the JSON document; another number where a field's meaning changes."""
FindingKind = Literal["ghost", "orphan", "stranger", "corrupt", "expired", "old_epoch", "leftover"]
"""``expired``: not used for so long (``ttl_s``) that its record ran out; ``old_epoch``: of weights
that are not served any more; ``leftover``: neither payload nor document, or in quarantine. The next
sweep removes these three; the others are what should not be there."""
Ending = Literal["complete", "interrupted", "deadline"]


@dataclass(frozen=True, slots=True)
class AgeBucket:
    """Chunks whose age is in ``[start_s, end_s)``."""

    start_s: int
    end_s: int | None
    """None: without an upper bound."""
    chunks: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class AgesAudit:
    """How old chunks are, and how long ago they were used; buckets of both in the same order."""

    age: tuple[AgeBucket, ...]
    """Since the chunk's newest payload was written."""
    last_use: tuple[AgeBucket, ...]
    """Since the chunk's last hit; empty where hits are not counted."""
    never_used_chunks: int | None
    never_used_bytes: int | None


@dataclass(frozen=True, slots=True)
class GrowthDay:
    """What of today's store was written on one day, UTC."""

    day: str
    """``2026-11-20``."""
    chunks: int
    payloads: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GrowthAudit:
    """Growth, as far as what is still stored tells it: what was swept is not in here."""

    days: tuple[GrowthDay, ...]
    """Oldest first, without gaps, the last 400 at most."""
    before: GrowthDay | None
    """All days before these in one, named by the first of them."""
    bytes_per_day: float | None
    """Mean of the last 7 whole days in which the store existed; None before there is one."""
    payloads_per_day: float | None
    """Written on the last whole day, of which least was swept."""


@dataclass(frozen=True, slots=True)
class Prices:
    """What is paid, in US dollars."""

    gb_month: float
    """For 10^9 bytes in a month."""
    per_1000_puts: float
    per_1000_gets: float


@dataclass(frozen=True, slots=True)
class TenantCost:
    """A tenant's part, by its bytes, payloads and hits."""

    tenant: str | None
    storage: float
    requests: float
    month: float


@dataclass(frozen=True, slots=True)
class CostAudit:
    """What the bulk store costs in a month at its size and use of today, in US dollars."""

    prices: Prices
    storage: float
    puts: float
    """Payloads written in a month, if each day is as the last whole one was."""
    gets: float | None
    """Payloads loaded in a month, by each chunk's hits since it was saved; those that lie hot too
    are not counted."""
    requests: float
    """Of both, as far as they are known."""
    month: float
    next_month: float | None
    """With 30 more days of this growth, if nothing is swept."""
    unused: float | None
    """Part of ``storage`` for chunks that nobody has used."""
    tenants: tuple[TenantCost, ...]


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """One thing that is not as it should be."""

    kind: FindingKind
    key: str
    """Where it is in the bulk store, or was to be."""
    nbytes: int
    detail: str


@dataclass(frozen=True, slots=True)
class FindingCount:
    """How many there are of one kind."""

    kind: FindingKind
    count: int
    nbytes: int
    young: int
    """Orphans that were written at most ``sweep_grace_s`` before the walk began, or since: they may
    have got their records meanwhile, or be about to."""
    remedy: str
    """What to do, in a sentence with the command."""


@dataclass(frozen=True, slots=True)
class FindingsAudit:
    """What is wrong, by kind in the order of ``FindingKind``, and the first few by name."""

    counts: tuple[FindingCount, ...]
    first: tuple[AuditFinding, ...]
    omitted: int
    """Found, counted and not named here."""


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """One field of two identities."""

    field: str
    a: str
    b: str
    why: str
    fix: str


@dataclass(frozen=True, slots=True)
class IdentityDifference:
    """Why two namespaces do not share."""

    a: str
    b: str
    """Namespaces."""
    reason: str
    """One sentence."""
    fields: tuple[FieldDifference, ...]
    """What there is to change; what only follows from it is left out."""


@dataclass(frozen=True, slots=True)
class AuditReport:
    """Everything."""

    made_s: int
    begun_s: int
    """When the walk began; nothing that was seen is older."""
    version: str
    """Of objkv."""
    bulk_url: str
    index_url: str
    """Both without secrets."""
    ending: Ending
    """Unless ``complete``, all numbers are of the part that was looked at."""
    parts_done: int
    parts: int
    """Of the walk: folders of the bulk store, and namespaces of the index."""
    resumed: bool
    totals: AuditTotals
    namespaces: tuple[NamespaceAudit, ...]
    """Largest first."""
    tenants: tuple[TenantAudit, ...]
    """Largest first."""
    depths: tuple[DepthAudit, ...]
    """By namespace in the order of ``namespaces``, then by depth."""
    roots: tuple[RootAudit, ...]
    """The largest, largest first."""
    roots_omitted: int
    tree: tuple[TreeNode, ...]
    """Parents before children; at most 2,000 nodes."""
    ages: AgesAudit
    growth: GrowthAudit
    cost: CostAudit
    findings: FindingsAudit
    differences: tuple[IdentityDifference, ...]
    differences_omitted: int
    """Pairs of namespaces that are not compared here."""
    problems: tuple[str, ...]
    """Sentences: what the reader must know to judge the numbers, the worst first."""
