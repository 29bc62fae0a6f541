"""Both sides of the KV connector over stores in memory, and what they read of vLLM's requests."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from objkv.agent.core import CoreLimits
from objkv.background import Steps, in_steps
from objkv.cache.chunks import CacheSettings, ChunkCache
from objkv.config import Config
from objkv.connector.kv.scheduler import SchedulerSide
from objkv.connector.kv.wiring import make_worker_side
from objkv.connector.kv.worker import Rank, WorkerSide
from objkv.connector.model.groups import Geometry
from objkv.index.base import ChunkEntry, ShardRecord
from objkv.keys.chunk import ChunkKey
from objkv.keys.identity import GroupIdentity, Identity
from objkv.keys.prefix import prefix_hashes, root_hash
from objkv.stores.base import PruneStore
from objkv.telemetry import MemoryRecorder
from tests.contracts.memory_index import MemoryIndex
from tests.contracts.memory_store import MemoryStore
from tests.support.inside import InsideAgent
from tests.support.paged_cache import CHUNK, paged_group
from tests.support.paged_cache import GROUP as THREE_LAYERS
from tests.support.steps import complete
from tests.support.waiting import wait_until

SIZE = 32
"""Tokens of a chunk, and of a block, on the scheduler's side."""
ONE_LAYER = GroupIdentity("full", None, ("l0",), heads=1, content=8, block_size=SIZE)
GEOMETRY = Geometry((ONE_LAYER,), SIZE, SIZE, tp_size=1)
FIELD = "0"
IDENTITY = Identity("m", "w", 0, "default", None, "bfloat16", (ONE_LAYER,), "canonical", SIZE)
RECORD = ShardRecord(9, 9, True, False, "0" * 32, 1)
OPENED: list[SchedulerSide | WorkerSide] = []
"""They are closed at the end of their test."""
PATIENCE_MS = 120_000
"""For other threads to come, on a machine that is busy with other things."""


class Jobs(list[Callable[[], Steps[None] | None]]):
    """Takes background jobs, unless it is full, and runs them, the oldest first, when a test wants
    it."""

    full = False

    def submit(self, job: Callable[[], Steps[None] | None]) -> bool:
        if not self.full:
            self.append(job)
        return not self.full

    def run(self) -> None:
        while self:
            complete(in_steps(self.pop(0)()))


def request(tokens: Sequence[int] | int = 64, name: str = "r", **more: Any) -> Any:
    """What is read of vLLM's request; ``tokens``: its prompt, or the length of it."""
    ids = [7] * tokens if isinstance(tokens, int) else tokens
    nothing = ("lora_request", "cache_salt", "prompt_embeds", "kv_transfer_params", "trace_headers")
    plain: dict[str, Any] = dict.fromkeys(nothing)
    plain |= {"request_id": name, "all_token_ids": ids, "num_tokens": len(ids), "mm_features": []}
    plain |= {"num_prompt_tokens": len(ids), "num_computed_tokens": 0, "resumable": False}
    return SimpleNamespace(**(plain | {"skip_reading_prefix_cache": False} | more))


def step(scheduled: Mapping[str, int], blocks: Sequence[int], *, sync_loads: bool = False) -> Any:
    """A step that computes so many tokens of each request, in the blocks of one."""
    return SimpleNamespace(
        has_sync_kv_loads=sync_loads,
        kv_connector_block_state=SimpleNamespace(get_block_ids=lambda _: (blocks,)),
        num_scheduled_tokens=dict(scheduled),
        preempted_req_ids=set(),
        scheduled_spec_decode_tokens={},
        total_num_scheduled_tokens=sum(scheduled.values()),
    )


def publish_prompt(index: MemoryIndex, tokens: Sequence[int], record: ShardRecord = RECORD) -> None:
    namespace = IDENTITY.namespace()
    hashes = prefix_hashes(namespace, tokens, SIZE)
    parents = [root_hash(namespace), *hashes]
    for i, (name, parent) in enumerate(zip(hashes, parents, strict=False)):
        entry = ChunkEntry(namespace, name, parent, i * SIZE, (i + 1) * SIZE)
        index.publish(entry, {FIELD: record}, ttl_s=3600)


def ask(side: SchedulerSide, one: Any, computed: int = 0) -> tuple[int | None, bool]:
    side.track(one)
    wait_until(lambda: side.match(one, computed)[0] is not None)
    return side.match(one, computed)


def breaks(fault: pytest.MonkeyPatch, owner: object, *names: str) -> None:
    for name in names:
        part, _, method = name.rpartition(".")
        target = getattr(owner, part) if part else owner
        fault.setattr(target, method, lambda *_, **__: 1 / 0)


def scheduler_side(
    index: Any = None,
    *,
    roles: Mapping[str, Any] | None = None,
    prefetch: Any = lambda *_: 0,
    geometry: Geometry = GEOMETRY,
    recorder: MemoryRecorder | None = None,
    may_reuse: Callable[[], bool] = lambda: True,
    **settings: Any,
) -> SchedulerSide:
    """A scheduler's side of a model with one layer; ``settings`` of ``Config``."""
    plain = {"chunk_tokens": SIZE, "lookup_deadline_ms": PATIENCE_MS}
    does = {"loads": True, "saves": True, "steps_in_flight": 1}
    side = SchedulerSide(
        Config.model_validate(plain | settings),
        geometry,
        IDENTITY,
        **(does | dict(roles or {})),
        bulk=MemoryStore(),
        index=index if index is not None else MemoryIndex(),
        recorder=recorder or MemoryRecorder(),
        prefetch=prefetch,
        may_reuse=may_reuse,
    )
    OPENED.append(side)
    return side


def worker_side(
    store: PruneStore,
    index: MemoryIndex,
    *,
    group: GroupIdentity = THREE_LAYERS,
    geometry: Geometry | None = None,
    rank: Rank | None = None,
    caches: Mapping[str, torch.Tensor] | None = None,
    recorder: MemoryRecorder | None = None,
    accepted: deque[ChunkKey] | None = None,
) -> WorkerSide:
    """A worker's side over a paged cache of its own, and an agent in this process."""
    recorder = recorder or MemoryRecorder()
    settings = CacheSettings("w", ttl_s=3600, lease_ms=600_000, hot_save_bytes_max=0)
    cache = ChunkCache(store, None, index, settings, recorder)
    agent = InsideAgent(cache, 8 << 20, CoreLimits(1, 64), recorder)
    if caches is None:
        _, tensors = paged_group(group, chunk_tokens=CHUNK, num_blocks=32, seed=2)
        caches = dict(zip(group.layers, tensors, strict=True))
    side = make_worker_side(
        Config(pinned_bytes_max=1 << 20),
        geometry or Geometry((group,), CHUNK, group.block_size, tp_size=1),
        rank or Rank(0, "w", batches_in_flight=1),
        agent.connect,
        recorder=recorder,
        kv_caches=caches,
        accepted=accepted,
    )
    OPENED.append(side)
    return side
