"""Measure the work of a load and of a step on the scheduler's and the forward thread. Needs vLLM,
but starts no engine.

A prompt of 32k tokens is found for 8 ranks, planned, sent and unpacked as vLLM's message queue does
it, and 512 requests generate one token in each step. The requests are vLLM's own; the benchmark
makes the calls that its scheduler makes.
"""

import pickle
import random
import statistics
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from benchmarks.alone import run_alone
from objkv.assembly.backends import open_bulk
from objkv.config import load_config
from objkv.connector.kv.scheduler import Roles, SchedulerSide
from objkv.connector.kv.wiring import make_scheduler_side
from objkv.connector.model.groups import Geometry
from objkv.index.base import ChunkEntry, ShardRecord, Shards
from objkv.index.fields import WrittenShards, encode_shard
from objkv.index.memory import MemoryIndex
from objkv.index.near import NearIndex
from objkv.keys.identity import GroupIdentity, Identity
from objkv.keys.prefix import PrefixChain, PromptExtras
from objkv.ops.bench.harness import SCALES, BenchRow, BenchSetting, Section, Target
from objkv.telemetry import NullRecorder

CHUNK_TOKENS = 256
_BLOCK_TOKENS = 16
_RANKS = 8
_CHUNKS = 128
_REQUESTS = 512
_GENERATED_AT = 100
"""Tokens of each generating request at the start."""
_LOADS, _QUICK_LOADS = 60, 3
_STEPS, _QUICK_STEPS = 2_000, 20
_PATIENCE_S = 60.0
PLAN_US = Target(1000, at_most=True, of="ours")
UNPACK_US = Target(300, at_most=True, of="ours")
STEP_US = Target(50, at_most=True, of="ours")
_LAYERS = tuple(f"layers.{number}" for number in range(80))
_GROUP = GroupIdentity("full", None, _LAYERS, heads=8, content=256, block_size=_BLOCK_TOKENS)
_IDENTITY = Identity(
    "bench", "weights", None, "bfloat16", (_GROUP,), "canonical", CHUNK_TOKENS, 0, "default"
)


class _EncodedIndex(MemoryIndex):
    """Answers with encoded records, as Redis does."""

    def find(self, namespace: str, prefix_hashes: Any, fields: Any) -> list[Shards | None]:
        names = tuple(fields)
        rows = super().find(namespace, prefix_hashes, names)
        return [
            row and WrittenShards(names, [encode_shard(row[n]) if n in row else b"" for n in names])
            for row in rows
        ]


def bench_scheduler(setting: BenchSetting) -> Section:
    """Measure a load on the scheduler's thread and in a worker, and steps of generation."""
    setting.tell("scheduler's thread", "a load, and steps of generation")
    rows = [*_loads(_QUICK_LOADS if setting.quick else _LOADS)]
    rows += _generation(_QUICK_STEPS if setting.quick else _STEPS)
    return Section("scheduler", tuple(rows), {})


