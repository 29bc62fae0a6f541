"""The answers to auditors in ``objkv audit``'s output: savings, provenance, pins, changes."""

from collections import Counter
from collections.abc import Sequence

from objkv.cli.output import Printer, counted, size
from objkv.ops.audit.answers import ProvenanceAudit, SavingsAudit
from objkv.ops.audit.report import AuditReport, ChangesAudit
from objkv.ops.formats import dollars, duration, moment

_HASH = 12
_WRITERS = 5
_PROTECTIONS = ("encrypted", "signed", "unsealed")


def show_answers(out: Printer, report: AuditReport, limit: int) -> None:
    """Print a line each for savings, provenance and lifecycle rules, and tables of pins and changes
    of at most ``limit`` rows."""
    savings, lifecycle = report.savings, report.lifecycle
    if savings.tokens is not None:
        out.line(f"saved: {_saved(savings)}")
    elif report.totals.hits:
        out.line("saved: unknown, no replica has reported what its loads saved")
    if report.provenance:
        out.line(f"provenance: {_provenance(report.provenance)}")
    if lifecycle is not None and lifecycle.status in ("none", "unknown"):
        out.line(f"lifecycle rules: {lifecycle.detail}")
    if report.pins:
        out.line()
        rows = [
            (pin.leaf[:_HASH], pin.namespace[:8], pin.tokens, pin.by or "(unknown)",
             moment(pin.created_s), moment(pin.until_s))
            for pin in report.pins[:limit]
        ]  # fmt: skip
        out.table(("pinned", "namespace", ">tokens", "by", "since", "until"), rows)
        _more(out, len(report.pins) - limit)
    if report.changes is not None:
        _changes(out, report.changes, limit)


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


def _provenance(found: Sequence[ProvenanceAudit]) -> str:
    """One sentence about all namespaces; the document and the page have each of them."""
    read = sum(one.headers for one in found)
    kinds = [(kind, sum(getattr(one, kind) for one in found)) for kind in _PROTECTIONS]
    shown = ", ".join(f"{number:,} {kind}" for kind, number in kinds if number)
    ids = sum(one.token_ids for one in found)
    stored = f"token ids in {ids:,}" if ids else "no token ids"
    hosts: Counter[str] = Counter()
    for one in found:
        hosts.update({writer.host: writer.payloads for writer in one.writers})
    names = ", ".join(host for host, _ in hosts.most_common(_WRITERS))
    more = len(hosts) - _WRITERS
    also = f" and {counted(more, 'other host')}" if more > 0 else ""
    return f"of {counted(read, 'header')} read, {shown}; {stored}; written by {names}{also}"


def _changes(out: Printer, changes: ChangesAudit, limit: int) -> None:
    out.line()
    more = "" if changes.hits is None else f", {changes.hits:+,} hits"
    out.line(
        f"since {moment(changes.made_s)}: {changes.chunks:+,} chunks, "
        f"{'-' if changes.nbytes < 0 else '+'}{size(abs(changes.nbytes))}{more}; verdict "
        f"{changes.verdict_then} then, {changes.verdict} now"
    )
    if changes.namespaces:
        out.table(
        ("changed", "model", "", ">chunks then", ">now", ">bytes then", ">now"),
        [
            (one.namespace[:8], one.model, one.kind, one.chunks_then, one.chunks,
             size(one.nbytes_then), size(one.nbytes))
            for one in changes.namespaces[:limit]
        ],
    )  # fmt: skip
    _more(out, len(changes.namespaces) - limit)
    if changes.findings:
        out.table(
            ("finding", ">then", ">now", ">new", ">fixed"),
            [(one.kind, one.count_then, one.count, one.new, one.fixed) for one in changes.findings],
        )


def _more(out: Printer, omitted: int) -> None:
    if omitted > 0:
        out.line(f"{omitted:,} more")
