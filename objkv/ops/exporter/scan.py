"""Takes an inventory of store and index from time to time, for ``--scan-every`` only: one request
per 1,000 payloads, and all index records."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from objkv.errors import ObjkvError
from objkv.ops.backends_view import BackendsView
from objkv.ops.inventory.file import Inventory
from objkv.ops.inventory.findings import NamespaceFindings, count_findings
from objkv.ops.inventory.walk import Walk, find_scope, read_view
from objkv.ops.listing import NamespaceSummary, counted_namespaces
from objkv.ops.runs import WorkPool

logger = logging.getLogger(__name__)

_STOP_S = 5.0
_WORKERS = 4


@dataclass(frozen=True, slots=True)
class Scan:
    """A complete scan."""

    namespaces: Sequence[NamespaceSummary]
    findings: NamespaceFindings
    ended_s: float
    seconds: float


@dataclass(slots=True)
class Scans:
    """Scans repeatedly from ``start`` to ``stop``, with a pause of ``every_s`` in between."""

    view: BackendsView
    every_s: float
    grace_s: float
    """Younger payloads do not count as orphans: writers publish the record last."""
    clock: Callable[[], float] = time.time
    last: Scan | None = None
    failures: int = 0
    _stopping: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _pool: WorkPool | None = None

    def start(self) -> None:
        """Start the first scan now, in the background."""
        self._thread = threading.Thread(target=self._go_on, name="objkv-scan", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop, and abandon a running scan."""
        self._stopping.set()
        if self._pool is not None:
            self._pool.halt()
        if self._thread is not None:
            self._thread.join(_STOP_S)

    def scan(self) -> None:
        """Scan once. Called by the thread, and by tests."""
        begun_s, pool = self.clock(), WorkPool(workers=_WORKERS)
        self._pool = pool
        try:
            with closing(Inventory(clock=self.clock)) as inventory:
                view = read_view(self.view)
                walk = Walk(view, inventory, find_scope(view), _WORKERS, self.clock)
                again = walk.second_looks(unrecorded=False)  # those count only once they are old
                every = (walk.records(), walk.payloads(), walk.leftovers(), walk.pins(), again)
                for units in every:
                    pool.run(() if self._stopping.is_set() else units)
                if self._stopping.is_set() or pool.ending != "complete":
                    return
                walk.judge(ttl_s=self.view.ttl_s)
                counted = counted_namespaces(inventory, walk.scope)
                found = count_findings(inventory, grace_s=self.grace_s)
                ended_s = self.clock()
                self.last = Scan(counted, found, ended_s, ended_s - begun_s)
        except ObjkvError as exc:
            self.failures += 1
            logger.warning("scan not finished reason=%s", exc)

    def _go_on(self) -> None:
        while not self._stopping.is_set():
            try:
                self.scan()
            except Exception:  # a bug; the next scan may succeed
                self.failures += 1
                logger.exception("scan failed unexpectedly")
            self._stopping.wait(self.every_s)
