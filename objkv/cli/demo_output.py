"""How the demo is shown: steps while it runs, then a table, or one JSON document."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from objkv.cli.output import Output, plain, printable, size
from objkv.ops.demo.report import DemoReport, Row

_COLUMNS = (
    "prompt", ">tokens", ">served by objkv", ">recompute", ">A", ">B", ">speed-up", "same answer",
)  # fmt: skip


class Steps:
    """Says on standard error what is being done: a spinner on a terminal, a line per step else."""

    def __init__(self, *, color: bool) -> None:
        self._console = Console(stderr=True, no_color=None if color else True, highlight=False)
        self._status = self._console.status("") if self._console.is_terminal else None
        self._name = ""
        self._started = 0.0

    def tell(self, name: str, stage: str) -> None:
        """``name`` now does ``stage``; the one before it, if another, is done."""
        if name != self._name:
            self._finish()
            self._name, self._started = name, time.monotonic()
            if self._status is None:
                self._console.print(f"{name} ...")
        if self._status is not None:
            self._status.update(f"{name}: {stage}")

    @contextmanager
    def shown(self) -> Iterator["Steps"]:
        """Show steps within the block, until ``finish``."""
        if self._status is not None:
            self._status.start()
        try:
            yield self
            self.finish()
        finally:
            if self._status is not None:
                self._status.stop()

    def finish(self) -> None:
        """The last step is done, and nothing else comes."""
        self._finish()
        if self._status is not None:
            self._status.stop()

    def _finish(self) -> None:
        if self._name and self._status is not None:
            seconds = time.monotonic() - self._started
            self._console.print(f"[green]done[/] {self._name} [dim]{seconds:.0f} s[/]")
        self._name = ""


def report_document(report: DemoReport) -> dict[str, Any]:
    """Everything, conclusions included, as JSON values."""
    document: dict[str, Any] = plain(report)
    for row, shown in zip(report.rows, document["rows"], strict=True):
        shown["speed_up"] = row.speed_up
    for name in ("speed_up_median", "identical", "served", "fine"):
        document[name] = getattr(report, name)
    return document


def print_report(out: Output, report: DemoReport) -> None:
    """The table and what it means."""
    out.line()
    out.line("Seconds to the first token", "bold")
    out.line("recompute: without objkv; A: computes and saves; B: loads what A saved")
    out.line()
    out.table(_COLUMNS, [_row(row) for row in report.rows])
    out.line()
    stored = report.stored
    out.line(
        f"{report.speed_up_median:.1f} times sooner (median). Stored: {stored.chunks} chunks, "
        f"{stored.tokens:,} tokens, {size(stored.nbytes)}."
    )
    if report.load_failures:
        out.line(f"{report.load_failures} loads failed and were computed after all", "yellow")
    if not report.identical:
        out.line("An answer differs from what the model computes without objkv.", "bold red")
    if not report.served:
        out.line("objkv served nothing.", "bold red")
    for name, counters in report.metrics.items():
        told = ", ".join(f"{counter} {value:,.0f}" for counter, value in counters.items())
        out.line(f"{name} /metrics: {told}")
    for notice in report.notices:
        out.line(notice, "yellow")
    out.line()
    out.line(
        f"{report.engine} on {report.device}. A small model with random weights, each prompt asked "
        "once and alone, each replica's own prefix cache emptied before it: this shows that it "
        "works, and is no benchmark.",
        "dim",
    )


def print_failure(log_tail: str) -> None:
    """The end of a log, on standard error."""
    for line in log_tail.splitlines():
        sys.stderr.write(f"  {printable(line)}\n")


def _row(row: Row) -> tuple[object, ...]:
    return (
        row.prompt,
        row.prompt_tokens,
        row.served_tokens,
        f"{row.recompute_s:.2f}",
        None if row.first_s is None else f"{row.first_s:.2f}",
        f"{row.second_s:.2f}",
        f"{row.speed_up:.1f}x",
        "yes" if row.identical else "no",
    )
