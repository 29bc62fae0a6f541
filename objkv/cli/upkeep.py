"""What the long commands share (``rebuild``, ``sweep``, ``verify``): both ends, threads, a place to
go on from, and how a report ends."""

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
from objkv.ops.runs import Checkpoint, Counters, Unit, WorkPool, checkpoint_file

WORKERS = 16
MEMORY_BYTES = 1 << 30
OneNamespace = Annotated[
    str | None, typer.Option(help="Of this one only, or its beginning.", metavar="NS")
]
Workers = Annotated[int, typer.Option(min=1, max=256, metavar="N")]
Restart = Annotated[
    bool, typer.Option("--restart", help="Begin anew, not where an earlier run ended.")
]
Deadline = Annotated[
    float | None, typer.Option(min=0, help="Begin nothing after it.", metavar="SECONDS")
]
MemoryBytes = Annotated[int, typer.Option(min=1, help="For payloads, together.", metavar="BYTES")]
_GO_ON = "run the same command again to go on"


@dataclass(frozen=True, slots=True)
class Upkeep:
    """One run of a long command."""

    session: Session
    view: BackendsView
    pool: WorkPool
    checkpoint: Checkpoint

    def run(self, what: str, units: Iterable[Unit]) -> None:
        """Do them, and show how far they are."""
        with self.session.out.steps(what) as on_progress:
            self.pool.run(units, on_progress)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """An interrupt ends what is done in here, and not the command: it shows how far it came."""
        try:
            yield
        except KeyboardInterrupt:
            self.pool.halt("interrupted")

    def pick(self, beginning: str | None) -> str | None:
        """The one namespace that begins so, of both ends; None for None. Raises ``ConfigError``."""
        if beginning is None:
            return None
        known = sorted({*stored_namespaces(self.view.bulk), *self.view.index.namespaces()})
        name = pick_namespace(known, beginning) if known else ""
        if name not in known:
            there = f"there are: {', '.join(known)}" if known else "nothing is stored"
            raise ConfigError(f"no such namespace: {beginning}; {there}")
        return name

    def with_keys(self, found: dict[str, StoredNamespace]) -> dict[str, StoredNamespace]:
        """Those whose payloads can be judged here; it is told which cannot, because the keys that
        they are sealed with are not. Raises ``ConfigError`` if that is true of all."""
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
            self.session.out.note(f"{name} is left alone: {why}")
        return left

    @property
    def counters(self) -> Counters:
        """What was found, by earlier runs that this one continues too."""
        total = Counters()
        total.add(self.checkpoint.counters)
        total.add(self.pool.partial)
        return total

    def report(self, command: str, **more: Any) -> dict[str, Any]:
        """The JSON document's common part, and ``more`` before the findings."""
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
        """A line for each."""
        findings = self.counters.findings
        self.session.out.table(("", "", ""), [(f.kind, f.key, f.detail) for f in findings])

    def report_nothing(self) -> None:
        """Say that there is nothing to work on, and where that was looked for."""
        public = self.session.config.public()
        self.session.out.line(f"nothing is stored yet in {public['bulk_url']}")
        self.report_end()

    def report_end(self) -> None:
        """Say how it ended, if that was early."""
        out, ending = self.session.out, self.pool.ending
        if ending != "complete" and not out.machine:
            goes_on = self.checkpoint.is_kept or ending == "limit"
            kept = f": {_GO_ON}" if goes_on else ""
            words = {
                "interrupted": "interrupted",
                "deadline": "the time is over",
                "limit": "the limit is reached",
            }
            out.line(f"not complete, {words[ending]}{kept}", "yellow")

    def code(self, otherwise: int) -> int:
        """The exit code. What has not looked at everything cannot say that all is fine."""
        if self.pool.ending == "interrupted":
            return INTERRUPTED
        return otherwise if self.pool.ending == "complete" else max(otherwise, FOUND)


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
    """Open both ends and the checkpoint of ``command`` with these ``settings``, which decide what
    it does. Raises ``ConfigError`` where there is nothing to work on."""
    refuse_memory(session, command)
    config = session.config
    if writes and config.role == "reader":
        raise ConfigError(f"{command} writes, and role is reader: set role to sweeper")
    has_bulk = session.has_bulk()
    with session.backends() as backends:
        with session.out.waiting("asking both ends"):
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
    """Raises ``ConfigError`` where an end is in the memory of this process, and so empty."""
    for name in ("bulk_url", "index_url"):
        if getattr(session.config, name).startswith("memory:"):
            raise ConfigError(
                f"{name} is memory:, which only the replica itself sees: there is nothing for "
                f"{command} to work on"
            )


def open_seals(session: Session) -> Callable[[StoredNamespace], Seal | None]:
    """What the payloads of a namespace are sealed with; raises ``ConfigError`` where the keys for
    that are not here."""
    # Once for each tenant, not for each namespace: to ask for keys may take seconds.
    seal = lru_cache(
        lambda tenant, seals: (
            open_seal(session.config, tenant=tenant, seals=seals) if seals else None
        )
    )

    def seal_of(namespace: StoredNamespace) -> Seal | None:
        """A namespace's document says how its payloads are sealed, and nobody can make another one
        of the same digest. Without one, what is configured counts."""
        if not namespace.is_known:
            return seal(None, session.config.seals)
        return seal(namespace.tenant, namespace.seals)

    return seal_of


def seal_of(session: Session, backends: Backends, namespace: str) -> Seal | None:
    """What the namespace's payloads are sealed with; None also where the keys are not here: then
    only damage is found."""
    try:
        return open_seals(session)(read_namespace(backends.bulk, namespace))
    except ConfigError as exc:
        session.out.note(f"seals are not verified: {exc}")
        return None
