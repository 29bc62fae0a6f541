"""``objkv bench``: benchmark objkv against the limits of this machine and its stores.

Benchmarks of objkv itself are in the project's ``benchmarks`` folder.
"""

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from objkv.assembly.backends import open_bulk, open_hot, open_index
from objkv.cli.command import FINE, FOUND, WRONG_USAGE, Session, command, ending_in_order
from objkv.cli.demo import Steps, print_failure
from objkv.cli.options import check_file
from objkv.cli.output import Printer, plain, size
from objkv.config import cache_folder
from objkv.errors import ConfigError, pip_install
from objkv.ops.bench.agent import bench_agent
from objkv.ops.bench.gpu import bench_gpu, bench_simulated
from objkv.ops.bench.harness import (
    BenchReport,
    BenchRow,
    BenchSetting,
    Factories,
    Section,
    Target,
    describe_machine,
)
from objkv.ops.bench.lookup import bench_lookup
from objkv.ops.bench.store import bench_configured, bench_store
from objkv.ops.programs import ProgramFailed
from objkv.telemetry import NullRecorder

PLOTS: Final = (".png", ".svg")
_COLUMNS = ("", ">objkv", ">limit", "unit", ">ratio", ">target", "reached", "limit is", "~detail")
_BAR_INCHES = 0.35
_COLORS = {True: "#2a9d5c", False: "#c8443c", None: "#6f7f8f"}


def check_plot(file: Path) -> None:
    """Raise ``ConfigError`` unless ``plot_report`` can write ``file``."""
    if file.suffix not in PLOTS:
        raise ConfigError(f"--plot {file}: the name must end in {' or '.join(PLOTS)}")
    check_file("--plot", file)
    if find_spec("matplotlib") is None:
        raise ConfigError(f"--plot needs matplotlib: {pip_install('plot')}")


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


