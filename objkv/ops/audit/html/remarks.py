"""The main findings of an audit: sentences with the numbers behind them, worst first.

A remark whose numbers are unknown is omitted.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from objkv.ops.audit.report import AuditReport, FindingKind
from objkv.ops.formats import count, dollars, noun, sentence, share, size, times

Level = Literal["bad", "warn", "info", "good"]

KINDS: Final[dict[FindingKind, tuple[str, str]]] = {
    "ghost": ("Ghosts", "with a record in the index but missing from the bulk store"),
    "orphan": ("Orphans", "in the bulk store but without a record, so readers cannot find them"),
    "stranger": ("Strangers", "in namespaces without a valid identity document"),
    "corrupt": ("Corrupt", "stored but damaged: the length or the header is wrong"),
    "expired": ("Expired", "without a record because they were not used for ttl_s"),
    "old_epoch": ("Old epochs", "from weights or a format no longer served"),
    "leftover": ("Leftovers", "left by killed writers, or in quarantine"),
}
FAULTS: Final[tuple[FindingKind, ...]] = ("ghost", "orphan", "stranger", "corrupt")
"""Kinds that should not exist. The next sweep removes all other kinds."""
_NAMES: Final[dict[FindingKind, str]] = {
    "corrupt": "corrupt payload",
    "expired": "expired payload",
    "old_epoch": "payload",
}
_AFTER: Final[dict[FindingKind, str]] = {"old_epoch": " from an earlier weights_epoch or format"}
_ORDER: Final = ("bad", "warn", "info", "good")
_UNUSED_SHARE: Final = 0.25
_FULL_SHARE: Final = 0.8


@dataclass(frozen=True, slots=True)
class Remark:
    """One finding and its consequences."""

    level: Level
    title: str
    detail: str


def name_of(kind: FindingKind, found: int) -> str:
    """Return the name of a kind: ``ghost``, ``ghosts``."""
    return f"{noun(found, _NAMES.get(kind, kind))}{_AFTER.get(kind, '')}"


def remarks(report: AuditReport) -> list[Remark]:
    """Return the remarks, worst first."""
    every = [*_findings(report), *_prefixes(report), *_use(report), *_places(report)]
    if not any(count.count for count in report.findings.counts):
        every.append(_agreement(report))
    return sorted(every, key=lambda remark: _ORDER.index(remark.level))


def _agreement(report: AuditReport) -> Remark:
    """The remark of a report without findings."""
    if report.ending == "complete":
        payloads = count(report.totals.payloads)
        detail = f"All {payloads} payloads have the expected record. The audit compared names and "
        detail += "lengths; objkv verify checks the bytes."
        return Remark("good", "Index and bulk store agree", detail)
    unknown = "The agreement of index and bulk store is unknown"
    return Remark("info", unknown, "This audit found no faults, but it is not complete.")


def _findings(report: AuditReport) -> Iterator[Remark]:
    for found in report.findings.counts:
        old = found.count - found.young
        if not found.count:
            continue
        _, meaning = KINDS[found.kind]
        level: Level = "bad" if found.kind == "corrupt" else "warn"
        if not old or found.kind not in FAULTS:
            level = "info"
        young = ""
        if found.young:
            are = "is" if found.young == 1 else "are"
            young = f" {count(found.young)} {are} young: saved during the audit or just before, "
            young += "so their records may still be published."
        yield Remark(
            level,
            f"{count(found.count)} {name_of(found.kind, found.count)}, {size(found.nbytes)}",
            f"Payloads {meaning}.{young} {sentence(found.remedy)}",
        )


def _prefixes(report: AuditReport) -> Iterator[Remark]:
    lost = [root for root in report.roots if root.token_start > 0]
    if lost:
        nbytes = sum(root.nbytes for root in lost)
        yield Remark(
            "warn",
            f"{count(len(lost))} {noun(len(lost), 'prefix has', 'prefixes have')} lost "
            "the first chunks",
            f"No request can use these {size(nbytes)} until the first chunks are saved again.",
        )
    best = max(report.roots, key=lambda root: root.hits or 0, default=None)
    if best is not None and best.hits and report.totals.hits:
        detail = f"Prefix {best.hash[:8]} of {best.namespace[:8]} had {count(best.hits)} "
        detail += f"{noun(best.hits, 'hit')}, {share(best.hits, report.totals.hits)} of all. "
        detail += f"All its prompts share {count(best.shared_tokens)} "
        detail += noun(best.shared_tokens, "token")
        if best.reuse:
            detail += f", and each stored byte was loaded {times(best.reuse)} on average"
        yield Remark("good", "The most used prefix", f"{detail}.")


def _use(report: AuditReport) -> Iterator[Remark]:
    totals = report.totals
    if totals.unused_bytes is None or not totals.nbytes:
        return
    part = totals.unused_bytes / totals.nbytes
    price = report.cost.unused
    cost = f", {dollars(price)} a month" if price is not None else ""
    if part >= _UNUSED_SHARE:
        yield Remark(
            "warn" if part >= 2 * _UNUSED_SHARE else "info",
            f"{share(totals.unused_bytes, totals.nbytes)} of all bytes were never used",
            f"{size(totals.unused_bytes)}{cost}. Prompts that occur once are saved like all "
            "others. A shorter ttl_s or a quota removes them sooner.",
        )
    elif totals.hits:
        yield Remark(
            "good",
            f"{share(totals.nbytes - totals.unused_bytes, totals.nbytes)} of all bytes are used",
            f"Chunks were hit {count(totals.hits)} {noun(totals.hits, 'time')}.",
        )


def _places(report: AuditReport) -> Iterator[Remark]:
    for tenant in report.tenants:
        if tenant.quota_bytes and tenant.nbytes >= _FULL_SHARE * tenant.quota_bytes:
            used = share(tenant.nbytes, tenant.quota_bytes)
            yield Remark(
                "warn",
                f"Tenant {tenant.tenant or '(unknown)'} has used {used} of its quota",
                f"{size(tenant.nbytes)} of {size(tenant.quota_bytes)}. Saves stop when the quota "
                "is full, and objkv sweep --apply evicts the least used chunks.",
            )
