"""One benchmark's command line: options, progress and output."""

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.harness import (
    BenchReport,
    BenchRow,
    BenchSetting,
    Section,
    Target,
    describe_machine,
)
from objkv.cli.command import FINE, FOUND, WRONG_USAGE, Session, command, ending_in_order
from objkv.cli.demo import Steps, print_failure
from objkv.cli.output import Printer, plain
from objkv.config import cache_folder
from objkv.errors import ConfigError
from objkv.ops.formats import size
from objkv.ops.programs import ProgramFailed

_COLUMNS = ("", ">objkv", ">limit", "unit", ">ratio", ">target", "reached", "limit is", "~detail")
Rounds = Annotated[
    int,
    typer.Option(
        min=1, max=1000, help="Number of rounds. Each measures objkv and its limits once."
    ),
]
Quick = Annotated[
    bool,
    typer.Option(
        "--quick", help="Use small sizes, to test that the benchmark runs. Prints no verdict."
    ),
]
Check = Annotated[bool, typer.Option("--check", help="Exit 1 if a row misses its target.")]
Work = Callable[[BenchSetting], Section]


def run_alone(work: Work) -> None:
    """Be ``python -m benchmarks.NAME``: measure ``work`` and print what it found."""

    def measure(
        session: Session,
        rounds: Rounds = 7,
        quick: Quick = False,
        check: Check = False,
    ) -> int:
        return run_work(session, work, BenchOptions(rounds, quick, check))

    run_command(measure, sys.modules[work.__module__].__doc__)


def run_command(measure: Callable[..., int], text: str | None) -> None:
    """Run a command line whose only command is ``measure``; ``text`` is its help."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(help=text)(command(measure))
    app()


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The options that all benchmarks share."""

    rounds: int
    quick: bool
    check: bool


def run_work(session: Session, work: Work, options: BenchOptions) -> int:
    """Run ``work``, show its report and return the exit code."""
    if options.check and options.quick:
        raise ConfigError("--check needs full sizes: remove --quick")
    machine, steps = describe_machine(), Steps()
    with ending_in_order(), tempfile.TemporaryDirectory(prefix="objkv-bench-") as folder:
        models = cache_folder() / "demo" / "models"
        setting = BenchSetting(options.rounds, options.quick, Path(folder), steps.tell, models)
        try:
            with steps.shown():
                section = work(setting)
        except ProgramFailed as exc:
            # The log is deleted with the temporary folder, so its last lines are shown here.
            sys.stderr.write(f"objkv: {exc.what}; the last lines of its log:\n")
            print_failure(exc.tail())
            return FOUND
    version = metadata.version("objkv")
    report = BenchReport(version, machine, options.rounds, options.quick, (section,))
    if session.out.machine:
        session.out.document(bench_document(report))
    else:
        print_report(session.out, report)
    if section.skipped:
        return WRONG_USAGE
    return FOUND if options.check and report.missed else FINE


def bench_document(report: BenchReport) -> dict[str, Any]:
    """The whole report with its verdicts, as JSON values."""
    document: dict[str, Any] = plain(report)
    for section, shown in zip(report.sections, document["sections"], strict=True):
        for row, cells in zip(section.rows, shown["rows"], strict=True):
            cells["ok"] = row.ok
    document["missed"] = len(report.missed)
    return document


def print_report(out: Printer, report: BenchReport) -> None:
    """Print the tables, the machine and the number of targets reached."""
    for section in report.sections:
        _print_section(out, section, judged=not report.quick)
    machine = report.machine
    memory = f", {size(machine.memory_bytes)}" if machine.memory_bytes else ""
    load = f", load {machine.load} before the first round" if machine.load is not None else ""
    out.line(f"{machine.cores} cores of {machine.cpu}{memory}, {machine.system}{load}", "dim")
    versions = [f"{name} {version}" for name, version in machine.libraries.items()]
    out.line(f"objkv {report.objkv}, Python {machine.python}, {', '.join(versions)}", "dim")
    out.line(
        f"Medians of {report.rounds} rounds. Each round measures every side in turn. A ratio is "
        "the median of the ratios of all rounds.",
        "dim",
    )
    if report.quick:
        out.line("--quick: the sizes are too small for meaningful figures.", "yellow")
        return
    judged = sum(row.ok is not None for section in report.sections for row in section.rows)
    if judged:
        missed = len(report.missed)
        style = "bold red" if missed else "green"
        out.line(f"{judged - missed} of {judged} targets reached", style)


def ratio_text(ratio: float | None) -> str:
    """``0.93``, or one decimal for 10 and more."""
    if ratio is None:
        return "-"
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}"


def _print_section(out: Printer, section: Section, *, judged: bool) -> None:
    out.line(section.name, "bold")
    if section.rows:
        out.table(_COLUMNS, [_cells(row, judged=judged) for row in section.rows])
    for name, version in section.servers.items():
        out.line(f"{name}: {version}", "dim")
    for note in section.notes:
        out.line(note, "dim" if section.skipped else "yellow")
    out.line()


def _cells(row: BenchRow, *, judged: bool) -> tuple[object, ...]:
    return (
        row.name,
        _figure(row.ours),
        None if row.limit is None else _figure(row.limit),
        row.unit,
        ratio_text(row.ratio),
        _target(row.target, row.unit) if judged and row.target is not None else "",
        {True: "ok", False: "missed", None: ""}[row.ok if judged else None],
        row.limit_name,
        row.detail,
    )


def _figure(value: float) -> str:
    """Three significant digits."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.4f}"


def _target(target: Target, unit: str) -> str:
    sign = "≤" if target.at_most else "≥"
    return f"{sign} {target.bound:g}" if target.of == "ratio" else f"{sign} {target.bound:g} {unit}"
