"""A full folder of one machine is swept by its replicas: nobody else would.

In processes of their own, because a sweep reads every record: in the engine's it would take turns
with the forward pass. One at a time on a machine, and not again for a while.

What lies in the folder counts, but a sweep gives up only what the index knows: records that have
expired, or went with the file they were in, are restored first. What is then still without one is
nothing that anybody can read, however much of it there is.
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
"""From the beginning of one sweep to that of the next, whichever replica makes it."""
_BOUND_S = 300.0
"""A rebuild, or a sweep, that takes longer is ended; the next one goes on where it was."""
_GRACE_S = 10.0
_SAID_BYTES = 500
_REBUILD = ("rebuild", "--json")
_SWEEP = ("sweep", "--apply", "--json")
_FORCE = "--force"
_REBUILT = (0, 1)
"""Exit codes of a rebuild that is complete; with 1, it found payloads that nobody can read."""
_ENDED = -2
"""Instead of the exit code of what was ended."""


def objkv_command() -> list[str]:
    """The program without its arguments, which gives way to all others."""
    nice = shutil.which("nice")
    first = [nice, "-n", "10"] if nice else []
    # -P: it imports nothing from the folder that the engine was started in.
    return [*first, sys.executable, "-P", "-m", "objkv.cli"]


class AutoSweep:
    """Sweeps when it is called, if nobody on this machine did so lately. Thread-safe."""

    def __init__(
        self,
        index: WriteIndex,
        settings: Mapping[str, str],
        recorder: Recorder,
        *,
        command: Sequence[str] | None = None,
    ) -> None:
        """
        Args:
            settings: ``OBJKV_*`` variables, which win over this process's own.
            command: the program, for tests; ``objkv_command`` by default.
        """
        self._index = index
        self._settings = settings
        self._recorder = recorder
        self._command = command
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def __call__(self) -> bool:
        """Sweep, and wait for the end of it; False if it was not this process's turn. Raises
        nothing."""
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
        """End a sweep under way; the next one goes on where it was. Idempotent."""
        with self._lock:
            self._closed = True
            process = self._process
        if process is not None:
            process.terminate()

    def _make_room(self) -> tuple[int, str]:
        code, said = self._run(_REBUILD)
        if code == _ENDED:
            return code, said
        if code in _REBUILT:  # so that the index, and this folder, are the ones they should be
            return self._run((*_SWEEP, _FORCE))
        logger.warning("rebuilding the index of a full folder failed code=%d error=%s", code, said)
        return self._run(_SWEEP)

    def _run(self, arguments: Sequence[str]) -> tuple[int, str]:
        with self._lock:
            if self._closed:
                return _ENDED, ""
            process = self._process = subprocess.Popen(
                [*(self._command or objkv_command()), *arguments],
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
            return _ENDED, ""
        finally:
            with self._lock:
                self._process = None
        return process.returncode, said[-_SAID_BYTES:].decode("utf-8", "replace").strip()
