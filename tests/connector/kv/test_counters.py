"""What raises each counter of loads, failures, queries and hits, and what does not."""

from collections.abc import Callable
from typing import Any

import pytest

from objkv.connector.counters import COUNTERS
from objkv.connector.kv.metadata import StepPlan
from objkv.errors import StoreUnavailable
from objkv.index.memory import MemoryIndex
from objkv.stores.memory import MemoryStore
from objkv.telemetry import MemoryRecorder
from tests.contracts.flaky import FlakyStore
from tests.support.paged_cache import BLOCKS, PATIENCE_S, Replica, StuckStore, wait_until
from tests.support.sides import ask, publish_prompt, request, scheduler_side, worker_side

LOADS = {name for name in COUNTERS if name == "loads" or name.startswith("load_")} - {"load_bytes"}
QUERIES = {name for name in COUNTERS if name.startswith(("quer", "hit", "local_hit"))}
CHUNKS = 3
Counted = dict[str, float]


def counted(recorder: MemoryRecorder, names: set[str]) -> Counted:
    found = recorder.drain()
    return {name: found[name] for name in names if found.get(name)}


# Loads.


def is_corrupt(writer: Replica, store: Any) -> None:
    payload = bytearray(store.get(writer.path(1)))
    payload[-1] ^= 1
    store.put(writer.path(1), payload)


FAILED = {"loads": 1.0, "load_failures": 1.0}


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda *_: None, {"loads": 1}),
        (is_corrupt, {**FAILED, "load_failed_blocks": 2 * BLOCKS, "load_corrupt": 1}),
        (
            lambda writer, store: store.delete(writer.path(1)),
            {**FAILED, "load_failed_blocks": 2 * BLOCKS, "load_ghosts": 1},
        ),
    ],
)
def test_a_load_is_counted_by_how_it_ended(
    spoil: Callable[[Replica, Any], None], expected: Counted
) -> None:
    store, index = MemoryStore(), MemoryIndex()
    writer, reader = Replica(store, index, seed=1), Replica(store, index, seed=2, threads=1)
    writer.save(range(CHUNKS))
    spoil(writer, store)
    reader.load(range(CHUNKS), first_block=9)
    wait_until(lambda: reader.leased == 0)
    found = counted(reader.recorder, LOADS)
    found.pop("load_given_up", None)  # of a later chunk, if it was on its way
    assert found == expected


def test_a_store_that_fails_and_a_full_queue_are_counted_as_such() -> None:
    store = FlakyStore(MemoryStore())
    index = MemoryIndex()
    writer, reader = Replica(store, index, seed=1), Replica(store, index, seed=2, queue_max=1)
    writer.save(range(CHUNKS))
    store.fail_until_mended(StoreUnavailable("gone"))
    reader.load(range(1), first_block=9)
    down = counted(reader.recorder, LOADS)
    assert down == {**FAILED, "load_failed_blocks": BLOCKS, "load_errors": 1}
    store.mend()
    reader.load(range(CHUNKS), first_block=9)
    full = counted(reader.recorder, LOADS)
    assert full == {**FAILED, "load_failed_blocks": 2 * BLOCKS, "load_refused": 2}


def test_a_load_that_is_late_is_a_failure_and_no_error() -> None:
    store, index = StuckStore(), MemoryIndex()
    reader = Replica(store, index, seed=1, deadline_s=0.05)
    reader.save(range(1))
    reader.load(range(1), first_block=9)
    store.go.set()
    wait_until(lambda: reader.leased == 0)
    found = counted(reader.recorder, LOADS)
    assert found == {**FAILED, "load_failed_blocks": BLOCKS, "load_given_up": 1}


def test_a_request_that_ends_while_its_prefix_loads_is_no_failure() -> None:
    """Such as one whose client has left. The store is healthy, and nothing is recomputed."""
    store, index, recorder = StuckStore(), MemoryIndex(), MemoryRecorder()
    writer = Replica(store, index, seed=1)
    writer.save(range(CHUNKS))
    worker = worker_side(store, index, recorder=recorder)
    worker.start_loads(StepPlan(loads=(writer.load_plan(range(CHUNKS), 9),)))
    assert store.asked.wait(PATIENCE_S)
    assert worker.results(StepPlan(), {"r"}).received == {"r"}
    assert worker.take_failed_blocks() == set(range(9, 9 + CHUNKS * BLOCKS))
    store.go.set()
    worker.close()
    found = counted(recorder, LOADS)
    assert found.pop("load_given_up", 0) <= CHUNKS
    assert found == {"loads": 1}


def test_a_load_that_failed_before_its_request_ended_is_a_failure() -> None:
    index, recorder = MemoryIndex(), MemoryRecorder()
    store = FlakyStore(MemoryStore())
    writer = Replica(store, index, seed=1)
    writer.save(range(CHUNKS))
    worker = worker_side(store, index, recorder=recorder)
    store.fail_until_mended(StoreUnavailable("down"))
    worker.start_loads(StepPlan(loads=(writer.load_plan(range(CHUNKS), 9),)))
    wait_until(lambda: worker.loads.in_flight == 0)
    assert worker.results(StepPlan(), {"r"}).received == {"r"}
    worker.close()
    assert counted(recorder, {"loads", "load_failures"}) == {"loads": 1, "load_failures": 1}


# Queries and hits. Two of the prompt's chunks of 32 tokens are stored.

STORED = 64
HIT = {"queries": 1, "query_tokens": 70, "hits": 1, "hit_tokens": STORED, "hit_bulk_tokens": STORED}


@pytest.mark.parametrize(
    ("asked", "settings", "expected"),
    [
        ({}, {}, HIT),
        ({"tokens": [8] * 70}, {}, {"queries": 1, "query_tokens": 70}),
        ({"skip_reading_prefix_cache": True}, {}, {}),
        ({"resumable": True}, {}, {}),
        ({"kv_transfer_params": {"kv_load_tiers": [{"medium": "CPU"}]}}, {}, {}),
        ({}, {"roles": {"loads": False}}, {}),
        ({}, {"admission": "never"}, {"queries": 1, "query_tokens": 70}),
    ],
    ids=["hit", "miss", "computes all", "session", "other tier", "producer", "admission"],
)
def test_queries_are_the_requests_that_may_load(
    asked: dict[str, Any], settings: dict[str, Any], expected: Counted
) -> None:
    publish_prompt(index := MemoryIndex(), [7] * 70)
    recorder = MemoryRecorder()
    side = scheduler_side(index, recorder=recorder, load_mode="async", **settings)
    one = request(**({"tokens": [7] * 70} | asked))
    tokens, _ = ask(side, one)
    side.plan_load(one, ([1, 2, 3],), tokens or 0)
    side.plan_load(one, ([1, 2, 3],), 0)  # as after a load between steps
    side.close()
    assert counted(recorder, QUERIES) == expected
