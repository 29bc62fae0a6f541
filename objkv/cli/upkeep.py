"""Shared by the long commands (``rebuild``, ``sweep``, ``verify``): opening store and index, worker
threads and the end of the report."""

from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from objkv.assembly.backends import Backends
from objkv.assembly.seal import open_seals
from objkv.cli.command import INTERRUPTED, Session, require_role
from objkv.cli.output import counted
from objkv.codec.seal import Seal
from objkv.errors import ConfigError
from objkv.keys.identity import NAMESPACE_HEX
from objkv.keys.prefix import PREFIX_HASH_BYTES
from objkv.ops.backends_view import BackendsView, read_namespace
from objkv.ops.inventory.file import Inventory
from objkv.ops.inventory.walk import Walk, WalkScope, find_scope
from objkv.ops.listing import find_namespace
from objkv.ops.runs import Counters, Unit, WorkPool

WORKERS = 16
"""Threads of a long command."""


@dataclass(frozen=True, slots=True)
class Upkeep:
    """One run of a long command."""

    session: Session
    view: BackendsView
    inventory: Inventory
    pool: WorkPool
    namespace: str | None = None
    """The only namespace to work on; None for all."""

    def run(self, what: str, units: Iterable[Unit]) -> None:
        with self.session.out.steps(what) as on_progress:
            self.pool.run(units, on_progress)

    def walk(self, *, only_sealed_here: bool = False, only_read: bool = False) -> Walk:
        """Return the walk that fills the inventory. ``only_sealed_here``: see ``_with_keys``.
        ``only_read``: see ``_of_this_format``."""
        with self.session.out.waiting("reading namespaces"):
            scope = find_scope(self.view, self.namespace)
        if only_read:
            scope = self._of_this_format(scope)
        if only_sealed_here:
            scope = self._with_keys(scope)
        return Walk(self.view, self.inventory, scope)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """An interrupt ends the block but not the command, which then reports partial results."""
        try:
            yield
        except KeyboardInterrupt:
            self.pool.halt()

    def _of_this_format(self, scope: WalkScope) -> WalkScope:
        """Leave out the namespaces of an earlier format, with a note that counts them."""
        old = {name for name, one in scope.namespaces.items() if one.is_old_format}
        if old:
            self.session.out.note(
                f"left out {counted(len(old), 'namespace')} of an earlier format that is not read "
                "any more: objkv sweep --apply deletes the payloads"
            )
        return scope.without(old)

    def _with_keys(self, scope: WalkScope) -> WalkScope:
        """Leave out the namespaces whose sealing keys are not configured here, with a note for
        each. Raises ``ConfigError`` if no namespace remains."""
        skipped = dict[str, str]()
        for name, namespace in scope.namespaces.items():
            try:
                self.view.seal_of(namespace)
            except ConfigError as exc:
                skipped[name] = str(exc)
        if skipped and len(skipped) == len(scope.namespaces):
            raise ConfigError("; ".join(dict.fromkeys(skipped.values())))
        for name, why in skipped.items():
            self.session.out.note(f"{name} is skipped: {why}")
        return scope.without(skipped)

    @property
    def counters(self) -> Counters:
        return self.pool.counters

    def report(self, command: str, **more: Any) -> None:
        """Print the JSON document: the common keys, with ``more`` before the findings."""
        ending, counters = self.pool.ending, self.counters
        head = {"command": command, "ending": ending, "complete": ending == "complete"}
        found = {"findings": counters.findings, "omitted": counters.omitted}
        self.session.out.document({**head, **more, **found})

    def report_nothing(self) -> None:
        url = self.session.config.public()["bulk_url"]
        self.session.out.line(f"nothing is stored in {url} yet")
        self.report_end()

    def report_end(self) -> None:
        """Print that the run is incomplete, if it is."""
        if self.pool.ending != "complete" and not self.session.out.machine:
            self.session.out.line("incomplete, interrupted", "yellow")

    def code(self, otherwise: int) -> int:
        """Return the exit code. An incomplete run never reports success."""
        return otherwise if self.pool.ending == "complete" else INTERRUPTED


@contextmanager
def upkeep(
    session: Session, command: str, *, writes: bool, namespace: str | None
) -> Iterator[Upkeep]:
    """Open store and index. Raises ``ConfigError``, also if the role may not write."""
    config = session.config
    if writes:
        name = f"{command} --quarantine" if command == "verify" else command
        require_role(session, f"{name} --apply")
    has_bulk = session.has_bulk()
    with session.backends() as backends:
        with session.out.waiting("checking store and index"):
            if has_bulk:
                backends.bulk.check()
            if writes and (has_bulk or not config.index_url.startswith("bulk:")):
                backends.index.check()
            else:  # a check may write, and would create a missing index file
                backends.index.lookup("0" * NAMESPACE_HEX, [bytes(PREFIX_HASH_BYTES)])
        view = BackendsView.of(config, backends, command, open_seals(config))
        if namespace is not None:
            namespace = find_namespace(view.bulk, view.index, namespace, must_exist=True)
        with closing(Inventory()) as inventory:
            yield Upkeep(session, view, inventory, WorkPool(workers=WORKERS), namespace)


def seal_of(session: Session, backends: Backends, namespace: str) -> Seal | None:
    """Return the seal of the namespace's payloads. If the keys are not configured here, print a
    note and return None: then checks find damage only."""
    try:
        return open_seals(session.config)(read_namespace(backends.bulk, namespace))
    except ConfigError as exc:
        session.out.note(f"seals are not verified: {exc}")
        return None
