"""``objkv warm``: compute and store prompts before users send them."""

import os
from typing import TYPE_CHECKING, Annotated

import typer

from objkv.cli.command import (
    FINE,
    FOUND,
    INTERRUPTED,
    UNREACHABLE,
    Session,
    command,
    ending_in_order,
)
from objkv.cli.output import Printer
from objkv.errors import ConfigError
from objkv.ops.formats import printable, size
from objkv.ops.warm.prompts import read_prompts

if TYPE_CHECKING:
    from objkv.ops.warm.run import WarmReport

_SHOWN_MAX = 20


def show_report(out: Printer, report: "WarmReport") -> None:
    """Print the result as text."""
    if report.namespace:
        out.line(f"namespace {report.namespace}, model {printable(report.model)}")
    is_check = report.mode == "check"
    rows: list[tuple[object, ...]] = [
        ("prompts", report.prompts),
        ("stored" if is_check else "stored before", report.stored_before),
    ]
    if not is_check:
        rows.append(("warmed", report.warmed))
    if report.short:
        rows.append(("shorter than a chunk", report.short))
    if report.failed:
        rows.append(("missing" if is_check else "failed", report.failed))
    out.table(("", ">"), rows)
    if report.asked_tokens:
        speed = report.asked_tokens / report.seconds if report.seconds else 0.0
        out.line(
            f"sent {report.asked_tokens:,} tokens in {report.seconds:.1f} s, {speed:,.0f} "
            f"tokens/s; {report.cached_tokens:,} of them were cached; saved "
            f"{report.saved_chunks:,} chunks, {size(report.saved_bytes)}"
        )
    for one in report.endpoints:
        if one.errors:
            out.line(
                f"{one.name}: {one.answered:,} answers, {one.errors:,} errors, the last: "
                f"{one.last_error}",
                "yellow",
            )
    if report.failures:
        out.line()
        shown = report.failures[:_SHOWN_MAX]
        out.table(("not warmed", "~why"), [(one.name, one.why) for one in shown])
        if more := report.failed - len(shown):
            out.line(f"{more:,} more: --json lists the first thousand")
    if report.ending != "complete":
        why = f": {report.why}" if report.why else ""
        left = f", {report.left:,} prompts left" if report.left else ""
        out.line(
            f"incomplete, {report.ending}{left}{why}; run the same command again to continue",
            "yellow",
        )


_Prompts = Annotated[
    list[str] | None, typer.Argument(help="JSON Lines files, or - for stdin.", metavar="FILES")
]
_Endpoint = Annotated[
    list[str] | None,
    typer.Option(help="An OpenAI-compatible server of the fleet; repeatable.", metavar="URL"),
]
_Model = Annotated[
    str | None,
    typer.Option(help="Start vllm serve with this model folder or hub id.", metavar="MODEL"),
]
_Check = Annotated[bool, typer.Option("--check", help="Only report which prompts are stored.")]
_EngineArg = Annotated[
    list[str] | None,
    typer.Option(help="An argument of vllm serve for --model; repeatable.", metavar="NAME[=VALUE]"),
]
_ServedModel = Annotated[
    str | None, typer.Option(help="The base model's name in requests.", metavar="NAME")
]
_Namespace = Annotated[
    str | None,
    typer.Option(
        "--namespace",
        "-n",
        help="Namespace: its hex digits, MODEL or TENANT/MODEL, or a beginning (default: found "
        "with a test request).",
        metavar="NS",
    ),
]
_Concurrency = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=4096,
        help="Concurrent requests per endpoint (default: 8; 64 with --model).",
        metavar="N",
    ),
]


@command
def warm(
    session: Session,
    prompts: _Prompts = None,
    endpoint: _Endpoint = None,
    model: _Model = None,
    check: _Check = False,
    engine_arg: _EngineArg = None,
    served_model: _ServedModel = None,
    namespace: _Namespace = None,
    concurrency: _Concurrency = None,
) -> int:
    """Compute and save prompts before users send them.

    Waits until they are stored. Skips stored prompts, so an interrupted command can be repeated.
    VLLM_API_KEY is the endpoints' API key.
    """
    from objkv.client.warming import run_warm

    if not prompts:
        raise ConfigError("no prompts: name JSON Lines files, or - for standard input")
    if engine_arg and model is None:
        raise ConfigError("--engine-arg needs --model")
    if model is None:  # whose replica creates it
        session.has_bulk()
    with ending_in_order(), session.out.steps("warming") as step:
        report = run_warm(
            session.resolved,
            read_prompts(prompts),
            endpoints=endpoint or (),
            model=model,
            check=check,
            served_model=served_model,
            api_key=os.environ.get("VLLM_API_KEY"),
            engine_arguments=[_argument(text) for text in engine_arg or ()],
            namespace=namespace,
            at_once=concurrency,
            progress=lambda one: step(one.done, one.prompts),
        )
    if not session.out.document(report.plain()):
        show_report(session.out, report)
    if report.ending != "complete":
        return INTERRUPTED if report.ending == "interrupted" else UNREACHABLE
    return FINE if report.is_complete else FOUND


def _argument(text: str) -> str:
    name, equals, value = text.removeprefix("--").partition("=")
    return f"--{name.replace('_', '-')}{equals}{value}"
