"""Watches store and index for ``objkv exporter``: availability, totals and their age, and with
``--scan-every`` an inventory of both: one request per 1,000 payloads, and all index records.

Threads check the backends, and scrapes read the last results: a scrape never waits for a backend,
and a hanging backend blocks only its own thread.
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Literal

from objkv.errors import ObjkvError
from objkv.index.base import ServerFacts, Usage
from objkv.ops.backends_view import BackendsView, read_namespace
from objkv.ops.inventory.file import Inventory
from objkv.ops.inventory.findings import NamespaceFindings, count_findings
from objkv.ops.inventory.walk import Walk, find_scope
from objkv.ops.listing import NamespaceSummary, counted_namespaces
from objkv.ops.runs import WorkPool
from objkv.stores.base import ReadStore

logger = logging.getLogger(__name__)

End = Literal["bulk", "hot", "index"]
DOCUMENTS_AT_ONCE = 200
"""Identity documents read in one round; the rest waits for the next round."""
DOCUMENTS_MAX = 20_000
"""Documents kept in memory."""
_STOP_S = 5.0
_WORKERS = 4


@dataclass(frozen=True, slots=True)
class BackendHealth:
    """The result of the last check of a backend."""

    is_up: bool
    seconds: float
    asked_s: float
    """Seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Tenant and model from a namespace's document; empty if it is missing or not yet read."""

    tenant: str = ""
    model: str = ""


@dataclass(frozen=True, slots=True)
class StoredUsage:
    """The totals of all namespaces from the index."""

    usage: tuple[Usage, ...]
    read_s: float


@dataclass(frozen=True, slots=True)
class Scan:
    """A complete scan."""

    namespaces: Sequence[NamespaceSummary]
    findings: NamespaceFindings
    ended_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class _Asked:
    """Of one backend. Its thread replaces it as a whole, so that readers need no lock."""

    answer: BackendHealth | None = None
    since: float | None = None
    """Monotonic start of the running check; None between checks."""


