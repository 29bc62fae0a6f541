"""What one replica saves another loads, byte for byte, in time; anything else is a miss."""

from collections.abc import Callable
from dataclasses import replace
from threading import Event
from typing import Any

import numpy as np
import pytest

from objkv.agent import client
from objkv.agent.fill import PartPolicy
from objkv.keys.identity import GroupIdentity
from objkv.stores.base import Arrived
from objkv.transfer.layouts import PayloadLayout
from objkv.transfer.loading import loader as module
from objkv.transfer.loading.loader import LoadJob
from objkv.transfer.registration import RegistrationWindows
from tests.contracts.clock import ManualClock
from tests.contracts.memory_index import MemoryIndex
from tests.support.device import ON_HOST
from tests.support.paged_cache import BLOCKS, IN_PARTS, PiecewiseStore, Replica, same_blocks, stores
from tests.support.waiting import PATIENCE_S, at_once, wait_until
from tests.transfer.test_saver import HungLane, HungMark


def watched(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[..., Any]
) -> list[Any]:
    """Return the list of what is noted of each call."""
    notes, call = list[Any](), getattr(owner, name)

    def noted(*given: Any, **named: Any) -> Any:
        notes.append(note(*given, **named))
        return call(*given, **named)

    monkeypatch.setattr(owner, name, noted)
    return notes


class StuckStore(PiecewiseStore):
    """Gets hang until ``go``; with ``gives_first`` not those that begin with a payload's first
    byte."""

    def __init__(self, *, gives_first: bool = False) -> None:
        super().__init__()
        self._gives_first, self.go = gives_first, Event()

    def get_into(
        self, key: str, buffer: memoryview, arrived: Arrived | None = None, start: int | None = None
    ) -> int | None:
        if start or not self._gives_first:
            assert self.go.wait(PATIENCE_S)
        return super().get_into(key, buffer, arrived, start)


def test_steps_and_loads_between_them_end_at_their_own_deadlines_and_write_nothing_later() -> None:
    store, clock = StuckStore(), ManualClock()
    limits = {"step_deadline_s": 5.0, "deadline_s": 600.0}
    replica = Replica(store, MemoryIndex(), seed=1, clock=clock, **limits)
    replica.save(range(3))
    before = replica.snapshot()
    for name, chunk, sync in (("step", 0, True), ("late", 1, False)):
        plan = replica.load_plan(range(chunk, chunk + 1), 9 + 2 * chunk, sync=sync)
        replica.loader.submit(replace(plan, request_id=name))
    clock.advance(5.0)
    try:
        at_once(lambda: replica.loader.wait_layer(0, 0))
        (step,) = at_once(lambda: replica.loader.take_finished(sync=True))
    except AssertionError:
        store.go.set()  # so that no thread is waited for
        replica.loader.cancel("step")
        raise
    assert step.failed_blocks == {9, 10}
    assert not step.rejected
    assert replica.loader.take_finished(sync=False) == []
    clock.advance(595.0)
    store.go.set()
    wait_until(lambda: replica.leased == 0)
    assert replica.outcome().failed_blocks == {11, 12}
    assert same_blocks(before, range(32), replica.caches, range(32))
    assert not replica.load(range(2), first_block=20).failed, "they are of use to the next"


def test_a_step_does_not_wait_for_room_that_slow_loads_have_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "WINDOW", 2)
    store = StuckStore()
    replica = Replica(store, MemoryIndex(), seed=1)
    replica.save(range(3))
    store.go.set()
    assert not replica.load(range(2, 3), 20).failed, "it is in memory now"
    store.go.clear()
    replica.loader.submit(replace(replica.load_plan(range(2), 9), request_id="slow"))
    wait_until(lambda: replica.loader.link.leased == 2)
    replica.loader.submit(replica.load_plan(range(2, 3), 20, sync=True))
    try:
        (step,) = at_once(lambda: replica.loader.take_finished(sync=True))
    finally:
        store.go.set()
    assert not step.failed
    assert not replica.outcome().failed


