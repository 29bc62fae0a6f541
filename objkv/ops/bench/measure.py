"""Puts and gets of the configured stores, lookups of the index, and loads by the node agent.

Each is measured alone; gets and loads are measured at once, too. Every payload is verified.
"""

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from objkv.agent.client import AgentConnection
from objkv.agent.memory.arena import CellState
from objkv.agent.messages import Claims, Urgency
from objkv.cache.chunks import publish_record, shard_record
from objkv.codec.header import header_bytes_needed, read_header
from objkv.codec.payload import read_claimed
from objkv.errors import TransferError
from objkv.index.base import ChunkEntry, ShardRecord, WriteIndex
from objkv.keys.prefix import prefix_hashes, root_hash
from objkv.ops.bench.sample import (
    CHUNK_TOKENS,
    NAMESPACE,
    PAYLOAD_8_MIB,
    PAYLOAD_256_KIB,
    PayloadSample,
    Shape,
    get_verified,
    make_samples,
    stored_for_a_while,
)
from objkv.stores.base import HotStore, PruneStore, copy_bytes

_CHUNKS = 128
"""Chunks of the prompt that is looked up."""
_TTL_S = 600
"""Lifetime of records: those of an interrupted run expire soon."""
_FIELD = "0.L0-32_H0-8"
_RECORD = ShardRecord((32 << 20) + 12_288, 32 << 20, True, False, "0" * 16, 1)
_PAYLOADS, _READERS = 4, (1, 4)
"""Of the measurement of the agent."""
_DEADLINE_S = 60.0


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
    """Measure a store with the rights of a writer. Raises ``StoreError``, and ``PayloadError`` if
    a payload differs from the one put."""
    samples = make_samples(shape, max(effort.at_once))
    first, slab = samples[0], _slab(samples[0])
    puts, gets, heads = [], [], []
    with stored_for_a_while(store, samples, expires=name == "hot"):
        for sample in samples[1:]:
            store.put(sample.key, sample.payload)
        for _ in range(effort.calls):
            puts.append(seconds(lambda: store.put(first.key, first.payload)))
            gets.append(seconds(lambda: get_verified(store, first, slab)))
            heads.append(seconds(lambda: store.head(first.key)))
        yield latency(f"{name} head", heads)
        yield latency(f"{name} put {shape.name}", puts)
        yield latency(f"{name} get {shape.name}", gets)
        for count in effort.at_once:
            some = samples[:count]
            works = [partial(get_verified, store, one, _slab(one)) for one in some]
            took = at_once(works, effort.rounds)
            nbytes = sum(len(sample.payload) for sample in some)
            yield throughput(f"{name} get {shape.name}, {count} at once", nbytes, took)


def bench_index(index: WriteIndex, effort: Effort) -> Iterator[BenchRow]:
    """Measure lookups in a namespace that is deleted at the end. Raises ``StoreError``."""
    with _published(index) as (namespace, hashes):
        calls = range(effort.calls)
        yield latency("index round trip", [seconds(index.check) for _ in calls])
        finds = [seconds(lambda: index.find(namespace, hashes, (_FIELD,))) for _ in calls]
        yield latency(f"index lookup of {_CHUNKS} chunks", finds)


