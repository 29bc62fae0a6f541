"""``objkv doctor``: check settings, bulk store and index, and suggest fixes."""

from dataclasses import replace
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
from objkv.ops.doctor.doctor import DoctorReport, Patient, Verdict, examine
from objkv.ops.doctor.probes import Check
from objkv.ops.doctor.transfer import read_transfer
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


@command
def doctor(
    session: Session,
    all_: Annotated[bool, typer.Option("--all", help="Show default settings too.")] = False,
    transfer: Annotated[
        str | None,
        typer.Option(
            "--kv-transfer-config",
            help="vLLM's option of this name: check it, and probe its stores.",
            metavar="JSON|FILE",
        ),
    ] = None,
) -> int:
    """Check settings, bulk store and index, and suggest fixes."""
    checks: tuple[Check, ...] = ()
    if transfer is not None:
        found = read_transfer(transfer, file=session.file)
        session, checks = replace(session, resolved=found.resolved), found.checks
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
        report = examine(session.resolved, patient, checks)
    if session.out.machine:
        session.out.document(report)
    else:
        _print(session.out, report, all_settings=all_)
    return _CODES[report.verdict]


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
