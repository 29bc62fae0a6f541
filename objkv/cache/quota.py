"""Stops saves before a store is full. Savers check here first, without waiting.

A background thread reads how much is stored, every half minute while there is something to save. In
between, this process's own saves are added, but not those of others. So a quota may be exceeded by
the fleet's saves of half a minute. A failed reading changes nothing.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterable
from threading import Condition, Thread
from time import monotonic
from typing import Final

from objkv.cache.auto_sweep import AutoSweep
from objkv.errors import StoreError
from objkv.index.base import Usage
from objkv.keys.identity import NAMESPACE_HEX, identity_path
from objkv.stores.base import ReadStore
from objkv.telemetry import Recorder

logger = logging.getLogger(__name__)

FULL_PERCENT: Final = 95
"""At this share of a quota saves stop. What is left is for saves that no reading shows yet."""
_INTERVAL_S = 30.0
_SHARE_MAX = 1 / 50
"""Maximum share of time spent reading, if that walks a folder."""
_DOCUMENT_BYTES_MAX = 1 << 20
_CLOSE_S = 1.0


class Quota:
    """There is room until ``used`` returns at least ``limit_bytes``. Thread-safe.

    A separate thread calls ``used``. It starts with the first call of ``has_room`` and is idle
    without further calls. ``used`` must raise only ``StoreError``.
    """

    def __init__(
        self,
        used: Callable[[], int],
        limit_bytes: int,
        recorder: Recorder,
        *,
        relief: AutoSweep | None = None,
    ) -> None:
        """``relief`` is called on that thread while there is no room. It is closed with this."""
        assert limit_bytes > 0
        self._used = used
        self._limit_bytes = limit_bytes
        self._recorder = recorder
        self._relief = relief
        self._changed = Condition()
        self._asked = self._closed = self.is_full = self._has_failed = False
        self._bytes: int | None = None
        self._thread: Thread | None = None

    def has_room(self) -> bool:
        """Whether to save at all: True until the first reading. Never waits."""
        if not self._asked:  # without the lock: the forward thread calls this in every step
            with self._changed:
                self._asked = True
                if self._thread is None and not self._closed:
                    self._thread = Thread(target=self._watch, name="objkv-quota", daemon=True)
                    self._thread.start()
                self._changed.notify()
        return not self.is_full

    def add(self, nbytes: int) -> None:
        """Record that ``nbytes`` were saved."""
        with self._changed:
            if self._bytes is not None:
                self._bytes += nbytes
                self._judge()

    def close(self) -> None:
        """Stop. Waits at most a second for a reading in progress. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            thread = self._thread
        if self._relief is not None:
            self._relief.close()
        if thread is not None:
            thread.join(_CLOSE_S)

    def __repr__(self) -> str:
        return f"<Quota {self._bytes} of {self._limit_bytes} bytes>"

    def read(self) -> None:
        """Read how much is used. For the thread, and for tests in its place."""
        try:
            used = self._used()
        except StoreError:  # keep the previous state
            self._recorder.count("quota_errors")
            return
        with self._changed:
            self._bytes = used
            self._judge()

    def _watch(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asked or self._closed)
                if self._closed:
                    return
                self._asked = False
            begun = monotonic()
            try:
                self.read()
                self.relieve()
            except Exception:  # a bug; without this thread there would be no further readings
                self._recorder.count("quota_errors")
                if not self._has_failed:
                    self._has_failed = True
                    logger.exception("reading how much is stored failed")
            pause_s = max(_INTERVAL_S, (monotonic() - begun) / _SHARE_MAX)
            with self._changed:
                if self._changed.wait_for(lambda: self._closed, pause_s):
                    return

    def relieve(self) -> None:
        """Have room made if there is none."""
        if self._relief is not None and self.is_full and self._relief():
            self.read()

    def _judge(self) -> None:
        assert self._bytes is not None
        is_full = self._bytes >= self._limit_bytes
        if is_full != self.is_full:
            self.is_full = is_full
            words = "quota reached, saves stopped" if is_full else ("below quota, saves resumed")
            logger.warning("%s used_bytes=%d limit_bytes=%d", words, self._bytes, self._limit_bytes)


class TenantUsage:
    """Sums the stored bytes of one tenant, using the namespaces' identity documents.

    A namespace whose document is missing or does not match its name belongs to no tenant.
    """

    def __init__(self, usage: Callable[[], Iterable[Usage]], bulk: ReadStore, tenant: str) -> None:
        self._usage = usage
        self._bulk = bulk
        self._tenant = tenant
        self._tenants: dict[str, str] = {}

    def __call__(self) -> int:
        """Return the number of bytes. Reads one document per new namespace. Raises
        ``StoreError``."""
        nbytes = 0
        for one in self._usage():
            tenant = self._tenants.get(one.namespace) or read_tenant(self._bulk, one.namespace)
            if tenant is not None:  # otherwise its writer may be about to put it
                self._tenants[one.namespace] = tenant
            nbytes += one.nbytes if tenant == self._tenant else 0
        return nbytes


def read_tenant(bulk: ReadStore, namespace: str) -> str | None:
    """Return the tenant of a namespace, or None if no document matches its name."""
    document = bulk.get_range(identity_path(namespace), 0, _DOCUMENT_BYTES_MAX)
    if document is None or hashlib.sha256(document).hexdigest()[:NAMESPACE_HEX] != namespace:
        return None
    try:
        tenant = json.loads(document)["tenant"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    return tenant if isinstance(tenant, str) else None
