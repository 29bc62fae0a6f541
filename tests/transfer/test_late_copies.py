"""Lanes whose copies pass later than they are given, as on a GPU."""

from collections.abc import Sequence
from dataclasses import replace
from threading import Event, Thread

import pytest
import torch

from objkv.codec.payload import read_header
from objkv.errors import StoreUnavailable
from objkv.index.memory import MemoryIndex
from objkv.stores.base import Arrived
from objkv.stores.memory import MemoryStore
from objkv.transfer.lanes import HostBlocks, HostLane
from objkv.transfer.plan import LoadOutcome
from tests.transfer.arriving import PiecewiseStore
from tests.transfer.lazy import LazyLane
from tests.transfer.paged_cache import same_blocks
from tests.transfer.world import IN_SPANS, PATIENCE_S, Replica, stores, wait_until

MINE, THEIRS = [9, 10], [1, 2]


class LateMark:
    def __init__(self, lane: "LateLane") -> None:
        self._lane = lane

    def done(self) -> bool:
        return self._lane.passed.is_set()

    def wait(self) -> None:
        self._lane.waited.set()
        assert self._lane.passed.wait(PATIENCE_S)

    def hold_compute(self) -> None:
        self._lane.held += 1


class LateLane(HostLane):
    """Its copies pass when the test says so."""

    def __init__(self) -> None:
        self.passed = Event()
        self.waited = Event()
        self.held = 0
        self.places: list[int] = []

    def place(self, block_ids: Sequence[int]) -> HostBlocks:
        self.places.append(len(block_ids))
        return super().place(block_ids)

    def mark(self) -> LateMark:
        return LateMark(self)


def replica_of(lane: LateLane) -> Replica:
    replica = Replica(PiecewiseStore(), MemoryIndex(), seed=1, lane=lambda: lane)
    replica.save(range(1))
    return replica


def test_between_steps_a_load_is_over_when_its_copies_have_passed_and_so_are_its_slabs() -> None:
    lane = LateLane()
    replica = replica_of(lane)
    replica.loader.submit(replica.load_plan(range(1), MINE[0]))
    assert lane.waited.wait(PATIENCE_S)
    assert replica.loader.take_finished(sync=False) == []
    assert replica.load_slabs.leased == 1
    lane.passed.set()
    assert not replica.outcome().failed
    wait_until(lambda: replica.load_slabs.leased == 0)
    assert same_blocks(replica.caches, MINE, replica.caches, THEIRS)
    replica.close()


def test_within_a_step_the_forward_thread_waits_for_no_copy_and_slabs_do() -> None:
    lane = LateLane()
    replica = replica_of(lane)
    replica.loader.submit(replica.load_plan(range(1), MINE[0], sync=True))
    for layer in range(3):
        replica.loader.wait_layer(0, layer)
        assert lane.held == layer + 1
    (outcome,) = replica.loader.take_finished(sync=True)
    assert not outcome.failed
    assert lane.held == 4, "what comes after the step waits for all of it"
    assert not lane.passed.is_set()
    assert replica.load_slabs.leased == 1
    lane.passed.set()
    wait_until(lambda: replica.load_slabs.leased == 0)
    replica.close()


def test_a_load_that_is_cancelled_is_told_when_its_copies_have_passed() -> None:
    """Its blocks go to somebody else with that."""
    lane = LateLane()
    replica = replica_of(lane)
    replica.loader.submit(replica.load_plan(range(1), MINE[0]))
    assert lane.waited.wait(PATIENCE_S)
    lane.waited.clear()
    replica.loader.cancel("r")
    told: list[LoadOutcome] = []
    telling = Thread(target=lambda: told.extend(replica.loader.take_finished(sync=False)))
    telling.start()
    assert lane.waited.wait(PATIENCE_S)
    assert not told
    lane.passed.set()
    telling.join()
    assert told[0].failed_blocks == set(MINE)
    replica.close()


def test_block_ids_are_placed_once_for_all_layers_of_a_move() -> None:
    lane = LateLane()
    lane.passed.set()
    replica = replica_of(lane)
    del lane.places[:]
    assert not replica.load(range(1), first_block=MINE[0]).failed
    assert lane.places == [2]
    replica.close()


class BreaksOff(MemoryStore):
    """Has given all but the last bytes when it fails."""

    def get_into(
        self, key: str, buffer: memoryview, arrived: Arrived | None = None, start: int | None = None
    ) -> int | None:
        start = start or 0
        part = (self.get(key) or b"")[start : start + len(buffer) - 1][:-1]
        buffer[: len(part)] = part
        assert arrived is not None
        arrived(len(part))
        raise StoreUnavailable("gone shortly before the end")


@pytest.mark.parametrize("sync", [False, True])
def test_what_bulk_writes_over_a_hot_copy_that_broke_off_is_not_copied_unverified(
    *, sync: bool
) -> None:
    """Verified layers of the hot copy may still be on their way from the slab to the blocks."""
    (store, index), hot = stores(), BreaksOff()
    replica = Replica(store, index, seed=1, hot=hot, lane=LazyLane, cuts=IN_SPANS)
    replica.save(range(1))
    path = replica.path(0)
    payload = bytearray(store.get(path) or b"")
    hot.put(path, payload)
    payload[read_header(payload).frames[0].offset] ^= 1
    store.put(path, payload)
    before = replica.snapshot()
    (load,) = (plan := replica.load_plan(range(1), MINE[0], sync=sync)).moves
    records = tuple((field, replace(record, hot=True)) for field, record in load.records)
    replica.loader.submit(replace(plan, moves=(replace(load, records=records),)))
    (outcome,) = replica.loader.take_finished(sync=True) if sync else [replica.outcome()]
    replica.close()
    if not outcome.failed:
        assert same_blocks(replica.caches, MINE, replica.caches, THEIRS)
    for now, then in zip(replica.caches, before, strict=True):
        for mine, theirs in zip(MINE, THEIRS, strict=True):
            assert torch.equal(now[mine], now[theirs]) or torch.equal(now[mine], then[mine])
