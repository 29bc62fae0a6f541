"""How ``objkv audit`` tells its report: tables, one JSON document, and the page."""

import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from objkv.cli.output import Output, age, plain, size
from objkv.ops.audit_report import JSON_FORMAT, AuditReport, NamespaceAudit, RootAudit
from objkv.ops.report import html_report

_HASH = 12
_NAMED = 3
"""Findings of each kind."""
_DIFFERENCES = 5


def write_html(report: AuditReport, file: Path, *, private: bool) -> None:
    """The page, whole or not at all; ``private``: for its owner's eyes only."""
    page = html_report(report).encode()
    file = file.absolute()
    fd, name = tempfile.mkstemp(prefix=f".{file.name}-", dir=file.parent)
    try:
        with os.fdopen(fd, "wb") as opened:
            opened.write(page)
        if not private:
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(name, 0o666 & ~mask)
        os.replace(name, file)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def show_report(
    out: Output, report: AuditReport, *, limit: int, html: Path | None, is_kept: bool
) -> None:
    """Print it."""
    if out.machine:
        out.document(
            {
                "command": "audit",
                "format": JSON_FORMAT,
                "complete": report.ending == "complete",
                "html": None if html is None else str(html),
                **plain(report),
            }
        )
        return
    if not report.namespaces and report.ending == "complete":
        out.line(f"nothing is stored in {report.bulk_url}, and nothing in {report.index_url}")
    else:
        _totals(out, report)
        _namespaces(out, report, limit)
        _tenants(out, report, limit)
        _roots(out, report, limit)
        _findings(out, report)
        _costs(out, report)
        _differences(out, report)
    for problem in report.problems:
        out.line(problem, "yellow")
    if html is not None:
        out.line(f"the page is in {html}")
    if report.ending != "complete":
        why = "interrupted" if report.ending == "interrupted" else "the time is over"
        go_on = ": run the same command again to go on" if is_kept else ""
        out.line(f"not complete, {why}{go_on}", "yellow")


def _totals(out: Output, report: AuditReport) -> None:
    totals = report.totals
    out.line(
        f"{totals.chunks:,} chunks, {totals.payloads:,} payloads, {size(totals.nbytes)}, "
        f"{_number(totals.tokens)} tokens; {totals.namespaces:,} namespaces, {totals.tenants:,} "
        f"tenants, {totals.roots:,} prefixes"
    )
    if totals.records is not None and totals.used_chunks is not None:
        used = 100 * totals.used_chunks / max(1, totals.records)
        out.line(
            f"{_number(totals.hits)} hits; {totals.used_chunks:,} of {totals.records:,} recorded "
            f"chunks were used ({used:.0f} %), {size(totals.unused_bytes)} never"
        )
    out.line()


def _namespaces(out: Output, report: AuditReport, limit: int) -> None:
    columns = (
        "namespace", "model", "tenant", ">prefixes", ">chunks", ">tokens", ">bytes", ">hits",
        ">used", ">newest", ">oldest", ">last used", ">wrong",
    )  # fmt: skip
    rows = [_namespace_row(one, report.made_s) for one in report.namespaces[:limit]]
    out.table(columns, rows)
    _more(out, len(report.namespaces) - limit)


def _namespace_row(one: NamespaceAudit, now_s: int) -> Sequence[object]:
    return (
        one.namespace,
        one.model if one.is_known else one.problem,
        one.tenant,
        one.roots,
        one.chunks,
        one.tokens,
        size(one.nbytes),
        one.hits,
        one.used_chunks,
        age(one.newest_s, now_s),
        age(one.oldest_s, now_s),
        age(one.last_used_s, now_s),
        one.to_mend,
    )


def _tenants(out: Output, report: AuditReport, limit: int) -> None:
    if len(report.tenants) < 2 and not any(one.quota_bytes for one in report.tenants):
        return
    out.line()
    columns = ("tenant", ">namespaces", ">chunks", ">bytes", ">quota", ">hits", ">unused", ">month")
    month = {one.tenant: one.month for one in report.cost.tenants}
    rows = [
        (
            one.tenant if one.tenant is not None else "(not known)",
            one.namespaces,
            one.chunks,
            size(one.nbytes),
            size(one.quota_bytes),
            one.hits,
            size(one.unused_bytes),
            _usd(month.get(one.tenant)),
        )
        for one in report.tenants[:limit]
    ]
    out.table(columns, rows)
    _more(out, len(report.tenants) - limit)


def _roots(out: Output, report: AuditReport, limit: int) -> None:
    if not report.roots:
        return
    out.line()
    columns = (
        "largest prefixes", "namespace", ">chunks", ">bytes", ">shared", ">branches", ">ends",
        ">hits", ">reuse", ">last used", "text",
    )  # fmt: skip
    rows = [_root_row(one, report.made_s) for one in report.roots[:limit]]
    out.table(columns, rows)
    _more(out, max(0, len(report.roots) - limit) + report.roots_omitted)


def _root_row(one: RootAudit, now_s: int) -> Sequence[object]:
    gone = f"tokens before {one.token_start:,} are gone: unusable" if one.token_start else None
    return (
        one.hash[:_HASH],
        one.namespace[:8],
        one.chunks,
        size(one.nbytes),
        f"{one.shared_tokens:,} tokens",
        one.branches,
        one.leaves,
        one.hits,
        None if one.reuse is None else f"{one.reuse:.1f}",
        age(one.last_used_s, now_s),
        one.label or gone or "",
    )


def _findings(out: Output, report: AuditReport) -> None:
    rows = [
        (one.kind, one.count, size(one.nbytes), one.young, one.remedy)
        for one in report.findings.counts
        if one.count
    ]
    out.line()
    if not rows:
        out.line("nothing is wrong" if report.ending == "complete" else "nothing wrong so far")
        return
    out.table(("found", ">count", ">bytes", ">young", "what to do"), rows)
    first = report.findings.first
    named = [
        one
        for kind in dict.fromkeys(one.kind for one in first)
        for one in [one for one in first if one.kind == kind][:_NAMED]
    ]
    out.table(("", "", ""), [(one.kind, one.key, one.detail) for one in named])
    left = len(first) - len(named) + report.findings.omitted
    if left:
        out.line(f"{left:,} more: --json names the first 100 of each kind")


def _costs(out: Output, report: AuditReport) -> None:
    cost, growth = report.cost, report.growth
    out.line()
    if growth.bytes_per_day is not None:
        out.line(f"grows by {size(int(growth.bytes_per_day))} a day, of what is still stored")
    more = "" if cost.next_month is None else f", {_usd(cost.next_month)} a month from now"
    unused = "" if cost.unused is None else f" ({_usd(cost.unused)} for what nobody used)"
    out.line(
        f"costs {_usd(cost.month)} a month{more}: storage {_usd(cost.storage)}{unused}, requests "
        f"{_usd(cost.requests)}, at {cost.prices.gb_month:g} $/GB"
    )


def _differences(out: Output, report: AuditReport) -> None:
    if not report.differences:
        return
    out.line()
    for one in report.differences[:_DIFFERENCES]:
        out.line(f"{one.a[:8]} and {one.b[:8]}: {one.reason}")
    left = len(report.differences) - _DIFFERENCES + report.differences_omitted
    if left > 0:
        out.line(f"{left:,} more pairs; objkv diff compares two")


def _more(out: Output, omitted: int) -> None:
    if omitted > 0:
        out.line(f"{omitted:,} more")


def _usd(value: float | None) -> str:
    if value is None:
        return "-"
    return f"${value:,.2f}" if value >= 1 or value == 0 else f"${value:.2g}"


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"
