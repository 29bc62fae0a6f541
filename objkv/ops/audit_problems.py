"""What a reader of an audit must know to judge its numbers: one sentence each, the worst first."""

from collections.abc import Iterator, Sequence

from objkv.ops.audit_findings import Walked
from objkv.ops.audit_report import AuditReport
from objkv.ops.ends import QUARANTINE
from objkv.ops.report.figures import noun, span

_NAMES_SHOWN = 3
_MOST = 0.5
_FEW = 20
"""Payloads of which most may be wrong by chance."""


def problems(
    report: AuditReport,
    walked: dict[str, Walked],
    *,
    others: Sequence[str],
    met: Sequence[str],
    namespaces_omitted: int,
) -> tuple[str, ...]:
    """Of ``report``, which has none yet. ``others``: folders that are not objkv's; ``met``: what
    could not be looked at; ``namespaces_omitted``: by the tree."""
    has_index = report.totals.records is not None
    found = [*_early(report), *_resumed(report), *(_ends(report) if has_index else ())]
    found += [*_namespaces(report, walked), *met]
    if namespaces_omitted:
        found.append(
            f"the tree leaves out the {namespaces_omitted} smallest "
            f"{noun(namespaces_omitted, 'namespace')}"
        )
    if not has_index and report.totals.payloads:
        found.append(
            "the bulk store is its own index: nothing expires, hits are not counted, and what is "
            "told of chunks was read from the headers of payloads"
        )
    if others:
        found.append(f"{_listed(others)}: not of objkv, and not looked at")
    return tuple(found)


def foreign_folders(folders: Sequence[str], namespaces: Sequence[str]) -> list[str]:
    """Those of the bulk store's folders that are not of objkv."""
    return [name for name in folders if name not in namespaces and name != QUARANTINE]


def _early(report: AuditReport) -> Iterator[str]:
    if report.ending == "complete":
        return
    why = "it was interrupted" if report.ending == "interrupted" else "the time was over"
    yield (
        f"{report.parts_done:,} of {report.parts:,} parts were looked at, because {why}: all "
        "numbers are of these; the same command goes on from there"
    )


def _resumed(report: AuditReport) -> Iterator[str]:
    if report.resumed:
        ago = span(report.made_s - report.begun_s)
        yield (
            f"an earlier walk was continued, which began {ago} ago: what it had seen by then is "
            "told as it was, and may have changed or gone since; --restart looks at all anew"
        )


def _ends(report: AuditReport) -> Iterator[str]:
    """Where both ends do not seem to belong together."""
    totals = report.totals
    counts = {one.kind: one.count for one in report.findings.counts}
    lost = sum(one.count - one.young for one in report.findings.counts if one.kind == "orphan")
    if report.ending != "complete":
        return
    if totals.payloads and not totals.records and counts["orphan"] + counts["expired"]:
        yield (
            "the index has no record of any payload: it was lost, index_url or redis_prefix is "
            "not the one of this bucket, or nothing was used for long; objkv rebuild restores it"
        )
    elif lost > _FEW and lost > _MOST * totals.payloads:
        yield (
            f"{lost:,} of {totals.payloads:,} payloads have no record, although they "
            "are younger than a record's life: most of the index was lost, or it is another's; "
            "objkv rebuild restores it"
        )
    if counts["ghost"] and not totals.payloads:
        yield (
            "the bulk store has none of the payloads that the index knows: bulk_url is not the "
            "one of this index, or it was emptied"
        )
    elif counts["ghost"] > _FEW and counts["ghost"] > totals.payloads:
        yield (
            f"{counts['ghost']:,} records have no payload, more than there are payloads: was the "
            "bucket emptied, by a lifecycle rule for example?"
        )


def _namespaces(report: AuditReport, walked: dict[str, Walked]) -> Iterator[str]:
    strangers = [one.namespace for one in report.namespaces if not one.is_known and one.payloads]
    if strangers:
        yield f"{_listed(strangers)}: payloads without a valid identity document"
    old = [name for name, one in walked.items() if one.is_old]
    if old:
        yield f"{_listed(old)}: of an earlier weights_epoch; objkv sweep removes it"
    gone = sum(one.token_start > 0 for one in report.roots)
    if gone:
        yield (
            f"{gone} of the largest {len(report.roots)} "
            f"{noun(len(report.roots), 'prefix', 'prefixes')} "
            f"{noun(gone, 'has lost its', 'have lost their')} beginning: what "
            "follows it can not be loaded"
        )
    for tenant in report.tenants:
        if tenant.quota_bytes is not None and tenant.nbytes > tenant.quota_bytes:
            yield f"tenant {tenant.tenant} is above its quota"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    shown = ", ".join(names[:_NAMES_SHOWN])
    return f"{shown} and {more:,} more" if more > 0 else shown
