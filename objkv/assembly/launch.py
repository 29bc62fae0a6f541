"""One agent a socket: taking the socket's name, and starting an agent where none listens."""

import fcntl
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Final

from objkv.agent.client import is_listening
from objkv.agent.peers import bind_private, peer_of
from objkv.config.node import is_private, open_private
from objkv.errors import ConfigError

logger = logging.getLogger(__name__)
IDLE_EXIT_S: Final = 600
"""An agent that a replica started ends after this time without clients."""
_PAUSES_S = "1 2 4 8 16 32 60 60 60 60 60 60"
"""After each agent that cannot start, or is killed. Then a replica has to ask for another one."""
_KEEP = 'for pause in %s; do "$@" && break; sleep $pause; done'
"""Starts agents until one ends in order, as their parent: a container's process 1 may reap none."""
_LEAVE_NOTHING = '; rm -f "$0".*'
"""The end of the agent of one replica: no other replica uses the name."""
_BACKLOG = 128
_LOG_BYTES_MAX = 4 << 20
_REPLACE_S = 15.0
"""How long a replaced agent may take to give up its socket."""
_LOOK_S = 1.0
"""How long a plain start, which only looks for an agent that replaces another, is waited for."""
_POLL_S = 0.02
_CPUS_MAX = 8192
"""More than Linux numbers. It keeps those that the container allows."""
_OWN = os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC


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

    def __init__(self, path: Path, *, replace: bool = False) -> None:
        """``replace``: have the agent of the path end in ``listen``, so that one listens all the
        time. Raises ``AgentRuns`` or ``ConfigError``."""
        self._path, self._replaces = path, replace
        self._locks: list[int] = []
        self.listener = new_socket()
        self._inode = -1
        changing = f"{path}.next.lock"
        try:
            if replace:
                self._locks.append(self._take(changing, _LOOK_S))
            else:
                self._locks.append(self._take(f"{path}.lock"))
                if is_listening(path):  # something has removed the lock of the agent that runs
                    raise AgentRuns(self._why_taken())
                if os.path.lexists(changing):  # an agent that replaces another goes first
                    os.close(self._take(changing))
        except BaseException:
            self.close()
            raise

    @property
    def replaced(self) -> int:
        """The process that will be replaced; 0 if there is none, or this one cannot end it."""
        return agent_at(self._path) if self._replaces else 0

    def listen(self) -> None:
        """Have the path, and listen. Raises ``AgentRuns`` or ``ConfigError``."""
        before = self.replaced
        if self._replaces and before <= 0:  # one that this process cannot end has to end first
            self._locks.append(self._take(f"{self._path}.lock", _REPLACE_S))
        self._listen(self.listener)
        if before > 0:
            with suppress(OSError):  # it has ended
                os.kill(before, signal.SIGTERM)
            self._locks.append(self._take(f"{self._path}.lock", _REPLACE_S))
        if self._replaces:
            os.close(self._locks.pop(0))
            self._replaces = False  # from now on it may be replaced itself

    def restore(self) -> socket.socket | None:
        """Listen at the path again if a job that cleans folders has removed it, and relock; keep
        the lock from looking old. Returns a new listener, None if all is as it was; the caller
        closes the old one. Raises ``AgentRuns`` if the path is another agent's now, and
        ``ConfigError`` or ``OSError`` if nothing can listen there for now."""
        try:
            if self._path.lstat().st_ino != self._inode:
                raise AgentRuns(self._why_taken())
            with suppress(AgentRuns):  # a start that finds this agent, and gives the lock up again
                self._relock()
            return None
        except FileNotFoundError:
            pass
        self._relock()
        listener = new_socket()
        self._listen(listener)
        self.listener = listener
        logger.warning("the agent's socket was removed, listening again path=%s", self._path)
        return listener

    def report(self, error: BaseException | None) -> None:
        """Leave a note for replicas if the agent cannot start; without an error, remove it."""
        note = Path(f"{self._path}.error")
        with suppress(OSError):
            note.unlink(missing_ok=True)
            if error is not None and not self._replaces:
                with open(os.open(note, _OWN, 0o600), "w", encoding="utf-8") as file:
                    file.write(str(error))

    def close(self) -> None:
        """Give the path to others. The lock file stays: removing it would let two agents run."""
        with suppress(OSError):
            if self._path.stat().st_ino == self._inode:  # otherwise an agent has replaced this one
                self._path.unlink()
        with suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self.listener.close()
        while self._locks:
            os.close(self._locks.pop())

    def _listen(self, listener: socket.socket) -> None:
        """Listen, also if the path exists, or close ``listener``. Raises ``ConfigError``."""
        made = Path(f"{self._path}.{'next' if self._replaces else 'new'}")
        try:
            made.unlink(missing_ok=True)
            bind_private(listener, str(made))
            listener.listen(_BACKLOG)
            self._inode = made.stat().st_ino
            made.rename(self._path)
        except OSError as exc:
            listener.close()
            why = exc.strerror or exc
            raise ConfigError(f"the agent cannot listen on {self._path}: {why}") from exc

    def _relock(self) -> None:
        """Keep the lock, or take it again. Raises like ``_take``."""
        lock, own = f"{self._path}.lock", os.fstat(self._locks[-1])
        with suppress(FileNotFoundError):
            if os.lstat(lock).st_ino == own.st_ino:
                os.utime(self._locks[-1])
                return
        self._locks.append(self._take(lock))

    def _why_taken(self) -> str:
        if self._replaces:
            return f"another agent serves {self._path} and has not ended: end it, and try again"
        return f"another agent serves {self._path}: use it, or replace it with --replace"

    def _take(self, name: str, seconds: float = 0.0) -> int:
        """Return a locked descriptor. Raises ``AgentRuns`` and ``ConfigError``."""
        try:
            lock = os.open(name, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise ConfigError(
                f"the agent cannot create {name} ({exc.strerror}): give another --socket, whose "
                "folder exists and may be written by this user"
            ) from exc
        end = monotonic() + seconds
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return lock
            except OSError as exc:
                if monotonic() >= end:
                    os.close(lock)
                    raise AgentRuns(self._why_taken()) from exc
            sleep(_POLL_S)


def new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)