class AgentReader:
    """Reads payloads as a worker does: checks headers, copies frames out of the agent's memory."""

    def __init__(
        self, socket: Path, samples: Sequence[PayloadSample], seals: Sequence[str]
    ) -> None:
        """Raises ``TransferError``."""
        self._agent = AgentConnection(socket, wants_arena=True, seals=seals)
        self._layers, self._claims = samples[0].layers, [sample.claim for sample in samples]
        self._payloads = [sample.payload for sample in samples]
        self._targets = [_slab(sample) for sample in samples]

    def load(self) -> None:
        """Load the payloads once. Raises ``TransferError`` if the agent cannot get one."""
        agent = self._agent
        claims = Claims.of(self._claims)
        leases = agent.open(claims, deadline_s=_DEADLINE_S, urgency=Urgency.BETWEEN_STEPS)
        for lease, claim, target in zip(leases, self._claims, self._targets, strict=True):
            progress = lease.progress
            while progress.state is CellState.FILLING:
                # Read first: the wait for an earlier payload may have consumed the event.
                progress = agent.arena.board.read(lease.cell)
                if progress.state is CellState.FILLING:
                    agent.wait(_DEADLINE_S)
            if progress.state is not CellState.READY:
                raise TransferError("the agent has no payload: does it use the same store?")
            payload = agent.arena.view[progress.offset : progress.offset + progress.nbytes]
            head = payload[: header_bytes_needed(payload[:8])]
            frames = read_claimed(head, claim, self._layers).frames
            at = 0
            for start, end in zip(frames.starts, frames.ends, strict=True):
                copy_bytes(target[at : at + end - start], payload[start:end], end - start)
                at += end - start
        agent.release([lease.number for lease in leases])

    def copy(self) -> None:
        """Copy as many bytes."""
        for target, payload in zip(self._targets, self._payloads, strict=True):
            copy_bytes(target, payload, len(payload))

    def close(self) -> None:
        self._agent.close()


def bench_agent(
    socket: Path, bulk: PruneStore, index: WriteIndex, effort: Effort, seals: Sequence[str]
) -> Iterator[BenchRow]:
    """Measure the agent at ``socket`` over its own store and index. Raises ``TransferError``, also
    unless its payloads have ``seals``, and ``StoreError``."""
    with ExitStack() as stack:
        namespace, hashes = stack.enter_context(_published(index))
        samples = make_samples(effort.bulk, _PAYLOADS)
        stack.enter_context(stored_for_a_while(bulk, samples, expires=False))
        for sample in samples:
            bulk.put(sample.key, sample.payload)
            key, header = sample.claim.key, read_header(sample.payload)
            record = shard_record(header)
            stack.callback(index.forget, NAMESPACE, key.prefix_hash, key.field, record)
            publish_record(index, header, hot=False, ttl_s=_TTL_S)
        readers = [
            stack.enter_context(closing(AgentReader(socket, samples, seals)))
            for _ in range(max(_READERS))
        ]
        nbytes = sum(len(sample.payload) for sample in samples)
        what = f"{_PAYLOADS} payloads of {effort.bulk.name}"
        yield throughput(f"agent load from the store, {what}", nbytes, [seconds(readers[0].load)])
        for count in _READERS:
            for name, work in (
                ("agent load from memory", AgentReader.load),
                ("copy", AgentReader.copy),
            ):
                took = at_once([partial(work, reader) for reader in readers[:count]], effort.rounds)
                yield throughput(f"{name}, {what}, {count} at once", count * nbytes, took)
        agent = stack.enter_context(closing(AgentConnection(socket, seals=seals)))
        calls = range(effort.calls)
        finds = [seconds(lambda: agent.find(namespace, hashes, (_FIELD,))) for _ in calls]
        yield latency(f"agent lookup of {_CHUNKS} chunks", finds)


def at_once(works: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Return the seconds of each round of all ``works`` at once, without one that warms up."""
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


def _slab(sample: PayloadSample) -> memoryview:
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
def _published(index: WriteIndex) -> Iterator[tuple[str, list[bytes]]]:
    """Publish a prompt's records in a new namespace, yield it and the hashes, and forget them."""
    namespace = secrets.token_hex(16)
    hashes = prefix_hashes(namespace, range(_CHUNKS * CHUNK_TOKENS), CHUNK_TOKENS)
    parents = [root_hash(namespace), *hashes]
    try:
        for number, (parent, prefix_hash) in enumerate(zip(parents, hashes, strict=False)):
            start = number * CHUNK_TOKENS
            entry = ChunkEntry(namespace, prefix_hash, parent, start, start + CHUNK_TOKENS)
            index.publish(entry, {_FIELD: _RECORD}, ttl_s=_TTL_S)
        yield namespace, hashes
    finally:
        for prefix_hash in hashes:
            index.forget(namespace, prefix_hash, _FIELD, _RECORD)
