"""Counts what is in the bulk store, and what of it has no record: for ``--scan-every`` only.

A scan lists everything once, a request per 1,000 payloads, and asks the index for as many records;
it changes nothing and keeps a few numbers for each namespace.
"""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from objkv.errors import ObjkvError
from objkv.ops.backends_view import (
    QUARANTINE,
    BackendsView,
    StoredPayload,
    stored_namespaces,
    stored_parts,
)
from objkv.ops.backends_view import stored_payloads as payloads_of

logger = logging.getLogger(__name__)

_STOP_S = 5.0


@dataclass(slots=True)
class Counted:
    """One namespace."""

    payloads: int = 0
    nbytes: int = 0
    oldest_s: float = 0.0
    orphans: int = 0
    orphan_bytes: int = 0
    pinned: int = 0


@dataclass(frozen=True, slots=True)
class Scan:
    """A whole scan."""

    namespaces: Mapping[str, Counted]
    quarantined: int
    ended_s: float
    seconds: float


class _Stopped(Exception):
    """Nobody waits for it any more."""


@dataclass(slots=True)
class Scans:
    """Scans one after the other, from ``start`` to ``stop``, each ``every_s`` after the last."""

    view: BackendsView
    every_s: float
    grace_s: float
    """Payloads that are younger are no orphans: their record may be about to come."""
    found: Callable[[Scan], None] = lambda scan: None
    """Hears of each."""
    clock: Callable[[], float] = time.time
    last: Scan | None = None
    failures: int = 0
    _stopping: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin the first scan now, in the background."""
        self._thread = threading.Thread(target=self._go_on, name="objkv-scan", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Give a scan under way up."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_STOP_S)

    def is_alive(self) -> bool:
        """Whether there will be further scans."""
        return self._thread is not None and self._thread.is_alive()

    def scan(self) -> None:
        """Scan once. For the thread, and for tests instead of it."""
        begun_s = self.clock()
        try:
            namespaces = self._count(begun_s)
            quarantined = sum(1 for _ in self.view.bulk.scan(f"{QUARANTINE}/"))
        except ObjkvError as exc:
            self.failures += 1
            logger.warning("scan not finished reason=%s", exc)
            return
        except _Stopped:
            return
        ended_s = self.clock()
        self.last = Scan(namespaces, quarantined, ended_s, ended_s - begun_s)
        self.found(self.last)

    def _count(self, begun_s: float) -> dict[str, Counted]:
        counted: defaultdict[str, Counted] = defaultdict(Counted)
        for name in stored_namespaces(self.view.bulk):
            of = counted[name]
            for part in stored_parts(self.view.bulk, [name]):
                for batch in payloads_of(self.view, part):
                    if self._stopping.is_set():
                        raise _Stopped
                    for stored in batch:
                        self._add(of, stored, begun_s)
        return dict(counted)

    def _add(self, of: Counted, stored: StoredPayload, begun_s: float) -> None:
        entry = stored.entry
        of.payloads += 1
        of.nbytes += entry.nbytes
        of.oldest_s = min(of.oldest_s or entry.modified_s, entry.modified_s)
        if stored.record is not None and stored.record.pinned:
            of.pinned += 1
        is_old = entry.modified_s < begun_s - self.grace_s
        if stored.shard is None and is_old and not self.view.is_own_index:
            of.orphans += 1
            of.orphan_bytes += entry.nbytes

    def _go_on(self) -> None:
        while not self._stopping.is_set():
            try:
                self.scan()
            except Exception:  # a bug; the next scan may come to its end
                self.failures += 1
                logger.exception("scan failed unexpectedly")
            self._stopping.wait(self.every_s)
