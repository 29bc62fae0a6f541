"""Replicas sweep their machine's own bulk folder when it is full, because no operator does.

The sweep runs in child processes: it reads every record, and in the engine's process it would
compete with the forward pass. A lease allows one sweep per machine and enforces a pause after it.

Every payload in the folder counts towards its size, but a sweep evicts only payloads with records.
Expired or lost records are therefore restored first. Payloads still without a record are
unreadable, and the sweep deletes them, however many there are.
"""

import logging
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from threading import Lock

from objkv.errors import StoreError
from objkv.index.base import WriteIndex
from objkv.telemetry import Recorder

logger = logging.getLogger(__name__)

LEASE = "sweep"
_PAUSE_MS = 600_000
"""Minimum time between the starts of two sweeps by any replica of the machine."""
_BOUND_S = 300.0
"""Time limit of a rebuild or a sweep, half of the pause. The next one begins anew."""
_GRACE_S = 10.0
_SAID_BYTES = 500
_REBUILD = ("rebuild", "--apply", "--json")
_SWEEP = ("sweep", "--apply", "--json")
_FORCE = "--force"
_REBUILT = (0, 1)
"""Exit codes of a complete rebuild; 1 means that it found unreadable payloads."""
_ENDED = -2
"""Stands for the exit code of a process ended by this one."""


def _command() -> list[str]:
    """Return the objkv command without arguments, at low priority if ``nice`` is installed."""
    nice = shutil.which("nice")
    first = [nice, "-n", "10"] if nice else []
    # -P: import nothing from the working directory of the engine.
    return [*first, sys.executable, "-P", "-m", "objkv.cli"]


class AutoSweep:
    """Sweeps when called, unless a replica of this machine did so recently. Thread-safe."""

    def __init__(
        self,
        index: WriteIndex,
        settings: Mapping[str, str],
        recorder: Recorder,
    ) -> None:
        """``settings``: ``OBJKV_*`` variables, which override this process's environment."""
        self._index = index
        self._settings = settings
        self._recorder = recorder
        self._command = _command()
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def __call__(self) -> bool:
        """Sweep, and wait until it ends. Return False if another replica has the lease. Never
        raises."""
        try:
            if not self._index.lease(LEASE, uuid.uuid4().hex, ttl_ms=_PAUSE_MS):
                return False
            code, said = self._make_room()
        except (StoreError, OSError) as exc:
            code, said = -1, str(exc)
        self._recorder.count("sweeps")
        if code not in (0, _ENDED) and not self._closed:
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
        code, said = self._run(_REBUILD)
        if self._closed:
            return code, said
        if code in _REBUILT:  # index and folder now match, so --force is safe
            return self._run((*_SWEEP, _FORCE))
        logger.warning("rebuilding the index of a full folder failed code=%d error=%s", code, said)
        return self._run(_SWEEP)

    def _run(self, arguments: Sequence[str]) -> tuple[int, str]:
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
