"""``objkv audit``: a report of contents, owners, usage, cost and faults."""

import os
import secrets
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from objkv import __version__
from objkv.assembly.backends import read_lifecycle
from objkv.cli.command import FINE, FOUND, Session, command
from objkv.cli.options import Namespace, check_file
from objkv.cli.output import Printer, counted, plain
from objkv.cli.upkeep import upkeep
from objkv.config.prices import audit_prices
from objkv.errors import ConfigError
from objkv.ops.audit.audit import audit_stages, make_report
from objkv.ops.audit.report import JSON_FORMAT, AuditReport, SavingsAudit, verdict
from objkv.ops.formats import age, dollars, duration, moment, share, size
from objkv.ops.runs import Finding


def write_html(report: AuditReport, file: Path) -> None:
    """Write the page to ``file`` atomically."""
    from objkv.ops.audit.html.page import html_report  # late: it imports jinja2

    page, file = html_report(report), file.absolute()
    partial = file.with_name(f".{file.name}-{secrets.token_hex(4)}")
    opened = partial.open("x", encoding="utf-8")  # a file that exists is another writer's
    try:
        with opened:
            opened.write(page)
        os.replace(partial, file)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def show_report(out: Printer, report: AuditReport, *, limit: int, html: Path | None) -> None:
    """Print the report: at most ``limit`` rows of each table, or one JSON document."""
    head = {"command": "audit", "format": JSON_FORMAT, "verdict": verdict(report), "html": html}
    if out.machine:
        out.document({**head, **plain(report)})
        return
    if not report.namespaces:
        out.line(f"nothing is stored in {report.bulk_url} yet")
    else:
        _totals(out, report)
        _namespaces(out, report, limit)
        _tenants(out, report, limit)
        _roots(out, report, limit)
        _findings(out, report, limit)
        _answers(out, report, limit)
    for problem in report.problems:
        out.line(problem, "yellow")


def _totals(out: Printer, report: AuditReport) -> None:
    totals = report.totals
    if headline := _HEADLINES.get(verdict(report)):
        out.line(*headline)
    out.line(
        f"{counted(totals.chunks, 'chunk')}, {counted(totals.payloads, 'payload')}, "
        f"{size(totals.nbytes)}, {_counted(totals.tokens, 'token')}; "
        f"{counted(totals.namespaces, 'namespace')}, {counted(totals.tenants, 'tenant')}, "
        f"{counted(totals.roots, 'prefix', 'prefixes')}"
    )
    if totals.used_chunks is not None:
        used = f"{totals.used_chunks:,} of {counted(totals.chunks, 'chunk')}"
        were = "was" if totals.chunks == 1 else "were"
        out.line(
            f"{_counted(totals.hits, 'hit')}; {used} {were} used "
            f"({share(totals.used_chunks, totals.chunks)}), {size(totals.unused_bytes)} never used"
        )
    out.line()


def _namespaces(out: Printer, report: AuditReport, limit: int) -> None:
    now_s = report.made_s
    columns = (
        "namespace", "model", "tenant", ">bytes", ">chunks", ">hits", ">faults", ">last used",
        ">used", ">prefixes", ">tokens", ">newest", ">oldest",
    )  # fmt: skip
    rows = [
        (one.namespace, one.model if one.is_known else one.problem, one.tenant, size(one.nbytes),
         one.chunks, one.hits, one.faults, age(one.last_used_s, now_s), one.used_chunks, one.roots,
         one.tokens, age(one.newest_s, now_s), age(one.oldest_s, now_s))
        for one in report.namespaces[:limit]
    ]  # fmt: skip
    _table(out, columns, rows, len(report.namespaces))


def _tenants(out: Printer, report: AuditReport, limit: int) -> None:
    if len(report.tenants) < 2 and not any(one.quota_bytes for one in report.tenants):
        return
    out.line()
    columns = ("tenant", ">bytes", ">quota", ">month", ">unused", ">hits", ">chunks", ">namespaces")
    rows = [
        ("(unknown)" if one.tenant is None else one.tenant, size(one.nbytes),
         size(one.quota_bytes), dollars(one.month), size(one.unused_bytes), one.hits, one.chunks,
         one.namespaces)
        for one in report.tenants[:limit]
    ]  # fmt: skip
    _table(out, columns, rows, len(report.tenants))


def _roots(out: Printer, report: AuditReport, limit: int) -> None:
    if not report.roots:
        return
    out.line()
    columns = (
        "largest prefixes", "namespace", ">bytes", ">hits", "~notes", ">last used", ">chunks",
        ">shared", ">ends",
    )  # fmt: skip
    rows = [
        (one.hash, one.namespace, size(one.tree_bytes), one.tree_hits,
         f"unusable: tokens before {one.token_start:,} are gone" if one.token_start else "",
         age(one.last_used_s, report.made_s), one.tree_chunks,
         counted(one.token_end - one.token_start, "token"), one.leaves)
        for one in report.roots[:limit]
    ]  # fmt: skip
    _table(out, columns, rows, report.totals.roots)


