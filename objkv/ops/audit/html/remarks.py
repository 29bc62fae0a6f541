"""What of an audit deserves to be read first: sentences with the numbers they rest on, worst first.

Nothing in here is a guess: a sentence whose numbers are not known is not said.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from objkv.ops.audit.report import AuditReport, FindingKind
from objkv.ops.formats import brief, count, dollars, noun, sentence, share, size, times

Level = Literal["bad", "warn", "info", "good"]

KINDS: Final[dict[FindingKind, tuple[str, str]]] = {
    "ghost": ("Ghosts", "recorded in the index, but not in the bulk store"),
    "orphan": ("Orphans", "in the bulk store, but nobody finds them: they have no record"),
    "stranger": ("Strangers", "of namespaces that no identity document explains"),
    "corrupt": (
        "Corrupt",
        "stored, but damaged: of the wrong length, or with a header that is not right",
    ),
    "expired": ("Expired", "not used for so long (ttl_s) that their record ran out"),
    "old_epoch": ("Old epochs", "of weights that are not served any more"),
    "leftover": ("Leftovers", "of writers that were killed, or in quarantine"),
}
TO_MEND: Final[tuple[FindingKind, ...]] = ("ghost", "orphan", "stranger", "corrupt")
"""What should not be there; all else goes with the next sweep."""
_NAMES: Final[dict[FindingKind, str]] = {
    "corrupt": "corrupt payload",
    "expired": "expired payload",
    "old_epoch": "payload",
}
_AFTER: Final[dict[FindingKind, str]] = {"old_epoch": " of an earlier weights_epoch"}
_ORDER: Final = ("bad", "warn", "info", "good")
_UNUSED_SHARE: Final = 0.25
_FULL_SHARE: Final = 0.8


@dataclass(frozen=True, slots=True)
class Remark:
    """One sentence, and what follows from it."""

    level: Level
    title: str
    detail: str


def name_of(kind: FindingKind, found: int) -> str:
    """``ghost``, ``ghosts``."""
    return f"{noun(found, _NAMES.get(kind, kind))}{_AFTER.get(kind, '')}"


def remarks(report: AuditReport) -> list[Remark]:
    """The worst first."""
    every = [*_findings(report), *_prefixes(report), *_use(report), *_places(report)]
    every += [*_sharing(report), *_growth(report)]
    if not any(count.count for count in report.findings.counts):
        every.append(_agreement(report))
    return sorted(every, key=lambda remark: _ORDER.index(remark.level))


def _agreement(report: AuditReport) -> Remark:
    """Where nothing wrong was found: what that says of now."""
    if is_of_now(report):
        told = f"All {count(report.totals.payloads)} payloads have the record they should have; "
        told += "names and lengths were compared, bytes are what objkv verify reads."
        return Remark("good", "Index and bulk store agree", told)
    seen = "part of what was told here was seen in an earlier run, and may be gone since"
    if report.ending != "complete":
        seen = "not everything was looked at"
    unknown = "Whether index and bulk store agree is not known"
    return Remark("info", unknown, f"Nothing wrong in what was seen, but {seen}.")


def is_of_now(report: AuditReport) -> bool:
    """Whether all of it was seen, and in this run."""
    return report.ending == "complete" and not report.resumed


def _findings(report: AuditReport) -> Iterator[Remark]:
    for found in report.findings.counts:
        old = found.count - found.young
        if not found.count:
            continue
        _, meaning = KINDS[found.kind]
        level: Level = "bad" if found.kind == "corrupt" else "warn"
        if not old or found.kind not in TO_MEND:
            level = "info"
        young = ""
        if found.young:
            are = "is" if found.young == 1 else "are"
            young = f" {count(found.young)} {are} young, saved while the audit went on or just "
            young += "before: replicas leave such for a moment."
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
            "the beginning",
            f"{size(nbytes)} that no request can use until the first chunks are saved again.",
        )
    best = max(report.roots, key=lambda root: root.hits or 0, default=None)
    if best is not None and best.hits and report.totals.hits:
        told = f"Prefix {best.hash[:8]} of {best.namespace[:8]} had {count(best.hits)} "
        told += f"{noun(best.hits, 'hit')}, "
        told += (
            f"{share(best.hits, report.totals.hits)} of all; {count(best.shared_tokens)} "
            f"{noun(best.shared_tokens, 'token is', 'tokens are')} "
        )
        told += "common to all that begins with it"
        told += f", and each of its bytes was loaded {times(best.reuse)}." if best.reuse else "."
        yield Remark("good", "The most used prefix", told)


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
            f"{size(totals.unused_bytes)}{cost}. Prompts that come once are saved like all others; "
            "a shorter ttl_s or a quota lets go of them sooner.",
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
                f"{size(tenant.nbytes)} of {size(tenant.quota_bytes)}: saves stop when it is full, "
                "and objkv sweep gives up what is used least.",
            )


def _sharing(report: AuditReport) -> Iterator[Remark]:
    models = {one.namespace: one.model for one in report.namespaces}
    same = [
        pair
        for pair in report.differences
        if models.get(pair.a) is not None and models.get(pair.a) == models.get(pair.b)
    ]
    if same:
        first = same[0]
        yield Remark(
            "info",
            f"{count(len(same))} {noun(len(same), 'pair')} of namespaces of the same model "
            "do not share",
            f"{first.a[:8]} and {first.b[:8]}, for one: {first.reason}.",
        )


def _growth(report: AuditReport) -> Iterator[Remark]:
    growth, totals = report.growth, report.totals
    if not growth.bytes_per_day or not totals.nbytes:
        return
    days = totals.nbytes / growth.bytes_per_day
    then = report.cost.next_month
    price = f" In a month it would cost {dollars(then)} a month." if then is not None else ""
    yield Remark(
        "info",
        f"It grows by {size(growth.bytes_per_day)} a day",
        f"At that pace, and without a sweep, it is twice as large in {brief(days)} "
        f"{noun(round(days), 'day')}.{price}",
    )
