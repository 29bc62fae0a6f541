"""Watches store and index for ``objkv exporter``: availability, totals and their age.

Threads check the backends, and scrapes read the last results: a scrape never waits for a backend,
and a hanging backend blocks only its own thread. Full listings are in ``scan``.
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from objkv.errors import ObjkvError
from objkv.index.base import ServerFacts, Usage
from objkv.ops.backends_view import read_namespace
from objkv.stores.base import ReadStore

logger = logging.getLogger(__name__)

End = Literal["bulk", "hot", "index"]
DOCUMENTS_AT_ONCE = 200
"""Identity documents read in one round; the rest waits for the next round."""
DOCUMENTS_MAX = 20_000
"""Documents kept in memory."""
_STOP_S = 5.0


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
class Asks:
    """The calls to the backends; each raises ``ObjkvError``."""

    checks: Mapping[End, Callable[[], None]]
    documents: ReadStore
    """The store that holds identity documents."""
    usage: Callable[[], Sequence[Usage]] | None = None
    """None if reading totals would list the whole store."""
    facts: Callable[[], ServerFacts | None] = lambda: None


@dataclass(frozen=True, slots=True)
class _Asked:
    """Of one backend. Its thread replaces it as a whole, so that readers need no lock."""

    answer: BackendHealth | None = None
    since: float | None = None
    """Monotonic start of the running check; None between checks."""


class BackendsWatch:
    """Checks the backends in the background from ``start`` to ``stop``; reading never waits."""

    def __init__(
        self,
        asks: Asks,
        *,
        every_s: float,
        late_s: float,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """``late_s``: a backend whose check takes longer is reported as down."""
        self._asks = asks
        self._every_s = every_s
        self._late_s = late_s
        self._clock = clock
        self._monotonic = monotonic
        self._asked: dict[End, _Asked] = {end: _Asked() for end in asks.checks}
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self.origins: dict[str, Origin] = {}
        """By namespace, as far as they have been read."""
        self.stored: StoredUsage | None = None
        self.facts: ServerFacts | None = None
        self.usage_failures = 0

    def start(self) -> None:
        """Check each backend on its own thread, immediately and then every ``every_s``."""
        for end in self._asks.checks:
            thread = threading.Thread(
                target=self._go_on, args=(end,), name=f"objkv-watch-{end}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Stop the checks. A thread that still waits for an answer ends later on its own."""
        self._stopping.set()
        until = self._monotonic() + _STOP_S
        for thread in self._threads:
            thread.join(max(0.0, until - self._monotonic()))

    @property
    def ends(self) -> tuple[End, ...]:
        """The backends that are checked."""
        return tuple(self._asked)

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

    def ask(self, end: End) -> None:
        """Check one backend once. Called by its thread, and by tests."""
        before = self._asked[end].answer
        was_up = before is None or before.is_up
        begun, begun_s = self._monotonic(), self._clock()
        self._asked[end] = _Asked(before, since=begun)
        error: ObjkvError | None = None
        try:
            self._asks.checks[end]()
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
            self._read_facts()
        elif error is None and end == "bulk":
            self._read_documents()

    def _read_usage(self) -> None:
        if self._asks.usage is None:
            return
        try:
            usage = tuple(self._asks.usage())
        except ObjkvError as exc:
            self.usage_failures += 1
            logger.debug("usage not read reason=%s", exc)
            return
        self.stored = StoredUsage(usage, self._clock())

    def _read_facts(self) -> None:
        try:
            self.facts = self._asks.facts()
        except ObjkvError:  # the facts are optional, and the check succeeded
            self.facts = None

    def _read_documents(self) -> None:
        """Read some of the unknown documents, at random: a missing one must not block others."""
        usage = () if self.stored is None else self.stored.usage
        names = [one.namespace for one in usage if one.namespace not in self.origins]
        with suppress(ObjkvError):  # the next check reports the failure
            for name in random.sample(names, min(DOCUMENTS_AT_ONCE, len(names))):
                origin = _origin(self._asks.documents, name)
                if origin is not None and len(self.origins) < DOCUMENTS_MAX:
                    self.origins[name] = origin

    def _go_on(self, end: End) -> None:
        while not self._stopping.is_set():
            try:
                self.ask(end)
            except Exception:  # a bug; without this thread the last result would never change
                logger.exception("check failed unexpectedly end=%s", end)
            self._stopping.wait(self._every_s)


def _origin(bulk: ReadStore, namespace: str) -> Origin | None:
    try:
        found = read_namespace(bulk, namespace)
    except ValueError:  # the index names a namespace that cannot be a key
        return Origin()
    return Origin(found.tenant or "", found.model or "") if found.is_known else None
