"""``bench store``: payloads between a store and a slab, against bytes between the same two ends.

Everything that is got is verified while it arrives; the limit is not, and pays for nothing but
moving bytes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Self

import numpy as np

from objkv.ops.bench.harness import (
    Compared,
    Crew,
    Row,
    Section,
    Setting,
    Target,
    Work,
    interleave,
    make_slab,
)
from objkv.ops.bench.sample import (
    PAYLOAD_1_MIB,
    PAYLOAD_8_MIB,
    PAYLOAD_32_MIB,
    PAYLOAD_256_KIB,
    Sample,
    Shape,
    Verifier,
    make_samples,
)
from objkv.ops.bench.servers import PlainRedis, local_config, running_redis, s3_config
from objkv.stores.base import PruneStore
from tests.support.servers.plain_limit import PlainClient
from tests.support.servers.quick_s3 import QuickS3Process, quick_s3_process

S3_GET = Target(0.85)
S3_PUT = Target(0.80)
REDIS_GET = Target(0.90)
DIRECTORY_GET = Target(0.70)
_ROUND_BYTES = 64 << 20
_QUICK_ROUND_BYTES = 1 << 20
_PASSES = 6
"""How often a round gets every payload: a round of 64 MiB is over in 15 ms, in which a busy machine
may well not have run one of the threads."""
_CONNECTIONS = (1, 4)

Move = Callable[[int, Sample, memoryview], object]
"""Moves one payload, given the number of the thread, the payload and the thread's slab."""


def bench_store(setting: Setting) -> Section:
    """All stores, each against its limit. Raises ``ConfigError`` if there is no Redis to start,
    and ``ObjkvError`` if anything was not as it was put."""
    rows: list[Row] = []
    with quick_s3_process() as server:
        rows += _s3(setting, server)
    with running_redis(setting.folder / "redis") as redis:
        rows += _redis(setting, redis.url)
        with PlainRedis(redis.url) as plain:
            servers = {"S3": "objkv.testing quick_s3, in memory", "Redis": plain.version()}
    rows += _directory(setting)
    return Section("store", tuple(rows), servers)


def _s3(setting: Setting, server: QuickS3Process) -> Iterator[Row]:
    # One request per payload: the limit has as many connections as there are threads, and no more.
    config = s3_config(server.url, s3_ranges_max="0", s3_hedge_percent_max="0")
    store = setting.factories.open_bulk(config)
    try:
        for shape in _large(setting):
            for threads in _CONNECTIONS:
                case = f"{shape.name}, {_connections(threads)}"
                with (
                    _plain_clients(server, threads) as clients,
                    _Bench(setting, shape, threads) as bench,
                ):
                    setting.tell("S3", f"GET {case}")
                    gets = _Limit("plain recv_into", bench.gets(_plain_gets(clients)))
                    yield bench.compare_gets(f"S3 GET {case}", store, gets, S3_GET)
                    setting.tell("S3", f"PUT {case}")
                    puts = _Limit("plain sendall", bench.each(_plain_puts(clients)))
                    yield bench.compare_puts(f"S3 PUT {case}", store, puts, S3_PUT)
    finally:
        store.close()


def _redis(setting: Setting, url: str) -> Iterator[Row]:
    store = setting.factories.open_hot(local_config(index_url=f"{url}/0"))
    assert store is not None
    try:
        for shape, threads in product(_small(setting), _CONNECTIONS):
            case = f"{shape.name}, {_connections(threads)}"
            setting.tell("Redis", f"GET {case}")
            with ExitStack() as stack:
                clients = [stack.enter_context(PlainRedis(url)) for _ in range(threads)]
                bench = stack.enter_context(_Bench(setting, shape, threads))
                for sample in bench.samples:
                    clients[0].set(sample.key, sample.payload)
                limit = _Limit("RESP recv_into", bench.gets(_plain_redis_gets(clients)))
                yield bench.compare_gets(f"Redis GET {case}", store, limit, REDIS_GET)
                for sample in bench.samples:
                    clients[0].delete(sample.key)
    finally:
        store.close()


