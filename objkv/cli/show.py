"""``objkv show``: the payloads of one chunk, verified."""

from typing import Annotated

import typer

from objkv.assembly.backends import Backends
from objkv.cli.command import FINE, FOUND, Session, command
from objkv.cli.options import Namespace
from objkv.cli.output import Printer
from objkv.cli.upkeep import seal_of
from objkv.errors import ConfigError
from objkv.keys.chunk import ChunkKey
from objkv.keys.prefix import PREFIX_HASH_BYTES
from objkv.ops.backends_view import record_keys, stored_namespaces
from objkv.ops.formats import age, size
from objkv.ops.listing import find_namespace
from objkv.ops.show import PayloadReport, choose_chunk, find_payloads, inspect_payload


@command
def show(
    session: Session,
    key: Annotated[
        str,
        typer.Argument(
            help="Path of a payload, or a prefix hash, given whole or by its first digits.",
            metavar="KEY",
        ),
    ],
    namespace: Namespace = None,
) -> int:
    """Show the payloads of one chunk and verify every byte."""
    with session.backends() as backends:
        keys = _keys(backends, key, namespace)
        seals = {ns: seal_of(session, backends, ns) for ns in {key.namespace for key in keys}}
        reports = [inspect_payload(backends.bulk, key, seals[key.namespace]) for key in keys]
    verdicts = {report.verdict for report in reports} or {"missing"}
    worst = next(v for v in ("missing", "corrupt", "ok") if v in verdicts)
    if not session.out.document({"key": key, "verdict": worst, "payloads": reports}):
        _print(session.out, key, reports)
    return FINE if worst == "ok" else FOUND


def _keys(backends: Backends, text: str, namespace: str | None) -> list[ChunkKey]:
    if "/" in text:
        try:
            return [ChunkKey.parse(text)]
        except ValueError as exc:
            raise ConfigError(
                f"{exc}; a path looks like namespace/aa/hash/group.safetensors"
            ) from exc
    if namespace is None:
        places = sorted({*stored_namespaces(backends.bulk), *backends.index.namespaces()})
    else:
        places = [find_namespace(backends.bulk, backends.index, namespace)]
    if not places:
        raise ConfigError(
            "no namespace is stored; either no replica has saved yet, or bulk_url and index_url "
            "are wrong"
        )
    found = find_payloads(backends.bulk, places, text)
    if len(text) == 2 * PREFIX_HASH_BYTES:
        # A payload that has a record but is not stored is reported as missing.
        prefix_hash = bytes.fromhex(text)
        for place in places:
            [record] = backends.index.lookup(place, [prefix_hash])
            if record is not None and (promised := list(record_keys(place, record))):
                found.setdefault((place, prefix_hash), []).extend(promised)
    chunk = choose_chunk(found, text)
    return [] if chunk is None else sorted({*found[chunk]}, key=ChunkKey.path)


def _print(out: Printer, key: str, reports: list[PayloadReport]) -> None:
    if not reports:
        out.line(f"{key} is not in the bulk store", "bold red")
    for number, report in enumerate(reports):
        if number:
            out.line()
        out.line(report.key, "bold")
        rows: list[tuple[str, object]] = [("verdict", report.verdict)]
        if report.problem:
            rows.append(("problem", report.problem))
        if report.token_start is not None and report.token_end is not None:
            parent = report.parent_hash.hex() if report.parent_hash else None
            seal = "verified" if report.seal_verified else "not verified"
            rows += [
                ("tokens", f"{report.token_start:,}-{report.token_end:,}"),
                ("group", report.group),
                ("shard", report.shard or "all of the group"),
                ("parent", parent),
                ("codec", f"{report.codec}, {report.ratio} of the raw size"),
                ("size", f"{size(report.nbytes)} (header {size(report.header_bytes)})"),
                ("header checksum", report.header_checksum),
                ("token digest", report.token_digest),
                ("token ids", "stored" if report.tokens_stored else "not stored"),
                ("signed by", report.signed_by and f"{report.signed_by}, {seal}"),
                ("encrypted by", report.encrypted_by),
                ("writer", report.writer),
                ("age", age(report.created_s)),
            ]
        unsealed = ("signed by", None), ("encrypted by", None)
        out.table(("", "~"), [row for row in rows if row not in unsealed])
        if report.frames:
            out.line()
            columns = ("layer", "~checksum", ">bytes", ">raw bytes", "codec", "dtype", "shape")
            frames = [
                (one.layer, one.problem or "ok", one.nbytes, one.raw_bytes, one.codec, one.dtype,
                 "x".join(map(str, one.shape)))
                for one in report.frames
            ]  # fmt: skip
            out.table(columns, frames)
