"""``objkv import``: what ``objkv export`` wrote, brought into a cache."""

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from objkv.assembly.backends import open_bulk
from objkv.cli.command import FINE, FOUND, Session, command
from objkv.cli.output import size
from objkv.cli.upkeep import MEMORY_BYTES, WORKERS, MemoryBytes, Upkeep, Workers, upkeep
from objkv.codec.payload import CODECS
from objkv.config import Config
from objkv.errors import ConfigError, PayloadError
from objkv.ops.export.import_ import Arrival, Import, arrivals, new_bytes
from objkv.ops.export.manifest import NAME, Head, ManifestLine, read_head, read_lines
from objkv.ops.listing import list_tenants
from objkv.ops.verify_payload import Budget
from objkv.telemetry import NullRecorder


@command
def import_(
    session: Session,
    folder: Annotated[Path, typer.Argument(help="What objkv export wrote.", metavar="DIR")],
    codec: Annotated[
        str, typer.Option(help=f"Compress payloads: {', '.join(CODECS)}.", metavar="CODEC")
    ] = "none",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be brought in.")
    ] = False,
    memory_bytes: MemoryBytes = MEMORY_BYTES,
    workers: Workers = WORKERS,
) -> int:
    """Bring an export into this cache: every byte is checked, and nothing is replaced.

    Run again, it brings in what is not there.

    Who brings KV in vouches for it: import only what you or people you trust have exported.
    """
    if codec not in CODECS:
        raise ConfigError(f"--codec {codec!r}: one of {', '.join(CODECS)}")
    if not (folder / NAME).is_file():
        raise ConfigError(f"{folder}: no {NAME}, so it is no complete export")
    head, lines = _read(folder)
    with (
        # What was done is seen in the cache itself, by whoever it was undone since.
        upkeep(session, "import", writes=not dry_run, workers=workers, resumable=False) as run,
        closing(open_bulk(_source(session, folder), NullRecorder())) as source,
    ):
        names = sorted({line.key.partition("/")[0] for line in lines})
        found = arrivals(run.view, source, names)
        for arrival in found:
            run.view.seal_of(arrival.namespace)  # raises where the keys are not here
        _tell_arrivals(session, found)
        if dry_run:
            return _show_plan(session, head, found)
        _refuse_overflow(run, lines, found)
        with run.interruptible():
            work = Import(run.view, source, found, budget=Budget(memory_bytes), codec=codec)
            new = work.documents()
            run.run("importing", work.lines(lines))
            run.run("announcing", work.shapes())
        _show(run, head, new)
        wrong = run.counters.counts["missing"] + run.counters.counts["refused"]
        return run.code(FOUND if wrong else FINE)


def _read(folder: Path) -> tuple[Head, list[ManifestLine]]:
    """About 0.5 KiB of memory for each payload. Raises ``ConfigError``."""
    try:
        head = read_head(folder)
        return head, list(read_lines(folder, head))
    except PayloadError as exc:
        raise ConfigError(f"{folder}: {exc}") from exc


def _source(session: Session, folder: Path) -> Config:
    place = {"bulk_url": f"file://{folder.resolve()}", "index_url": "bulk:", "role": "reader"}
    return session.config.model_copy(update=place)


def _tell_arrivals(session: Session, found: list[Arrival]) -> None:
    for arrival in found:
        name, tenant = arrival.namespace.name, arrival.namespace.tenant
        if arrival.document is not None:
            session.out.note(
                f"{name} is new here: replicas find it if their identity is the same "
                "(objkv diff compares them)"
            )
        if tenant not in (None, session.config.tenant):
            session.out.note(f"{name} is of tenant {tenant}; here the tenant is set to "
                             f"{session.config.tenant}")  # fmt: skip


def _refuse_overflow(run: Upkeep, lines: list[ManifestLine], found: list[Arrival]) -> None:
    """Raises ``ConfigError`` where a tenant's quota would be exceeded."""
    quota = run.session.config.quota_bytes
    if not quota:
        return
    with run.session.out.waiting("reading the index"):
        stored = {one.tenant: one.nbytes for one in list_tenants(run.view.bulk, run.view.index)}
        more = new_bytes(run.view.index, lines, found)
    for tenant, nbytes in more.items():
        used = stored.get(tenant, 0)
        if nbytes and used + nbytes > quota:
            raise ConfigError(
                f"tenant {tenant}: {size(nbytes)} more than the {size(used)} that are stored "
                f"exceed quota_bytes, {size(quota)}: raise it, or sweep first"
            )


def _show_plan(session: Session, head: Head, found: list[Arrival]) -> int:
    out = session.out
    new = [one.namespace.name for one in found if one.document is not None]
    if out.machine:
        out.document({"command": "import", "dry_run": True, "manifest": head, "new": new})
    else:
        out.line(
            f"{head.payloads:,} payloads, {size(head.nbytes)}, of {len(found)} "
            f"{'namespace' if len(found) == 1 else 'namespaces'}, {len(new)} new here; nothing "
            "was changed"
        )
    return FINE


def _show(run: Upkeep, head: Head, new: int) -> None:
    counts, out = run.counters.counts, run.session.out
    kinds = ("added", "present", "indexed", "busy", "missing", "refused")
    if out.machine:
        numbers = {kind: counts[kind] for kind in kinds}
        out.document(run.report("import", manifest=head, new_namespaces=new, **numbers))
        return
    words = {
        "added": "added",
        "present": "stored already",
        "indexed": "stored already, and given a record",
        "busy": "being saved by a replica right now",
        "missing": "missing in the export",
        "refused": "refused",
    }
    told = [f"{counts[kind]:,} {words[kind]}" for kind in kinds if counts[kind]]
    out.line(f"{head.payloads:,} payloads: {', '.join(told) or 'nothing done'}")
    run.print_findings()
    run.report_end()
    if run.pool.ending != "complete":
        out.line("run it again to go on: what is stored stays")
