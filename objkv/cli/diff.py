"""``objkv diff``: why two namespaces or replicas do not share."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from objkv.assembly.backends import Backends
from objkv.cli.command import FINE, FOUND, Session, command
from objkv.cli.options import read_text
from objkv.cli.output import Printer
from objkv.errors import ConfigError, PayloadError, UnclearName
from objkv.keys.identity import identity_path
from objkv.ops.backends_view import identity_document
from objkv.ops.diff import DiffReport, Document, namespace_of, parse_document
from objkv.ops.diff import diff as compare
from objkv.ops.listing import find_namespace

_VALUE_CHARS = 64


@command
def diff(
    session: Session,
    a: Annotated[
        str,
        typer.Argument(
            help="identity.json file, replica log file, or namespace: its hex digits, MODEL or "
            "TENANT/MODEL, or a beginning. - reads standard input.",
            metavar="A",
        ),
    ],
    b: Annotated[str, typer.Argument(help="The other side, given like A.", metavar="B")],
) -> int:
    """Explain why two namespaces or replicas do not share KV."""
    if a == b == "-":
        raise ConfigError("only one of A and B can be - (standard input)")
    with session.backends(may_lack_bulk=True) as backends:  # files need no store
        sides = [_read(backends, text) for text in (a, b)]
    report = compare(*sides)
    if not session.out.document(_document((a, b), sides, report)):
        _print(session.out, (a, b), sides, report)
    return FINE if report.share else FOUND


def _read(backends: Backends, text: str) -> Document:
    if text == "-":
        return parse_document(sys.stdin.read(), "standard input")
    path = Path(text)
    if path.exists() and not path.is_dir():  # a pipe too, as in diff <(kubectl logs a) NS
        return parse_document(read_text(path), text)
    try:
        name = find_namespace(backends.bulk, backends.index, text)
    except UnclearName as exc:
        raise UnclearName(f"{text} is not a file, and {exc}", exc.choices) from exc
    stored = identity_document(backends.bulk, name)
    if stored is None:
        raise ConfigError(
            f"the bulk store has no {identity_path(name)}: check bulk_url, or give the replica's "
            "log, which has its identity"
        )
    try:
        document = parse_document(stored.decode("utf-8", "replace"), identity_path(name))
    except ConfigError as exc:
        raise PayloadError(f"{identity_path(name)}: not an identity document") from exc
    if namespace_of(document) != name:
        raise PayloadError(
            f"{identity_path(name)}: belongs to another namespace, {namespace_of(document)}; "
            "delete it, and a replica of that model writes the right one when it starts"
        )
    return document


def _document(
    names: tuple[str, str], sides: Sequence[Document], report: DiffReport
) -> dict[str, Any]:
    a, b = (
        {"source": name, "namespace": namespace_of(side), "model": side.get("model")}
        for name, side in zip(names, sides, strict=True)
    )
    return {
        "share": report.share,
        "reason": report.reason,
        "a": a,
        "b": b,
        "differences": report.differences,
    }


def _print(
    out: Printer, names: tuple[str, str], sides: Sequence[Document], report: DiffReport
) -> None:
    rows = [
        (letter, namespace_of(side), str(side.get("model")), name)
        for letter, name, side in zip("ab", names, sides, strict=True)
    ]
    out.table(("", "namespace", "model", "given as"), rows)
    out.line()
    if report.share:
        out.line(report.reason, "green")
        out.line("(TP, PP, rank and vLLM version may differ)")
        out.line(
            "if one still misses what the other saved, compare bulk_url and index_url "
            "(objkv doctor), cache_salt and the adapter of the requests"
        )
        return
    out.table(
        ("field", "~a", "~b"), [(d.field, _value(d.a), _value(d.b)) for d in report.differences]
    )
    out.line()
    out.line(report.reason, "bold")
    for one in report.differences:
        out.line()
        if one.follows_from is not None:
            out.line(f"{one.field}: follows from {one.follows_from}")
        else:
            out.line(f"{one.field}: {one.why}")
            out.line(f"  {one.fix}")


def _value(value: Any) -> str:
    text = json.dumps(value) if not isinstance(value, str) else value
    return text if len(text) <= _VALUE_CHARS else f"{text[: _VALUE_CHARS - 1]}…"
