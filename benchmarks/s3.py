"""Compare payloads between an S3 server in memory and a slab with plain sockets on the same route.

objkv verifies every byte while it arrives; the limit does not. The plain server is a process of its
own, as S3 is. A request to it is nine bytes, ``G`` or ``P`` and a length: the server then sends so
many bytes, or takes so many and answers one.
"""

import mmap
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from threading import Barrier
from typing import Self
from unittest.mock import patch

from benchmarks.alone import run_alone
from benchmarks.harness import (
    BenchRow,
    BenchSetting,
    Compared,
    Section,
    Target,
    Work,
    interleave,
)
from objkv.assembly import fetchers
from objkv.assembly.backends import open_bulk
from objkv.config import load_config
from objkv.ops.bench.sample import PAYLOAD_8_MIB, PayloadSample, Shape, get_verified, make_samples
from objkv.stores.base import PruneStore
from objkv.telemetry import NullRecorder
from tests.support.servers.listener import Listener
from tests.support.servers.quick_s3 import quick_s3_process

PAYLOAD_1_MIB = Shape("1 MiB", layers=15, layer_bytes=64 << 10)
PAYLOAD_32_MIB = Shape("32 MiB", layers=32, layer_bytes=1 << 20)
"""One chunk of 256 tokens of an 8B model: 32 layers, 8 KV heads of 128."""
S3_GET = Target(0.85)
S3_PUT = Target(0.80)
CONNECTIONS = (1, 4)
START_S = 300.0
_ROUND_BYTES = 64 << 20
_QUICK_ROUND_BYTES = 1 << 20
_PASSES = 6
"""Passes of gets over all payloads in a round. One pass of 64 MiB takes 15 ms, in which a busy
machine may not run every thread."""
_REQUEST = struct.Struct(">cQ")
_STEP_BYTES = 64 << 20
_GIVEN_BYTES = 128 << 20
"""More than caches hold; one piece of memory for all connections."""

Move = Callable[[int, PayloadSample, memoryview], object]
"""Moves one payload; arguments are the thread's number, the payload and the thread's slab."""


def bench_s3(setting: BenchSetting) -> Section:
    """Gets and puts. Raises ``ObjkvError`` if anything was not as it was put."""
    with quick_s3_process() as server, plain_server() as plain:
        rows = tuple(_rows(setting, server.url, plain))
        return Section("s3", rows, {"S3": "quick_s3, in memory"})


def _rows(setting: BenchSetting, url: str, plain: tuple[str, int]) -> Iterator[BenchRow]:
    settings = {
        "bulk_url": "s3://bench/kv",
        "s3_endpoint_url": url,
        "s3_region": "us-east-1",
        "s3_addressing": "path",
        "s3_access_key_id": "bench",
        "s3_secret_access_key": "bench",
    }
    # One request per payload: the limit has as many connections as there are threads, and no more.
    with patch.object(fetchers, "RANGES_MAX", 0):
        store = open_bulk(load_config(settings, environ={}), NullRecorder())
    try:
        for shape in (PAYLOAD_1_MIB,) if setting.quick else (PAYLOAD_8_MIB, PAYLOAD_32_MIB):
            for threads in CONNECTIONS:
                setting.report_stage("S3", f"{shape.name}, {threads} threads")
                with PayloadBench(setting, shape, threads, plain) as bench:
                    yield from bench.rows(store)
    finally:
        store.close()


