"""Measure how fast one core receives payloads by TLS, against what OpenSSL alone decrypts there.

    python -m benchmarks.agent_tls [--rounds N] [--json]

An S3 server in memory sends payloads of 32 MiB on loopback, and one thread gets them with objkv's
client, as a fetching thread of an agent does, pinned to one core. All figures are bytes per second
of processor time, which a busy machine disturbs less than elapsed time. Besides: the same bytes by
Python's two ways to read TLS without HTTP, ``SSLSocket.recv_into`` and a ``MemoryBIO``, and by a
plain socket, which shows what the kernel takes of that core.
"""

import argparse
import json
import os
import re
import shutil
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path

from benchmarks.s3 import plain_clients, s3_config
from objkv.ops.bench.harness import make_slab
from tests.ops.bench.setting import FACTORIES
from tests.support.servers.certificates import make_certificates
from tests.support.servers.quick_s3 import quick_s3_process

NBYTES = 32 << 20
PART = 1 << 20
READ = 256 << 10
CIPHER = "aes-256-gcm"
"""What OpenSSL's default settings agree on."""
_RATE = re.compile(r"^AES-256-GCM\s+([0-9.]+)k", re.MULTILINE)


class RawServer:
    """Sends ``NBYTES`` by TLS for each byte that it receives, from a process of its own."""

    def __init__(self, certificates: Path) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._pid = os.fork()
        if not self._pid:
            _pin(-1)
            self._serve(certificates)

    def _serve(self, certificates: Path) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificates / "cert.pem", certificates / "key.pem")
        data = os.urandom(PART)

        def talk(plain: socket.socket) -> None:
            with suppress(OSError), context.wrap_socket(plain, server_side=True) as sock:
                while sock.recv(1):
                    for _ in range(NBYTES // PART):
                        sock.sendall(data)

        while True:
            threading.Thread(target=talk, args=self._listener.accept()[:1], daemon=True).start()

    def close(self) -> None:
        """End the process."""
        os.kill(self._pid, 9)
        os.waitpid(self._pid, 0)
        self._listener.close()


def _pin(core: int) -> None:
    """Run this process on its first core (0) or its last one (-1)."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[core]})


def by_socket(address: tuple[str, int], context: ssl.SSLContext) -> Callable[[memoryview], None]:
    """Read records with ``SSLSocket.recv_into``, as objkv's client does."""
    sock = context.wrap_socket(socket.create_connection(address), server_hostname="localhost")

    def read(into: memoryview) -> None:
        sock.send(b"x")
        at = 0
        while at < NBYTES:
            at += sock.recv_into(into[at : at + (512 << 10)])

    return read


def by_bio(address: tuple[str, int], context: ssl.SSLContext) -> Callable[[memoryview], None]:
    """Receive much at once, and decrypt it record by record from memory."""
    sock = socket.create_connection(address)
    came, leaves = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(came, leaves, server_hostname="localhost")
    room = memoryview(bytearray(READ))
    while True:
        try:
            tls.do_handshake()
            break
        except ssl.SSLWantReadError:
            sock.sendall(leaves.read())
            came.write(room[: sock.recv_into(room)])
    sock.sendall(leaves.read())

    def read(into: memoryview) -> None:
        tls.write(b"x")
        sock.sendall(leaves.read())
        at = 0
        while at < NBYTES:
            try:
                at += tls.read(NBYTES - at, into[at:])  # type: ignore[arg-type]
            except ssl.SSLWantReadError:
                came.write(room[: sock.recv_into(room)])

    return read


def openssl() -> float:
    """Bytes per second that OpenSSL decrypts on this process's core, in records of 16 KiB."""
    command = ["openssl", "speed", "-evp", CIPHER, "-bytes", "16384", "-seconds", "1", "-decrypt"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    found = _RATE.search(ran.stdout)
    assert found is not None, ran.stdout
    return 1e3 * float(found[1])


def measure(rounds: int) -> dict[str, float]:
    """Return GB per second of processor time, by what was measured; medians."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        certificates = make_certificates(folder)
        raw = stack.enter_context(closing(RawServer(certificates)))
        server = stack.enter_context(quick_s3_process(tls=certificates))
        os.sched_setaffinity(server.pid, {sorted(os.sched_getaffinity(0))[-1]})
        _pin(0)
        # One connection per payload, as the raw ways have.
        options = {"s3_ranges_max": "0", "s3_hedge_percent_max": "0"}
        trusted = str(certificates / "ca.pem")
        config = s3_config(server.url, s3_ca_bundle=trusted, **options)
        store = stack.enter_context(closing(FACTORIES.open_bulk(config)))
        store.put("payload", os.urandom(NBYTES))
        context = ssl.create_default_context(cafile=trusted)
        into = make_slab(NBYTES)

        def by_client(room: memoryview) -> object:
            return store.get_into("payload", room)

        (plain,) = stack.enter_context(plain_clients(server.plain, 1))
        ways = {
            "objkv": by_client,
            "recv_into": by_socket(raw.address, context),
            "memory_bio": by_bio(raw.address, context),
            "plain": plain.get_into,
        }
        found: dict[str, list[float]] = {name: [] for name in (*ways, "openssl")}
        for number in range(rounds + 1):
            for name, way in ways.items():
                begun = time.process_time()
                way(into)
                if number:  # the first connects
                    found[name].append(NBYTES / (time.process_time() - begun))
            if number:
                found["openssl"].append(openssl())
        return {name: statistics.median(rates) / 1e9 for name, rates in found.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if shutil.which("openssl") is None:
        sys.exit("openssl is not installed")
    found = measure(options.rounds)
    if options.json:
        json.dump(found, sys.stdout)
        return
    for name, rate in found.items():
        print(f"{name} {rate:.2f} GB/s per core, {rate / found['openssl']:.2f} of openssl")


if __name__ == "__main__":
    main()