@pytest.mark.parametrize("sync", [False, True])
def test_a_reader_that_verifies_looks_at_each_frame_once_however_few_slabs_there_are(
    monkeypatch: pytest.MonkeyPatch, *, sync: bool
) -> None:
    store, index = stores()
    writer = Replica(store, index, seed=1)
    reader = Replica(store, index, seed=2, slabs=1)
    writer.save(range(4))
    assert not reader.load(range(4), first_block=9).failed, "all are in memory now"
    seen = watched(monkeypatch, module, "frame_pages", lambda header, index, *_: index)
    monkeypatch.setattr(
        RegistrationWindows, "are_readable", lambda _, starts, nbytes: np.zeros(len(starts), bool)
    )
    monkeypatch.setattr(reader.loader, "_verify", True)
    assert not reader.load(range(4), first_block=9, sync=sync).failed
    assert sorted(seen) == sorted(4 * list(range(len(reader.caches))))
    ids = range(4 * BLOCKS)
    assert same_blocks(writer.caches, [1 + i for i in ids], reader.caches, [9 + i for i in ids])


# Layer 0 of all chunks comes first, and is usable while later layers are still on the wire.


LAYERED_CHUNKS = 4
LAYERED = 8
LAYERED_GROUP = GroupIdentity(
    "full", None, tuple(f"l{i}" for i in range(LAYERED)), heads=4, content=64, block_size=32
)
ALL_THEIRS = [1 + i for i in range(LAYERED_CHUNKS * BLOCKS)]
ALL_MINE = [9 + i for i in range(LAYERED_CHUNKS * BLOCKS)]


