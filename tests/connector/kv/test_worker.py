"""The worker's side over a real paged cache in memory, one step at a time."""

import threading
from collections import deque
from dataclasses import replace
from threading import Event
from typing import Any

import pytest
import torch

from objkv.connector.kv import worker as worker_module
from objkv.connector.kv.metadata import FailedLoad, StepPlan, StepReport
from objkv.connector.kv.worker import Rank, WorkerSide
from objkv.connector.pacing import EMPTY_STEP_S
from objkv.errors import StoreUnavailable
from objkv.keys.chunk import ChunkKey
from objkv.keys.identity import GroupIdentity
from objkv.keys.prefix import token_digest
from objkv.telemetry import MemoryRecorder
from objkv.transfer.plan import BlocksToZero, LoadPlan, SaveMove, SavePlan
from objkv.transfer.slabs import Slab, SlabPool, SlabsExhaustedError
from tests.contracts.flaky import FlakyStore
from tests.contracts.memory_index import MemoryIndex
from tests.contracts.memory_store import MemoryStore
from tests.support.paged_cache import (
    BLOCKS,
    CHUNK,
    GROUP,
    NAMESPACE,
    TOKENS,
    Replica,
    paged_group,
    stores,
    wait_until,
)
from tests.support.plans import unpacked
from tests.support.sides import breaks, worker_side
from tests.support.waiting import PATIENCE_S


def without_its_payload(
    group: GroupIdentity = GROUP, *, sync: bool = False, lacks: bool = True, **more: Any
) -> tuple[WorkerSide, LoadPlan]:
    """A worker, and a load whose payload is gone, unless it is not to ``lack``."""
    store, index = stores()
    writer = Replica(store, index, seed=1, group=group)
    writer.save(range(1))
    plan = writer.load_plan(range(1), 9, sync=sync)
    if lacks:
        store.delete(writer.path(0))
    writer.close()
    return worker_side(store, index, group=group, **more), plan


def told(worker: WorkerSide) -> StepReport:
    report = worker.take_report()
    assert report is not None
    return report


def save_of(chunk_of: LoadPlan) -> SavePlan:
    """A save of what a load is to fill."""
    move = unpacked(chunk_of.moves)[0].move
    save = SaveMove(move, token_digest(TOKENS[:CHUNK]), None)
    return SavePlan("s", NAMESPACE, (save,))


@pytest.mark.parametrize("speculating", [False, True])
def test_a_load_that_failed_within_a_step_is_told_in_that_step(*, speculating: bool) -> None:
    """With speculation vLLM asks for results before it ends the step."""
    worker, load = without_its_payload(sync=True)
    plan = StepPlan((load,), (save_of(load),))
    worker.start_loads(plan)
    for layer in GROUP.layers:
        worker.wait_layer(layer)
    if not speculating:
        worker.end_forward(plan)
    results = worker.results(plan, set())
    assert worker.take_failed_blocks() == set(range(9, 9 + BLOCKS))
    assert results.finished_recving == set()
    if speculating:
        worker.end_forward(plan)
    assert worker.take_failed_blocks() == set()
    assert told(worker).dropped == {("s", 0)}  # computed from blocks that were not loaded


def test_a_step_with_nothing_to_compute_waits_for_loads_and_no_other_step_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = worker_side(*stores())
    waited: list[float] = []
    monkeypatch.setattr(worker.loader, "wait_over", waited.append)
    worker.results(StepPlan(), set())
    assert waited == []
    worker.results(StepPlan(idle=True), set())
    assert waited == [EMPTY_STEP_S]


def test_the_end_of_a_forked_process_stops_nothing_of_its_parent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker, load = without_its_payload(sync=True)
    with monkeypatch.context() as forked:
        forked.setattr(worker_module, "getpid", lambda: -1)
        worker.close()
    names = [thread.name for thread in threading.enumerate()]
    assert "objkv-save-0" in names
    worker.start_loads(StepPlan(loads=(load,)))
    worker.end_forward(StepPlan(loads=(load,)))
    assert worker.take_report() is not None


