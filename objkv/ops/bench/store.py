"""``bench store``: getting and putting payloads, against moving the same bytes without objkv.

Every payload is verified while it arrives; the limit only moves bytes. ``--configured`` measures
the user's own stores.
"""

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Self

import numpy as np

from objkv.config import Config
from objkv.index.base import WriteIndex
from objkv.ops.bench.harness import (
    SCALES,
    BenchRow,
    BenchSetting,
    Compared,
    Section,
    Target,
    Threads,
    Work,
    interleave,
    make_slab,
    percentile,
)
from objkv.ops.bench.sample import (
    FIELD,
    FOLDER,
    PAYLOAD_1_MIB,
    PAYLOAD_8_MIB,
    PAYLOAD_32_MIB,
    PAYLOAD_256_KIB,
    RECORD,
    PayloadSample,
    Shape,
    chunk_hashes,
    get_verified,
    make_samples,
    publish,
)
from objkv.ops.bench.servers import PlainRedis, local_config, running_redis
from objkv.stores.base import PruneStore

REDIS_GET = Target(0.90)
DIRECTORY_GET = Target(0.70)
CONNECTIONS = (1, 4)
_ROUND_BYTES = 64 << 20
_QUICK_ROUND_BYTES = 1 << 20
_PASSES = 6
"""Passes over all payloads in a round. One pass of 64 MiB takes 15 ms, in which a busy machine may
not run every thread."""
CONFIGURED_CONNECTIONS = (1, 4, 16)
_PERCENTILES = (0.50, 0.95, 0.99)
_CALLS = 100
_QUICK_CALLS = 5
_CHUNKS = 128

Move = Callable[[int, PayloadSample, memoryview], object]
"""Moves one payload; arguments are the thread's number, the payload and the thread's slab."""


def bench_store(setting: BenchSetting) -> Section:
    """Measure Redis and a directory against their limits. Raises ``ConfigError`` if no Redis is
    installed, and ``ObjkvError`` if a payload differs from the one put."""
    with running_redis(setting.folder / "redis") as url, PlainRedis(url) as plain:
        rows = [*_redis(setting, url)]
        servers = {"Redis": plain.version()}
    rows += _directory(setting)
    return Section("store", tuple(rows), servers)


def _redis(setting: BenchSetting, url: str) -> Iterator[BenchRow]:
    store = setting.factories.open_hot(local_config(index_url=f"{url}/0"))
    assert store is not None
    try:
        for shape, threads in product(_small(setting), CONNECTIONS):
            case = f"{shape.name}, {connections(threads)}"
            setting.tell("Redis", f"GET {case}")
            with ExitStack() as stack:
                clients = [stack.enter_context(PlainRedis(url)) for _ in range(threads)]
                bench = stack.enter_context(PayloadBench(setting, shape, threads))
                for sample in bench.samples:
                    clients[0].set(sample.key, sample.payload)
                limit = Limit("RESP recv_into", bench.gets(_plain_redis_gets(clients)))
                yield bench.compare_gets(f"Redis GET {case}", store, limit, REDIS_GET)
                for sample in bench.samples:
                    clients[0].delete(sample.key)
    finally:
        store.close()


def _directory(setting: BenchSetting) -> Iterator[BenchRow]:
    folder = setting.folder / "chunks"
    store = setting.factories.open_bulk(local_config(bulk_url=f"file://{folder}"))
    try:
        for shape in large_payloads(setting):
            for threads in CONNECTIONS:
                case = f"{shape.name}, {threads} thread{'s' if threads > 1 else ''}"
                setting.tell("directory", f"GET {case}")
                with PayloadBench(setting, shape, threads) as bench:
                    limit = Limit("memcpy", bench.gets(_copy))
                    yield bench.compare_gets(f"directory GET {case}", store, limit, DIRECTORY_GET)
    finally:
        store.close()


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


def _plain_redis_gets(clients: Sequence[PlainRedis]) -> Move:
    return lambda number, sample, slab: clients[number].get_into(sample.key, slab)


def _copy(_: int, sample: PayloadSample, slab: memoryview) -> None:
    np.copyto(np.frombuffer(slab, np.uint8), np.frombuffer(sample.payload, np.uint8))


def _small(setting: BenchSetting) -> tuple[Shape, ...]:
    return (PAYLOAD_256_KIB,) if setting.quick else (PAYLOAD_256_KIB, PAYLOAD_1_MIB)


def large_payloads(setting: BenchSetting) -> tuple[Shape, ...]:
    """Return the shapes measured in bulk stores."""
    return (PAYLOAD_1_MIB,) if setting.quick else (PAYLOAD_8_MIB, PAYLOAD_32_MIB)


def connections(count: int) -> str:
    """Return the number of connections in words."""
    return "1 connection" if count == 1 else f"{count} connections"


