"""Measure a router's question, which prefix of a prompt is stored, with ``objkv.Client.match``.

Every prompt has 128 chunks, all stored, half of them hot; prompts share their first half. The index
is a Valkey on loopback, and the limit is PING over a bare socket.
"""

import asyncio
import random
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice

import objkv
from benchmarks.alone import run_alone
from objkv.assembly.backends import Backends, open_backends
from objkv.client.aio import AsyncClient
from objkv.config import Resolved
from objkv.index.base import ChunkEntry, ShardRecord, WriteIndex
from objkv.index.shapes import SHAPES_HASH
from objkv.keys.identity import GroupIdentity, Identity, identity_path
from objkv.keys.prefix import prefix_hashes, root_hash
from objkv.keys.topology import Shard
from objkv.ops.bench.harness import (
    BenchRow,
    BenchSetting,
    Compared,
    Section,
    Target,
    Threads,
    Timings,
    percentile,
)
from objkv.ops.bench.sample import CHUNK_TOKENS, RECORD
from objkv.ops.bench.servers import PlainRedis, local_config, running_redis
from objkv.telemetry import NullRecorder

P50_US = Target(1000, at_most=True, of="ours")
PER_SECOND = Target(1000, of="ours")
_CHUNKS = 128
_PROMPTS = 32
_ASKED, _QUICK_ASKED = 1_000, 20
_THREADS = 4
_LAYERS = tuple(f"layers.{number}" for number in range(32))
_GROUP = GroupIdentity("full", None, _LAYERS, heads=8, content=256, block_size=16)
_TTL_S = 24 * 3600
_PING = "PING, bare socket"
_MORE = ("ping", "p99", "processor")


@dataclass(frozen=True, slots=True)
class _Fleet:
    """A namespace, by the number of its ranks, and its prompts."""

    client: objkv.Client
    plain: PlainRedis
    namespaces: dict[int, str]
    prompts: list[list[int]]

    def ask(self, prompts: Sequence[Sequence[int]], asked: int, ranks: int = 1) -> list[float]:
        """Ask one question after the other; the seconds of each."""
        namespace, seconds = self.namespaces[ranks], []
        for prompt in islice(cycle(prompts), asked):
            begun = time.perf_counter()
            found = self.client.match(prompt, namespace=namespace)
            seconds.append(time.perf_counter() - begun)
            assert found.end == "complete"
        return seconds

    def ping(self, asked: int) -> float:
        """The median seconds of a PING."""
        seconds = []
        for _ in range(asked):
            begun = time.perf_counter()
            self.plain.ping()
            seconds.append(time.perf_counter() - begun)
        return percentile(seconds, 0.5)


def bench_router(setting: BenchSetting) -> Section:
    """Measure questions one after the other, from threads, and from asyncio."""
    asked = _QUICK_ASKED if setting.quick else _ASKED
    with running_redis(setting.folder / "redis") as url, PlainRedis(url) as plain:
        config = local_config(index_url=f"{url}/0", bulk_url=f"file://{setting.folder}/bulk")
        backends = open_backends(config, NullRecorder())
        with objkv.Client(Resolved(config, {}), backends) as client:
            prompts = list(_prompts())
            namespaces = {ranks: _store(backends, ranks, prompts) for ranks in (1, 8)}
            fleet = _Fleet(client, plain, namespaces, prompts)
            rows = [*_durations(setting, fleet, asked), *_rates(setting, fleet, asked)]
            return Section("router", tuple(rows), {"Redis": plain.version()})


def _durations(setting: BenchSetting, fleet: _Fleet, asked: int) -> Iterator[BenchRow]:
    setting.tell("a router's question", f"{_CHUNKS} chunks")
    arrays = [array("I", prompt) for prompt in fleet.prompts]
    short = [prompt[: 16 * CHUNK_TOKENS] for prompt in fleet.prompts]
    sides: dict[str, Callable[[], list[float]]] = {
        "list": lambda: fleet.ask(fleet.prompts, asked),
        "array": lambda: fleet.ask(arrays, asked),
        "ranks": lambda: fleet.ask(fleet.prompts, asked, 8),
        "short": lambda: fleet.ask(short, asked),
    }
    seconds: dict[str, list[float]] = {name: [] for name in (*_MORE, *sides)}
    for number in range(setting.rounds + 1):
        for name in list(sides)[:: 1 if number % 2 else -1]:
            found = sides[name]()
            if number:  # the first round opens connections
                seconds[name].append(percentile(found, 0.5))
                if name == "list":
                    seconds["p99"].append(percentile(found, 0.99))
        if number:
            seconds["ping"].append(fleet.ping(asked))
            begun = time.process_time()
            fleet.ask(fleet.prompts, asked)
            seconds["processor"].append((time.process_time() - begun) / asked)
    timings = Timings(seconds)
    names = {
        "list": f"match of {_CHUNKS} chunks, p50",
        "p99": f"match of {_CHUNKS} chunks, p99",
        "processor": f"match of {_CHUNKS} chunks, processor time",
        "array": f"match of {_CHUNKS} chunks, token ids in an array, p50",
        "ranks": f"match of {_CHUNKS} chunks from 8 ranks, p50",
        "short": "match of 16 chunks, p50",
    }
    for side, name in names.items():
        target = P50_US if side == "list" else None
        yield Compared(timings, side, "ping", _PING).duration(name, "µs", target)


