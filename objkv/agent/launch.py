"""One agent a socket: taking the socket's name, and starting an agent where none listens."""

import fcntl
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from objkv.errors import ConfigError

logger = logging.getLogger(__name__)
IDLE_EXIT_S: Final = 600
"""An agent that a replica started ends after this time without clients."""
_BACKLOG = 128
_LOG_BYTES_MAX = 4 << 20


def failure_of(path: Path) -> str | None:
    """Return why the last start of an agent at ``path`` failed; None if it did not."""
    try:
        return Path(f"{path}.error").read_text(encoding="utf-8", errors="replace") or None
    except OSError:
        return None


class AgentRuns(ConfigError):
    """Another agent serves the socket."""


class AgentSocket:
    """The socket of the one agent that serves a path."""

    def __init__(self, path: Path) -> None:
        """Raises ``AgentRuns``, or ``ConfigError`` if nothing can listen there."""
        self._path = path
        lock = f"{path}.lock"
        try:
            self._lock = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise ConfigError(f"no lock file {lock}: {exc}") from exc
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            os.close(self._lock)
            raise AgentRuns(f"another agent serves {path}") from exc
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            path.unlink(missing_ok=True)  # of an agent that was killed: this one holds the lock
            before = os.umask(0o177)
            try:
                self.listener.bind(str(path))
            finally:
                os.umask(before)
        except OSError as exc:
            self.listener.close()
            os.close(self._lock)
            raise ConfigError(f"the agent cannot listen on {path}: {exc}") from exc

    def report(self, error: BaseException | None) -> None:
        """Leave a note for replicas if the agent cannot start. Without an error, remove it and
        listen: until then a replica that waits for the agent does not find it."""
        note = Path(f"{self._path}.error")
        if error is None:
            note.unlink(missing_ok=True)
            self.listener.listen(_BACKLOG)
        else:
            note.write_text(str(error), encoding="utf-8")

    def close(self) -> None:
        """Give the path to others. The lock file stays: removing it would let two agents run."""
        self._path.unlink(missing_ok=True)
        with suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self.listener.close()
        os.close(self._lock)


def is_listening(path: Path) -> bool:
    """Whether an agent accepts connections."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(1.0)
        try:
            sock.connect(str(path))
        except OSError:
            return False
        return True


def start_agent(path: Path, environ: Mapping[str, str], idle_s: int = IDLE_EXIT_S) -> None:
    """Start an agent that outlives this process, unless one listens or is being started. Does not
    wait for it. Its log is next to its socket. Raises ``ConfigError``."""
    if is_listening(path):
        return
    log = Path(f"{path}.log")
    Path(f"{path}.error").unlink(missing_ok=True)
    command = [sys.executable, "-m", "objkv", "agent", "--socket", str(path)]
    try:
        if log.exists() and log.stat().st_size > _LOG_BYTES_MAX:
            log.unlink()
        with open(log, "ab", opener=_private) as output:
            # By a shell that ends at once, so that this process has no child to wait for.
            subprocess.run(
                ["/bin/sh", "-c", '"$@" &', "sh", *command, "--idle-exit", f"{idle_s}s"],
                check=True,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                cwd="/",
            )
    except (OSError, subprocess.SubprocessError) as exc:
        raise ConfigError(f"the agent cannot be started ({exc}): set agent to off") from exc
    logger.info("agent started socket=%s log=%s", path, log)


def _private(name: str, flags: int) -> int:
    return os.open(name, flags, 0o600)