def _loads(count: int) -> Iterator[BenchRow]:
    index = _EncodedIndex()
    geometry = Geometry((_GROUP,), CHUNK_TOKENS, _BLOCK_TOKENS, tp_size=_RANKS)
    side = _side(index, geometry)
    dice = random.Random(15)
    prompt = [dice.randrange(100_000) for _ in range(_CHUNKS * CHUNK_TOKENS)]
    _store(index, geometry, side.namespace, prompt)
    times: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[..., Any], *args: Any) -> Any:
        started = time.perf_counter()
        answer = call(*args)
        times.setdefault(name, []).append(time.perf_counter() - started)
        return answer

    for number in range(count):
        request = _request(f"r{number}", [*prompt, 1, 2, 3])
        first = number * _CHUNKS * CHUNK_TOKENS // _BLOCK_TOKENS % 100_000 + 1
        blocks = [list(range(first, first + _CHUNKS * CHUNK_TOKENS // _BLOCK_TOKENS))]
        side.track(request)
        _settle(side, request)
        tracked = side._requests.get(request.request_id)
        assert tracked is not None
        tracked.usable = None  # decide again, as the first match
        matched, _ = timed("match", side.match, request, 0)
        assert matched == _CHUNKS * CHUNK_TOKENS, matched
        timed("plan_load", side.plan_load, request, blocks, matched)
        plan = timed("plan_step", side.plan_step, _output({}))
        data = timed("pickle", pickle.dumps, plan, 5)
        timed("unpickle", pickle.loads, data)
        side.finish(request, blocks)
        times.setdefault("bytes", []).append(len(data) / 1e6)
    side.close()
    name, scale = f"load of {_CHUNKS} chunks for {_RANKS} ranks", SCALES["µs"]
    medians = {key: statistics.median(some) * scale for key, some in times.items()}
    yield BenchRow(f"{name}, match", "µs", medians["match"])
    for part in ("plan_load", "plan_step", "pickle"):
        yield BenchRow(f"{name}, {part}", "µs", medians[part])
    total = sum(medians[part] for part in ("plan_load", "plan_step", "pickle"))
    yield BenchRow(f"{name}, planned and sent", "µs", total, target=PLAN_US)
    yield BenchRow(
        f"{name}, unpacked by a worker",
        "µs",
        medians["unpickle"],
        target=UNPACK_US,
        detail=f"message of {medians['bytes']:,.0f} bytes",
    )


def _generation(steps: int) -> Iterator[BenchRow]:
    geometry = Geometry((_GROUP,), CHUNK_TOKENS, _BLOCK_TOKENS, tp_size=_RANKS)
    dice = random.Random(16)
    for name, save_decode in (("prompts saved", False), ("answers saved too", True)):
        side = _side(_EncodedIndex(), geometry, save_decode=save_decode)
        requests = []
        for number in range(_REQUESTS):
            tokens = [dice.randrange(100_000) for _ in range(_GENERATED_AT + number % CHUNK_TOKENS)]
            requests.append(request := _request(f"r{number}", tokens))
            side.track(request)
            _settle(side, request)
            side.plan_load(request, (), 0)
            request.num_computed_tokens = request.num_tokens
        table = [list(range(1, 1000))]
        scheduled = {request.request_id: 1 for request in requests}
        seconds = []
        for _ in range(steps):
            for request in requests:
                request._all_token_ids.append(7)
            output = _output(scheduled, table)
            started = time.perf_counter()
            side.plan_step(output)
            seconds.append(time.perf_counter() - started)
            side.end_step()
            for request in requests:
                request.num_computed_tokens += 1
        side.close()
        scale = SCALES["µs"]
        median = statistics.median(seconds) * scale
        yield BenchRow(
            f"step of {_REQUESTS} generating requests, {name}",
            "µs",
            median,
            target=STEP_US,
            detail=f"median of {steps:,} steps, mean {statistics.mean(seconds) * scale:,.0f} µs",
        )


def _side(index: MemoryIndex, geometry: Geometry, **more: Any) -> SchedulerSide:
    settings = {"bulk_url": "memory:", "index_url": "memory:"}
    config = load_config(settings | more, environ={})
    return make_scheduler_side(
        config,
        Roles(loads=True, saves=True, copies_are_synchronous=False, steps_in_flight=2),
        geometry,
        _IDENTITY,
        bulk=open_bulk(config, NullRecorder()),
        index=NearIndex(index, records_max=65_536, ttl_s=30, fields=geometry.all_fields()),
        recorder=NullRecorder(),
    )


def _store(index: MemoryIndex, geometry: Geometry, namespace: str, prompt: list[int]) -> None:
    chain = PrefixChain(namespace, CHUNK_TOKENS, PromptExtras())
    hashes = chain.extend(prompt, len(prompt))
    for chunk, one in enumerate(hashes):
        start = chunk * CHUNK_TOKENS
        entry = ChunkEntry(namespace, one, chain.parent(chunk), start, start + CHUNK_TOKENS)
        record = ShardRecord(2_621_440 + chunk, 2_621_440, "none", False, f"{chunk:032x}", 10**9)
        index.publish(entry, dict.fromkeys(geometry.all_fields(), record), ttl_s=3600)


def _request(name: str, tokens: list[int]) -> Request:
    return Request(name, tokens, SamplingParams(max_tokens=10_000), None)


def _output(scheduled: dict[str, int], table: Any = None) -> Any:
    """Return the parts of vLLM's output that objkv reads."""
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_spec_decode_tokens={},
        has_sync_kv_loads=False,
        preempted_req_ids=set(),
        finished_req_ids=set(),
        kv_connector_block_state=SimpleNamespace(
            get_block_ids=lambda _: table, boundary_state_offloads={}
        ),
    )


def _settle(side: SchedulerSide, request: Request) -> None:
    until = time.monotonic() + _PATIENCE_S
    while side.match(request, 0)[0] is None:
        assert time.monotonic() < until
        time.sleep(1e-4)


if __name__ == "__main__":
    run_alone(bench_scheduler)
