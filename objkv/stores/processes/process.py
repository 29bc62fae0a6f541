"""One fetching process, as its agent sees it: its lanes, and the memory that they share.

The memory belongs to this process alone, and it is never the agent's arena. An agent copies what
has arrived, and verifies the copy. So a process that writes late, or after its agent has given it
up, changes nothing that is read: its memory goes when it ends, and its successor has another.
"""

import fcntl
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from time import monotonic
from typing import Final

from objkv.stores.base import map_memory
from objkv.stores.processes.child import (
    ANSWERS,
    MESSAGE_BYTES_MAX,
    READY,
    REQUESTS,
    Answer,
    GetRequest,
)

LANE_BYTES: Final = 256 << 20
"""Memory of a lane. The system provides it as it is written."""
_END_S = 1.0
_FINAL_LENGTH = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class LaneLost(Exception):
    """The process has ended, or does not follow the protocol."""


class FetchLane:
    """One get at a time. Belongs to the thread that took it from the pool."""

    def __init__(self, process: "FetchProcess", sock: socket.socket, memory: memoryview) -> None:
        self.process = process
        self.memory = memory
        """Memory in which values arrive. Valid up to the last number of bytes that was reported."""
        self.is_owed = False
        """Whether a request has not had its last answer."""
        self.kill_s = 0.0
        """If the lane was abandoned: when the process is killed unless it has answered. By
        ``monotonic``."""
        self._sock = sock
        self._number = 0

    def fileno(self) -> int:
        """Return the socket's descriptor, to wait for answers."""
        return self._sock.fileno()

    def ask(self, request: GetRequest) -> None:
        """Send a request. Raises ``LaneLost``."""
        self._number, self.is_owed = request.number, True
        try:
            self._sock.settimeout(_END_S)
            self._sock.send(REQUESTS.dump_json(request))
        except OSError as exc:
            raise LaneLost(str(exc)) from exc

    def read(self, by_s: float) -> Answer | None:
        """Return the next answer; None if there is none by ``by_s``, a time of ``monotonic``.
        Raises ``LaneLost``."""
        try:
            # Python takes 0 for "never wait", which the last look at a lane should do.
            self._sock.settimeout(max(0.0, by_s - monotonic()))
            message = self._sock.recv(MESSAGE_BYTES_MAX)
        except (TimeoutError, BlockingIOError):
            return None
        except OSError as exc:
            raise LaneLost(str(exc)) from exc
        if not message:
            raise LaneLost("the fetching process ended")
        try:
            answer = ANSWERS.validate_json(message)
        except ValueError as exc:
            raise LaneLost(f"invalid answer of a fetching process: {exc}") from exc
        if answer.number != self._number:
            raise LaneLost("a fetching process answered another request")
        self.is_owed = not answer.is_last
        return answer

    def close(self) -> None:
        """Close the socket. The memory stays valid as long as it is referenced."""
        self._sock.close()


class FetchProcess:
    """A running process. Not thread-safe, except for its lanes: each belongs to one thread."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], lanes: int) -> None:
        """Start ``command``, to which descriptors are appended, without waiting until it is ready.
        Raises ``OSError``."""
        memory, view = _shared_memory(lanes * LANE_BYTES)
        pairs: list[tuple[socket.socket, socket.socket]] = []
        try:
            pairs += (
                socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(lanes + 1)
            )
            theirs = [memory, *(there.fileno() for _, there in pairs)]
            self._process = subprocess.Popen(
                [*command, *map(str, theirs)],
                pass_fds=theirs,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C at a terminal is for the agent
            )
        except BaseException:
            for here, _ in pairs:
                here.close()
            raise
        finally:
            os.close(memory)
            for _, there in pairs:
                there.close()
        self._control, *ours = [here for here, _ in pairs]
        self._control.setblocking(False)
        self.lanes: tuple[FetchLane, ...] = tuple(
            FetchLane(self, sock, view[n * LANE_BYTES : (n + 1) * LANE_BYTES])
            for n, sock in enumerate(ours)
        )
        self.free = list(self.lanes)
        """Lanes that are not in use. Guarded by the pool's lock."""
        self.born_s = monotonic()
        self.is_ready = False

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    def fileno(self) -> int:
        """Return the control socket's descriptor: readable once the process is ready, or ended."""
        return self._control.fileno()

    def look(self) -> bool:
        """Whether the process is alive. Updates ``is_ready``. Never waits."""
        try:
            message = self._control.recv(len(READY))
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.is_ready = message == READY
        return self.is_ready

    def end(self) -> bool:
        """Kill it, and close its sockets, which wakes threads that wait for it. Returns whether it
        has ended within a second; Python collects one that has not when it starts the next."""
        with suppress(OSError):
            self._process.kill()
        self._control.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return False
        return True

    def __repr__(self) -> str:
        state = "ready" if self.is_ready else "starting"
        return f"<FetchProcess {self.pid}, {state}, {len(self.free)}/{len(self.lanes)} lanes free>"


def _shared_memory(nbytes: int) -> tuple[int, memoryview]:
    """Return the descriptor of new memory, and a view of it, which does not need the descriptor.
    Its length is final: reading what a process has cut off would kill the agent. Raises
    ``OSError``."""
    fd = os.memfd_create("objkv-fetch", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _FINAL_LENGTH)
        return fd, memoryview(map_memory(fd, nbytes))
    except BaseException:
        os.close(fd)
        raise
