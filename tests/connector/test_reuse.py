"""No block is written by anybody before a save that is under way has read it."""

import pytest
import torch

from objkv.cache.chunks import CacheSettings, ChunkCache
from objkv.config import Config
from objkv.connector.kv import worker as worker_module
from objkv.connector.kv.metadata import StepPlan
from objkv.connector.kv.worker import Rank, WorkerSide
from objkv.connector.model.groups import Geometry
from objkv.keys.prefix import token_digest
from objkv.telemetry import MemoryRecorder
from objkv.transfer.lanes import HostLane
from objkv.transfer.plan import SaveMove, SavePlan
from tests.support.paged_cache import CHUNK, GROUP, NAMESPACE, TOKENS, Replica, paged_group, stores


class LateMark:
    """Of a copy that is not over when the step is, as on a GPU."""

    def __init__(self, held: list[str]) -> None:
        self._held = held

    def done(self) -> bool:
        return False

    def wait(self) -> None:
        return

    def hold_compute(self) -> None:
        self._held.append("held")


class LateLane(HostLane):
    def __init__(self, held: list[str]) -> None:
        self._held = held

    def mark(self) -> LateMark:
        return LateMark(self._held)


@pytest.mark.parametrize("writes_early", [False, True])
def test_the_model_waits_for_saves_before_the_runner_first_writes_for_the_next_step(
    monkeypatch: pytest.MonkeyPatch, *, writes_early: bool
) -> None:
    """vLLM's second model runner zeroes and copies blocks before it says that a step begins."""
    held: list[str] = []

    def open_lane(_device: torch.device, *, urgent: bool = False) -> LateLane:
        return LateLane(held)

    monkeypatch.setattr(worker_module, "open_lane", open_lane)
    store, index = stores()
    recorder = MemoryRecorder()
    settings = CacheSettings("w", ttl_s=3600, lease_ms=600_000, hot_payload_bytes_max=0)
    _, caches = paged_group(GROUP, chunk_tokens=CHUNK, num_blocks=32, seed=2)
    worker = WorkerSide(
        Config(pinned_bytes_max=1 << 20, load_threads=1, save_threads=1),
        Geometry((GROUP,), CHUNK, GROUP.block_size, tp_size=1),
        Rank(0, "w", batches_in_flight=2, writes_early=writes_early),
        ChunkCache(store, None, index, settings, recorder),
        recorder=recorder,
        kv_caches=dict(zip(GROUP.layers, caches, strict=True)),
    )
    planner = Replica(store, index, seed=1)
    save = SaveMove(planner.move(0, 1), token_digest(TOKENS[:CHUNK]), None)
    worker.end_forward(StepPlan(saves=(SavePlan("r", NAMESPACE, (save,)),)))
    assert bool(held) is writes_early
    worker.before_reuse()
    assert held
    worker.close()
    planner.close()
