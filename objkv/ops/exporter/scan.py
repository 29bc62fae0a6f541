"""Counts the payloads in the bulk store and those without a record, for ``--scan-every`` only.

A scan lists everything once, with one request per 1,000 payloads, and reads as many index records.
It changes nothing and keeps a few numbers per namespace.
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
    """The counts of one namespace."""

    payloads: int = 0
    nbytes: int = 0
    oldest_s: float = 0.0
    orphans: int = 0
    orphan_bytes: int = 0
    pinned: int = 0


@dataclass(frozen=True, slots=True)
class Scan:
    """A complete scan."""

    namespaces: Mapping[str, Counted]
    quarantined: int
    ended_s: float
    seconds: float


class _Stopped(Exception):
    """The scan was stopped."""


@dataclass(slots=True)
class Scans:
    """Scans repeatedly from ``start`` to ``stop``, with a pause of ``every_s`` in between."""

    view: BackendsView
    every_s: float
    grace_s: float
    """Younger payloads do not count as orphans: writers publish the record last."""
    found: Callable[[Scan], None] = lambda scan: None
    """Called with each complete scan."""
    clock: Callable[[], float] = time.time
    last: Scan | None = None
    failures: int = 0
    _stopping: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the first scan now, in the background."""
        self._thread = threading.Thread(target=self._go_on, name="objkv-scan", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop, and abandon a running scan."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_STOP_S)

    def is_alive(self) -> bool:
        """Whether there will be further scans."""
        return self._thread is not None and self._thread.is_alive()

    def scan(self) -> None:
        """Scan once. Called by the thread, and by tests."""
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
            except Exception:  # a bug; the next scan may succeed
                self.failures += 1
                logger.exception("scan failed unexpectedly")
            self._stopping.wait(self.every_s)
