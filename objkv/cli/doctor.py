"""``objkv doctor``: check settings, bulk store and index, and suggest fixes; or judge a model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from objkv.assembly.backends import (
    describe_index,
    open_bulk,
    open_hot,
    open_index,
    read_lifecycle,
)
from objkv.assembly.seal import open_seal
from objkv.cli.command import FINE, FOUND, UNREACHABLE, WRONG_USAGE, Session, command
from objkv.cli.output import Printer
from objkv.errors import ConfigError
from objkv.ops.doctor.doctor import DoctorReport, Patient, Verdict, examine
from objkv.ops.formats import size as bytes_text
from objkv.ops.models.verdict import ModelVerdict, VllmOptions, judge
from objkv.telemetry import MemoryRecorder, NullRecorder

_CODES: dict[Verdict, int] = {
    "ok": FINE,
    "warnings": FINE,
    "failed": FOUND,
    "denied": WRONG_USAGE,
    "unreachable": UNREACHABLE,
}
_SENTENCES: dict[Verdict, str] = {
    "ok": "everything works",
    "warnings": "everything works; see the warnings",
    "failed": "a check failed: replicas cannot work like this",
    "denied": "a permission is missing or a setting is wrong",
    "unreachable": "the bulk store or the index is unreachable",
}

_ALWAYS_SHOWN = ("bulk_url", "index_url")


Model = Annotated[
    Path | None,
    typer.Option(help="Judge the model in this folder and check nothing else.", metavar="FOLDER"),
]
Tp = Annotated[int, typer.Option(min=1, help="With --model, tensor parallel size.", metavar="N")]
Pp = Annotated[int, typer.Option(min=1, help="With --model, pipeline parallel size.", metavar="N")]
Dcp = Annotated[
    int, typer.Option(min=1, help="With --model, decode context parallel size.", metavar="N")
]
KvDtype = Annotated[
    str, typer.Option(help="With --model, vLLM's --kv-cache-dtype.", metavar="DTYPE")
]
Draft = Annotated[
    str | None,
    typer.Option(
        help="With --model, a method of speculative decoding or the folder of a draft.",
        metavar="FOLDER|METHOD",
    ),
]


@command
def doctor(
    session: Session,
    all_: Annotated[bool, typer.Option("--all", help="Show default settings too.")] = False,
    model: Model = None,
    tp: Tp = 1,
    pp: Pp = 1,
    dcp: Dcp = 1,
    kv_dtype: KvDtype = "auto",
    draft: Draft = None,
) -> int:
    """Check settings, bulk store and index, and suggest fixes.

    With --model, say what objkv does with a model before a server starts. Reads its config.json and
    connects to nothing.
    """
    options = VllmOptions(tp, pp, dcp, kv_dtype, draft, session.config.chunk_tokens)
    if model is not None:
        return _judge(session.out, judge(model, options))
    if options != VllmOptions(chunk_tokens=options.chunk_tokens):
        raise ConfigError("--tp, --pp, --dcp, --kv-dtype and --draft need --model")
    numbers = MemoryRecorder()
    patient = Patient(
        open_bulk=lambda: open_bulk(session.config, numbers, on_change=_ignore),
        open_hot=lambda: open_hot(session.config, NullRecorder(), on_change=_ignore),
        open_index=lambda: open_index(session.config, NullRecorder(), on_change=_ignore),
        describe_index=lambda: describe_index(session.config),
        numbers=numbers,
        open_seal=lambda: open_seal(session.config),
        read_rules=lambda: read_lifecycle(session.config),
    )
    with session.out.waiting("probing"):
        report = examine(session.resolved, patient)
    if session.out.machine:
        session.out.document(report)
    else:
        _print(session.out, report, all_settings=all_)
    return _CODES[report.verdict]


def _judge(out: Printer, verdict: ModelVerdict) -> int:
    code = FINE if verdict.refused is None else FOUND
    if out.machine:
        out.document(verdict)
        return code
    out.line(
        f"{verdict.model}: " + ("supported" if code == FINE else "refused by the connector"),
        "green" if code == FINE else "bold",
    )
    if verdict.refused is not None:
        out.line(verdict.refused)
    out.line()
    out.table(("", "~"), list(_rows(verdict)))
    return code


def _rows(verdict: ModelVerdict) -> Iterator[tuple[str, str]]:
    yield "use", "ObjKVConnector" if verdict.use == "connector" else "ObjKVTier, see docs/models.md"
    yield "layers", ", ".join(f"{count} with {kind}" for kind, count in verdict.layers.items())
    unknown = "set by vLLM: its pages are not divided by token"
    token, chunk = verdict.token_bytes, verdict.chunk_bytes
    yield "per token", unknown if token is None else f"{bytes_text(token)} as {verdict.kv_dtype}"
    if verdict.state_bytes:
        yield "states", f"{bytes_text(verdict.state_bytes)} per chunk"
    least = "at least " if verdict.state_bytes else ""
    yield (
        "chunk",
        f"{least}{verdict.chunk_tokens} tokens"
        + ("" if chunk is None else f", {least}{bytes_text(chunk)}"),
    )
    yield "shared with", verdict.shared_with
    yield "drafts", ", ".join(verdict.drafts)


def _ignore(change: object) -> None:
    """Log no circuit changes: the report has every failed check."""


def _print(out: Printer, report: DoctorReport, *, all_settings: bool) -> None:
    out.line(_SENTENCES[report.verdict], "green" if report.verdict == "ok" else "bold")
    out.line()
    checks = [
        (
            check.area,
            check.name,
            check.status,
            "" if check.elapsed_ms is None else f"{check.elapsed_ms:.1f}",
            check.detail,
        )
        for check in report.checks
    ]
    out.table(("area", "check", "status", ">ms", "~detail"), checks)
    fixes = [check for check in report.checks if check.fix]
    if fixes:
        out.line()
    for check in fixes:
        out.line(f"{check.area}, {check.name}: {check.fix}")
    out.line()
    rows = [
        (setting.name, setting.value, setting.source)
        for setting in report.settings
        if all_settings or setting.source != "default" or setting.name in _ALWAYS_SHOWN
    ]
    if rows:
        out.table(("setting", "~value", "from"), rows)
    if not all_settings:
        out.line("all other settings have their defaults; --all shows them")
    out.line()
    out.line(f"objkv {report.objkv}, Python {report.python}")
    here = [f"{name} {version}" for name, version in report.libraries.items() if version]
    out.line(f"libraries: {', '.join(here)}")
