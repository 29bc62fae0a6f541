"""Saves stop before a place is full: whoever saves asks here first, and never waits.

How much is stored is read in the background, every half minute while something is to be saved.
What this process saves in between is added; what others save is not, so a quota may be exceeded by
what the fleet saves in half a minute. What cannot be read changes nothing.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterable
from threading import Condition, Thread
from time import monotonic
from typing import Protocol

from objkv.errors import StoreError
from objkv.index.base import Usage
from objkv.keys.identity import NAMESPACE_HEX, identity_path
from objkv.stores.base import ReadStore
from objkv.telemetry import Recorder

logger = logging.getLogger(__name__)

_INTERVAL_S = 30.0
_SHARE_MAX = 1 / 50
"""Of the time that reading may take, where it walks a folder."""
_DOCUMENT_BYTES_MAX = 1 << 20
_CLOSE_S = 1.0


class Room(Protocol):
    """Tells whether there is room for what is to be saved."""

    def has_room(self) -> bool:
        """Whether to save at all. Never waits; safe from many threads."""

    def add(self, nbytes: int) -> None:
        """So much was saved."""

    def close(self) -> None:
        """Nobody asks any more. Idempotent."""


class Relieving(Protocol):
    """Makes room where it can."""

    def __call__(self) -> bool:
        """May take minutes; False if nothing was tried."""

    def close(self) -> None:
        """End it soon. Idempotent."""


class Unlimited:
    """``Room`` without a quota."""

    def has_room(self) -> bool:
        """Always."""
        return True

    def add(self, nbytes: int) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Quota:
    """``Room`` until ``limit_bytes`` are used, as ``used`` tells.

    ``used`` is called by a thread of its own, which begins with the first question and does nothing
    while nobody asks; it raises ``StoreError`` only.
    """

    def __init__(
        self,
        used: Callable[[], int],
        limit_bytes: int,
        recorder: Recorder,
        *,
        relief: Relieving | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """``relief`` is called by that thread while there is no room."""
        assert limit_bytes > 0
        self._used = used
        self._limit_bytes = limit_bytes
        self._recorder = recorder
        self._relief = relief
        self._clock = clock
        self._changed = Condition()
        self._asked = self._closed = self._is_full = self._has_failed = False
        self._bytes: int | None = None
        self._thread: Thread | None = None

    def has_room(self) -> bool:
        """See ``Room``; there is until the first reading."""
        if not self._asked:  # without the lock: the forward thread asks for every step
            with self._changed:
                self._asked = True
                if self._thread is None and not self._closed:
                    self._thread = Thread(target=self._watch, name="objkv-quota", daemon=True)
                    self._thread.start()
                self._changed.notify()
        return not self._is_full

    def add(self, nbytes: int) -> None:
        """See ``Room``."""
        with self._changed:
            if self._bytes is not None:
                self._bytes += nbytes
                self._judge()

    def close(self) -> None:
        """See ``Room``; waits a second at most for a reading under way."""
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
        """Read how much is used. For the thread, and for tests instead of it."""
        try:
            used = self._used()
        except StoreError:  # then as before
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
            begun = self._clock()
            try:
                self.read()
                self._relieve()
            except Exception:  # a bug; without this thread, nobody would ever read again
                self._recorder.count("quota_errors")
                if not self._has_failed:
                    self._has_failed = True
                    logger.exception("reading how much is stored failed")
            pause_s = max(_INTERVAL_S, (self._clock() - begun) / _SHARE_MAX)
            with self._changed:
                if self._changed.wait_for(lambda: self._closed, pause_s):
                    return

    def _relieve(self) -> None:
        if self._relief is not None and self._is_full and self._relief():
            self.read()

    def _judge(self) -> None:
        assert self._bytes is not None
        is_full = self._bytes >= self._limit_bytes
        if is_full != self._is_full:
            self._is_full = is_full
            words = "quota reached, saving nothing more" if is_full else "below quota, saving again"
            logger.warning("%s used_bytes=%d limit_bytes=%d", words, self._bytes, self._limit_bytes)


class TenantUsage:
    """How many bytes of what is stored are one tenant's, by the namespaces' identity documents.

    A namespace whose document is missing, or is not the one that names it, is nobody's.
    """

    def __init__(self, usage: Callable[[], Iterable[Usage]], bulk: ReadStore, tenant: str) -> None:
        self._usage = usage
        self._bulk = bulk
        self._tenant = tenant
        self._tenants: dict[str, str] = {}

    def __call__(self) -> int:
        """Bytes. One document is read for each namespace that is new. Raises ``StoreError``."""
        return sum(u.nbytes for u in self._usage() if self._tenant_of(u.namespace) == self._tenant)

    def _tenant_of(self, namespace: str) -> str | None:
        if namespace not in self._tenants:
            tenant = read_tenant(self._bulk, namespace)
            if tenant is None:  # its writer may be about to put it
                return None
            self._tenants[namespace] = tenant
        return self._tenants[namespace]


def read_tenant(bulk: ReadStore, namespace: str) -> str | None:
    """The tenant of a namespace, or None without a document whose digest is its name."""
    document = bulk.get_range(identity_path(namespace), 0, _DOCUMENT_BYTES_MAX)
    if document is None or hashlib.sha256(document).hexdigest()[:NAMESPACE_HEX] != namespace:
        return None
    try:
        tenant = json.loads(document)["tenant"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    return tenant if isinstance(tenant, str) else None