def bench_configured(setting: BenchSetting, config: Config) -> Section:
    """Measure the stores and the index of ``config``, each against a round trip to it.

    Temporary payloads are below ``bench/``, temporary records in a separate namespace; both are
    deleted at the end. Raises ``StoreError`` if a backend is unreachable.
    """
    bulk = setting.factories.open_bulk(config)
    try:
        bulk.check()
        rows = [*_store(setting, bulk, "bulk", _bulk_shape(setting))]
    finally:
        bulk.close()
    index = setting.factories.open_index(config)
    try:
        index.check()
        rows += _index(setting, index)
    finally:
        index.close()
    if (hot := setting.factories.open_hot(config)) is not None:
        try:
            hot.check()
            rows += _store(setting, hot, "hot", PAYLOAD_256_KIB)
        finally:
            hot.close()
    public = config.public()
    places = {"bulk": public["bulk_url"], "index": public["index_url"]}
    return Section("store", tuple(rows), places, ("your configured stores",))


def _store(setting: BenchSetting, store: PruneStore, name: str, shape: Shape) -> Iterator[BenchRow]:
    most = 4 if setting.quick else max(CONFIGURED_CONNECTIONS)
    samples = make_samples(shape, most, f"{FOLDER}/{secrets.token_hex(8)}")
    calls = _QUICK_CALLS if setting.quick else _CALLS
    with _removed(store, samples):
        setting.tell(name, f"put and get {shape.name}")
        slab = make_slab(len(samples[0].payload))
        puts, gets, heads = _life(store, samples, slab, calls)
        head = f"{name} head"
        for verb, seconds in (("put", puts), ("get", gets)):
            for share in _PERCENTILES:
                yield _latency(f"{name} {verb} {shape.name}", seconds, heads, share, head)
        for threads in CONFIGURED_CONNECTIONS:
            if threads <= most:
                setting.tell(name, f"get {shape.name}, {threads} at once")
                yield _throughput(setting, store, f"{name} get {shape.name}", samples[:threads])


def _life(
    store: PruneStore, samples: Sequence[PayloadSample], slab: memoryview, calls: int
) -> tuple[list[float], list[float], list[float]]:
    """Return the seconds of each put, get and head, one at a time; all samples exist at the end."""
    puts, gets, heads = [], [], []
    for sample in samples[1:]:
        store.put(sample.key, sample.payload)
    first = samples[0]
    for _ in range(calls):
        store.delete(first.key)
        puts.append(_seconds(lambda: store.put_if_absent(first.key, first.payload)))
        gets.append(_seconds(lambda: get_verified(store, first, slab)))
        heads.append(_seconds(lambda: store.head(first.key)))
    return puts, gets, heads


def _throughput(
    setting: BenchSetting, store: PruneStore, name: str, samples: Sequence[PayloadSample]
) -> BenchRow:
    slabs = [make_slab(len(sample.payload)) for sample in samples]
    repeats = 1 if setting.quick else 4
    nbytes = repeats * sum(len(sample.payload) for sample in samples)

    def thread(number: int) -> None:
        for _ in range(repeats):
            get_verified(store, samples[number], slabs[number])

    with Threads(len(samples)) as crew:
        crew.run(thread)
        seconds = [crew.run(thread) for _ in range(setting.rounds)]
    median = percentile(seconds, 0.5)
    return BenchRow(
        f"{name}, {len(samples)} at once", "MB/s", nbytes / median / 1e6, detail="verified"
    )


def _index(setting: BenchSetting, index: WriteIndex) -> Iterator[BenchRow]:
    namespace = secrets.token_hex(16)
    hashes = chunk_hashes(_CHUNKS)
    calls = _QUICK_CALLS if setting.quick else _CALLS
    setting.tell("index", f"looking up {_CHUNKS} chunks")
    try:
        publish(index, hashes, ttl_s=600, namespace=namespace)
        finds, checks = [], []
        for _ in range(calls):
            finds.append(_seconds(lambda: index.find(namespace, hashes, (FIELD,))))
            checks.append(_seconds(index.check))
    finally:
        for prefix_hash in hashes:
            index.forget(namespace, prefix_hash, FIELD, RECORD)
    for share in _PERCENTILES:
        yield _latency(f"lookup of {_CHUNKS} chunks", finds, checks, share, "one round trip")


def _latency(
    name: str, ours: Sequence[float], limit: Sequence[float], share: float, limit_name: str
) -> BenchRow:
    scale = SCALES["ms"]
    one, other = percentile(ours, share), percentile(limit, share)
    return BenchRow(
        f"{name}, p{share * 100:.0f}",
        "ms",
        one * scale,
        limit=other * scale,
        limit_name=limit_name,
        ratio=one / other,
    )


@contextmanager
def _removed(store: PruneStore, samples: Sequence[PayloadSample]) -> Iterator[None]:
    """Delete ``samples`` after the block, however it ends."""
    try:
        yield
    finally:
        for sample in samples:
            store.delete(sample.key)


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _bulk_shape(setting: BenchSetting) -> Shape:
    return PAYLOAD_256_KIB if setting.quick else PAYLOAD_8_MIB
