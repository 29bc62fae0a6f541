"""``objkv gpu-check``: whether objkv is right and fast on this machine's GPU, as a report."""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from objkv.cli.command import FINE, FOUND, INTERRUPTED, Session, command, ending_in_order
from objkv.cli.demo import Steps
from objkv.cli.options import check_folder
from objkv.cli.output import Printer, plain
from objkv.config import cache_folder, make_private
from objkv.errors import ConfigError
from objkv.ops.bench.gpu import SIMULATED, simulated_source
from objkv.ops.gpu_check.check import GpuChecks
from objkv.ops.gpu_check.report import GpuReport, page

_MODEL = "Qwen/Qwen3-0.6B"


def gpu_document(report: GpuReport) -> dict[str, Any]:
    """The whole report with its verdict, as JSON values."""
    document: dict[str, Any] = plain(report)
    document["passed"] = report.passed
    return document


def write_report(report: GpuReport, folder: Path) -> tuple[Path, Path]:
    """Write ``report.json`` and ``report.md`` to ``folder``, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    files = folder / "report.json", folder / "report.md"
    files[0].write_text(json.dumps(gpu_document(report), indent=2) + "\n")
    files[1].write_text(page(report))
    return files


def print_summary(out: Printer, report: GpuReport) -> None:
    """Print one line per stage, and everything that failed."""
    out.line(f"objkv {report.objkv} on {report.device}", "bold")
    if report.simulated:
        out.line("The device is simulated. Its times are those of a model, not of a GPU.", "yellow")
    rows = [(s.name, s.outcome, f"{s.seconds:.0f} s", s.summary) for s in report.stages]
    out.table(("stage", "result", ">time", "~"), rows)
    for stage in report.stages:
        for case in stage.cases:
            if case.ok is False:
                out.line(f"failed: {case.name}: {case.detail}", "bold red")
        if stage.outcome == "failed":
            for line in stage.note.splitlines():
                out.line(f"  {line}")


def _model(name: str | None, *, is_random: bool) -> str | None:
    """Return the name or folder of the replicas' model, None for one with random weights."""
    if is_random and name is not None:
        raise ConfigError("--model: --random and --simulated bring a model of their own")
    if name is not None and name.startswith(("/", ".", "~")):
        folder = Path(os.path.expanduser(name))
        if not (folder / "config.json").is_file():
            raise ConfigError(f"--model {name}: this folder has no config.json")
        return str(folder)
    return None if is_random else name or _MODEL


@command
def gpu_check(
    session: Session,
    model: Annotated[
        str | None,
        typer.Option(
            help=f"Model of the replicas: a name on Hugging Face, or a folder. Default: {_MODEL}."
        ),
    ] = None,
    random: Annotated[
        bool,
        typer.Option("--random", help="Use a model with random weights. Needs no network."),
    ] = False,
    simulated: Annotated[
        bool,
        typer.Option(
            "--simulated",
            help="Check a simulated device, and replicas on the CPU. Only in a clone.",
        ),
    ] = False,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Use small sizes, to test that it works. No replicas."),
    ] = False,
    out: Annotated[
        Path, typer.Option("--out", help="Folder for report.json and report.md.")
    ] = Path("objkv-gpu-check"),
) -> int:
    """Check that objkv is right and fast on this machine's GPU.

    Takes up to 20 minutes and needs vLLM. For sharing KV: run it before production, and attach
    report.md to an issue.
    """
    check_folder("--out", out)
    if simulated:
        simulated_source()
    steps, place = Steps(color=session.out.color), cache_folder() / "gpu-check"
    make_private(place)
    report: GpuReport | None = None
    try:
        with (
            ending_in_order(),
            tempfile.TemporaryDirectory(dir=place) as folder,
            steps.shown(),
        ):
            checks = GpuChecks(
                SIMULATED if simulated else "gpu",
                quick,
                _model(model, is_random=random or simulated),
                Path(folder),
                cache_folder() / "demo" / "models",
                steps.tell,
            )
            for report in checks.reports():
                files = write_report(report, out)
    except KeyboardInterrupt:
        newline = "\n" if sys.stderr.isatty() else ""  # the terminal has shown ^C
        left = "no report was written"
        if report is not None:
            left = f"the stages that ended are in {out / 'report.md'}"
        sys.stderr.write(f"{newline}objkv: interrupted; {left}\n")
        return INTERRUPTED
    assert report is not None
    if session.out.machine:
        session.out.document(gpu_document(report))
    else:
        print_summary(session.out, report)
        session.out.line(f"Report: {files[1]} and {files[0].name}", "dim")
    return FINE if report.passed else FOUND
