"""Processes as forks of one that has imported what they need: replicas with vLLM in one second
instead of twenty, node agents in a tenth instead of one and a half.

Each is a whole process, in the environment that it is given before it does anything, and it ends as
any Python process does. What it shares with the others is what is decided as Python starts: the
seed of its hashes. A process for which that matters, or that is to be several, is started afresh.

``python -m tests.support.nursery FD MODULE...`` serves; what starts it holds its standard input
open.
"""

import atexit
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

KEPT = set[int]()
"""Descriptors that this process has as long as nurseries that it started."""


class Fork:
    """A process like ``subprocess.Popen``'s, as far as tests need it. Thread-safe."""

    def __init__(self, connection: socket.socket, what: str) -> None:
        self._connection = connection
        self._lines = connection.makefile("r")
        self._what = what
        self._lock = threading.Lock()
        self.returncode: int | None = None
        """Its exit status, negative for a signal; None before ``wait`` or ``poll`` returned it."""
        pid = self._lines.readline()
        if not pid:
            raise RuntimeError(f"modules could not be imported, see above; {what} cannot be forked")
        self.pid = int(pid)

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        if not self._lock.acquire(timeout=-1 if timeout is None else timeout):
            raise subprocess.TimeoutExpired(self._what, timeout or 0.0)
        try:
            if self.returncode is None:
                left = None if end is None else max(0.0, 1000 * (end - time.monotonic()))
                poll = select.poll()  # its number may be larger than select() takes
                poll.register(self._connection, select.POLLIN)
                if not poll.poll(left):
                    raise subprocess.TimeoutExpired(self._what, timeout or 0.0)
                self.returncode = int(self._lines.readline() or -signal.SIGKILL)
                self._lines.close()
                self._connection.close()
            return self.returncode
        finally:
            self._lock.release()

    def poll(self) -> int | None:
        """Its exit status, or None while it runs, or while another thread waits for it."""
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return self.returncode  # which another thread may just have read

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Nursery:
    """The process that is forked; it starts when the first fork is wanted, and ends with this."""

    def __init__(
        self, folder: Path, environment: Mapping[str, str], modules: Sequence[str]
    ) -> None:
        """``folder`` is the working directory; ``environment`` what Python starts with; ``modules``
        what it imports: threads that one of them starts are not in the forks."""
        self._folder = folder
        self._environment = dict(environment)
        self._modules = tuple(modules)
        self._lock = threading.Lock()
        self._address = ""
        self._process: subprocess.Popen[bytes] | None = None

    def fork(
        self,
        module: str,
        *arguments: str,
        environment: Mapping[str, str],
        log: Path,
        folder: Path | None = None,
    ) -> Fork:
        """Run a module as ``python -m`` would, in a session of its own. ``folder``: its working
        directory, if it is not that of the others."""
        with self._lock:
            self._start()
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._address)
        told = {"module": module, "arguments": arguments, "log": str(log)}
        told["folder"] = str(folder or self._folder)
        connection.sendall(json.dumps(told | {"environment": dict(environment)}).encode() + b"\n")
        return Fork(connection, module)

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("")  # a name that the kernel chooses, not a file
            listener.listen()
            self._address = listener.getsockname()
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(listener.fileno()), *self._modules],
                cwd=self._folder,
                env=self._environment,
                pass_fds=(listener.fileno(),),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
            assert self._process.stdin is not None
            KEPT.add(self._process.stdin.fileno())


def _preload(modules: Sequence[str]) -> None:
    gc.disable()
    for module in modules:
        import_module(module)
    gc.freeze()  # Millions of objects that live as long as the process.
    gc.enable()


def _serve(listener: socket.socket) -> dict[str, Any] | None:
    """Returns in each fork, with what it was told; None once nobody is left to ask."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who attend
    ready = select.poll()
    ready.register(listener, select.POLLIN)
    ready.register(sys.stdin, select.POLLIN)
    while True:
        if any(number == sys.stdin.fileno() for number, _ in ready.poll()):
            return None
        connection, _ = listener.accept()
        with connection:
            if os.fork() == 0:
                listener.close()
                return _attend(connection)


def _attend(connection: socket.socket) -> dict[str, Any]:
    """Fork once more, and tell how that one ended. Returns in that one."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    told: dict[str, Any] = json.loads(connection.makefile("r").readline())
    child = os.fork()
    if child == 0:
        return told
    status = 1
    try:
        connection.sendall(f"{child}\n".encode())
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        connection.sendall(f"{status}\n".encode())
    finally:
        os._exit(0)


def _become(told: dict[str, Any]) -> None:
    os.setsid()
    log = os.open(told["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(log)
    os.chdir(told["folder"])
    os.environ.clear()
    os.environ.update(told["environment"])
    sys.argv[1:] = told["arguments"]
    runpy.run_module(told["module"], run_name="__main__", alter_sys=True)
    # As Python ends, but for taking a million objects apart one by one, which takes seconds.
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if not stream.closed:
            stream.flush()
    os._exit(0)


def main() -> None:
    listener = socket.socket(fileno=int(sys.argv[1]))
    _preload(sys.argv[2:])
    if told := _serve(listener):
        _become(told)


if __name__ == "__main__":
    main()