class PayloadBench:
    """Threads, each with its own slab, payloads, and connection to the plain server. All payloads
    together are about ``_ROUND_BYTES``, more than CPU caches hold; a pass moves each of them once.
    A context manager."""

    def __init__(
        self, setting: BenchSetting, shape: Shape, threads: int, plain: tuple[str, int]
    ) -> None:
        self._setting, self._threads = setting, threads
        plural = "" if threads == 1 else "s"
        self._case = f"{shape.name}, {threads} connection{plural}"
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="objkv-bench")
        self._start = Barrier(threads)
        wanted = _QUICK_ROUND_BYTES if setting.quick else _ROUND_BYTES
        each = max(1, wanted // (shape.raw_bytes * threads))
        self._samples = make_samples(shape, each * threads)
        self._slabs = [_slab(len(self._samples[0].payload)) for _ in range(threads)]
        self._plain, self._stack = plain, ExitStack()

    def __enter__(self) -> Self:
        clients = [PlainClient(self._plain) for _ in range(self._threads)]
        self._clients = [self._stack.enter_context(client) for client in clients]
        return self

    def __exit__(self, *_: object) -> None:
        self._start.abort()  # release threads that wait for the others
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._stack.close()

    def rows(self, store: PruneStore) -> Iterator[BenchRow]:
        """Gets, of which a payload is verified, and puts until they are acknowledged."""

        def put_and_delete() -> float:
            try:
                return self._each(lambda _, one, __: store.put_if_absent(one.key, one.payload))
            finally:
                self._delete(store)

        passes = 1 if self._setting.quick else _PASSES
        for sample in self._samples:
            store.put(sample.key, sample.payload)
        yield self._compare(
            f"S3 GET {self._case}",
            lambda: self._each(lambda _, one, slab: get_verified(store, one, slab), passes),
            lambda: self._each(lambda n, _, slab: self._clients[n].get_into(slab), passes),
            ("plain recv_into", S3_GET),
        )
        self._delete(store)
        yield self._compare(
            f"S3 PUT {self._case}",
            put_and_delete,
            lambda: self._each(lambda n, one, _: self._clients[n].put(one.payload)),
            ("plain sendall", S3_PUT),
        )

    def _compare(self, name: str, ours: Work, limit: Work, by: tuple[str, Target]) -> BenchRow:
        nbytes = sum(len(sample.payload) for sample in self._samples)
        timings = interleave({"ours": ours, "limit": limit}, self._setting.rounds)
        return Compared(timings, "ours", "limit", by[0]).throughput(name, nbytes, by[1])

    def _each(self, move: Move, passes: int = 1) -> float:
        """Move every thread's samples. Return the seconds of a pass, from the first start to the
        last end.

        Raises an error of a thread after all have ended. The threads read the clock themselves,
        because on a busy machine the waiting thread may wake up late.
        """

        def thread(number: int) -> tuple[float, float]:
            self._start.wait(START_S)
            begun = time.perf_counter()
            for _ in range(passes):
                for sample in self._samples[number :: self._threads]:
                    move(number, sample, self._slabs[number])
            return begun, time.perf_counter()

        futures = [self._pool.submit(thread, number) for number in range(self._threads)]
        for future in futures:
            future.exception()
        begun, ended = zip(*(future.result() for future in futures), strict=True)
        return (max(ended) - min(begun)) / passes

    def _delete(self, store: PruneStore) -> None:
        for sample in self._samples:
            store.delete(sample.key)


def _slab(nbytes: int) -> memoryview:
    """Return ``nbytes`` writable bytes, page-aligned, with every page touched."""
    slab = memoryview(mmap.mmap(-1, nbytes))
    for at in range(0, nbytes, mmap.PAGESIZE):
        slab[at] = 1
    return slab


@cache
def _given() -> memoryview:
    return memoryview(b"g" * _GIVEN_BYTES)


class PlainServer(Listener):
    """Sends bytes of a buffer that it has, takes bytes into another; keeps nothing."""

    def serve(self, connection: socket.socket) -> None:
        """Answer requests until the client is gone. What is sent lies elsewhere each time, as that
        of a store does: from a processor's cache it would be sent half as fast again. No page is
        touched for the first time while it is measured."""
        given, at = _given(), 0
        taken = memoryview(b"")
        request = memoryview(bytearray(_REQUEST.size))
        with suppress(ConnectionError):
            while True:
                _fill(connection, request)
                verb, nbytes = _REQUEST.unpack(request)
                if verb == b"G":
                    at = at if at + nbytes <= len(given) else 0
                    connection.sendall(given[at : at + nbytes])
                    at += nbytes
                else:
                    if len(taken) < nbytes:
                        taken = memoryview(bytearray(b"p" * nbytes))
                    _fill(connection, taken[:nbytes])
                    connection.sendall(b"!")


class PlainClient:
    """One connection to a ``PlainServer``; a context manager. For one thread at a time."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._socket = socket.create_connection(address)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def get_into(self, buffer: memoryview) -> None:
        """Fill ``buffer`` with what the server sends."""
        self._socket.sendall(_REQUEST.pack(b"G", len(buffer)))
        _fill(self._socket, buffer)

    def put(self, view: memoryview) -> None:
        """Send ``view`` and wait until the server has taken all of it."""
        self._socket.sendall(_REQUEST.pack(b"P", len(view)))
        self._socket.sendall(view)
        _fill(self._socket, memoryview(bytearray(1)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def _fill(connection: socket.socket, buffer: memoryview) -> None:
    at = 0
    while at < len(buffer):
        got = connection.recv_into(buffer[at : at + _STEP_BYTES])
        if not got:
            raise ConnectionError(f"closed after {at} of {len(buffer)} bytes")
        at += got


@contextmanager
def plain_server() -> Iterator[tuple[str, int]]:
    """The address of a ``PlainServer`` in a process of its own, killed at the end."""
    command = [sys.executable, "-c", "from benchmarks import s3; s3.serve()"]
    with subprocess.Popen(
        command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            host, port = process.stdout.readline().split()
            yield host, int(port)
        finally:
            process.kill()


def serve() -> None:
    """Serve until killed; print host and port."""
    with PlainServer() as server:
        print(*server.address, flush=True)
        signal.pause()  # until the benchmark ends this process


if __name__ == "__main__":
    run_alone(bench_s3)
