"""``objkv gpu-check``: whether replicas on this machine's GPU share prompts without changing a
token, and how fast bytes reach it."""

import os
import tempfile
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from objkv.cli.command import FINE, FOUND, Session, command, ending_in_order
from objkv.cli.demo import print_failure
from objkv.cli.output import Printer, plain
from objkv.config import cache_folder, make_private
from objkv.errors import ConfigError, pip_install
from objkv.ops.gpu_check import GpuCheck, GpuReport, run_check
from objkv.ops.programs import ProgramFailed

_MODEL = "Qwen/Qwen3-0.6B"


def print_report(out: Printer, report: GpuReport) -> None:
    gpu = report.gpu
    out.line(f"objkv {report.objkv} on {gpu.device}, model {report.model}", "bold")
    out.line("; ".join(f"{name} {text}" for name, text in gpu.about.items()), "dim")
    for name, rate in (("to device", gpu.to_device_gb_s), ("to host", gpu.to_host_gb_s)):
        of = f", {rate / gpu.link_gb_s:.0%} of its link ({gpu.link})" if gpu.link_gb_s else ""
        out.line(f"copies {name}: {rate:.1f} GB/s{of}")
    out.table(("replicas", "", "~"), [
        (case.name, "ok" if case.ok else "failed", case.detail) for case in report.cases
    ])  # fmt: skip
    for line in report.failure.splitlines():
        out.line(line, "bold red")


def _model(name: str | None, *, is_random: bool) -> str | None:
    """Return the name or folder of the replicas' model, None for one with random weights."""
    if is_random and name is not None:
        raise ConfigError("--model: --random brings a model of its own")
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
) -> int:
    """Check on this machine's GPU that replicas share KV and give the same answers.

    Takes up to 15 minutes and needs vLLM. Prints the copy rates to and from the GPU, too.
    """
    name = _model(model, is_random=random)
    if find_spec("torch") is None or find_spec("vllm") is None:
        raise ConfigError(f"gpu-check needs vLLM: {pip_install('vllm')}")
    models = cache_folder() / "demo" / "models"
    make_private(cache_folder())
    with (
        ending_in_order(),
        tempfile.TemporaryDirectory(dir=cache_folder(), prefix="gpu-check-") as folder,
    ):
        try:
            with session.out.stages() as report_stage:
                check = GpuCheck(name, Path(folder), models, report_stage)
                report = run_check(check, metadata.version("objkv"))
        except ProgramFailed as exc:  # its log is deleted with the folder
            print_failure(exc.what, exc)
            return FOUND
    passed = not report.failure and all(case.ok for case in report.cases)
    if not session.out.document({**plain(report), "passed": passed}):
        print_report(session.out, report)
    return FINE if passed else FOUND