@pytest.mark.parametrize("fails", [False, True])
def test_a_load_of_a_request_that_ends_counts_as_failed_only_if_it_had_before(
    *, fails: bool
) -> None:
    """Its client may have left: the store is healthy, and nothing is recomputed."""
    store, recorder, gate = FlakyStore(MemoryStore()), MemoryRecorder(), Event()
    writer = Replica(store, index := MemoryIndex(), seed=1)
    writer.save(range(3))
    worker = worker_side(store, index, recorder=recorder)
    store.arrived.clear()
    if fails:
        store.fail_until_mended(StoreUnavailable("down"))
    else:
        store.hold(gate)
    worker.start_loads(StepPlan(loads=(writer.load_plan(range(3), 9),)))
    wait_until(lambda: worker.loader.in_flight == 0 if fails else store.arrived.is_set())
    assert worker.results(StepPlan(), {"r"}).finished_recving == {"r"}
    assert worker.take_failed_blocks() == set(range(9, 9 + 3 * BLOCKS))
    gate.set()
    worker.close()
    counted = [recorder.value(n) for n in ("loads", "load_failures", "load_failed_blocks")]
    assert counted == [1, fails, fails * 3 * BLOCKS]


WINDOW = replace(GROUP, kind="sliding_window", window=64)


@pytest.mark.parametrize("group", [GROUP, WINDOW])
def test_a_window_fails_as_a_request_and_full_attention_from_a_block_on(
    group: GroupIdentity,
) -> None:
    """vLLM would go on from the first failed block, whose own window was never given blocks."""
    worker, load = without_its_payload(group)
    worker.start_loads(StepPlan(loads=(load,)))
    worker.loader.wait_over(PATIENCE_S)
    results = worker.results(StepPlan(), set())
    assert results.finished_recving == {"r"}
    assert results.failed_recving == ({"r"} if group is WINDOW else set())
    assert bool(worker.take_failed_blocks()) is (group is GROUP)


@pytest.mark.parametrize("closed", [False, True])
def test_blank_blocks_are_zeroed_unless_the_cache_may_be_unmapped(*, closed: bool) -> None:
    """With blanks that do not exist the load has failed."""
    _, caches = paged_group(GROUP, chunk_tokens=CHUNK, num_blocks=32)
    for cache in caches:
        cache.fill_(1)
    worker, load = without_its_payload(caches=dict(zip(GROUP.layers, caches, strict=True)))
    if closed:
        worker.close()
    for blanks in (
        (BlocksToZero(0, (20, 22)), BlocksToZero(7, (21,))),
        (BlocksToZero(0, (10_000,)),),
    ):
        worker.start_loads(StepPlan(loads=(replace(load, blocks_to_zero=blanks),)))
        wait_until(lambda: worker.results(StepPlan(), set()).finished_recving == {load.request_id})
        assert worker.take_failed_blocks() == set(range(9, 9 + BLOCKS))
    zeroed = {at for cache in caches for at, block in enumerate(cache) if not block.any()}
    assert zeroed == (set() if closed else {20, 22})


@pytest.mark.parametrize(
    ("group", "sync", "blocks", "whole"),
    [
        (GROUP, False, {9, 10}, False),
        (GROUP, False, set(), True),
        (WINDOW, False, {9, 10}, True),
        (WINDOW, False, set(), True),
        (GROUP, True, {9}, False),
    ],
)
def test_a_load_that_could_not_be_planned_has_failed(
    group: GroupIdentity, sync: bool, blocks: set[int], whole: bool
) -> None:
    """vLLM waits for it; without its blocks, or with a window, it fails as a whole. Within the step
    nothing is saved that was computed from its blocks."""
    worker, load = without_its_payload(group)
    lost = FailedLoad("r", sync, frozenset(blocks))
    plan = StepPlan(saves=(save_of(load),), failed_loads=(lost,))
    worker.start_loads(plan)
    worker.end_forward(plan)
    results = worker.results(plan, set())
    assert results.finished_recving == (set() if sync else {"r"})
    assert results.failed_recving == ({"r"} if whole else set())
    assert worker.take_failed_blocks() == (set() if whole else blocks)
    report = told(worker)
    assert (report.failed, report.dropped) == ({"r"}, {("s", 0)} if sync else set())
    assert worker.results(StepPlan(), set()).finished_recving == set()