class _Rounds:
    """Work that threads repeat until ``stop``, with a pause of ``every_s`` in between."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    def _begin(self, name: str, work: Callable[[], None]) -> None:
        """Start the first round now, in the background."""
        thread = threading.Thread(target=self._go_on, args=(work,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _go_on(self, work: Callable[[], None]) -> None:
        while not self._stopping.is_set():
            try:
                work()
            except Exception:  # a bug; without this thread the last result would never change
                logger.exception("failed unexpectedly thread=%s", threading.current_thread().name)
            self._stopping.wait(self._every_s)

    def stop(self) -> None:
        """Begin no further round. A thread that still waits for an answer ends later on its own."""
        self._stopping.set()
        until = time.monotonic() + _STOP_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))


class BackendsWatch(_Rounds):
    """Checks the backends in the background from ``start`` to ``stop``; reading never waits."""

    def __init__(
        self,
        checks: Mapping[End, Callable[[], None]],
        documents: ReadStore,
        *,
        usage: Callable[[], Sequence[Usage]] | None,
        facts: Callable[[], ServerFacts | None],
        every_s: float,
        late_s: float,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """``usage``: None if reading totals would list the whole store. ``late_s``: a backend whose
        check takes longer is reported as down."""
        super().__init__(every_s)
        self._checks, self._documents = checks, documents
        self._usage, self._facts = usage, facts
        self._late_s = late_s
        self._clock = clock
        self._monotonic = monotonic
        self._asked: dict[End, _Asked] = {end: _Asked() for end in checks}
        self.origins: dict[str, Origin] = {}
        """By namespace, as far as they have been read."""
        self.stored: StoredUsage | None = None
        self.facts: ServerFacts | None = None
        self.usage_failures = 0

    def start(self) -> None:
        """Check each backend on its own thread, immediately and then every ``every_s``."""
        for end in self._checks:
            self._begin(f"objkv-watch-{end}", lambda end=end: self.ask(end))  # type: ignore[misc]

    def answers(self) -> dict[End, BackendHealth]:
        """Return the last result for each backend. A late one is reported as down."""
        found: dict[End, BackendHealth] = {}
        for end, asked in self._asked.items():
            answer = asked.answer
            waited = 0.0 if asked.since is None else self._monotonic() - asked.since
            if waited > self._late_s:
                answer = BackendHealth(False, waited, self._clock() - waited)
            if answer is not None:
                found[end] = answer
        return found

    def ask_all(self) -> None:
        """Check every backend once; last the bulk store, which has the owners of namespaces."""
        for end in sorted(self._checks, key=lambda end: end == "bulk"):
            self.ask(end)

    def ask(self, end: End) -> None:
        before = self._asked[end].answer
        was_up = before is None or before.is_up
        begun, begun_s = self._monotonic(), self._clock()
        self._asked[end] = _Asked(before, since=begun)
        error: ObjkvError | None = None
        try:
            self._checks[end]()
        except ObjkvError as exc:
            error = exc
        answer = BackendHealth(error is None, self._monotonic() - begun, begun_s)
        self._asked[end] = _Asked(answer)
        if was_up and error is not None:
            logger.warning("end down end=%s reason=%s", end, error)
        elif error is None and not was_up:
            logger.warning("end up again end=%s", end)
        if error is None and end == "index":
            self._read_usage()
            facts = None
            with suppress(ObjkvError):  # the facts are optional, and the check succeeded
                facts = self._facts()
            self.facts = facts
        elif error is None and end == "bulk":
            self._read_documents()

    def _read_usage(self) -> None:
        if self._usage is None:
            return
        try:
            usage = tuple(self._usage())
        except ObjkvError as exc:
            self.usage_failures += 1
            logger.debug("usage not read reason=%s", exc)
            return
        self.stored = StoredUsage(usage, self._clock())

    def _read_documents(self) -> None:
        """Read some of the unknown documents, at random: a missing one must not block others."""
        usage = () if self.stored is None else self.stored.usage
        names = [one.namespace for one in usage if one.namespace not in self.origins]
        with suppress(ObjkvError):  # the next check reports the failure
            for name in random.sample(names, min(DOCUMENTS_AT_ONCE, len(names))):
                origin = _origin(self._documents, name)
                if origin is not None and len(self.origins) < DOCUMENTS_MAX:
                    self.origins[name] = origin


def _origin(bulk: ReadStore, namespace: str) -> Origin | None:
    try:
        found = read_namespace(bulk, namespace)
    except ValueError:  # the index names a namespace that cannot be a key
        return Origin()
    return Origin(found.tenant or "", found.model or "") if found.is_known else None


class Scans(_Rounds):
    """Takes an inventory of store and index from ``start`` to ``stop``."""

    def __init__(
        self,
        view: BackendsView,
        *,
        every_s: float,
        grace_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``grace_s``: younger payloads do not count as orphans: writers publish the record
        last."""
        super().__init__(every_s)
        self._view, self._grace_s, self._clock = view, grace_s, clock
        self.last: Scan | None = None
        self.failures = 0
        self._pool: WorkPool | None = None

    def start(self) -> None:
        self._begin("objkv-scan", self.scan)

    def stop(self) -> None:
        """Stop, and abandon a running scan."""
        self._stopping.set()
        if self._pool is not None:
            self._pool.halt()
        super().stop()

    def scan(self) -> None:
        try:
            self._scan()
        except ObjkvError as exc:
            self.failures += 1
            logger.warning("scan not finished reason=%s", exc)
        except Exception:
            self.failures += 1
            raise

    def _scan(self) -> None:
        begun_s, pool, view = self._clock(), WorkPool(workers=_WORKERS), self._view
        self._pool = pool
        with closing(Inventory(clock=self._clock)) as inventory:
            walk = Walk(view, inventory, find_scope(view), _WORKERS, self._clock)
            again = walk.second_looks(unrecorded=False)  # those count only once they are old
            for units in (walk.records(), walk.payloads(), walk.leftovers(), walk.pins(), again):
                pool.run(() if self._stopping.is_set() else units)
            if self._stopping.is_set() or pool.ending != "complete":
                return
            walk.judge(ttl_s=view.ttl_s)
            counted = counted_namespaces(inventory, walk.scope)
            found = count_findings(inventory, grace_s=self._grace_s)
            ended_s = self._clock()
            self.last = Scan(counted, found, ended_s, ended_s - begun_s)
