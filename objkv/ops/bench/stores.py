"""Puts and gets of the configured stores, and lookups of the configured index.

Each is measured alone; gets are measured at once, too. Every payload is verified while it arrives.
"""

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from objkv.index.base import WriteIndex
from objkv.ops.bench.sample import (
    FIELD,
    FOLDER,
    PAYLOAD_8_MIB,
    PAYLOAD_256_KIB,
    RECORD,
    PayloadSample,
    Shape,
    chunk_hashes,
    get_verified,
    make_samples,
    publish,
)
from objkv.stores.base import HotStore

CHUNKS = 128
"""Chunks of the prompt that is looked up."""
TTL_S = 600
"""Lifetime of records: those of an interrupted run expire soon."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured."""

    calls: int
    rounds: int
    at_once: tuple[int, ...]
    """Concurrent gets."""
    bulk: Shape
    hot: Shape = PAYLOAD_256_KIB


FULL = Effort(calls=100, rounds=7, at_once=(1, 4, 16), bulk=PAYLOAD_8_MIB)
QUICK = Effort(calls=5, rounds=1, at_once=(1, 4), bulk=PAYLOAD_256_KIB)
"""Only to test that it works."""


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One measurement."""

    name: str
    unit: str
    """``ms``, or ``MB/s`` (1e6 bytes)."""
    p50: float
    p95: float | None = None
    """Null for a throughput."""
    p99: float | None = None


def bench_store(store: HotStore, name: str, shape: Shape, effort: Effort) -> Iterator[BenchRow]:
    """Measure a store with payloads below ``bench/``, which are deleted at the end. Raises
    ``StoreError``, and ``PayloadError`` if a payload differs from the one put."""
    samples = make_samples(shape, max(effort.at_once), f"{FOLDER}/{secrets.token_hex(8)}")
    first, slab = samples[0], make_slab(samples[0])
    puts, gets, heads = [], [], []
    with removed(store, [sample.key for sample in samples]):
        for sample in samples[1:]:
            store.put(sample.key, sample.payload)
        for _ in range(effort.calls):
            store.delete(first.key)
            puts.append(seconds(lambda: store.put_if_absent(first.key, first.payload)))
            gets.append(seconds(lambda: get_verified(store, first, slab)))
            heads.append(seconds(lambda: store.head(first.key)))
        yield latency(f"{name} head", heads)
        yield latency(f"{name} put {shape.name}", puts)
        yield latency(f"{name} get {shape.name}", gets)
        for count in effort.at_once:
            some = samples[:count]
            works = [partial(get_verified, store, one, make_slab(one)) for one in some]
            took = at_once(works, effort.rounds)
            nbytes = sum(len(sample.payload) for sample in some)
            yield throughput(f"{name} get {shape.name}, {count} at once", nbytes, took)


def bench_index(index: WriteIndex, effort: Effort) -> Iterator[BenchRow]:
    """Measure lookups in a namespace that is deleted at the end. Raises ``StoreError``."""
    with published(index) as (namespace, hashes):
        calls = range(effort.calls)
        yield latency("index round trip", [seconds(index.check) for _ in calls])
        finds = [seconds(lambda: index.find(namespace, hashes, (FIELD,))) for _ in calls]
        yield latency(f"index lookup of {CHUNKS} chunks", finds)


def at_once(works: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Do all ``works`` at once, ``rounds`` times and once to warm up. Return the seconds of each
    round. An error of one is raised after all have ended."""
    took = []
    with ThreadPoolExecutor(len(works), thread_name_prefix="objkv-bench") as pool:
        for _ in range(1 + rounds):
            started = time.perf_counter()
            futures = [pool.submit(work) for work in works]
            errors = [future.exception() for future in futures]
            took.append(time.perf_counter() - started)
            for error in errors:
                if error is not None:
                    raise error
    return took[1:]


def make_slab(sample: PayloadSample) -> memoryview:
    """Return memory for a payload."""
    return memoryview(bytearray(len(sample.payload)))


def seconds(work: Callable[[], object]) -> float:
    """Return how long ``work`` takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def latency(name: str, took: Sequence[float]) -> BenchRow:
    """Return a row of durations."""
    p50, p95, p99 = (1e3 * percentile(took, share) for share in (0.50, 0.95, 0.99))
    return BenchRow(name, "ms", p50, p95, p99)


def throughput(name: str, nbytes: int, took: Sequence[float]) -> BenchRow:
    """Return a row of moving ``nbytes`` in each of these durations."""
    return BenchRow(name, "MB/s", nbytes / percentile(took, 0.5) / 1e6)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that ``share`` (0 to 1) of the values do not exceed."""
    assert values
    ordered = sorted(values)
    rank = -(-share * len(ordered) // 1)
    return ordered[max(0, min(len(ordered), int(rank)) - 1)]


@contextmanager
def removed(store: HotStore, keys: Sequence[str]) -> Iterator[None]:
    """Delete these keys after the block, however it ends."""
    try:
        yield
    finally:
        for key in keys:
            store.delete(key)


@contextmanager
def published(index: WriteIndex) -> Iterator[tuple[str, list[bytes]]]:
    """Publish a prompt's records in a new namespace, yield it and the hashes, and forget them."""
    namespace, hashes = secrets.token_hex(16), chunk_hashes(CHUNKS)
    try:
        publish(index, hashes, ttl_s=TTL_S, namespace=namespace)
        yield namespace, hashes
    finally:
        for prefix_hash in hashes:
            index.forget(namespace, prefix_hash, FIELD, RECORD)