@pytest.mark.parametrize("codec", ["none", "blosc"])
def test_layer_0_of_all_chunks_is_usable_before_the_last_layer_of_any_has_arrived(
    codec: str,
) -> None:
    store, index = StuckStore(gives_first=True), MemoryIndex()
    writer = Replica(store, index, seed=1, group=LAYERED_GROUP, codec=codec)
    for pages in writer.caches:
        pages.round_()  # compressible
    reader = Replica(store, index, seed=2, group=LAYERED_GROUP, part_policy=IN_PARTS)
    writer.save(range(LAYERED_CHUNKS))
    before = reader.snapshot()
    reader.loader.submit(reader.load_plan(range(LAYERED_CHUNKS), ALL_MINE[0], sync=True))
    for layer in range(LAYERED // IN_PARTS.parts_max):
        reader.loader.wait_layer(0, layer)
        assert same_blocks([writer.caches[layer]], ALL_THEIRS, [reader.caches[layer]], ALL_MINE)
    assert not store.go.is_set()
    assert same_blocks(before[-1:], ALL_MINE, reader.caches[-1:], ALL_MINE)
    store.go.set()
    (outcome,) = reader.loader.take_finished(sync=True)
    assert not outcome.failed
    assert same_blocks(writer.caches, ALL_THEIRS, reader.caches, ALL_MINE)
    wait_until(lambda: reader.leased == 0)


@ON_HOST
def test_the_lease_of_a_payload_that_failed_ends_after_the_copies_of_its_first_layers() -> None:
    store, index = StuckStore(gives_first=True), MemoryIndex()
    has_ended, looks = Event(), list[int]()
    lane = HungLane(HungMark(lambda: looks.append(1) or has_ended.is_set()))
    replica = Replica(store, index, seed=1, group=LAYERED_GROUP, part_policy=IN_PARTS, lane=lane)
    replica.save(range(1))
    replica.loader.submit(replica.load_plan(range(1), ALL_MINE[0], sync=True))
    replica.loader.wait_layer(0, 0)
    assert same_blocks(replica.caches[:1], ALL_THEIRS[:2], replica.caches[:1], ALL_MINE[:2])
    store.delete(replica.path(0))
    store.go.set()
    (outcome,) = replica.loader.take_finished(sync=True)
    assert outcome.failed_blocks == set(ALL_MINE[:BLOCKS])
    assert len(outcome.rejected) == 1
    wait_until(lambda: len(looks) > 4 or not replica.leased)
    leased = replica.leased
    has_ended.set()  # before anything fails: the lane is awaited when the test ends
    assert leased == 1
    wait_until(lambda: not replica.leased)


@ON_HOST
def test_the_lease_of_a_miss_does_not_wait_for_the_copies_of_another_load() -> None:
    has_ended = Event()
    replica = Replica(*stores(), seed=1, lane=HungLane(HungMark(has_ended.is_set)))
    replica.save(range(1))
    replica.loader.submit(replace(replica.load_plan(range(1), ALL_MINE[0]), request_id="hung"))
    wait_until(lambda: replica.leased == 1 and replica.recorder.value("load_bytes"))
    replica.loader.submit(replica.load_plan(range(1, 2), ALL_MINE[0]))
    wait_until(lambda: replica.recorder.value("load_ghosts"))
    wait_until(lambda: replica.leased == 1)
    has_ended.set()
    wait_until(lambda: not replica.leased)


def test_a_step_gets_the_first_layers_of_all_payloads_before_the_last_of_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_SLICE_BYTES", 1)
    store, index = stores()
    replica = Replica(store, index, seed=1, group=LAYERED_GROUP)
    replica.save(range(LAYERED_CHUNKS))
    assert not replica.load(range(LAYERED_CHUNKS), ALL_MINE[0]).failed  # they are in memory now
    wait_until(lambda: not replica.leased)  # otherwise there is no room for all of them
    seen = watched(
        monkeypatch, PayloadLayout, "scatter", lambda *given: (given[2].start, len(given[4]))
    )
    assert not replica.load(range(LAYERED_CHUNKS), ALL_MINE[0], sync=True).failed
    assert [row for row, _ in seen] == sorted(row for row, _ in seen)
    assert sum(count for _, count in seen) == LAYERED * LAYERED_CHUNKS
    assert same_blocks(replica.caches, ALL_THEIRS, replica.caches, ALL_MINE)


@pytest.mark.parametrize(
    ("sync", "part_policy", "requests"),
    [
        (True, PartPolicy(parts_max=4, part_bytes_min=1), 4),
        (True, PartPolicy(parts_max=2, part_bytes_min=1), 2),
        (True, PartPolicy(), 1),  # each request is paid for, and these payloads are small
        (False, PartPolicy(parts_max=4, part_bytes_min=1), 1),  # nobody waits for a layer
    ],
)
def test_how_many_requests_a_payload_costs(
    *, sync: bool, part_policy: PartPolicy, requests: int
) -> None:
    store, index = PiecewiseStore(), MemoryIndex()
    replica = Replica(store, index, seed=1, group=LAYERED_GROUP, part_policy=part_policy)
    replica.save(range(1))
    del store.requests[:]
    assert not replica.load(range(1), first_block=ALL_MINE[0], sync=sync).failed
    assert len(store.requests) == requests
    assert len(set(store.requests)) == requests


@ON_HOST
def test_closing_waits_once_for_a_device_that_hangs_and_not_for_each_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has_ended, (store, index) = Event(), stores()
    lane = HungLane(HungMark(has_ended.is_set))
    replica = Replica(store, index, seed=1, lane=lane, join_s=0.01)
    replica.save(range(1))
    for name in ("one", "other"):
        replica.loader.submit(replace(replica.load_plan(range(1), 9), request_id=name))
    wait_until(lambda: replica.loader.in_flight == 0)
    waits = watched(monkeypatch, LoadJob, "close", lambda job, seconds: seconds)
    monkeypatch.setattr(module, "_COPIES_S", 0.01)
    replica.loader.close()
    assert len(waits) == 2
    assert waits[1] == 0.0
    has_ended.set()