def _findings(out: Printer, report: AuditReport, limit: int) -> None:
    rows = [
        (one.kind, one.count, size(one.nbytes), one.young or None, one.remedy)
        for one in report.findings.counts
        if one.count
    ]
    out.line()
    if not rows:
        out.line("nothing is wrong; payload bytes were not checked (use objkv verify)")
        return
    out.table(("finding", ">count", ">bytes", ">young", "~what to do"), rows)
    named = _named(report.findings.first, limit)
    out.table(("", "", "~"), [(one.kind, one.key, one.detail) for one in named])
    left = len(report.findings.first) - len(named) + report.findings.omitted
    if left:
        out.line(f"{left:,} more; --json lists the first 100 of each kind")


def _named(first: Sequence[Finding], limit: int) -> list[Finding]:
    """Return ``limit`` findings in their order, spread evenly over the kinds."""
    seen: Counter[str] = Counter()
    turns = []
    for place, one in enumerate(first):
        turns.append((seen[one.kind], place))
        seen[one.kind] += 1
    return [first[place] for place in sorted(place for _, place in sorted(turns)[:limit])]


def _table(
    out: Printer, columns: Sequence[str], rows: Sequence[Sequence[object]], every: int
) -> None:
    """Print the first rows of a table that has ``every``."""
    out.table(columns, rows)
    if every > len(rows):
        out.line(f"{every - len(rows):,} more")


def _counted(value: int | None, one: str) -> str:
    return f"- {one}s" if value is None else counted(value, one)


def _answers(out: Printer, report: AuditReport, limit: int) -> None:
    """Print a line each for cost, savings and lifecycle rules, and at most ``limit`` pins."""
    savings, lifecycle, cost = report.savings, report.lifecycle, report.cost
    unused = "" if cost.unused is None else f" (unused chunks {dollars(cost.unused)})"
    out.line()
    out.line(f"storage: {dollars(cost.month)} a month{unused}, at {cost.prices.gb_month:g} $/GB")
    if savings.tokens is not None:
        out.line(f"saved: {_saved(savings)}")
    elif report.totals.hits:
        out.line("saved: unknown, no replica has reported what its loads saved")
    if lifecycle is not None and lifecycle.status in ("none", "unknown"):
        out.line(f"lifecycle rules: {lifecycle.detail}")
    if report.pins:
        out.line()
        rows = [
            (pin.leaf[:12], pin.namespace[:8], pin.tokens, pin.by or "(unknown)",
             moment(pin.created_s), moment(pin.until_s))
            for pin in report.pins[:limit]
        ]  # fmt: skip
        columns = ("pinned", "namespace", ">tokens", "by", "since", "until")
        _table(out, columns, rows, len(report.pins))


def _saved(savings: SavingsAudit) -> str:
    since = f"{counted(savings.tokens or 0, 'token')} loaded since {savings.first_month}"
    if savings.gpu_s is None:
        return f"{since}; GPU time unknown, no replica has measured how fast it computes"
    usd = "" if savings.usd is None else f", {dollars(savings.usd)}"
    of = ""
    if savings.timed_tokens != savings.tokens:
        of = f" for the {savings.timed_tokens:,} that were timed"
    return (
        f"{since}: {duration(savings.gpu_s)} of GPU time{usd}{of} "
        f"(computing {duration(savings.compute_gpu_s)}, loading {duration(savings.load_gpu_s)})"
    )


_HEADLINES = {
    "corrupt": ("corrupt payloads were found", "red"),
    "faults": ("faults were found", "yellow"),
}


@command
def audit(
    session: Session,
    namespace: Namespace = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Also write the report to this file as one HTML page.", metavar="FILE"),
    ] = None,
    limit: Annotated[
        int,
        typer.Option(
            min=1,
            help="Maximum rows per table. The table of findings always has every kind.",
            metavar="N",
        ),
    ] = 20,
) -> int:
    """Report stored chunks: owner, age, usage, cost and faults.

    The report compares the names in the bulk store with the records in the index. It does not
    check payload bytes; objkv verify does.
    """
    if html is not None:
        check_file("--html", html)
    with upkeep(session, "audit", writes=False, namespace=namespace) as run:
        walk = run.walk()
        for what, units in audit_stages(walk):
            run.run(what, units)
        if run.pool.ending != "complete":
            raise KeyboardInterrupt  # numbers of a part of the store would mislead
        with session.out.waiting("computing figures"):
            report = make_report(
                walk,
                session.config,
                version=__version__,
                prices=audit_prices(session.resolved),
                lifecycle=lambda: read_lifecycle(session.config),
            )
        show_report(session.out, report, limit=limit, html=html)
        if html is not None:
            try:
                write_html(report, html)
            except OSError as exc:
                raise ConfigError(f"--html {html}: {exc.strerror}") from exc
            if not session.out.machine:
                session.out.line(f"HTML report: {html}")
        return FINE if verdict(report) == "fine" else FOUND
