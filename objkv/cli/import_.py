"""``objkv import``: chunks that ``objkv export`` wrote, added to a cache."""

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from objkv.assembly.backends import open_bulk
from objkv.cli.command import FINE, FOUND, Session, command
from objkv.cli.output import counted, size
from objkv.cli.upkeep import (
    MEMORY_BYTES,
    WORKERS,
    DryRun,
    MemoryBytes,
    Upkeep,
    Workers,
    refuse_contradiction,
    upkeep,
)
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
    folder: Annotated[
        Path, typer.Argument(help="Directory that objkv export wrote.", metavar="DIR")
    ],
    codec: Annotated[
        str,
        typer.Option(help=f"Codec for the stored payloads: {', '.join(CODECS)}.", metavar="CODEC"),
    ] = "none",
    apply: Annotated[
        bool, typer.Option("--apply", help="Import (default: report what would be imported).")
    ] = False,
    dry_run: DryRun = False,
    memory_bytes: MemoryBytes = MEMORY_BYTES,
    workers: Workers = WORKERS,
) -> int:
    """Import chunks that objkv export wrote.

    Reports what would be imported; --apply imports it.

    Every byte is checked, and valid stored chunks are never replaced. Running the command again
    imports only missing chunks.

    Import only from sources you trust: replicas serve imported KV as if they had computed it.
    """
    refuse_contradiction(apply=apply, dry_run=dry_run)
    if codec not in CODECS:
        raise ConfigError(f"--codec {codec!r}: choose one of {', '.join(CODECS)}")
    if not (folder / NAME).is_file():
        raise ConfigError(f"{folder}: not a complete export, {NAME} is missing")
    head, lines = _read(folder)
    with (
        # No checkpoint: the cache itself shows which chunks are imported.
        upkeep(session, "import", writes=apply, workers=workers, resumable=False) as run,
        closing(open_bulk(_source(session, folder), NullRecorder())) as source,
    ):
        names = sorted({line.key.partition("/")[0] for line in lines})
        found = arrivals(run.view, source, names)
        for arrival in found:
            run.view.seal_of(arrival.namespace)  # raises if its seal keys are not configured
        _note_arrivals(session, found)
        with session.out.waiting("reading the index"):
            more = new_bytes(run.view.index, lines, found)
        overflow = _overflow(run, more)
        if not apply:
            return _show_plan(session, head, found, sum(more.values()), overflow)
        if overflow is not None:
            raise ConfigError(overflow)
        with run.interruptible():
            work = Import(run.view, source, found, budget=Budget(memory_bytes), codec=codec)
            new = work.documents()
            run.run("importing", work.lines(lines))
            run.run("publishing shapes", work.shapes())
        _show(run, head, new)
        wrong = run.counters.counts["missing"] + run.counters.counts["refused"]
        return run.code(FOUND if wrong else FINE)


def _read(folder: Path) -> tuple[Head, list[ManifestLine]]:
    """Read the manifest, with about 0.5 KiB of memory per payload. Raises ``ConfigError``."""
    try:
        head = read_head(folder)
        return head, list(read_lines(folder, head))
    except PayloadError as exc:
        raise ConfigError(f"{folder}: {exc}") from exc


def _source(session: Session, folder: Path) -> Config:
    place = {"bulk_url": f"file://{folder.resolve()}", "index_url": "bulk:", "role": "reader"}
    return session.config.model_copy(update=place)


def _note_arrivals(session: Session, found: list[Arrival]) -> None:
    for arrival in found:
        name, tenant = arrival.namespace.name, arrival.namespace.tenant
        if arrival.document is not None:
            session.out.note(
                f"{name} is new in this cache; only replicas with the same identity find it "
                "(objkv diff compares identities)"
            )
        if tenant not in (None, session.config.tenant):
            session.out.note(
                f"{name} belongs to tenant {tenant}; the configured tenant is "
                f"{session.config.tenant}"
            )


def _overflow(run: Upkeep, more: dict[str | None, int]) -> str | None:
    """Return why an import of ``more`` bytes by tenant would exceed a quota; None if it fits."""
    quota = run.session.config.quota_bytes
    if not quota:
        return None
    stored = {one.tenant: one.nbytes for one in list_tenants(run.view.bulk, run.view.index)}
    for tenant, nbytes in more.items():
        used = stored.get(tenant, 0)
        if nbytes and used + nbytes > quota:
            return (
                f"tenant {tenant} stores {size(used)}, and another {size(nbytes)} would exceed "
                f"quota_bytes, {size(quota)}; raise quota_bytes or sweep first"
            )
    return None


def _show_plan(
    session: Session, head: Head, found: list[Arrival], more: int, overflow: str | None
) -> int:
    """Print what --apply would do. ``more``: bytes of payloads without a record."""
    out = session.out
    new = [one.namespace.name for one in found if one.document is not None]
    if out.machine:
        document = {"command": "import", "dry_run": True, "applied": False, "manifest": head}
        out.document({**document, "new": new, "new_bytes": more, "refusal": overflow})
    else:
        names = counted(len(found), "namespace")
        out.line(
            f"{head.payloads:,} payloads, {size(head.nbytes)}, in {names} ({len(new)} new); "
            f"{size(more)} are not stored here"
        )
        if overflow is not None:
            out.line(f"--apply would be refused: {overflow}", "yellow")
        elif more:
            out.line("nothing was imported: add --apply to import")
    return FOUND if more else FINE


def _show(run: Upkeep, head: Head, new: int) -> None:
    counts, out = run.counters.counts, run.session.out
    kinds = ("added", "present", "indexed", "busy", "missing", "refused")
    if out.machine:
        numbers = {kind: counts[kind] for kind in kinds}
        out.document(
            run.report("import", applied=True, manifest=head, new_namespaces=new, **numbers)
        )
        return
    words = {
        "added": "added",
        "present": "already stored",
        "indexed": "already stored, record added",
        "busy": "being saved by a replica",
        "missing": "missing from the export",
        "refused": "refused",
    }
    parts = [f"{counts[kind]:,} {words[kind]}" for kind in kinds if counts[kind]]
    out.line(f"{head.payloads:,} payloads: {', '.join(parts) or 'nothing done'}")
    run.print_findings()
    run.report_end()
    if run.pool.ending != "complete":
        out.line("imported chunks are kept; run the same command again to continue")
