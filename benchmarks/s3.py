"""Compare payloads between an S3 server in memory and a slab with plain sockets on the same route.

objkv verifies every byte while it arrives; the limit does not.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Self
from unittest.mock import patch

from benchmarks.alone import run_alone
from benchmarks.harness import (
    BenchRow,
    BenchSetting,
    Compared,
    Section,
    Target,
    Threads,
    Work,
    interleave,
    local_config,
    make_slab,
    open_store,
)
from benchmarks.plain_limit import PlainClient, plain_server
from benchmarks.sample import PAYLOAD_1_MIB, PAYLOAD_32_MIB
from objkv.assembly import fetchers
from objkv.config import Config
from objkv.ops.bench.sample import PAYLOAD_8_MIB, PayloadSample, Shape, get_verified, make_samples
from objkv.stores.base import PruneStore
from tests.support.servers.quick_s3 import quick_s3_process

S3_GET = Target(0.85)
S3_PUT = Target(0.80)
CONNECTIONS = (1, 4)
_ROUND_BYTES = 64 << 20
_QUICK_ROUND_BYTES = 1 << 20
_PASSES = 6
"""Passes over all payloads in a round. One pass of 64 MiB takes 15 ms, in which a busy machine may
not run every thread."""

Move = Callable[[int, PayloadSample, memoryview], object]
"""Moves one payload; arguments are the thread's number, the payload and the thread's slab."""


def bench_s3(setting: BenchSetting) -> Section:
    """Gets and puts. Raises ``ObjkvError`` if anything was not as it was put."""
    with quick_s3_process() as server, plain_server() as plain:
        rows = tuple(_rows(setting, server.url, plain))
        return Section("s3", rows, {"S3": "quick_s3, in memory"})


def s3_config(endpoint_url: str, **changes: str) -> Config:
    """Settings for a bucket behind ``endpoint_url``; ``changes`` are values of other settings."""
    settings = {
        "bulk_url": "s3://bench/kv",
        "s3_endpoint_url": endpoint_url,
        "s3_region": "us-east-1",
        "s3_addressing": "path",
        "s3_access_key_id": "bench",
        "s3_secret_access_key": "bench",
    }
    return local_config(**settings | changes)


def _rows(setting: BenchSetting, url: str, plain: tuple[str, int]) -> Iterator[BenchRow]:
    # One request per payload: the limit has as many connections as there are threads, and no more.
    with patch.object(fetchers, "RANGES_MAX", 0):
        store = open_store(s3_config(url))
    try:
        for shape in large_payloads(setting):
            for threads in CONNECTIONS:
                case = f"{shape.name}, {connections(threads)}"
                with (
                    plain_clients(plain, threads) as clients,
                    PayloadBench(setting, shape, threads) as bench,
                ):
                    setting.tell("S3", f"GET {case}")
                    gets = Limit("plain recv_into", bench.gets(_plain_gets(clients)))
                    yield bench.compare_gets(f"S3 GET {case}", store, gets, S3_GET)
                    setting.tell("S3", f"PUT {case}")
                    puts = Limit("plain sendall", bench.each(_plain_puts(clients)))
                    yield bench.compare_puts(f"S3 PUT {case}", store, puts, S3_PUT)
    finally:
        store.close()


@contextmanager
def plain_clients(address: tuple[str, int], count: int) -> Iterator[list[PlainClient]]:
    """As many connections to a ``PlainServer``."""
    with ExitStack() as stack:
        yield [stack.enter_context(PlainClient(address)) for _ in range(count)]


def _plain_gets(clients: Sequence[PlainClient]) -> Move:
    return lambda number, _, slab: clients[number].get_into(slab)


def _plain_puts(clients: Sequence[PlainClient]) -> Move:
    return lambda number, sample, _: clients[number].put(sample.payload)


@dataclass(frozen=True, slots=True)
class Limit:
    """The comparison: moving the same number of bytes without objkv."""

    name: str
    work: Work


class PayloadBench:
    """Threads, each with its own slab and payloads. All payloads together are about
    ``_ROUND_BYTES``, more than CPU caches hold; a pass moves each of them once."""

    def __init__(self, setting: BenchSetting, shape: Shape, threads: int) -> None:
        self._setting = setting
        self._crew = Threads(threads)
        wanted = _QUICK_ROUND_BYTES if setting.quick else _ROUND_BYTES
        each = max(1, wanted // (shape.raw_bytes * threads))
        self.samples = make_samples(shape, each * threads)
        self._slabs = [make_slab(len(self.samples[0].payload)) for _ in range(threads)]
        self._nbytes = sum(len(sample.payload) for sample in self.samples)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._crew.__exit__()

    def each(self, move: Move, passes: int = 1) -> Work:
        """Return a round in which every thread moves its samples; it gives the seconds per pass."""

        def thread(number: int) -> None:
            for _ in range(passes):
                for sample in self.samples[number :: self._crew.threads]:
                    move(number, sample, self._slabs[number])

        return lambda: self._crew.run(thread) / passes

    def gets(self, move: Move) -> Work:
        """Return a round of several passes, as gets can be repeated."""
        return self.each(move, 1 if self._setting.quick else _PASSES)

    def compare_gets(self, name: str, store: PruneStore, limit: Limit, target: Target) -> BenchRow:
        """Return a row for getting and verifying every payload."""

        def get(_: int, sample: PayloadSample, slab: memoryview) -> None:
            get_verified(store, sample, slab)

        try:
            for sample in self.samples:
                store.put(sample.key, sample.payload)
            return self._compare(name, self.gets(get), limit, target)
        finally:
            self._delete(store)

    def compare_puts(self, name: str, store: PruneStore, limit: Limit, target: Target) -> BenchRow:
        """Return a row for putting until acknowledged; payloads are deleted between rounds."""

        def put(_: int, sample: PayloadSample, __: memoryview) -> None:
            assert store.put_if_absent(sample.key, sample.payload)

        def put_and_delete() -> float:
            try:
                return puts()
            finally:
                self._delete(store)

        puts = self.each(put)
        return self._compare(name, put_and_delete, limit, target)

    def _compare(self, name: str, ours: Work, limit: Limit, target: Target) -> BenchRow:
        timings = interleave({"ours": ours, "limit": limit.work}, self._setting.rounds)
        compared = Compared(timings, "ours", "limit", limit.name)
        return compared.throughput(name, self._nbytes, target)

    def _delete(self, store: PruneStore) -> None:
        for sample in self.samples:
            store.delete(sample.key)


def large_payloads(setting: BenchSetting) -> tuple[Shape, ...]:
    """Return the shapes measured in bulk stores."""
    return (PAYLOAD_1_MIB,) if setting.quick else (PAYLOAD_8_MIB, PAYLOAD_32_MIB)


def connections(count: int) -> str:
    """Return the number of connections in words."""
    return "1 connection" if count == 1 else f"{count} connections"


if __name__ == "__main__":
    run_alone(bench_s3)
