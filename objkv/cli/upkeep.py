"""Shared by the long commands (``rebuild``, ``sweep``, ``verify``): opening store and index, worker
threads, the checkpoint and the end of the report."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any

import typer

from objkv.assembly.backends import Backends
from objkv.assembly.seal import open_seal
from objkv.cli.command import FOUND, INTERRUPTED, Session
from objkv.codec.seal import Seal
from objkv.config.urls import cache_folder
from objkv.errors import ConfigError, StoreUnavailable
from objkv.ops.backends_view import (
    BackendsView,
    StoredNamespace,
    pick_namespace,
    read_namespace,
    stored_namespaces,
)
from objkv.ops.doctor.access import COMMAND_ROLES
from objkv.ops.runs import Checkpoint, Counters, Unit, WorkPool, checkpoint_file

WORKERS = 16
MEMORY_BYTES = 1 << 30
OneNamespace = Annotated[
    str | None, typer.Option(help="Only this namespace, or a unique start of it.", metavar="NS")
]
Workers = Annotated[int, typer.Option(min=1, max=256, help="Number of threads.", metavar="N")]
Restart = Annotated[
    bool, typer.Option("--restart", help="Start over instead of resuming an earlier run.")
]
Deadline = Annotated[
    float | None, typer.Option(min=0, help="Start no new work after this time.", metavar="SECONDS")
]
MemoryBytes = Annotated[
    int, typer.Option(min=1, help="Memory limit for all payloads in flight.", metavar="BYTES")
]
_GO_ON = "run the same command again to continue"


@dataclass(frozen=True, slots=True)
class Upkeep:
    """One run of a long command."""

    session: Session
    view: BackendsView
    pool: WorkPool
    checkpoint: Checkpoint

    def run(self, what: str, units: Iterable[Unit]) -> None:
        """Run the units and show the progress."""
        with self.session.out.steps(what) as on_progress:
            self.pool.run(units, on_progress)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """An interrupt ends the block but not the command, which then reports partial results."""
        try:
            yield
        except KeyboardInterrupt:
            self.pool.halt("interrupted")

    def pick(self, beginning: str | None) -> str | None:
        """Return the one namespace in store or index with this beginning; None for None. Raises
        ``ConfigError``."""
        if beginning is None:
            return None
        known = sorted({*stored_namespaces(self.view.bulk), *self.view.index.namespaces()})
        name = pick_namespace(known, beginning) if known else ""
        if name not in known:
            url = self.session.config.public()["bulk_url"]
            stored = f"stored are {', '.join(known)}" if known else _nothing_stored(url)
            raise ConfigError(f"no such namespace: {beginning}; {stored}")
        return name

    def with_keys(self, found: dict[str, StoredNamespace]) -> dict[str, StoredNamespace]:
        """Return the namespaces whose sealing keys are configured here and print a note for each
        other one. Raises ``ConfigError`` if no namespace remains."""
        left, skipped = {}, dict[str, str]()
        for name, namespace in found.items():
            try:
                self.view.seal_of(namespace)
            except ConfigError as exc:
                skipped[name] = str(exc)
            else:
                left[name] = namespace
        if skipped and not left:
            raise ConfigError("; ".join(dict.fromkeys(skipped.values())))
        for name, why in skipped.items():
            self.session.out.note(f"{name} is skipped: {why}")
        return left

    @property
    def counters(self) -> Counters:
        """The findings so far, including those of the runs that this one resumes."""
        total = Counters()
        total.add(self.checkpoint.counters)
        total.add(self.pool.partial)
        return total

    def report(self, command: str, **more: Any) -> dict[str, Any]:
        """Return the JSON document: the common keys, with ``more`` before the findings."""
        counters = self.counters
        return {
            "command": command,
            "ending": self.pool.ending,
            "complete": self.pool.ending == "complete",
            "resumed": self.checkpoint.resumed,
            **more,
            "findings": counters.findings,
            "omitted": counters.omitted,
        }

    def print_findings(self) -> None:
        """Print a line for each finding."""
        findings = self.counters.findings
        self.session.out.table(("", "", ""), [(f.kind, f.key, f.detail) for f in findings])

    def report_nothing(self) -> None:
        """Print that the store is empty, with its URL."""
        self.session.out.line(_nothing_stored(self.session.config.public()["bulk_url"]))
        self.report_end()

    def report_end(self) -> None:
        """Print why the run is incomplete, if it is."""
        out, ending = self.session.out, self.pool.ending
        if ending != "complete" and not out.machine:
            goes_on = self.checkpoint.is_kept or ending == "limit"
            kept = f": {_GO_ON}" if goes_on else ""
            words = {
                "interrupted": "interrupted",
                "deadline": "the deadline has passed",
                "limit": "the limit is reached",
            }
            out.line(f"incomplete, {words[ending]}{kept}", "yellow")

    def code(self, otherwise: int) -> int:
        """Return the exit code. An incomplete run never reports success."""
        if self.pool.ending == "interrupted":
            return INTERRUPTED
        return otherwise if self.pool.ending == "complete" else max(otherwise, FOUND)


def _nothing_stored(url: str) -> str:
    return f"nothing is stored in {url} yet"


@contextmanager
def upkeep(
    session: Session,
    command: str,
    *settings: object,
    writes: bool,
    workers: int,
    deadline_s: float | None = None,
    restart: bool = False,
    resumable: bool = True,
) -> Iterator[Upkeep]:
    """Open store, index and the checkpoint of ``command``. ``settings`` are the values that select
    its work; runs with equal settings share a checkpoint. Raises ``ConfigError`` for memory:
    URLs, a missing folder, or a reader that would write."""
    refuse_memory(session, command)
    config = session.config
    if writes and config.role == "reader":
        needed = COMMAND_ROLES[command][-1]
        raise ConfigError(f"{command} writes, but role is reader: set role to {needed}")
    has_bulk = session.has_bulk()
    with session.backends() as backends:
        with session.out.waiting("checking store and index"):
            if has_bulk:
                backends.bulk.check()
            if has_bulk or not config.index_url.startswith("bulk:"):
                backends.index.check()
        view = BackendsView.of(
            config,
            (backends.bulk, backends.hot),
            backends.index,
            backends.admin,
            command=command,
            seal_of=open_seals(session),
        )
        place = (config.bulk_url, config.index_url, config.s3_endpoint_url, config.redis_prefix)
        file = checkpoint_file(cache_folder(), command, place, settings)
        if restart:
            file.unlink(missing_ok=True)
        checkpoint = Checkpoint(file if resumable else None)
        pool = WorkPool(checkpoint, workers=workers, deadline_s=deadline_s)
        is_done = False
        try:
            yield Upkeep(session, view, pool, checkpoint)
            is_done = pool.ending in ("complete", "limit")
        except StoreUnavailable as exc:
            if not checkpoint.is_kept:
                raise
            raise StoreUnavailable(f"{exc}; {_GO_ON}") from exc
        finally:
            checkpoint.close(complete=is_done)


def refuse_memory(session: Session, command: str) -> None:
    """Raise ``ConfigError`` if store or index is in this process's memory, and so always empty."""
    for name in ("bulk_url", "index_url"):
        if getattr(session.config, name).startswith("memory:"):
            raise ConfigError(
                f"{name} is memory:, which only the replica itself can read: {command} needs "
                "a store that it shares with the replicas"
            )


def open_seals(session: Session) -> Callable[[StoredNamespace], Seal | None]:
    """Return a function that gives a namespace's seal; it raises ``ConfigError`` if the keys are
    not configured here."""
    # Once per tenant rather than per namespace: requesting keys may take seconds.
    seal = lru_cache(
        lambda tenant, seals: (
            open_seal(session.config, tenant=tenant, seals=seals) if seals else None
        )
    )

    def seal_of(namespace: StoredNamespace) -> Seal | None:
        """The document names the seals, and the namespace is its digest, so it cannot be forged.
        Without a document the configured seals apply."""
        if not namespace.is_known:
            return seal(None, session.config.seals)
        return seal(namespace.tenant, namespace.seals)

    return seal_of


def seal_of(session: Session, backends: Backends, namespace: str) -> Seal | None:
    """Return the seal of the namespace's payloads. If the keys are not configured here, print a
    note and return None: then checks find damage only."""
    try:
        return open_seals(session)(read_namespace(backends.bulk, namespace))
    except ConfigError as exc:
        session.out.note(f"seals are not verified: {exc}")
        return None
