"""Measure the work on the scheduler's thread during a lookup. Needs vLLM, but starts no engine.

The request is synthetic, and the benchmark makes the calls that vLLM makes in each step.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from threading import Event
from types import SimpleNamespace
from typing import Any

from benchmarks.alone import run_alone
from benchmarks.harness import SCALES, BenchRow, BenchSetting, Section, Target
from benchmarks.worker import BLOCK, LLAMA_8B
from objkv.assembly.backends import open_bulk, open_index
from objkv.config import Config, load_config
from objkv.connector.kv.scheduler import SchedulerSide
from objkv.connector.model.groups import Geometry
from objkv.index.base import Record, ShardRecords
from objkv.index.guarded import GuardedIndex
from objkv.keys.identity import Identity
from objkv.ops.bench.sample import CHUNK_TOKENS
from objkv.telemetry import NullRecorder

STEP_US = Target(100, at_most=True, of="ours")
_PROMPT_TOKENS = 128 << 10
_STEPS = 5_000
_QUICK_STEPS = 200
_REQUESTS = 5
_ANSWER_S = 600.0
_IDENTITY = Identity(
    "bench", "weights", 0, "default", None, "bfloat16", (LLAMA_8B,), "canonical", CHUNK_TOKENS
)


class _SilentIndex(GuardedIndex):
    """Answers no lookup before ``answer`` is set."""

    answer = Event()

    def lookup(self, namespace: str, prefix_hashes: Sequence[bytes]) -> list[Record | None]:
        self.answer.wait(_ANSWER_S)
        return [None] * len(prefix_hashes)

    def find(
        self, namespace: str, prefix_hashes: Sequence[bytes], fields: Sequence[str]
    ) -> list[ShardRecords | None]:
        self.answer.wait(_ANSWER_S)
        return [None] * len(prefix_hashes)


def bench_steps(setting: BenchSetting) -> Section:
    """When a request arrives, and in each step while its lookup is in flight."""
    setting.report_stage("scheduler's thread", "a lookup is in flight")
    return Section("steps", tuple(_rows(_QUICK_STEPS if setting.quick else _STEPS)), {})


def _rows(steps: int) -> Iterator[BenchRow]:
    urls = {"bulk_url": "file:///kv", "index_url": "sqlite:///i"}
    config = load_config({**urls, "lookup_deadline_ms": 10**9}, environ={})
    index = _SilentIndex(open_index(config, NullRecorder()))
    side = _side(config, index)
    arrivals, in_steps = [], []
    for number in range(_REQUESTS):
        request = _request(f"r{number}")
        arrivals.append(_seconds(lambda request=request: side.track(request)))
        for _ in range(max(1, steps // _REQUESTS)):
            in_steps.append(_seconds(lambda request=request: _step(side, request)))
            # As a step of a model would: other threads get the time between two steps.
            time.sleep(0)
    index.answer.set()
    side.close()
    name, scale = f"scheduler's thread, {_PROMPT_TOKENS:,} tokens", SCALES["µs"]
    arrival, median = statistics.median(arrivals) * scale, statistics.median(in_steps) * scale
    yield BenchRow(
        f"{name}, arrival", "µs", arrival, target=STEP_US, detail="once per request, median"
    )
    detail = f"lookup in flight, {steps:,} steps"
    yield BenchRow(f"{name}, a step, median", "µs", median, target=STEP_US, detail=detail)


def _step(side: SchedulerSide, request: Any) -> None:
    matched, _ = side.match(request, 0)
    assert matched is None, "the lookup is in flight"


def _side(config: Config, index: _SilentIndex) -> SchedulerSide:
    geometry = Geometry((LLAMA_8B,), CHUNK_TOKENS, BLOCK, tp_size=1)
    return SchedulerSide(
        config,
        geometry,
        _IDENTITY,
        loads=True,
        saves=True,
        steps_in_flight=2,
        bulk=open_bulk(config, NullRecorder()),
        index=index,
        recorder=NullRecorder(),
        prefetch=lambda *_: 0,
    )


def _request(name: str) -> Any:
    """What is read of vLLM's request."""
    return SimpleNamespace(
        request_id=name,
        all_token_ids=[(number * 7919) % 128_000 for number in range(_PROMPT_TOKENS)],
        num_tokens=_PROMPT_TOKENS,
        num_prompt_tokens=_PROMPT_TOKENS,
        num_computed_tokens=0,
        lora_request=None,
        cache_salt=None,
        mm_features=[],
        prompt_embeds=None,
        kv_transfer_params=None,
        trace_headers=None,
        resumable=False,
        skip_reading_prefix_cache=False,
    )


def _seconds(call: Any) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


if __name__ == "__main__":
    run_alone(bench_steps)