def _directory(setting: Setting) -> Iterator[Row]:
    folder = setting.folder / "chunks"
    store = setting.factories.open_bulk(local_config(bulk_url=f"file://{folder}"))
    try:
        for shape in _large(setting):
            for threads in _CONNECTIONS:
                case = f"{shape.name}, {threads} thread{'s' if threads > 1 else ''}"
                setting.tell("directory", f"GET {case}")
                with _Bench(setting, shape, threads) as bench:
                    limit = _Limit("memcpy", bench.gets(_copy))
                    yield bench.compare_gets(f"directory GET {case}", store, limit, DIRECTORY_GET)
    finally:
        store.close()


@dataclass(frozen=True, slots=True)
class _Limit:
    name: str
    work: Work


class _Bench:
    """Threads, each with a slab of its own and payloads that no other moves: together about
    ``_ROUND_BYTES``, more than caches hold; a pass moves each once."""

    def __init__(self, setting: Setting, shape: Shape, threads: int) -> None:
        self._setting = setting
        self._crew = Crew(threads)
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
        """One round: every thread moves its samples; the time that a pass took."""

        def thread(number: int) -> None:
            for _ in range(passes):
                for sample in self.samples[number :: self._crew.threads]:
                    move(number, sample, self._slabs[number])

        return lambda: self._crew.run(thread) / passes

    def gets(self, move: Move) -> Work:
        """A round that may get a payload more than once."""
        return self.each(move, 1 if self._setting.quick else _PASSES)

    def compare_gets(self, name: str, store: PruneStore, limit: _Limit, target: Target) -> Row:
        """A row for getting and verifying every payload."""

        def get(_: int, sample: Sample, slab: memoryview) -> None:
            verifier = Verifier(sample, slab)
            verifier.finish(store.get_into(sample.key, slab, verifier.arrived))

        try:
            for sample in self.samples:
                store.put(sample.key, sample.payload)
            return self._compare(name, self.gets(get), limit, target)
        finally:
            self._delete(store)

    def compare_puts(self, name: str, store: PruneStore, limit: _Limit, target: Target) -> Row:
        """A row for putting until acknowledged; what was put is deleted between rounds."""

        def put(_: int, sample: Sample, __: memoryview) -> None:
            assert store.put_if_absent(sample.key, sample.payload)

        def put_and_delete() -> float:
            try:
                return puts()
            finally:
                self._delete(store)

        puts = self.each(put)
        return self._compare(name, put_and_delete, limit, target)

    def _compare(self, name: str, ours: Work, limit: _Limit, target: Target) -> Row:
        timings = interleave({"ours": ours, "limit": limit.work}, self._setting.rounds)
        compared = Compared(timings, "ours", "limit", limit.name)
        return compared.throughput(name, self._nbytes, target)

    def _delete(self, store: PruneStore) -> None:
        for sample in self.samples:
            store.delete(sample.key)


@contextmanager
def _plain_clients(server: QuickS3Process, count: int) -> Iterator[list[PlainClient]]:
    with ExitStack() as stack:
        yield [stack.enter_context(PlainClient(server.plain)) for _ in range(count)]


def _plain_gets(clients: Sequence[PlainClient]) -> Move:
    return lambda number, _, slab: clients[number].get_into(slab)


def _plain_puts(clients: Sequence[PlainClient]) -> Move:
    return lambda number, sample, _: clients[number].put(sample.payload)


def _plain_redis_gets(clients: Sequence[PlainRedis]) -> Move:
    return lambda number, sample, slab: clients[number].get_into(sample.key, slab)


def _copy(_: int, sample: Sample, slab: memoryview) -> None:
    np.copyto(np.frombuffer(slab, np.uint8), np.frombuffer(sample.payload, np.uint8))


def _small(setting: Setting) -> tuple[Shape, ...]:
    return (PAYLOAD_256_KIB,) if setting.quick else (PAYLOAD_256_KIB, PAYLOAD_1_MIB)


def _large(setting: Setting) -> tuple[Shape, ...]:
    return (PAYLOAD_1_MIB,) if setting.quick else (PAYLOAD_8_MIB, PAYLOAD_32_MIB)


def _connections(count: int) -> str:
    return "1 connection" if count == 1 else f"{count} connections"