def _rates(setting: BenchSetting, fleet: _Fleet, asked: int) -> Iterator[BenchRow]:
    setting.tell("a router's question", "as many as possible")
    twin, namespace = AsyncClient(fleet.client), fleet.namespaces[1]

    def one_thread() -> float:
        return sum(fleet.ask(fleet.prompts, asked))

    async def gathered() -> float:
        begun = time.perf_counter()
        left = islice(cycle(fleet.prompts), asked)

        async def ask() -> None:
            for prompt in left:
                await twin.match(prompt, namespace=namespace)

        await asyncio.gather(*(ask() for _ in range(_THREADS)))
        return time.perf_counter() - begun

    with Threads(_THREADS) as threads:
        share = -(-asked // _THREADS)
        sides: dict[str, Callable[[], float]] = {
            "one thread": one_thread,
            f"{_THREADS} threads": lambda: threads.run(
                lambda _: fleet.ask(fleet.prompts, share) and None
            ),
            f"asyncio, {_THREADS} at once": lambda: asyncio.run(gathered()),
        }
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(setting.rounds):
            for name, work in sides.items():
                seconds[name].append(work())
    timings = Timings(seconds)
    for name in sides:
        rate = asked / timings.median(name)
        target = PER_SECOND if name == "one thread" else None
        yield BenchRow(f"questions per second, {name}", "", rate, target=target)


def _prompts() -> Iterator[list[int]]:
    dice = random.Random(16)
    half = _CHUNKS // 2 * CHUNK_TOKENS
    shared = [dice.randrange(128_000) for _ in range(half)]
    for _ in range(_PROMPTS):
        yield shared + [dice.randrange(128_000) for _ in range(half)]


def _store(backends: Backends, ranks: int, prompts: Sequence[Sequence[int]]) -> str:
    """Publish every chunk of ``prompts`` as ``ranks`` replicas' ranks do; return the namespace."""
    identity = Identity(
        f"bench-{ranks}", "weights", None, "bfloat16", (_GROUP,), "canonical", CHUNK_TOKENS, 0,
        "default",
    )  # fmt: skip
    namespace, each = identity.namespace(), _GROUP.heads // ranks
    backends.bulk.put(identity_path(namespace), identity.canonical())
    shards = [Shard(0, len(_LAYERS), rank * each, (rank + 1) * each) for rank in range(ranks)]
    fields = [f"0.{shard}" for shard in shards]
    now_s = int(time.time())
    _publish(backends.index, namespace, SHAPES_HASH, SHAPES_HASH, 0, {
        field: ShardRecord(0, 0, "none", False, "", now_s) for field in fields
    })  # fmt: skip
    known = set[bytes]()
    for prompt in prompts:
        parent = root_hash(namespace)
        for number, prefix_hash in enumerate(prefix_hashes(namespace, prompt, CHUNK_TOKENS)):
            if prefix_hash not in known:
                known.add(prefix_hash)
                record = replace(RECORD, hot=number < _CHUNKS // 2, created_s=now_s)
                every = dict.fromkeys(fields, record)
                _publish(backends.index, namespace, prefix_hash, parent, number, every)
            parent = prefix_hash
    return namespace


def _publish(
    index: WriteIndex,
    namespace: str,
    prefix_hash: bytes,
    parent: bytes,
    number: int,
    shards: Mapping[str, ShardRecord],
) -> None:
    start = number * CHUNK_TOKENS
    entry = ChunkEntry(namespace, prefix_hash, parent, start, start + CHUNK_TOKENS)
    index.publish(entry, shards, ttl_s=_TTL_S)


if __name__ == "__main__":
    run_alone(bench_router)
