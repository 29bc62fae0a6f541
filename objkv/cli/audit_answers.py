"""The answers to auditors in ``objkv audit``'s output: savings, lifecycle rules, pins."""

from objkv.cli.output import Printer, counted
from objkv.ops.audit.answers import SavingsAudit
from objkv.ops.audit.report import AuditReport
from objkv.ops.formats import dollars, duration, moment

_HASH = 12


def show_answers(out: Printer, report: AuditReport, limit: int) -> None:
    """Print a line each for savings and lifecycle rules, and at most ``limit`` pins."""
    savings, lifecycle = report.savings, report.lifecycle
    if savings.tokens is not None:
        out.line(f"saved: {_saved(savings)}")
    elif report.totals.hits:
        out.line("saved: unknown, no replica has reported what its loads saved")
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
        if len(report.pins) > limit:
            out.line(f"{len(report.pins) - limit:,} more")


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
