"""How ``objkv warm`` shows how far it is, and what it did."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from objkv.cli.output import Output, printable, size
from objkv.ops.warm.report import WarmReport
from objkv.ops.warm.story import Watch

_SHOWN_MAX = 20


@contextmanager
def watching(out: Output, *, promote: bool) -> Iterator[Watch]:
    """Shown while somebody watches a terminal."""
    console = Console(stderr=True, no_color=None if out.color else True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("starting", total=None, speed="")

        def stage(text: str) -> None:
            progress.reset(task, description=text, total=None, speed="")

        def prepared(count: int) -> None:
            progress.update(task, completed=count)

        def warmed(report: WarmReport) -> None:
            if promote and report.promotion is not None:
                told = report.promotion
                speed = f"{size(told.promoted_bytes)} copied"
                progress.update(task, completed=told.done, total=told.payloads, speed=speed)
                return
            elapsed = progress.tasks[0].elapsed or 0.0
            rate = report.asked_tokens / elapsed if elapsed else 0.0
            progress.update(
                task, completed=report.done, total=report.prompts, speed=f"{rate:,.0f} tokens/s"
            )

        yield Watch(stage, prepared, warmed, out.note)


def show_report(out: Output, report: WarmReport) -> None:
    """The result, for people or for machines."""
    if out.machine:
        out.document(report.plain())
        return
    if report.promotion is not None:
        _show_promotion(out, report)
    else:
        _show_warmed(out, report)
    _show_failures(out, report)
    if report.ending != "complete":
        why = f": {report.why}" if report.why else ""
        left = f", {report.left:,} prompts are left" if report.left else ""
        out.line(
            f"not complete, {report.ending}{left}{why}; run the same command again to go on",
            "yellow",
        )


def _show_warmed(out: Output, report: WarmReport) -> None:
    if report.namespace:
        out.line(f"namespace {report.namespace}, model {printable(report.model)}")
    rows: list[tuple[object, ...]] = [
        ("prompts", report.prompts, f"{report.prompt_tokens:,} tokens"),
    ]
    if report.mode == "check":
        rows.append(("stored", report.stored_before, ""))
    else:
        rows.append(("stored before", report.stored_before, "skipped"))
        rows.append(("warmed", report.warmed, _warmed(report)))
    if report.short:
        rows.append(("too short", report.short, "they fill no chunk, so nothing can be stored"))
    if report.failed:
        rows.append(("missing" if report.mode == "check" else "failed", report.failed, ""))
    out.table(("", ">", ""), rows)
    if report.mode == "check":
        return
    if report.asked_tokens:
        out.line(_asked(report))
    out.line(f"saved {report.saved_chunks:,} chunks, {size(report.saved_bytes)}")
    if report.resumed:
        earlier = report.earlier
        out.line(
            f"runs before this one warmed {earlier['warmed']:,} prompts and saved "
            f"{earlier['saved_chunks']:,} chunks, {size(earlier['saved_bytes'])}"
        )
    answered = sum(one.answered for one in report.endpoints)
    if (answered and len(report.endpoints) > 1) or any(one.errors for one in report.endpoints):
        out.line()
        out.table(
            ("endpoint", ">answers", ">tokens", ">errors", "state", "last error"),
            [
                (
                    one.name,
                    one.answered,
                    one.tokens,
                    one.errors,
                    "down" if one.is_down else "ok",
                    one.last_error,
                )
                for one in report.endpoints
            ],
        )


def _warmed(report: WarmReport) -> str:
    told = "verified in the index"
    if report.shared:
        told += f"; {report.shared:,} of them had all their chunks computed by others"
    return told


def _asked(report: WarmReport) -> str:
    speed = report.asked_tokens / report.seconds if report.seconds else 0.0
    told = f"asked {report.asked_tokens:,} tokens in {report.seconds:.1f} s, {speed:,.0f} tokens/s"
    if report.cached_tokens is not None:
        told += f"; {report.cached_tokens:,} of them were not computed again"
    return told + (f"; {report.retries:,} requests were repeated" if report.retries else "")


def _show_promotion(out: Output, report: WarmReport) -> None:
    told = report.promotion
    assert told is not None
    out.line(f"namespace {report.namespace}, model {printable(report.model)}")
    rows: list[tuple[object, ...]] = [
        ("payloads", told.payloads, ""),
        ("hot before", told.hot_before, ""),
        ("promoted", told.promoted, size(told.promoted_bytes)),
    ]
    if told.too_large:
        rows.append(("too large", told.too_large, "above hot_payload_bytes_max"))
    if told.over_budget:
        rows.append(("left out", told.over_budget, "beyond --bytes-max"))
    if told.failed:
        rows.append(("failed", told.failed, ""))
    out.table(("", ">", ""), rows)


def _show_failures(out: Output, report: WarmReport) -> None:
    if not report.failures:
        return
    out.line()
    shown = report.failures[:_SHOWN_MAX]
    out.table(("not warmed", "why"), [(one.name, one.why) for one in shown])
    if more := max(report.failed, len(report.failures)) - len(shown):
        out.line(f"and {more:,} more: --json names the first thousand")
