"""``objkv export``: chunks as plain safetensors files in a directory."""

import os
import stat
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from objkv import __version__
from objkv.assembly.backends import open_bulk
from objkv.cli import prompts
from objkv.cli.command import FINE, FOUND, Session, command
from objkv.cli.options import check_folder
from objkv.cli.output import size
from objkv.cli.upkeep import MEMORY_BYTES, WORKERS, MemoryBytes, Upkeep, Workers, upkeep
from objkv.config import local_path
from objkv.errors import ConfigError, PayloadError
from objkv.keys.chunk import ChunkKey
from objkv.keys.identity import Identity
from objkv.keys.prefix import PromptExtras
from objkv.ops.backends_view import (
    HANDOFF_LAYOUT,
    read_namespace,
    record_keys,
    stored_parts,
)
from objkv.ops.export.export import Export, chain_keys
from objkv.ops.export.manifest import Head, ManifestWriter
from objkv.ops.listing import find_identity
from objkv.ops.match import match_prompt
from objkv.ops.show import BEGINNING_CHARS_MIN, is_beginning
from objkv.ops.verify_payload import Budget
from objkv.stores.base import PruneStore
from objkv.telemetry import NullRecorder


@command
def export(
    session: Session,
    out: Annotated[
        Path, typer.Option(help="Directory to write to. Created if missing.", metavar="DIR")
    ],
    namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace",
            "-n",
            help="Namespace: its hex digits, MODEL or TENANT/MODEL, or a beginning. Without a "
            "prefix or prompt, all of it is exported.",
            metavar="NS",
        ),
    ] = None,
    prefix: Annotated[
        str | None,
        typer.Option(help="Export the chunk with this hash and all before it.", metavar="HASH"),
    ] = None,
    below: Annotated[
        bool,
        typer.Option("--below", help="With --prefix, also export all chunks that continue it."),
    ] = False,
    tokens: prompts.Tokens = None,
    text: prompts.Text = None,
    text_file: prompts.TextFile = None,
    tokenizer: prompts.TokenizerPath = None,
    cache_salt: prompts.CacheSalt = None,
    lora_digest: prompts.LoraDigest = None,
    without_tokens: Annotated[
        bool, typer.Option("--without-tokens", help="Omit stored token ids.")
    ] = False,
    memory_bytes: MemoryBytes = MEMORY_BYTES,
    workers: Workers = WORKERS,
) -> int:
    """Export chunks as plain safetensors files.

    Exported files are not compressed, signed or encrypted. An export that was interrupted resumes
    when the same command runs again.
    """
    prompt = None
    if any(one is not None for one in (tokens, text, text_file)):
        prompt = prompts.read_prompt(tokens, text, text_file, tokenizer)
    extras = prompts.read_extras(lora_digest, cache_salt)
    wanted = _Wanted(namespace, prefix, below, prompt, extras)
    wanted.check()
    check_folder("--out", out)
    _check_place(session, out)
    with upkeep(
        session, "export", writes=False, workers=workers, namespace=namespace, resumable=False
    ) as run:
        head = _run(run, wanted, out, Budget(memory_bytes), with_tokens=not without_tokens)
        _show(run, out, head)
        wrong = run.counters.counts["corrupt"] + run.counters.counts["missing"]
        return run.code(FOUND if wrong else FINE)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The chunks to export."""

    namespace: str | None
    prefix: str | None
    below: bool
    prompt: list[int] | None
    extras: PromptExtras

    def check(self) -> None:
        """Raise ``ConfigError`` for a selection that is empty or contradictory."""
        prefix = self.prefix
        if prefix is not None and (self.prompt is not None or not is_beginning(prefix)):
            raise ConfigError(
                f"--prefix takes {BEGINNING_CHARS_MIN} to 40 hex digits of a prefix hash and "
                "cannot be combined with a prompt"
            )
        if self.prompt is None and prefix is None and self.namespace is None:
            raise ConfigError("give --namespace, --prefix or a prompt (--tokens, --text)")
        if self.below and prefix is None:
            raise ConfigError("--below needs --prefix")


def _run(
    run: Upkeep, wanted: _Wanted, out: Path, budget: Budget, *, with_tokens: bool
) -> Head | None:
    """Export the chunks; None if interrupted."""
    identity = find_identity(run.view.bulk, run.view.index, run.namespace)
    if identity.page_layout == HANDOFF_LAYOUT:
        raise ConfigError(
            f"{identity.namespace()} contains hand-offs between engines, which cannot be exported"
        )
    keys = _keys(run, identity, wanted)
    with _private(), run.interruptible():
        # KV reveals its prompt, so only the user may read the directory.
        out.mkdir(mode=0o700, parents=True, exist_ok=True)
        with closing(ManifestWriter(out)) as manifest, _Folder(run.session, out) as target:
            _warn_of_others(run.session, out)
            if (out / identity.namespace()).is_dir():
                run.session.out.note(
                    f"resuming the export in {out}: correct files are kept; delete it to start over"
                )
            work = Export(run.view, target, manifest.add, budget=budget, with_tokens=with_tokens)
            _export(run, work, identity.namespace(), keys)
            if run.pool.ending == "complete":
                return manifest.finish(__version__, int(time.time()))
    return None


def _keys(run: Upkeep, identity: Identity, wanted: _Wanted) -> list[ChunkKey] | None:
    """Return the selected payloads; None for all. Raises ``PayloadError`` if there are none."""
    index, name = run.view.index, identity.namespace()
    with run.session.out.waiting("reading the index"):
        if wanted.prefix is not None:
            return chain_keys(index, name, wanted.prefix, below=wanted.below)
        if wanted.prompt is None:
            return None
        report = match_prompt(index, identity, wanted.prompt, wanted.extras)
        hashes = [chunk.prefix_hash for chunk in report.chunks if chunk.usable]
        if not hashes:
            raise PayloadError(
                "no part of this prompt would be served; objkv match --explain shows why"
            )
        run.session.out.note(
            f"{report.usable_tokens:,} of {report.prompt_tokens:,} tokens would be served"
        )
        records = index.lookup(name, hashes)
        return [key for record in records if record for key in record_keys(name, record)]


def _check_place(session: Session, out: Path) -> None:
    """Raise ``ConfigError`` for a directory inside the bulk store."""
    if session.config.bulk_url.startswith("file:"):
        place, bulk = out.resolve(), local_path(session.config.bulk_url).resolve()
        if place == bulk or bulk in place.parents:
            raise ConfigError(f"{out} is inside the bulk store; choose another directory")


@contextmanager
def _private() -> Iterator[None]:
    """Create files and directories that only this user can access."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def _warn_of_others(session: Session, out: Path) -> None:
    mode = stat.S_IMODE(out.stat().st_mode)
    if mode & 0o077:
        session.out.note(
            f"other users can access {out} (mode {mode:o}); new files are readable only by you, "
            "existing files keep their mode, and KV reveals its prompt"
        )


