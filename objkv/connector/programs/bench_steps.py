"""The work on the scheduler's thread while a lookup is in flight.

``python -m objkv.connector.programs.bench_steps TOKENS STEPS`` tells it as one JSON line. The
request is no real one, everything else is: what vLLM calls in each step is called here.
"""

import statistics
import sys
import time
from collections.abc import Sequence
from threading import Event
from types import SimpleNamespace
from typing import Any

from objkv.assembly.backends import open_bulk, open_index
from objkv.config import Config, load_config
from objkv.connector.kv.scheduler import Roles, SchedulerSide
from objkv.connector.kv.wiring import make_scheduler_side
from objkv.connector.model.groups import Geometry
from objkv.index.base import Record, Shards
from objkv.index.guarded import GuardedIndex
from objkv.index.near import NearIndex
from objkv.keys.identity import GroupIdentity, Identity
from objkv.ops.bench.harness import percentile
from objkv.ops.bench.jobs import StepsAnswer
from objkv.ops.bench.records import CHUNK_TOKENS, make_tokens
from objkv.telemetry import NullRecorder

_BLOCK_TOKENS = 16
_REQUESTS = 5
_ANSWER_S = 600.0
_LAYERS = tuple(f"layers.{number}" for number in range(32))
_GROUP = GroupIdentity("full", None, _LAYERS, heads=8, content=256, block_size=_BLOCK_TOKENS)
_IDENTITY = Identity(
    "bench", "weights", None, "bfloat16", (_GROUP,), "canonical", CHUNK_TOKENS, 0, "default"
)


class _SilentIndex(GuardedIndex):
    """Answers no lookup before ``answer`` is set."""

    answer = Event()

    def lookup(self, namespace: str, prefix_hashes: Sequence[bytes]) -> list[Record | None]:
        self.answer.wait(_ANSWER_S)
        return [None] * len(prefix_hashes)

    def find(
        self, namespace: str, prefix_hashes: Sequence[bytes], fields: Sequence[str]
    ) -> list[Shards | None]:
        self.answer.wait(_ANSWER_S)
        return [None] * len(prefix_hashes)


def measure(tokens: int, steps: int) -> StepsAnswer:
    """Seconds for some requests of ``tokens`` tokens, over ``steps`` steps in all."""
    config = load_config(
        {"bulk_url": "memory:", "index_url": "memory:", "lookup_deadline_ms": 10**9}, environ={}
    )
    index = _SilentIndex(open_index(config, NullRecorder()))
    side = _side(config, index)
    arrivals, in_steps = [], []
    for number in range(_REQUESTS):
        request = _request(f"r{number}", tokens)
        arrivals.append(_seconds(lambda request=request: side.track(request)))
        for _ in range(max(1, steps // _REQUESTS)):
            in_steps.append(_seconds(lambda request=request: _step(side, request)))
            # As a step of a model would: other threads get the time between two steps.
            time.sleep(0)
    index.answer.set()
    side.close()
    return StepsAnswer(
        arrival_s=statistics.median(arrivals),
        step_median_s=statistics.median(in_steps),
        step_p95_s=percentile(in_steps, 0.95),
    )


def _step(side: SchedulerSide, request: Any) -> None:
    matched, _ = side.match(request, 0)
    assert matched is None, "the lookup is in flight"


def _side(config: Config, index: _SilentIndex) -> SchedulerSide:
    geometry = Geometry((_GROUP,), CHUNK_TOKENS, _BLOCK_TOKENS, tp_size=1)
    return make_scheduler_side(
        config,
        Roles(loads=True, saves=True, copies_are_synchronous=False, steps_in_flight=2),
        geometry,
        _IDENTITY,
        bulk=open_bulk(config, NullRecorder()),
        index=NearIndex(index, records_max=65_536, ttl_s=30, fields=geometry.all_fields()),
        recorder=NullRecorder(),
    )


def _request(name: str, tokens: int) -> Any:
    """What is read of vLLM's request."""
    return SimpleNamespace(
        request_id=name,
        all_token_ids=make_tokens(tokens),
        num_tokens=tokens,
        num_prompt_tokens=tokens,
        num_computed_tokens=0,
        lora_request=None,
        cache_salt=None,
        mm_features=[],
        prompt_embeds=None,
        resumable=False,
        skip_reading_prefix_cache=False,
    )


def _seconds(call: Any) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def main() -> None:
    """Print what was measured."""
    print(measure(int(sys.argv[1]), int(sys.argv[2])).model_dump_json(), flush=True)


if __name__ == "__main__":
    main()
