"""The report of an audit as plain values, for the tables, for ``--json`` and for the HTML page.

Names, units and meanings are a promise to scripts (``docs/audit.md``): fields may be added, but no
field changes its meaning. ``None`` means unknown, never zero. Bytes are bytes in the bulk store,
times are seconds since the epoch, and token ranges are ``[start, end)``. Texts are untrusted: the
code that shows them masks or escapes them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from objkv.config.prices import Prices
from objkv.ops.inventory.findings import Findings
from objkv.ops.inventory.tree import Branch
from objkv.ops.pin import PinnedPrefix


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
    newest_s: int | None
    last_used_s: int | None
    """When a chunk was last hit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditTotals(StoredAudit):
    """The sums over all namespaces."""

    namespaces: int
    tenants: int


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
    """Whether its identity document is valid; otherwise its payloads are unidentified."""
    problem: str | None
    findings: Mapping[str, int]
    """How many it has of each kind that it has at all."""
    faults: int
    """Those that should not exist: no young orphans, and nothing that the next sweep removes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantAudit(StoredAudit):
    """All namespaces of one tenant."""

    tenant: str | None
    """None for namespaces whose identity document is unreadable."""
    namespaces: int
    quota_bytes: int | None
    """The quota in this command's settings; None for no limit."""
    month: float
    """What its bytes cost in a month, in US dollars."""


JSON_FORMAT: Final = 3
"""Of the JSON document. It increases when a field changes its meaning."""


@dataclass(frozen=True, slots=True)
class CostAudit:
    """Monthly cost of storing what is stored now, in US dollars, without requests, which
    ``objkv size`` estimates."""

    prices: Prices
    month: float
    unused: float | None
    """The part of it for chunks that were never used."""


@dataclass(frozen=True, slots=True)
class SavingsAudit:
    """The savings by loads, as the replicas that loaded measured them. They outlive the chunks.
    Measured are the loads, their duration, and how long the same replica computed a token of a
    prompt at that time. Assumed is that it would have computed every loaded token at this pace."""

    first_month: str | None
    """Since when replicas have reported; None, like all sums, if none has."""
    loads: int | None
    tokens: int | None
    timed_tokens: int | None
    """Those of replicas that had measured how fast they compute; the next numbers cover these."""
    compute_gpu_s: float | None
    """Computing time of these tokens, times the GPUs of the replica."""
    load_gpu_s: float | None
    """Duration of their loads, times the GPUs of the replica, as if all GPUs had waited."""
    gpu_s: float | None
    """The difference: GPU seconds saved."""
    usd: float | None
    """Price of ``gpu_s``; None without a price per GPU hour."""


LifecycleStatus = Literal["fits", "conflicts", "none", "unknown"]


@dataclass(frozen=True, slots=True)
class LifecycleAudit:
    """Whether the bucket's lifecycle rules fit the settings."""

    status: LifecycleStatus
    """``none``: no rule deletes payloads. ``unknown``: the rules could not be read."""
    expire_days: int | None
    """Age at which a rule deletes payloads."""
    detail: str
    """The findings in sentences, with what to do."""


AuditVerdict = Literal["corrupt", "faults", "fine"]


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
    totals: AuditTotals
    namespaces: tuple[NamespaceAudit, ...]
    """Largest first."""
    tenants: tuple[TenantAudit, ...]
    """Largest first."""
    tree: tuple[Branch, ...]
    """The 2,000 largest branches of prefixes, each after the one that it continues."""
    cost: CostAudit
    findings: Findings
    namespace: str | None
    """The one namespace that was audited; None for all."""
    savings: SavingsAudit
    pins: tuple[PinnedPrefix, ...]
    """Active pins, the next to end first."""
    lifecycle: LifecycleAudit | None
    """None if the bulk store is not a bucket."""
    problems: tuple[str, ...]
    """Sentences that qualify the numbers, worst first."""
    is_doubted: bool = False
    """Whether index and bulk store do not seem to belong together."""

    @property
    def roots(self) -> tuple[Branch, ...]:
        """The branches of ``tree`` with which a prefix begins."""
        return tuple(one for one in self.tree if one.parent is None)


def verdict(report: AuditReport) -> AuditVerdict:
    """Return the worst finding. Young orphans are no faults: their records may yet come."""
    found = {one.kind: one.faults for one in report.findings.counts}
    if found["corrupt"]:
        return "corrupt"
    return "faults" if any(found.values()) or report.is_doubted else "fine"
