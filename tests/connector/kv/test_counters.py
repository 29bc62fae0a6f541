"""What raises each counter of loads, failures, queries and hits, and what does not."""

from threading import Event
from typing import Any

import pytest

from objkv.connector.counters import COUNTERS
from objkv.connector.kv.metadata import StepPlan
from objkv.errors import StoreUnavailable
from objkv.telemetry import MemoryRecorder
from tests.contracts.flaky import FlakyStore
from tests.contracts.memory_index import MemoryIndex
from tests.contracts.memory_store import MemoryStore
from tests.support.paged_cache import BLOCKS, Replica, wait_until
from tests.support.sides import ask, publish_prompt, request, scheduler_side, worker_side

QUERIES = {name for name in COUNTERS if name.startswith(("quer", "hit", "local_hit"))}
CHUNKS = 3
Counted = dict[str, float]


def counted(recorder: MemoryRecorder, names: set[str]) -> Counted:
    found = recorder.drain()
    return {name: found[name] for name in names if found.get(name)}


# Loads.


@pytest.mark.parametrize("fails", [False, True])
def test_a_load_of_a_request_that_ends_has_failed_only_if_it_had_before(*, fails: bool) -> None:
    """Its client may have left: the store is healthy, and nothing is recomputed."""
    store, recorder, gate = FlakyStore(MemoryStore()), MemoryRecorder(), Event()
    writer = Replica(store, index := MemoryIndex(), seed=1)
    writer.save(range(CHUNKS))
    worker = worker_side(store, index, recorder=recorder)
    store.arrived.clear()
    if fails:
        store.fail_until_mended(StoreUnavailable("down"))
    else:
        store.hold(gate)
    worker.start_loads(StepPlan(loads=(writer.load_plan(range(CHUNKS), 9),)))
    wait_until(lambda: worker.loader.in_flight == 0 if fails else store.arrived.is_set())
    assert worker.results(StepPlan(), {"r"}).finished_recving == {"r"}
    assert worker.take_failed_blocks() == set(range(9, 9 + CHUNKS * BLOCKS))
    gate.set()
    worker.close()
    failures = {"load_failures": 1.0, "load_failed_blocks": CHUNKS * BLOCKS}
    assert counted(recorder, {"loads", *failures}) == {"loads": 1.0} | (failures if fails else {})


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
        ({}, {"roles": {"loads": False}}, {}),
        ({}, {"admission": "never"}, {"queries": 1, "query_tokens": 70}),
    ],
    ids=["hit", "miss", "computes all", "session", "producer", "admission"],
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
    assert counted(recorder, QUERIES) == expected
