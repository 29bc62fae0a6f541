"""What raises each counter of loads, failures, queries and hits, and what does not."""

from collections.abc import Callable
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

LOADS = {name for name in COUNTERS if name == "loads" or name.startswith("load_")} - {"load_bytes"}
QUERIES = {name for name in COUNTERS if name.startswith(("quer", "hit", "local_hit"))}
CHUNKS = 3
Counted = dict[str, float]
LATER = Event()


def counted(recorder: MemoryRecorder, names: set[str]) -> Counted:
    found = recorder.drain()
    return {name: found[name] for name in names if found.get(name)}


# Loads.


def is_corrupt(writer: Replica, store: FlakyStore) -> None:
    payload = bytearray(store.get(writer.path(1)) or b"")
    payload[-1] ^= 1
    store.put(writer.path(1), payload)


def is_down(_writer: Replica, store: FlakyStore) -> None:
    store.fail_until_mended(StoreUnavailable("down"))


def failed(chunks: int, **why: int) -> Counted:
    return {"loads": 1.0, "load_failures": 1.0, "load_failed_blocks": chunks * BLOCKS, **why}


@pytest.mark.parametrize(
    ("spoil", "chunks", "options", "expected"),
    [
        (lambda *_: None, CHUNKS, {}, {"loads": 1}),
        (is_corrupt, CHUNKS, {}, failed(2, load_corrupt=1)),
        (lambda w, store: store.delete(w.path(1)), CHUNKS, {}, failed(2, load_ghosts=1)),
        (is_down, 1, {}, failed(1, load_errors=1)),
        (lambda *_: None, CHUNKS, {"queue_max": 1}, failed(2, load_refused=2)),
        (lambda _, store: store.hold(LATER), 1, {"deadline_s": 0.05}, failed(1, load_given_up=1)),
    ],
    ids=["whole", "corrupt", "ghost", "down", "full queue", "late"],
)
def test_a_load_is_counted_by_how_it_ended(
    spoil: Callable[[Replica, Any], None], chunks: int, options: dict[str, Any], expected: Counted
) -> None:
    LATER.clear()
    store, index = FlakyStore(MemoryStore()), MemoryIndex()
    writer = Replica(store, index, seed=1)
    reader = Replica(store, index, seed=2, threads=1, **options)
    writer.save(range(CHUNKS))
    spoil(writer, store)
    reader.load(range(chunks), first_block=9)
    LATER.set()
    wait_until(lambda: reader.leased == 0)
    found = counted(reader.recorder, LOADS)
    if chunks > 1:
        found.pop("load_given_up", None)  # of a later chunk, if it was on its way
    assert found == expected


@pytest.mark.parametrize("fails", [False, True])
def test_a_load_of_a_request_that_ends_has_failed_only_if_it_had_before(*, fails: bool) -> None:
    """Its client may have left: the store is healthy, and nothing is recomputed."""
    store, recorder, gate = FlakyStore(MemoryStore()), MemoryRecorder(), Event()
    writer = Replica(store, index := MemoryIndex(), seed=1)
    writer.save(range(CHUNKS))
    worker = worker_side(store, index, recorder=recorder)
    store.arrived.clear()
    if fails:
        is_down(writer, store)
    else:
        store.hold(gate)
    worker.start_loads(StepPlan(loads=(writer.load_plan(range(CHUNKS), 9),)))
    wait_until(lambda: worker.loader.in_flight == 0 if fails else store.arrived.is_set())
    assert worker.results(StepPlan(), {"r"}).finished_recving == {"r"}
    assert worker.take_failed_blocks() == set(range(9, 9 + CHUNKS * BLOCKS))
    gate.set()
    worker.close()
    found = counted(recorder, {"loads", "load_failures", "load_failed_blocks"})
    assert found == (failed(CHUNKS) if fails else {"loads": 1})


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