def agent_at(path: Path) -> int:
    """Return the process that listens at ``path``; 0 if there is none, or in another container."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(1.0)
        try:
            sock.connect(str(path))
            pid, uid = peer_of(sock)
        except OSError:
            return 0
        return pid if uid == os.geteuid() else 0


def start_agent(path: Path, environ: Mapping[str, str], idle_s: int) -> None:
    """Start an agent that outlives this process, unless one listens, or was started and has not
    ended for good. ``path``: of ``replica_socket``, next to its log. Raises ``ConfigError``."""
    if is_listening(path):
        return
    command = ["agent", "--socket", str(path), "--idle-exit", f"{idle_s}s"]
    script = f"({_KEEP % _PAUSES_S}{_LEAVE_NOTHING if is_private(path) else ''}) &"
    try:
        with open_private(path.parent) as folder, ExitStack() as opened, _all_cores():

            def own_file(kind: str) -> int:
                fd = os.open(f"{path.name}.{kind}", _OWN | os.O_APPEND, 0o600, dir_fd=folder)
                opened.callback(os.close, fd)
                return fd

            starts = own_file("start")
            try:
                fcntl.flock(starts, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            with suppress(FileNotFoundError):
                os.unlink(f"{path.name}.error", dir_fd=folder)
            log = own_file("log")
            if os.fstat(log).st_size > _LOG_BYTES_MAX:
                os.ftruncate(log, 0)
            # Not in a session of its own: Linux divides processors between sessions (autogroups),
            # and then threads of vLLM that spin with sched_yield kept an agent waiting for 0.9 s.
            subprocess.run(
                ["/bin/sh", "-c", script, path, sys.executable, "-m", "objkv", *command],
                check=True,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
                cwd="/",
                pass_fds=[starts],  # so the lock is held until the last of them has ended
            )
    except (OSError, subprocess.SubprocessError) as exc:
        raise ConfigError(f"the agent cannot be started: {exc}") from exc
    logger.info("agent started socket=%s log=%s.log", path, path)


@contextmanager
def _all_cores() -> Iterator[None]:
    """Let processes that this thread starts run on all cores of the container. Workers are often
    bound to a few of them, where an agent would compete with the model."""
    own = os.sched_getaffinity(0)
    with suppress(OSError):  # a sandbox may forbid it
        os.sched_setaffinity(0, range(_CPUS_MAX))
    try:
        yield
    finally:
        if os.sched_getaffinity(0) != own:
            os.sched_setaffinity(0, own)
