"""``objkv warm``: compute and store prompts before users send them."""

from typing import Annotated

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
from objkv.cli.options import time_option
from objkv.cli.output import Printer
from objkv.errors import ConfigError
from objkv.ops.formats import printable, size
from objkv.ops.listing import find_namespace
from objkv.ops.warm.prompts import read_prompts
from objkv.ops.warm.report import WarmLimits, WarmProgress, WarmReport

_SHOWN_MAX = 20


def show_report(out: Printer, report: WarmReport) -> None:
    """Print the result as text or as one JSON document."""
    if out.machine:
        out.document(report.plain())
        return
    _show_warmed(out, report)
    _show_failures(out, report)
    if report.ending != "complete":
        why = f": {report.why}" if report.why else ""
        left = f", {report.left:,} prompts left" if report.left else ""
        out.line(
            f"incomplete, {report.ending}{left}{why}; run the same command again to continue",
            "yellow",
        )


def _show_warmed(out: Printer, report: WarmReport) -> None:
    if report.namespace:
        out.line(f"namespace {report.namespace}, model {printable(report.model)}")
    rows: list[tuple[object, ...]] = [
        ("prompts", report.prompts, f"{report.prompt_tokens:,} tokens"),
    ]
    if report.mode == "check":
        rows.append(("stored", report.stored_before, ""))
    else:
        rows.append(("stored before", report.stored_before, "skipped"))
        rows.append(("warmed", report.warmed, _warmed(report)))
    if report.short:
        rows.append(("too short", report.short, "shorter than one chunk, so not stored"))
    if report.failed:
        rows.append(("missing" if report.mode == "check" else "failed", report.failed, ""))
    out.table(("", ">", "~"), rows)
    if report.mode == "check":
        return
    if report.asked_tokens:
        out.line(_asked(report))
    out.line(f"saved {report.saved_chunks:,} chunks, {size(report.saved_bytes)}")
    answered = sum(one.answered for one in report.endpoints)
    if (answered and len(report.endpoints) > 1) or any(one.errors for one in report.endpoints):
        out.line()
        out.table(
            ("endpoint", ">answers", ">tokens", ">errors", "state", "~last error"),
            [
                (
                    one.name,
                    one.answered,
                    one.tokens,
                    one.errors,
                    "down" if one.is_down else "ok",
                    one.last_error,
                )
                for one in report.endpoints
            ],
        )


def _warmed(report: WarmReport) -> str:
    text = "verified in the index"
    if report.shared:
        text += f"; all chunks of {report.shared:,} of them were computed by others"
    return text


def _asked(report: WarmReport) -> str:
    speed = report.asked_tokens / report.seconds if report.seconds else 0.0
    text = f"sent {report.asked_tokens:,} tokens in {report.seconds:.1f} s, {speed:,.0f} tokens/s"
    if report.cached_tokens is not None:
        text += f"; {report.cached_tokens:,} of them were cached"
    return text + (f"; {report.retries:,} requests were retried" if report.retries else "")


def _show_failures(out: Printer, report: WarmReport) -> None:
    if not report.failures:
        return
    out.line()
    shown = report.failures[:_SHOWN_MAX]
    out.table(("not warmed", "~why"), [(one.name, one.why) for one in shown])
    if more := max(report.failed, len(report.failures)) - len(shown):
        out.line(f"{more:,} more: --json lists the first thousand")


_USUAL = WarmLimits()
_Prompts = Annotated[
    list[str] | None,
    typer.Argument(help="JSON Lines files, glob patterns, or - for stdin.", metavar="FILES"),
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
_Lora = Annotated[
    list[str] | None,
    typer.Option(
        help="A LoRA adapter: its name in requests, and its folder or digest. Repeatable.",
        metavar="NAME=FOLDER",
    ),
]
_EngineArg = Annotated[
    list[str] | None,
    typer.Option(help="An argument of vllm serve for --model; repeatable.", metavar="NAME[=VALUE]"),
]
_ServedModel = Annotated[
    str | None, typer.Option(help="The base model's name in requests.", metavar="NAME")
]
_ApiKey = Annotated[
    str | None,
    typer.Option(help="API key of the endpoints.", envvar="VLLM_API_KEY", show_envvar=True),
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
    typer.Option(min=1, max=4096, help="Concurrent requests per endpoint.", metavar="N"),
]
_Attempts = Annotated[int, typer.Option(min=1, help="Attempts per prompt.", metavar="N")]
_RequestS = Annotated[
    float,
    time_option("Retry a request that takes longer", "--request-timeout", least=0.1, shown="10m"),
]
_SaveS = Annotated[
    float,
    time_option(
        "Time limit from the answer to a prompt until its KV is saved",
        "--save-timeout",
        least=0.1,
        shown="1m",
    ),
]
_GoneS = Annotated[
    float,
    time_option("Give up after this time without answers", "--give-up-after", shown="2m"),
]


@command
def warm(
    session: Session,
    prompts: _Prompts = None,
    endpoint: _Endpoint = None,
    model: _Model = None,
    check: _Check = False,
    lora: _Lora = None,
    engine_arg: _EngineArg = None,
    served_model: _ServedModel = None,
    api_key: _ApiKey = None,
    namespace: _Namespace = None,
    concurrency: _Concurrency = None,
    attempts: _Attempts = _USUAL.attempts_max,
    request_s: _RequestS = 600.0,
    save_s: _SaveS = _USUAL.save_s,
    gone_s: _GoneS = _USUAL.gone_s,
) -> int:
    """Compute and save prompts before users send them.

    Waits until they are stored. Skips stored prompts, so an interrupted command can be repeated.
    """
    from objkv.client.warming import WarmOptions, run_warm

    places = list(prompts or ())
    if not places:
        raise ConfigError("no prompts: name JSON Lines files, or - for standard input")
    if engine_arg and model is None:
        raise ConfigError("--engine-arg needs --model")
    if namespace is not None:
        with session.backends() as backends:
            namespace = find_namespace(backends.bulk, backends.index, namespace)
    options = WarmOptions(
        endpoints=endpoint or (),
        model=model,
        check=check,
        served_model=served_model,
        api_key=api_key,
        engine_arguments=dict(_argument(text) for text in engine_arg or ()),
        namespace=namespace,
        adapters=dict(_pair(text, "--lora") for text in lora or ()),
        at_once=concurrency,
        answer_s=request_s,
        limits=WarmLimits(attempts_max=attempts, save_s=save_s, gone_s=gone_s),
    )
    with ending_in_order(), session.out.steps("warming") as step:
        progress = WarmProgress(lambda one: step(one.done, one.prompts), session.out.note)
        report = run_warm(session.resolved, read_prompts(places), options, progress)
    show_report(session.out, report)
    return _code(report)


def _code(report: WarmReport) -> int:
    if report.ending != "complete":
        return INTERRUPTED if report.ending == "interrupted" else UNREACHABLE
    return FINE if report.is_complete else FOUND


def _pair(text: str, option: str) -> tuple[str, str]:
    name, found, value = text.partition("=")
    if not (name and found and value):
        raise ConfigError(f"{option} {text}: write NAME=VALUE")
    return name, value


def _argument(text: str) -> tuple[str, str | bool]:
    name, found, value = text.partition("=")
    flags = {"": not found or "", "true": True, "false": False}
    return name.removeprefix("--"), flags.get(value, value)
