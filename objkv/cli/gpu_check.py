"""``objkv gpu-check``: whether objkv is right and fast on this machine's GPU, as a report."""

import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from objkv.assembly.backends import open_bulk, open_hot, open_index
from objkv.cli.command import FINE, FOUND, INTERRUPTED, Session, command, ending_in_order
from objkv.cli.demo import Steps, count_stored
from objkv.cli.output import Printer, plain
from objkv.config import cache_folder
from objkv.errors import ConfigError
from objkv.ops.bench.gpu import simulated_source
from objkv.ops.bench.gpu_check import GpuChecks, GpuReport, write_report
from objkv.ops.bench.harness import BenchSetting, Factories
from objkv.ops.demo import DemoFolder, DemoReport, Size, prompts_of, show_replicas
from objkv.telemetry import NullRecorder

_ROUNDS = 5


def gpu_document(report: GpuReport) -> dict[str, Any]:
    """The whole report with its verdict, as JSON values."""
    document: dict[str, Any] = plain(report)
    document["passed"] = report.passed
    return document


@command
def gpu_check(
    session: Session,
    simulated: Annotated[
        bool,
        typer.Option(
            "--simulated", help="Check the simulated device of a clone of the project instead."
        ),
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Use small sizes, only to test that it works.")
    ] = False,
    out: Annotated[
        Path, typer.Option("--out", help="Folder for report.json and report.md.")
    ] = Path("objkv-gpu-check"),
) -> int:
    """Check that objkv is right and fast on this machine's GPU.

    Takes up to 20 minutes and needs vLLM. For sharing KV: run it before production, and attach
    report.md to an issue.
    """
    if find_spec("vllm") is None:
        raise ConfigError("gpu-check needs vLLM: pip install 'objkv[vllm]'")
    if simulated:
        simulated_source()
    length: Size = "small" if quick else "normal"
    place = DemoFolder(cache_folder() / "gpu-check")
    steps = Steps(color=session.out.color)

    def replicas() -> DemoReport:
        return show_replicas(length, place, steps.tell, lambda: count_stored(place))

    try:
        with (
            ending_in_order(),
            tempfile.TemporaryDirectory(prefix="objkv-gpu-check-") as folder,
            place.prepared(prompts_of(length)),
            steps.shown(),
        ):
            setting = _setting(Path(folder), steps, quick=quick)
            report = GpuChecks(setting, simulated, replicas).run()
    except KeyboardInterrupt:
        sys.stderr.write("objkv: interrupted; nothing was reported\n")
        return INTERRUPTED
    document = gpu_document(report)
    files = write_report(report, out, document)
    if session.out.machine:
        session.out.document(document)
    else:
        _print(session.out, report)
        session.out.line(f"Report: {files[1]} and {files[0].name}", "dim")
    return FINE if report.passed else FOUND


def _print(out: Printer, report: GpuReport) -> None:
    out.line(f"Device: {report.facts.get('device', '')}")
    if report.simulated:
        out.line("The device is simulated. Its times say nothing about a GPU.", "yellow")
    for stage in report.stages:
        style = "bold" if stage.passed else "bold red"
        out.line(f"{'passed' if stage.passed else 'FAILED'}  {stage.name}", style)
        for line in (stage.fault, *stage.lines):
            if line:
                out.line(f"  {line}")


def _setting(folder: Path, steps: Steps, *, quick: bool) -> BenchSetting:
    recorder = NullRecorder()
    return BenchSetting(
        rounds=1 if quick else _ROUNDS,
        quick=quick,
        folder=folder,
        factories=Factories(
            open_bulk=lambda config: open_bulk(config, recorder),
            open_hot=lambda config: open_hot(config, recorder),
            open_index=lambda config: open_index(config, recorder),
        ),
        tell=steps.tell,
        models=cache_folder() / "demo" / "models",
    )
