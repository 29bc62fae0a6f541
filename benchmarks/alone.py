"""One benchmark's command line: options, progress and output."""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.harness import BenchRow, BenchSetting, Section, Target, machine
from objkv.cli.command import FINE, FOUND, Session, command, ending_in_order
from objkv.cli.demo import print_failure
from objkv.cli.output import Printer, plain
from objkv.config import cache_folder
from objkv.errors import ConfigError
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
        session: Session, rounds: Rounds = 7, quick: Quick = False, check: Check = False
    ) -> int:
        return run_work(session, work, rounds, quick=quick, check=check)

    run_command(measure, sys.modules[work.__module__].__doc__)


def run_command(measure: Callable[..., int], text: str | None) -> None:
    """Run a command line whose only command is ``measure``; ``text`` is its help."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(help=text)(command(measure))
    app()


def run_work(session: Session, work: Work, rounds: int, *, quick: bool, check: bool) -> int:
    """Run ``work``, show its report and return the exit code."""
    if check and quick:
        raise ConfigError("--check needs full sizes: remove --quick")
    where = machine()
    with ending_in_order(), tempfile.TemporaryDirectory(prefix="objkv-bench-") as folder:
        models = cache_folder() / "demo" / "models"
        try:
            with session.out.stages() as report_stage:
                section = work(BenchSetting(rounds, quick, Path(folder), report_stage, models))
        except ProgramFailed as exc:  # its log is deleted with the folder
            print_failure(exc.what, exc)
            return FOUND
    if session.out.machine:
        rows = [{**plain(row), "ok": row.ok} for row in section.rows]
        report = {"machine": where, "rounds": rounds, "quick": quick}
        session.out.document(report | {"servers": dict(section.servers), "rows": rows})
    else:
        print_report(session.out, section, rounds, where, quick=quick)
    return FOUND if check and section.missed else FINE


def print_report(out: Printer, section: Section, rounds: int, where: str, *, quick: bool) -> None:
    """Print the table, the machine and the number of targets reached."""
    cells = [_cells(row, judged=not quick) for row in section.rows]
    out.line(section.name, "bold")
    out.table(_COLUMNS, cells)
    for name, version in section.servers.items():
        out.line(f"{name}: {version}", "dim")
    out.line(where, "dim")
    out.line(
        f"Medians of {rounds} rounds. Each round measures every side in turn. A ratio is "
        "the median of the ratios of all rounds.",
        "dim",
    )
    if quick:
        out.line("--quick: the sizes are too small for meaningful figures.", "yellow")
        return
    if judged := sum(row.ok is not None for row in section.rows):
        style = "bold red" if section.missed else "green"
        out.line(f"{judged - section.missed} of {judged} targets reached", style)


def _cells(row: BenchRow, *, judged: bool) -> tuple[object, ...]:
    return (
        row.name,
        _figure(row.ours),
        None if row.limit is None else _figure(row.limit),
        row.unit,
        None if row.ratio is None else _figure(row.ratio),
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
