"""A load of a group that forgets tokens fails whole: there is no shorter prefix that it serves."""

from dataclasses import replace

from objkv.cache.chunks import CacheSettings, ChunkCache
from objkv.config import Config
from objkv.connector.kv.metadata import StepPlan
from objkv.connector.kv.worker import Rank, WorkerSide
from objkv.connector.model.groups import Geometry
from objkv.keys.identity import GroupIdentity
from objkv.telemetry import MemoryRecorder
from tests.support.paged_cache import CHUNK, GROUP, Replica, paged_group, stores, wait_until

WINDOW = replace(GROUP, kind="sliding_window", window=64)


def test_a_window_alone_fails_as_a_request_and_not_as_blocks() -> None:
    """vLLM would go on from the first failed block, whose own window was never given blocks."""
    results = _fail(WINDOW)
    assert results == ({"r"}, {"r"}, set())


def test_full_attention_alone_fails_from_a_block_on() -> None:
    received, failed, blocks = _fail(GROUP)
    assert (received, failed) == ({"r"}, set())
    assert blocks


def _fail(group: GroupIdentity) -> tuple[set[str], set[str], set[int]]:
    """What a worker tells of a load whose payload is gone: received, failed, failed blocks."""
    store, index = stores()
    writer = Replica(store, index, seed=1, group=group)
    writer.save(range(1))
    plan = StepPlan(loads=(writer.load_plan(range(1), 9),))
    store.delete(writer.path(0))
    writer.close()
    recorder = MemoryRecorder()
    settings = CacheSettings("w", ttl_s=3600, lease_ms=600_000, hot_payload_bytes_max=0)
    _, caches = paged_group(group, chunk_tokens=CHUNK, num_blocks=32, seed=2)
    worker = WorkerSide(
        Config(pinned_bytes_max=1 << 20, load_threads=1, save_threads=1),
        Geometry((group,), CHUNK, group.block_size, tp_size=1),
        Rank(0, "w", batches_in_flight=1),
        ChunkCache(store, None, index, settings, recorder),
        recorder=recorder,
        kv_caches=dict(zip(group.layers, caches, strict=True)),
    )
    received: set[str] = set()
    failed: set[str] = set()

    def told() -> bool:
        results = worker.results(StepPlan(), set())
        received.update(results.received)
        failed.update(results.failed)
        return bool(received)

    try:
        worker.start_loads(plan)
        wait_until(told)
        return received, failed, worker.take_failed_blocks()
    finally:
        worker.close()
