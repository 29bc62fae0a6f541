"""Stores that processes may be killed in: a folder, and servers that may be killed, too."""

import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from objkv.assembly.backends import Backends, open_backends
from objkv.config import Config
from objkv.ops.backends_view import BackendsView
from objkv.ops.programs import die_with_parent
from objkv.stores.s3.client import open_s3_access
from objkv.telemetry import NullRecorder
from tests.support.servers.listener import Listener
from tests.support.servers.ports import free_port, is_accepting
from tests.support.servers.quick_s3 import quick_s3_process
from tests.support.servers.redis import RedisServer, valkey_server
from tests.support.waiting import wait_until

BUCKET = "kv-cache"
LEASE_MS = 40


class Place:
    """Both ends. Whoever forks uses ``fresh``, which this process has never used itself."""

    kills: tuple[str, ...] = ()
    """Servers that may be killed: ``index``, ``gateway``."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.fresh = open_backends(config, NullRecorder())
        self.used = open_backends(config, NullRecorder())

    @property
    def view(self) -> BackendsView:
        return self.view_of(self.used)

    def view_of(self, backends: Backends) -> BackendsView:
        view = BackendsView.of(self.config, backends, "crash")
        # One owner in the process and its children: what a killed one leased is not waited for.
        return replace(view, owner=f"crash-{os.getpid()}", lease_ms=LEASE_MS)

    def wipe(self) -> None:
        raise NotImplementedError

    def kill(self, server: str) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.used.close()


class FolderPlace(Place):
    def __init__(self, folder: Path, *, own_index: bool) -> None:
        self._folder = folder
        index = "bulk:" if own_index else f"sqlite://{folder}/index.sqlite"
        super().__init__(Config(bulk_url=f"file://{folder}/chunks", index_url=index))

    def wipe(self) -> None:
        shutil.rmtree(self._folder / "chunks", ignore_errors=True)
        if self.config.index_url != "bulk:":
            for record in _records(self.used):
                self.used.admin.drop(*record)


class _Gateway(Listener):
    """Carries bytes to a server and back."""

    def __init__(self, target: tuple[str, int], port: int) -> None:
        self._target = target
        super().__init__(port)

    def serve(self, connection: socket.socket) -> None:
        with socket.create_connection(self._target) as server:
            threading.Thread(target=_carry, args=(server, connection), daemon=True).start()
            _carry(connection, server)


def _carry(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while some := source.recv(1 << 20):
            target.sendall(some)
        target.shutdown(socket.SHUT_RDWR)


class ServerPlace(Place):
    """Valkey, and an S3 server behind a gateway that can be killed without losing the bucket."""

    kills = ("index", "gateway")

    def __init__(self, valkey: RedisServer, url: str) -> None:
        self._valkey = valkey
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._target = parts.hostname, parts.port
        self._port = free_port()
        self._gateway = 0
        self._start_gateway()
        config = Config(
            bulk_url=f"s3://{BUCKET}/crash",
            index_url=f"{valkey.url}/0",
            s3_addressing="path",
            s3_region="us-east-1",
            lookup_deadline_ms=5_000,
            s3_endpoint_url=f"http://127.0.0.1:{self._port}",
            s3_access_key_id="test",
            s3_secret_access_key="test",
        )
        access = open_s3_access(config)
        access.client.create_bucket(Bucket=BUCKET)
        access.close()
        super().__init__(config)

    def wipe(self) -> None:
        for entry in self.used.bulk.scan(""):
            self.used.bulk.delete(entry.key)
        with self._valkey.client() as client:
            client.flushall()

    def kill(self, server: str) -> None:
        if server == "index":
            self._valkey.kill()
            self._valkey.start()
            return
        self._end_gateway()
        self._start_gateway()

    def close(self) -> None:
        super().close()
        self._end_gateway()

    def _end_gateway(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._gateway, signal.SIGKILL)
        os.waitpid(self._gateway, 0)

    def _start_gateway(self) -> None:
        self._gateway = os.fork()
        if self._gateway == 0:
            die_with_parent()
            try:
                _Gateway(self._target, self._port)
                threading.Event().wait()
            finally:
                os._exit(1)
        wait_until(lambda: is_accepting(self._port), "the gateway")


@contextmanager
def folder_place(*, own_index: bool = False) -> Iterator[Place]:
    """In memory, if the machine has such a folder: what a process that is killed had written stays
    either way, and no disk has to be waited for."""
    memory = Path("/dev/shm")  # noqa: S108  # a folder of its own is made in it
    parent = memory if os.access(memory, os.W_OK) else None
    with (
        tempfile.TemporaryDirectory(prefix="objkv-crash-", dir=parent) as folder,
        closing(FolderPlace(Path(folder), own_index=own_index)) as place,
    ):
        yield place


@contextmanager
def quick_place() -> Iterator[Place]:
    with (
        tempfile.TemporaryDirectory() as folder,
        valkey_server(Path(folder)) as valkey,
        quick_s3_process() as s3,
        closing(ServerPlace(valkey, s3.url)) as place,
    ):
        yield place


def _records(backends: Backends) -> list[tuple[str, bytes]]:
    index = backends.index
    return [(name, one.prefix_hash) for name in index.namespaces() for one in index.scan(name)]
