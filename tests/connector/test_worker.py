"""The worker's side over a real paged cache in memory, one step at a time."""

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from objkv.cache.chunks import CacheSettings, ChunkCache
from objkv.config import Config
from objkv.connector.kv import worker as worker_module
from objkv.connector.kv.metadata import StepPlan
from objkv.connector.kv.worker import Rank, WorkerSide
from objkv.connector.model.groups import Geometry
from objkv.telemetry import MemoryRecorder
from objkv.transfer.plan import LoadPlan
from tests.support.paged_cache import BLOCKS, CHUNK, GROUP, Replica, paged_group, stores
from tests.support.servers.redis import wait_until


@pytest.fixture
def spoilt() -> Iterator[tuple[WorkerSide, LoadPlan]]:
    """A worker, and a load within the step whose payload is gone."""
    store, index = stores()
    writer = Replica(store, index, seed=1)
    writer.save(range(1))
    plan = writer.load_plan(range(1), 9, sync=True)
    store.delete(writer.path(0))
    writer.close()
    config = Config(pinned_bytes_max=1 << 20, load_threads=1, save_threads=1)
    recorder = MemoryRecorder()
    settings = CacheSettings("w", ttl_s=3600, lease_ms=600_000, hot_payload_bytes_max=0)
    _, caches = paged_group(GROUP, chunk_tokens=CHUNK, num_blocks=32, seed=2)
    worker = WorkerSide(
        config,
        Geometry((GROUP,), CHUNK, GROUP.block_size, tp_size=1),
        Rank(0, "w", batches_in_flight=1),
        ChunkCache(store, None, index, settings, recorder),
        recorder=recorder,
        kv_caches=dict(zip(GROUP.layers, caches, strict=True)),
    )
    yield worker, plan
    worker.close()


@pytest.mark.parametrize("speculating", [False, True])
def test_a_load_that_failed_within_a_step_is_told_in_that_step(
    spoilt: tuple[WorkerSide, LoadPlan], *, speculating: bool
) -> None:
    """With speculation vLLM asks for results before it ends the step."""
    worker, load = spoilt
    plan = StepPlan(loads=(load,))
    worker.start_loads(plan)
    for layer in GROUP.layers:
        worker.wait_layer(layer)
    if not speculating:
        worker.end_forward(plan)
    results = worker.results(plan, set())
    assert worker.take_failed_blocks() == set(range(9, 9 + BLOCKS))
    assert results.received == set()
    if speculating:
        worker.end_forward(plan)
    assert worker.take_failed_blocks() == set()


def test_a_load_is_told_to_have_ended_whatever_happens_to_its_report(
    spoilt: tuple[WorkerSide, LoadPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, load = spoilt
    plan = StepPlan(loads=(replace(load, sync=False),))
    monkeypatch.setattr(worker, "_note", lambda _: 1 / 0)
    worker.start_loads(plan)
    received: set[str] = set()
    wait_until(
        lambda: bool(received.update(worker.results(plan, set()).received) or received),
        "the load to end",
    )
    assert received == {load.request_id}
    assert worker.take_failed_blocks() == set(range(9, 9 + BLOCKS))


def test_a_step_with_nothing_to_compute_waits_for_loads_and_no_other_step_does(
    spoilt: tuple[WorkerSide, LoadPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, _ = spoilt
    waited: list[float] = []
    monkeypatch.setattr(worker._loader, "wait_over", waited.append)
    worker.results(StepPlan(), set())
    assert waited == []
    worker.results(StepPlan(idle=True), set())
    assert waited == [worker_module._IDLE_WAIT_S]


def test_waiting_for_loads_ends_with_the_first_that_is_over(
    spoilt: tuple[WorkerSide, LoadPlan],
) -> None:
    worker, load = spoilt
    worker.start_loads(StepPlan(loads=(replace(load, sync=False),)))
    worker._loader.wait_over(300)
    assert worker.results(StepPlan(), set()).received == {load.request_id}


def test_the_end_of_a_forked_process_stops_nothing_of_its_parent(
    spoilt: tuple[WorkerSide, LoadPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, load = spoilt
    with monkeypatch.context() as forked:
        forked.setattr(worker_module, "getpid", lambda: -1)
        worker.close()
    names = [thread.name for thread in threading.enumerate()]
    assert "objkv-save-0" in names
    worker.start_loads(StepPlan(loads=(load,)))
    worker.end_forward(StepPlan(loads=(load,)))
    assert worker.take_report() is not None
