"""Node agents as processes of their own."""

import functools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Self

from objkv.agent.client import is_listening
from objkv.agent.http.metrics import PREFIX
from tests.support.nursery import Fork, Nursery
from tests.support.servers.process import freeze
from tests.support.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[2]


class AgentProcess:
    """``objkv agent`` over some stores. As a context manager it ends with its block."""

    def __init__(
        self,
        settings: Mapping[str, str],
        *,
        path: Path | None = None,
        options: Sequence[str] = (),
        constants: Mapping[str, Any] | None = None,
        fresh: bool = False,
    ) -> None:
        """``settings``: names and values. ``path``: by default in a new folder with a short name,
        since a socket's path may have 107 bytes. ``options``: of the command. ``constants``: see
        ``tests.support.tuned``. ``fresh``: as a service starts it, not as a fork."""
        self.folder = Path(tempfile.mkdtemp(prefix="objkv-", dir="/tmp"))
        self.path = path or self.folder / "agent.sock"
        self.log_file = self.folder / "log"
        self.log_file.touch()
        ours = {f"OBJKV_{name.upper()}": value for name, value in settings.items()}
        program = ["tests.support.tuned", json.dumps(constants)] if constants else ["objkv"]
        command = (*program, "agent", "--socket", str(self.path), *options)
        self.process = self._start(command, _environment() | ours, fresh=fresh)
        wait_until(self._is_up)

    def _start(
        self, command: Sequence[str], environment: dict[str, str], *, fresh: bool
    ) -> "Fork | subprocess.Popen[bytes]":
        if not fresh:
            place: dict[str, Any] = {"log": self.log_file, "folder": self.folder}
            return _nursery().fork(*command, environment=environment, **place)
        command = [sys.executable, "-m", *command]
        with self.log_file.open("wb") as log:
            return subprocess.Popen(
                command, env=environment, cwd=self.folder, stdout=log, stderr=subprocess.STDOUT
            )

    def _is_up(self) -> bool:
        assert self.process.poll() is None, self.log()
        return "agent ready" in self.log() and is_listening(self.path)

    @property
    def url(self) -> str:
        return f"unix://{self.path}"

    def log(self) -> str:
        return self.log_file.read_text()

    def end(self) -> dict[str, int]:
        """End it in order. The numbers that it logs last."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(PATIENCE_S) == 0, self.log()
        last = re.search(r"agent ended (.*)", self.log())
        assert last is not None, self.log()
        pairs = (pair.partition("=") for pair in last[1].split())
        return {name: int(value) for name, _, value in pairs}

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        freeze(self.process.pid)

    def metrics(self) -> dict[str, float]:
        """Its metrics, without the prefix. Raises ``OSError`` or ``HTTPException`` if it ends."""
        return metrics_of(self.path)

    def fetchers(self) -> list[int]:
        """Its fetching processes. Each child is listed by the thread that started it."""
        while True:
            tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
            with suppress(OSError):  # a thread has ended, and its children are another's now
                return sorted(int(pid) for task in tasks for pid in task.read_text().split())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self.folder)


def metrics_of(path: Path) -> dict[str, float]:
    with closing(HTTPConnection("agent", timeout=PATIENCE_S)) as connection:
        connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.sock.settimeout(PATIENCE_S)
        connection.sock.connect(f"{path}.http")
        connection.request("GET", "/metrics")
        page = connection.getresponse().read().decode()
    lines = re.findall(rf"^{PREFIX}(\w+) (\S+)$", page, re.MULTILINE)
    return {name: float(value) for name, value in lines}


def _environment() -> dict[str, str]:
    return {n: v for n, v in os.environ.items() if not n.startswith("OBJKV_")}


@functools.cache
def _nursery() -> Nursery:
    modules = (
        "objkv.cli.agent",
        "objkv.stores.s3.client",
        "objkv.stores.s3.store",
        "objkv.index.redis.index",
    )
    return Nursery(ROOT, _environment(), modules)


@contextmanager
def agent_folder() -> Iterator[Path]:
    """A folder for sockets, with a short path. Agents in it end with the block."""
    with tempfile.TemporaryDirectory(prefix="objkv-", dir="/tmp") as name:
        try:
            yield Path(name)
        finally:
            end_agents(name)


def end_agents(name: str) -> None:
    """Kill the agents, and the shells that start them, whose socket or store a name is part of."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (process / "cmdline").read_bytes()
            settings = (process / "environ").read_bytes() if b"\0agent\0" in command else b""
            if name.encode() in command + settings:
                os.kill(int(process.name), signal.SIGKILL)