@pytest.mark.parametrize("broken", ["wait_layer", "take_finished"])
def test_if_waiting_for_a_layer_fails_the_loads_of_the_step_have_failed(
    monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """Otherwise the model would compute from blocks that may not be loaded."""
    worker, load = without_its_payload(sync=True, lacks=False)
    plan = StepPlan(loads=(load,))
    with monkeypatch.context() as fault:
        breaks(fault, worker.loader, broken)
        worker.start_loads(plan)
        for layer in GROUP.layers:
            worker.wait_layer(layer)
        if broken == "take_finished":
            worker.end_forward(plan)
    worker.end_forward(plan)
    worker.results(plan, set())
    assert worker.take_failed_blocks() == set(range(9, 9 + BLOCKS))
    assert told(worker).failed == {load.request_id}
    worker.results(StepPlan(), set())
    assert worker.take_failed_blocks() == set()


@pytest.mark.parametrize("sync", [True, False])
def test_loads_that_cannot_be_ordered_after_earlier_work_are_not_started(
    monkeypatch: pytest.MonkeyPatch, *, sync: bool
) -> None:
    """They could write to blocks that it still uses."""
    worker, load = without_its_payload(sync=True, lacks=False)
    plan = StepPlan(loads=(replace(load, sync=sync),))
    breaks(monkeypatch, worker.loader, "mark_compute", "submit")
    worker.before_forward(plan)
    worker.start_loads(plan)
    worker.end_forward(plan)
    assert worker.results(plan, set()).finished_recving == (set() if sync else {load.request_id})
    assert worker.take_failed_blocks() == set(range(9, 9 + BLOCKS))


@pytest.mark.parametrize("broken", ["loader.cancel", "saver.left_device"])
def test_the_end_of_a_load_is_reported_whatever_else_fails(
    monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """vLLM waits for it for ever."""
    worker, load = without_its_payload()
    breaks(monkeypatch, worker, broken)
    worker.start_loads(StepPlan(loads=(load,)))
    worker.loader.wait_over(PATIENCE_S)
    results = worker.results(StepPlan(held=frozenset({"h"})), {"f", "h"})
    assert results.finished_recving == {load.request_id}
    assert results.finished_sending == (set() if broken == "saver.left_device" else {"h"})


def test_if_computing_cannot_be_held_for_saves_the_device_is_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise they could read, and store, what is written to their blocks next."""
    worker = worker_side(*stores())
    awaited: list[str] = []
    monkeypatch.setattr(torch.cpu, "synchronize", lambda _: awaited.append("device"))
    breaks(monkeypatch, worker.saver, "fence", "gather")
    worker.before_reuse(StepPlan())
    assert awaited == []
    worker.before_reuse(StepPlan(reused=frozenset({"r"})))
    assert awaited == ["device"]
    worker.end_forward(StepPlan())


def test_a_save_that_is_refused_after_its_step_is_in_a_later_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lease(_: SlabPool) -> Slab:
        raise SlabsExhaustedError("all are leased")

    worker, load = without_its_payload()
    monkeypatch.setattr(SlabPool, "lease", lease)
    worker.end_forward(StepPlan(saves=(save_of(load),)))
    assert worker.saver.drain(PATIENCE_S)
    assert told(worker).dropped == {("s", 0)}
    assert worker.take_report() is None


@pytest.mark.parametrize("has_events", [False, True])
def test_what_the_agent_accepted_is_in_the_next_report(*, has_events: bool) -> None:
    accepted = deque[ChunkKey]() if has_events else None
    worker, load = without_its_payload(accepted=accepted)
    save = save_of(load)
    worker.end_forward(StepPlan(saves=(save,)))
    assert worker.saver.drain(PATIENCE_S)
    if has_events:
        assert told(worker).stored == {(NAMESPACE, save.moves[0].move.prefix_hash, "0")}
    assert worker.take_report() is None


def test_the_model_waits_at_the_end_of_a_step_whose_loads_failed_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is saved in such a step, but saves of earlier ones may still read their blocks."""
    rank = Rank(0, "w", batches_in_flight=2, writes_early=True)
    worker, fenced = worker_side(*stores(), rank=rank), list[Any]()
    monkeypatch.setattr(worker.saver, "fence", fenced.append)
    failed = FailedLoad("another", sync=True, blocks=frozenset({20}))
    plan = StepPlan(failed_loads=(failed,), may_reuse=True)
    worker.start_loads(plan)
    worker.end_forward(plan)
    assert fenced == [None], "of all requests"
