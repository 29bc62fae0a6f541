"""``objkv doctor``: check what a replica uses, and suggest fixes; or judge a model."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from objkv.assembly.backends import describe_index, open_bulk, open_hot, open_index, read_lifecycle
from objkv.assembly.seal import open_seal
from objkv.cli.command import FINE, FOUND, UNREACHABLE, WRONG_USAGE, Session, command
from objkv.cli.output import Printer
from objkv.errors import ConfigError
from objkv.ops.doctor.doctor import DoctorReport, Openers, Verdict, examine
from objkv.ops.doctor.probes import BAD, Check
from objkv.ops.formats import size as bytes_text
from objkv.ops.models.verdict import ModelVerdict, judge
from objkv.telemetry import NullRecorder

_CODES: dict[Verdict, int] = {
    "ok": FINE,
    "warnings": FINE,
    "failed": FOUND,
    "full": FOUND,
    "denied": WRONG_USAGE,
    "unreachable": UNREACHABLE,
}
_WORST_FIRST: Final = (*BAD, "warning", "not checked", "ok")


Model = Annotated[
    Path | None,
    typer.Option(help="Judge the model in this folder and check nothing else.", metavar="FOLDER"),
]
Tp = Annotated[int, typer.Option(min=1, help="With --model, tensor parallel size.", metavar="N")]
KvDtype = Annotated[
    str, typer.Option(help="With --model, vLLM's --kv-cache-dtype.", metavar="DTYPE")
]


@command
def doctor(
    session: Session,
    all_: Annotated[bool, typer.Option("--all", help="Show each check and setting.")] = False,
    model: Model = None,
    tp: Tp = 1,
    kv_dtype: KvDtype = "auto",
) -> int:
    """Check settings, agent, stores and index, and suggest fixes.

    If a node agent runs, or OBJKV_AGENT names one, checks the agent and the stores that it uses.
    With --model, say what objkv does with a model before a server starts. Reads its config.json and
    connects to nothing. Does not judge pipeline parallelism, DCP or drafts.
    """
    if model is not None:
        chunk_tokens = session.config.chunk_tokens
        verdict = judge(model, tp=tp, kv_dtype=kv_dtype, chunk_tokens=chunk_tokens)
        return _judge(session.out, verdict)
    if (tp, kv_dtype) != (1, "auto"):
        raise ConfigError("--tp and --kv-dtype need --model")
    openers = Openers(
        # Without logs: the report has every failed check.
        bulk=lambda: open_bulk(session.config, NullRecorder(), logs=False),
        hot=lambda: open_hot(session.config, NullRecorder(), logs=False),
        index=lambda: open_index(session.config, NullRecorder(), logs=False),
        describe_index=lambda: describe_index(session.config),
        seal=lambda: open_seal(session.config),
        read_rules=lambda: read_lifecycle(session.config),
    )
    with session.out.waiting("probing"):
        report = examine(session.resolved, openers)
    if not session.out.document(report):
        _print(session.out, report, everything=all_)
    return _CODES[report.verdict]


def _judge(out: Printer, verdict: ModelVerdict) -> int:
    code = FINE if verdict.refused is None else FOUND
    if out.document(verdict):
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
    if verdict.note is not None:
        yield "dtype", verdict.note
    yield "not judged", "pipeline parallelism, DCP, drafts; see docs/models.md"


def _print(out: Printer, report: DoctorReport, *, everything: bool) -> None:
    fine = report.verdict == "ok" and not any(c.status == "not checked" for c in report.checks)
    out.line(report.summary, "green" if fine else "bold")
    out.line()
    out.table(("", "", "~"), list(_check_rows(report.checks, everything=everything)))
    out.line()
    own_agent = any(o.name == "agent" and str(o.value).startswith("unix:") for o in report.settings)
    stores = () if own_agent else ("bulk_url", "index_url")
    out.table(
        ("setting", "~value", "from"),
        [
            (one.name, one.value, one.source)
            for one in report.settings
            if everything or one.source != "default" or one.name in stores
        ],
    )
    if not everything:
        out.line("all other settings have their defaults; --all shows them and each check", "dim")
    out.line(f"objkv {report.objkv}, Python {report.python}", "dim")


def _check_rows(checks: Sequence[Check], *, everything: bool) -> Iterator[tuple[str, str, str]]:
    """Yield each problem, the worst first, with what to do; then each area's passed checks."""
    groups: dict[tuple[str, ...], list[Check]] = {}
    for check in sorted(checks, key=lambda one: _WORST_FIRST.index(one.status)):
        is_short = check.status == "ok" and not everything
        said = ("", "", "") if is_short else (check.detail, check.fix, check.name * everything)
        groups.setdefault((check.status, check.area, *said), []).append(check)
    for (status, area, detail, fix, _), found in groups.items():
        names = [check.name for check in found]
        if status == "ok" and not everything:
            more = f": {found[0].detail}" if len(found) == 1 and found[0].detail else ""
            yield status, area, ", ".join(names) + more
            continue
        yield status, f"{area}: {', '.join(names)}", detail
        if fix:
            yield "", "", f"to do: {fix}"
