"""Mooncake Store over TCP. Runs in Mooncake's environment; written for 0.3.13.post1.

Three roles: ``server`` is a master and the process whose memory holds the values; writer and
reader contribute no memory to the store, and register their buffers with it.
"""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mooncake.store import MooncakeDistributedStore
from protocol import Bytes, Servers, Worker, serve

SEGMENT_BYTES = 2 << 30
OWN_BYTES = 64 << 20
"""Of a client's own buffer, which calls with registered buffers do not use."""
LEASE_MS = 200
START_S = 30.0


class MooncakeWorker(Worker):
    """A client, or the store that clients use."""

    def __init__(self) -> None:
        self._master: subprocess.Popen[bytes] | None = None
        self._registered: list[Bytes] = []

    def open(self, servers: Servers, role: str, threads: int) -> None:
        """As ``server`` start the master, and write where it is for the other roles."""
        super().open(servers, role, threads)
        place = Path(servers.folder) / "mooncake.json"
        if role == "server":
            port = self._start_master(Path(servers.folder))
            self._connect(port, SEGMENT_BYTES)
            place.write_text(json.dumps({"port": port}))
        else:
            self._connect(json.loads(place.read_text())["port"], 0)

    def prepare(self, value_bytes: int, values: int) -> None:
        """Buffers, registered; those of the size before are given up."""
        for buffer in self._registered:
            self._check(self._store.unregister_buffer(buffer.ctypes.data), "unregister_buffer")
        self._registered = []
        if self.role != "server":
            whole = np.zeros(value_bytes * values, np.uint8)
            self._check(self._store.register_buffer(whole.ctypes.data, whole.size), "register")
            self._registered = [whole]
            self.buffers = np.split(whole, values)

    def put(self, names: Sequence[str]) -> None:
        """Returns when the values are in the server's memory."""
        codes = self._store.batch_put_from(list(names), *self._places(len(names)))
        self._check(min(codes), "batch_put_from")

    def get(self, names: Sequence[str]) -> None:
        """Into the registered buffers."""
        codes = self._store.batch_get_into(list(names), *self._places(len(names)))
        self._check(min(codes), "batch_get_into")

    def lookup(self, names: Sequence[str]) -> int:
        """One batched question."""
        found = self._store.batch_is_exist(list(names))
        return found.index(0) if 0 in found else len(found)

    def clear(self) -> None:
        """Remove everything."""
        if self.role == "writer":
            self._check(self._store.remove_all(True), "remove_all")

    def close(self) -> None:
        """Disconnect; the server ends its master."""
        self._store.close()
        if self._master is not None:
            self._master.terminate()
            self._master.wait(START_S)

    def _start_master(self, folder: Path) -> int:
        port, metrics = _free_port(), _free_port()
        program = Path(sys.executable).with_name("mooncake_master")
        options = [f"--rpc_port={port}", f"--metrics_port={metrics}"]
        options += [f"--default_kv_lease_ttl={LEASE_MS}"]
        with (folder / "mooncake_master.log").open("wb") as log:
            self._master = subprocess.Popen([program, *options], stdout=log, stderr=log)
        until = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                return port
            except OSError:
                if time.monotonic() > until or self._master.poll() is not None:
                    raise
                time.sleep(0.05)

    def _connect(self, port: int, segment_bytes: int) -> None:
        self._store = MooncakeDistributedStore()
        own, master = f"127.0.0.1:{_free_port()}", f"127.0.0.1:{port}"
        memory = segment_bytes, OWN_BYTES
        code = self._store.setup(own, "P2PHANDSHAKE", *memory, "tcp", "", master)
        self._check(code, "setup")

    def _places(self, count: int) -> tuple[list[int], list[int]]:
        buffers = self.buffers[:count]
        return [b.ctypes.data for b in buffers], [b.size for b in buffers]

    def _check(self, code: Any, what: str) -> None:
        if code < 0:
            raise RuntimeError(f"{what}: {code}")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    serve(MooncakeWorker())
