"""How benchmarks are shown: a table, a JSON document, a drawing of the ratios."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from objkv.cli.output import Output, plain, size
from objkv.errors import ConfigError
from objkv.ops.bench.rows import BenchReport, Row, Section, Target

PLOTS: Final = (".png", ".svg")
_COLUMNS = ("", ">objkv", ">limit", "unit", ">ratio", ">target", "reached", "limit is", "detail")
_BAR_INCHES = 0.35
_COLORS = {True: "#2a9d5c", False: "#c8443c", None: "#6f7f8f"}


def check_plot(file: Path) -> None:
    """Raise ``ConfigError`` unless ``plot_report`` can draw into ``file``."""
    if file.suffix not in PLOTS:
        raise ConfigError(f"--plot {file}: the name must end in {' or '.join(PLOTS)}")
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"--plot {file}: there is no such folder")
    if find_spec("matplotlib") is None:
        raise ConfigError('--plot needs matplotlib: pip install "objkv[plot]"')


def bench_document(report: BenchReport) -> dict[str, Any]:
    """Everything, conclusions included, as JSON values."""
    document: dict[str, Any] = plain(report)
    for section, shown in zip(report.sections, document["sections"], strict=True):
        for row, cells in zip(section.rows, shown["rows"], strict=True):
            cells["ok"] = row.ok
    document["missed"] = len(report.missed)
    return document


def print_report(out: Output, report: BenchReport) -> None:
    """The tables, the machine, and what was missed."""
    for section in report.sections:
        _print_section(out, section)
    machine = report.machine
    memory = f", {size(machine.memory_bytes)}" if machine.memory_bytes else ""
    load = f", load {machine.load} before" if machine.load is not None else ""
    out.line(f"{machine.cores} cores of {machine.cpu}{memory}, {machine.system}{load}", "dim")
    versions = [f"{name} {version}" for name, version in machine.libraries.items()]
    out.line(f"objkv {report.objkv}, Python {machine.python}, {', '.join(versions)}", "dim")
    out.line(
        f"Medians of {report.rounds} rounds, each of which measured every side in turn; a ratio is "
        "the median of the rounds' own.",
        "dim",
    )
    if report.quick:
        out.line("Quick: sizes too small for the figures to mean anything.", "yellow")
    judged = sum(row.ok is not None for section in report.sections for row in section.rows)
    if judged:
        missed = len(report.missed)
        style = "bold red" if missed else "green"
        out.line(f"{judged - missed} of {judged} targets reached", style)


def plot_report(file: Path, report: BenchReport) -> None:
    """Draw every row that has a ratio as a bar, with a mark where its target is."""
    rows = [row for section in report.sections for row in section.rows if row.ratio is not None]
    figure = import_module("matplotlib.figure").Figure(
        figsize=(9, 1.2 + _BAR_INCHES * max(1, len(rows))), layout="constrained"
    )
    axes = figure.subplots()
    places = range(len(rows))
    ratios = [row.ratio or 0.0 for row in rows]
    axes.barh(places, ratios, color=[_COLORS[row.ok] for row in rows])
    for place, row in zip(places, rows, strict=True):
        axes.text(row.ratio or 0.0, place, f" {ratio_text(row.ratio)}", va="center", fontsize=8)
        if row.target is not None and row.target.of == "ratio":
            axes.plot([row.target.bound] * 2, [place - 0.45, place + 0.45], color="black")
    axes.set_yticks(places, [row.name for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.1)  # room for the figures
    if ratios and max(ratios) > 10 * max(min(ratios), 1e-3):
        axes.set_xscale("log")
    axes.set_xlabel("ours by the limit, measured in the same run; black marks are targets")
    machine = report.machine
    axes.set_title(f"objkv {report.objkv} on {machine.cores} cores of {machine.cpu}", fontsize=9)
    figure.savefig(file)


def ratio_text(ratio: float | None) -> str:
    """``0.93``, or with fewer digits where it is large."""
    if ratio is None:
        return "-"
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}"


def _print_section(out: Output, section: Section) -> None:
    out.line(section.name, "bold")
    if section.rows:
        out.table(_COLUMNS, [_cells(row) for row in section.rows])
    for name, version in section.servers.items():
        out.line(f"{name}: {version}", "dim")
    for note in section.notes:
        out.line(note, "dim" if section.skipped else "yellow")
    out.line()


def _cells(row: Row) -> tuple[object, ...]:
    return (
        row.name,
        _figure(row.ours),
        None if row.limit is None else _figure(row.limit),
        row.unit,
        ratio_text(row.ratio),
        "" if row.target is None else _target(row.target, row.unit),
        {True: "ok", False: "missed", None: ""}[row.ok],
        row.limit_name,
        row.detail,
    )


def _figure(value: float) -> str:
    """Three digits that count."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.4f}"


def _target(target: Target, unit: str) -> str:
    sign = "≤" if target.at_most else "≥"
    return f"{sign} {target.bound:g}" if target.of == "ratio" else f"{sign} {target.bound:g} {unit}"
