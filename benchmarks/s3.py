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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from threading import Barrier
from unittest.mock import patch

from benchmarks.alone import run_alone
from benchmarks.harness import (
    QUICK_S3,
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

Move = Callable[[int, PayloadSample], object]
"""Moves one payload; the first argument is the thread's number."""


def bench_s3(setting: BenchSetting) -> Section:
    """Gets and puts. Raises ``ObjkvError`` if anything was not as it was put."""
    with ExitStack() as stack:
        server, plain = stack.enter_context(quick_s3_process()), stack.enter_context(plain_server())
        settings = {"bulk_url": "s3://bench/kv", "s3_endpoint_url": server.url, **QUICK_S3}
        # One request per payload: the limit has as many connections as there are threads.
        with patch.object(fetchers, "RANGES_MAX", 0):
            store = open_bulk(load_config(settings, environ={}), NullRecorder())
        stack.callback(store.close)
        rows = list[BenchRow]()
        for shape in (PAYLOAD_1_MIB,) if setting.quick else (PAYLOAD_8_MIB, PAYLOAD_32_MIB):
            for threads in CONNECTIONS:
                setting.report_stage("S3", f"{shape.name}, {threads} threads")
                rows += _case(setting, store, plain, shape, threads)
    return Section("s3", tuple(rows), {"S3": "quick_s3, in memory"})


def _case(
    setting: BenchSetting,
    store: PruneStore,
    plain: tuple[str, int],
    shape: Shape,
    threads: int,
) -> Iterator[BenchRow]:
    """Gets, of which a payload is verified, and puts until they are acknowledged. All payloads
    together are about ``_ROUND_BYTES``, more than CPU caches hold; a pass moves each of them once.
    Each thread has its own payloads, slab, and connection to the plain server."""
    wanted = _QUICK_ROUND_BYTES if setting.quick else _ROUND_BYTES
    samples = make_samples(
        shape, max(1, wanted // (shape.layers * shape.layer_bytes * threads)) * threads
    )
    slabs = [_slab(len(samples[0].payload)) for _ in range(threads)]
    passes = 1 if setting.quick else _PASSES
    pool = ThreadPoolExecutor(threads, thread_name_prefix="objkv-bench")
    each = partial(_each, pool, samples, threads)

    def put_and_delete() -> float:
        try:
            return each(lambda _, one: store.put_if_absent(one.key, one.payload))
        finally:
            delete()

    def delete() -> None:
        for sample in samples:
            store.delete(sample.key)

    def compare(verb: str, ours: Work, limit: Work, by: tuple[str, Target]) -> BenchRow:
        timings = interleave({"ours": ours, "limit": limit}, setting.rounds)
        name = f"S3 {verb} {shape.name}, {threads} connection{'' if threads == 1 else 's'}"
        nbytes = sum(len(sample.payload) for sample in samples)
        return Compared(timings, "ours", "limit", by[0]).throughput(name, nbytes, by[1])

    for sample in samples:
        store.put(sample.key, sample.payload)
    with pool, ExitStack() as stack:
        clients = [stack.enter_context(_connect(plain)) for _ in range(threads)]
        yield compare(
            "GET",
            lambda: each(lambda n, one: get_verified(store, one, slabs[n]), passes),
            lambda: each(lambda n, _: _get(clients[n], slabs[n]), passes),
            ("plain recv_into", S3_GET),
        )
        delete()
        yield compare(
            "PUT",
            put_and_delete,
            lambda: each(lambda n, one: _put(clients[n], one.payload)),
            ("plain sendall", S3_PUT),
        )


def _each(
    pool: Executor, samples: Sequence[PayloadSample], threads: int, move: Move, passes: int = 1
) -> float:
    """Move every thread's samples. Return the seconds of a pass, from the first start to the last
    end. Raises an error of a thread.

    The threads read the clock themselves, because on a busy machine the waiting thread may wake up
    late.
    """
    start = Barrier(threads, timeout=START_S)

    def thread(number: int) -> tuple[float, float]:
        start.wait()
        begun = time.perf_counter()
        for _ in range(passes):
            for sample in samples[number::threads]:
                move(number, sample)
        return begun, time.perf_counter()

    times = list(pool.map(thread, range(threads)))
    return (max(ended for _, ended in times) - min(begun for begun, _ in times)) / passes


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


def _connect(address: tuple[str, int]) -> socket.socket:
    """A connection to a ``PlainServer``, for one thread at a time."""
    connection = socket.create_connection(address)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _get(connection: socket.socket, buffer: memoryview) -> None:
    """Fill ``buffer`` with what the server sends."""
    connection.sendall(_REQUEST.pack(b"G", len(buffer)))
    _fill(connection, buffer)


def _put(connection: socket.socket, view: memoryview) -> None:
    """Send ``view`` and wait until the server has taken all of it."""
    connection.sendall(_REQUEST.pack(b"P", len(view)))
    connection.sendall(view)
    _fill(connection, memoryview(bytearray(1)))


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
