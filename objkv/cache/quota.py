"""Stops saves before a store is full.

A background thread reads how much is stored, every half minute while there is something to save. In
between, this process's own saves are added. So a quota may be exceeded by the fleet's saves of half
a minute. A failed reading changes nothing.
"""

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping
from threading import Condition, Lock, Thread
from time import monotonic
from typing import Final

from objkv.errors import StoreError
from objkv.index.base import Usage, WriteIndex
from objkv.keys.identity import NAMESPACE_HEX, identity_path
from objkv.stores.base import ReadStore
from objkv.telemetry import Recorder

logger = logging.getLogger(__name__)

LEASE = "sweep"
_PAUSE_MS = 600_000
"""Minimum time between the starts of two sweeps by any replica of the machine."""
_BOUND_S = 300.0
"""Time limit of a rebuild or a sweep, half of the pause. The next one begins anew."""
_GRACE_S = 10.0
_SAID_BYTES = 500
_ENDED = -2
"""Stands for the exit code of a process ended by this one."""


class AutoSweep:
    """Sweeps the machine's own bulk folder, which no operator does, but not often. Thread-safe.

    The sweep runs in child processes, because it reads every record. A lease allows one per machine
    and enforces a pause after it. A sweep evicts only payloads with records, so expired or lost
    ones are restored first. Those still without one are unreadable, and deleted.
    """

    def __init__(self, index: WriteIndex, settings: Mapping[str, str], recorder: Recorder) -> None:
        """``settings``: ``OBJKV_*`` variables, which override this process's environment."""
        self._index = index
        self._settings = settings
        self._recorder = recorder
        nice = shutil.which("nice")
        first = [nice, "-n", "10"] if nice else []
        # -P: import nothing from the working directory of the engine.
        self._command = [*first, sys.executable, "-P", "-m", "objkv.cli"]
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def __call__(self) -> bool:
        """Sweep, and wait for its end. Return False if another has the lease. Never raises."""
        try:
            if not self._index.lease(LEASE, uuid.uuid4().hex, ttl_ms=_PAUSE_MS):
                return False
            code, said = self._make_room()
        except (StoreError, OSError) as exc:
            code, said = -1, str(exc)
        self._recorder.count("sweeps")
        is_left = code == 1 and not said  # by a complete sweep, such as unidentified payloads
        if code not in (0, _ENDED) and not is_left and not self._closed:
            self._recorder.count("sweep_errors")
            logger.warning("sweeping a full folder failed code=%d error=%s", code, said)
        return True

    def close(self) -> None:
        """End a running sweep. Idempotent."""
        with self._lock:
            self._closed = True
            process = self._process
        if process is not None:
            process.terminate()

    def _make_room(self) -> tuple[int, str]:
        code, said = self._run("rebuild", "--apply", "--json")
        if self._closed:
            return code, said
        if code in (0, 1):  # complete, so index and folder match, and --force is safe
            return self._run("sweep", "--apply", "--json", "--force")
        logger.warning("rebuilding the index of a full folder failed code=%d error=%s", code, said)
        return self._run("sweep", "--apply", "--json")

    def _run(self, *arguments: str) -> tuple[int, str]:
        with self._lock:
            if self._closed:
                return _ENDED, ""
            process = self._process = subprocess.Popen(
                [*self._command, *arguments],
                env=os.environ | self._settings,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
        try:
            _, said = process.communicate(timeout=_BOUND_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.communicate(timeout=_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
            return _ENDED, f"still running after {_BOUND_S:.0f} s"
        finally:
            with self._lock:
                self._process = None
        return process.returncode, said[-_SAID_BYTES:].decode("utf-8", "replace").strip()


FULL_PERCENT: Final = 95
"""At this share of a quota saves stop. What is left is for saves that no reading shows yet."""
_INTERVAL_S = 30.0
_SHARE_MAX = 1 / 50
"""Maximum share of time spent reading, if that walks a folder."""
_DOCUMENT_BYTES_MAX = 1 << 20
_CLOSE_S = 1.0


class Quota:
    """There is room until ``used``, which raises only ``StoreError``, returns at least
    ``limit_bytes``. Thread-safe. Its thread calls ``used`` after ``has_room``."""

    def __init__(
        self,
        used: Callable[[], int],
        limit_bytes: int,
        recorder: Recorder,
        *,
        relief: AutoSweep | None = None,
    ) -> None:
        """``relief``: called on that thread while there is no room, and closed with this."""
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
        with self._changed:
            if self._bytes is not None:
                self._bytes += nbytes
                self._judge()

    def close(self) -> None:
        """Waits at most a second for a reading in progress. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            thread = self._thread
        if self._relief is not None:
            self._relief.close()
        if thread is not None:
            thread.join(_CLOSE_S)

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
        if self._relief is not None and self.is_full and self._relief():
            self.read()

    def _judge(self) -> None:
        assert self._bytes is not None
        is_full = self._bytes >= self._limit_bytes
        if is_full != self.is_full:
            self.is_full = is_full
            words = "quota reached, saves stopped" if is_full else "below quota, saves resumed"
            logger.warning("%s used_bytes=%d limit_bytes=%d", words, self._bytes, self._limit_bytes)


class TenantUsage:
    """Sums the stored bytes of one tenant. A namespace whose identity document is missing or does
    not match its name belongs to none."""

    def __init__(self, usage: Callable[[], Iterable[Usage]], bulk: ReadStore, tenant: str) -> None:
        self._usage = usage
        self._bulk = bulk
        self._tenant = tenant
        self._tenants: dict[str, str] = {}

    def __call__(self) -> int:
        """Reads one document per new namespace. Raises ``StoreError``."""
        nbytes = 0
        for one in self._usage():
            tenant = self._tenants.get(one.namespace) or read_tenant(self._bulk, one.namespace)
            if tenant is not None:  # otherwise its writer may be about to put it
                self._tenants[one.namespace] = tenant
            nbytes += one.nbytes if tenant == self._tenant else 0
        return nbytes


def read_tenant(bulk: ReadStore, namespace: str) -> str | None:
    """Return the tenant of a namespace, or None if no document matches its name."""
    document = bulk.get(identity_path(namespace), 0, _DOCUMENT_BYTES_MAX)
    if document is None or hashlib.sha256(document).hexdigest()[:NAMESPACE_HEX] != namespace:
        return None
    try:
        tenant = json.loads(document)["tenant"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    return tenant if isinstance(tenant, str) else None
