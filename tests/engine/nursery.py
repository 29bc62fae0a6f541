"""Replicas as forks of a process that has imported vLLM: one second each instead of twenty.

Each is a whole process with an engine of its own, in the environment that it is given before vLLM
looks at it, and it ends as any Python process does. What it shares with the others is what is
decided as Python starts: the seed of its hashes. A replica for which that matters, or that is to be
several processes, is started afresh.

``python -m tests.engine.nursery`` serves; what starts it holds its standard input open.
"""

import atexit
import gc
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


class Fork:
    """A process like ``subprocess.Popen``'s, as far as a replica needs it."""

    def __init__(self, connection: socket.socket, what: str) -> None:
        self._connection = connection
        self._lines = connection.makefile("r")
        self._what = what
        self._status: int | None = None
        pid = self._lines.readline()
        if not pid:
            raise RuntimeError("vLLM could not be imported, see above; no replica can be forked")
        self.pid = int(pid)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, negative for a signal. Raises ``subprocess.TimeoutExpired``."""
        if self._status is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                assert timeout is not None
                raise subprocess.TimeoutExpired(self._what, timeout)
            self._status = int(self._lines.readline() or -signal.SIGKILL)
            self._lines.close()
            self._connection.close()
        return self._status

    def poll(self) -> int | None:
        """Its exit status, or None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None


class Nursery:
    """The process that is forked; it starts when the first fork is wanted, and ends with this."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        """``folder`` is the working directory; ``environment`` what Python starts with."""
        self._folder = folder
        self._environment = dict(environment)
        self._lock = threading.Lock()
        self._address = ""
        self._process: subprocess.Popen[bytes] | None = None

    def fork(self, module: str, *arguments: str, environment: Mapping[str, str], log: Path) -> Fork:
        """Run a module as ``python -m`` would, in a session of its own."""
        with self._lock:
            self._start()
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._address)
        told = {"module": module, "arguments": arguments, "log": str(log)}
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
                [sys.executable, "-m", "tests.engine.nursery", str(listener.fileno())],
                cwd=self._folder,
                env=self._environment,
                pass_fds=(listener.fileno(),),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )


def _preload() -> None:
    gc.disable()
    import vllm.distributed.elastic_ep.elastic_execute
    import vllm.entrypoints.launchers.cli_args
    import vllm.entrypoints.openai.api_server
    import vllm.lora.request
    import vllm.model_executor.layers.quantization.online.base
    import vllm.model_executor.models.llama
    import vllm.v1.attention.backends.cpu_attn
    import vllm.v1.core.sched.scheduler
    import vllm.v1.worker.cpu_worker
    from vllm import LLM

    # vLLM starts a process of 10 s to look at each class of model, so that CUDA is not initialised.
    # There is none here, and the replica imports the class anyway.
    from vllm.model_executor.models import registry

    import objkv.connector.kv.connector  # noqa: F401

    assert hasattr(registry, "_run_in_subprocess")
    registry._run_in_subprocess = lambda look: look()

    # vLLM looks for its kernels in every module, in each engine anew; once is enough.
    from vllm.platforms import current_platform

    current_platform.register_triton_kernel_overrides()
    vars(current_platform)["register_triton_kernel_overrides"] = lambda: None

    # Engines of servers and ranks are forks too; on CPUs vLLM starts Python anew for each.
    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor

    for module in (utils, multiproc_executor):
        assert hasattr(module, "get_mp_context")
        module.get_mp_context = lambda: multiprocessing.get_context("fork")

    assert LLM
    assert vllm.lora.request
    gc.freeze()  # Millions of objects that live as long as the process; vLLM collects often,
    gc.unfreeze = lambda: None  # also as it ends, after it has unfrozen them.
    gc.enable()


def _serve(listener: socket.socket) -> dict[str, Any] | None:
    """Returns in each fork, with what it was told; None once nobody is left to ask."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who attend
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
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
    """Serve until standard input ends."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    _preload()
    if told := _serve(listener):
        _become(told)


if __name__ == "__main__":
    main()