def plot_report(file: Path, report: BenchReport) -> None:
    """Draw every row that has a ratio as a bar, and mark its target."""
    rows = [row for section in report.sections for row in section.rows if row.ratio is not None]
    figure = import_module("matplotlib.figure").Figure(
        figsize=(9, 1.2 + _BAR_INCHES * max(1, len(rows))), layout="constrained"
    )
    axes = figure.subplots()
    places = range(len(rows))
    ratios = [row.ratio or 0.0 for row in rows]
    axes.barh(places, ratios, color=[_COLORS[None if report.quick else row.ok] for row in rows])
    for place, row in zip(places, rows, strict=True):
        axes.text(row.ratio or 0.0, place, f" {ratio_text(row.ratio)}", va="center", fontsize=8)
        if row.target is not None and row.target.of == "ratio":
            axes.plot([row.target.bound] * 2, [place - 0.45, place + 0.45], color="black")
    axes.set_yticks(places, [row.name for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.1)  # room for the figures
    if ratios and max(ratios) > 10 * max(min(ratios), 1e-3):
        axes.set_xscale("log")
    axes.set_xlabel("objkv divided by its limit, measured in the same run; black marks are targets")
    machine = report.machine
    axes.set_title(f"objkv {report.objkv} on {machine.cores} cores of {machine.cpu}", fontsize=9)
    figure.savefig(file)


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
Plot = Annotated[
    Path | None, typer.Option(help="Draw the ratios as a .png or .svg file.", metavar="FILE")
]
Work = Callable[[BenchSetting], Section]
bench = typer.Typer(
    name="bench",
    help="Benchmark objkv against the limits of this machine.",
    no_args_is_help=True,
)


@command
def store(
    session: Session,
    rounds: Rounds = 7,
    quick: Quick = False,
    check: Check = False,
    plot: Plot = None,
    configured: Annotated[
        bool, typer.Option("--configured", help="Measure your configured stores instead.")
    ] = False,
    far: Annotated[bool, typer.Option("--far", hidden=True)] = False,
) -> int:
    """Benchmark stores against a bare socket and memcpy.

    Starts a private Redis. Every payload is verified while it arrives.
    """
    if far:
        raise ConfigError(_moved("store --far", "far"))

    def own(setting: BenchSetting) -> Section:
        return bench_configured(setting, session.config)

    work = own if configured else bench_store
    return run_works(session, (work,), BenchOptions(rounds, quick, check, plot))


@command
def lookup(
    session: Session,
    rounds: Rounds = 7,
    quick: Quick = False,
    check: Check = False,
    plot: Plot = None,
) -> int:
    """Benchmark index lookups against one round trip."""
    return run_works(session, (bench_lookup,), BenchOptions(rounds, quick, check, plot))


@command
def agent(
    session: Session,
    rounds: Rounds = 7,
    quick: Quick = False,
    check: Check = False,
    plot: Plot = None,
) -> int:
    """Benchmark loads, saves and lookups by a node agent against memcpy."""
    return run_works(session, (bench_agent,), BenchOptions(rounds, quick, check, plot))


@command
def gpu(
    session: Session,
    rounds: Rounds = 7,
    quick: Quick = False,
    check: Check = False,
    plot: Plot = None,
    simulated: Annotated[
        bool,
        typer.Option(
            "--simulated",
            help="Measure a model of a GPU instead, with objkv's real code. Only in a clone.",
        ),
    ] = False,
) -> int:
    """Benchmark GPU loads and saves against pinned copies."""
    work = bench_simulated if simulated else bench_gpu
    return run_works(session, (work,), BenchOptions(rounds, quick, check, plot))


@command
def everything(
    session: Session,
    rounds: Rounds = 7,
    quick: Quick = False,
    check: Check = False,
    plot: Plot = None,
) -> int:
    """Run all benchmarks and print one report.

    Benchmarks that cannot run on this machine are skipped with a note.
    """
    works = (bench_store, bench_lookup, bench_agent, bench_gpu)
    possible = tuple(_if_possible(work) for work in works)
    return run_works(session, possible, BenchOptions(rounds, quick, check, plot))


def _moved(name: str, module: str) -> str:
    return (
        f"bench {name} is no longer part of objkv: in a clone of the project run "
        f".venv/bin/python -m benchmarks.{module}"
    )


def _gone(name: str) -> Callable[..., None]:
    @command
    def gone(_session: Session) -> int:
        raise ConfigError(_moved(name, name))

    return gone


_COMMANDS = {"store": store, "lookup": lookup, "agent": agent, "gpu": gpu, "all": everything}
for _name, _command in _COMMANDS.items():
    bench.command(_name)(_command)
for _name in ("codec", "engine"):
    any_options = {"ignore_unknown_options": True, "allow_extra_args": True}
    bench.command(_name, hidden=True, context_settings=any_options)(_gone(_name))


def _if_possible(work: Work) -> Work:
    """Return ``work`` with a missing dependency reported as a note instead of an error."""

    def possible(setting: BenchSetting) -> Section:
        try:
            return work(setting)
        except ConfigError as exc:
            name = work.__name__.removeprefix("bench_")
            return Section(name, (), {}, (str(exc),), skipped=True)

    return possible


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The options that all benchmarks share."""

    rounds: int
    quick: bool
    check: bool
    plot: Path | None


def run_works(session: Session, works: tuple[Work, ...], options: BenchOptions) -> int:
    """Run all ``works``, show one report and return the exit code."""
    if options.check and options.quick:
        raise ConfigError("--check needs full sizes: remove --quick")
    if options.plot is not None:
        check_plot(options.plot)
    machine = describe_machine()
    sections = _measure(works, options, Steps(color=session.out.color))
    if sections is None:
        return FOUND
    report = BenchReport(
        objkv=metadata.version("objkv"),
        machine=machine,
        rounds=options.rounds,
        quick=options.quick,
        sections=sections,
    )
    if session.out.machine:
        session.out.document(bench_document(report))
    else:
        print_report(session.out, report)
    if options.plot is not None:
        plot_report(options.plot, report)
    if len(works) == 1 and sections[0].skipped:  # the only benchmark requested
        return WRONG_USAGE
    return FOUND if options.check and report.missed else FINE


def _measure(
    works: tuple[Work, ...], options: BenchOptions, steps: Steps
) -> tuple[Section, ...] | None:
    """Return the sections, or None after reporting a child program that failed."""
    sections = []
    with ending_in_order(), tempfile.TemporaryDirectory(prefix="objkv-bench-") as name:
        try:
            with steps.shown():
                for number, work in enumerate(works):
                    folder = Path(name) / str(number)
                    folder.mkdir()
                    sections.append(work(_setting(folder, options, steps)))
        except ProgramFailed as exc:
            # The log is deleted with the temporary folder, so its last lines are shown here.
            sys.stderr.write(f"objkv: {exc.what}; the last lines of its log:\n")
            print_failure(exc.tail())
            return None
    return tuple(sections)


def _setting(folder: Path, options: BenchOptions, steps: Steps) -> BenchSetting:
    recorder = NullRecorder()
    return BenchSetting(
        rounds=options.rounds,
        quick=options.quick,
        folder=folder,
        factories=Factories(
            open_bulk=lambda config: open_bulk(config, recorder),
            open_hot=lambda config: open_hot(config, recorder),
            open_index=lambda config: open_index(config, recorder),
        ),
        tell=steps.tell,
        models=cache_folder() / "demo" / "models",
    )