class _Folder:
    """The export directory, opened as a store."""

    def __init__(self, session: Session, out: Path) -> None:
        place = {"bulk_url": f"file://{out.resolve()}", "index_url": "bulk:", "role": "writer"}
        self._store = open_bulk(session.config.model_copy(update=place), NullRecorder())

    def __enter__(self) -> PruneStore:
        return self._store

    def __exit__(self, *_: object) -> None:
        self._store.close()


def _export(run: Upkeep, work: Export, name: str, keys: list[ChunkKey] | None) -> None:
    namespace = read_namespace(run.view.bulk, name)
    seal = run.view.seal_of(namespace)
    work.documents([name])
    if keys is None:
        parts = stored_parts(run.view.bulk, [name], run.expected())
        run.run("exporting", work.parts(parts, {name: namespace}))
    else:
        run.run("exporting", work.keys(keys, seal))


def _show(run: Upkeep, out: Path, head: Head | None) -> None:
    counts, printer = run.counters.counts, run.session.out
    if printer.machine:
        kinds = ("exported", "kept", "gone", "corrupt", "missing")
        printer.document(
            run.report("export", out=str(out), manifest=head, **{k: counts[k] for k in kinds})
        )
        return
    if head is not None:
        printer.line(f"{head.payloads:,} payloads, {size(head.nbytes)}, in {out}")
    if counts["kept"]:
        printer.line(f"{counts['kept']:,} of them had been exported before")
    run.print_findings()
    run.report_end()
    if run.pool.ending != "complete":
        printer.line("exported files are kept; run the same command again to continue")
