"""What loads and saves do about a store that hangs, or that is asked too much."""

import math
from threading import Event

import pytest

from objkv.errors import StoreBusy
from objkv.index.memory import MemoryIndex
from objkv.net.deadline import ends_s
from objkv.stores.base import Arrived, Buffer
from objkv.stores.memory import MemoryStore
from objkv.testing.flaky import FlakyStore
from tests.transfer.world import PATIENCE_S, Replica, wait_until


class HangingStore(MemoryStore):
    """Gets return when the gate opens, whatever their deadline: as on a network file system whose
    server is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Event()
        self.gate.set()
        self.asked = 0

    def get_into(
        self, key: str, buffer: memoryview, arrived: Arrived | None = None, start: int | None = None
    ) -> int | None:
        self.asked += 1
        assert self.gate.wait(PATIENCE_S)
        return super().get_into(key, buffer, arrived, start)


@pytest.mark.parametrize("sync", [True, False])
def test_when_all_threads_hang_loads_fail_at_once_and_none_is_queued(sync: bool) -> None:
    store = HangingStore()
    deadlines = {"deadline_s": 0.05, "step_deadline_s": 0.05}
    replica = Replica(store, MemoryIndex(), seed=1, join_s=0.01, **deadlines)
    replica.save(range(4))
    store.gate.clear()
    assert replica.load(range(4), 9, sync=sync).failed  # at its deadline
    wait_until(lambda: store.asked == 2)  # each thread hangs at one
    wait_until(replica.loader._is_stuck)
    assert replica.load(range(4), 9, sync=sync).failed
    assert replica.recorder.value("load_refused") == 4
    assert store.asked == 2
    replica.close()  # does not wait for them
    store.gate.set()


def test_threads_that_come_back_load_again() -> None:
    store = HangingStore()
    replica = Replica(store, MemoryIndex(), seed=1, deadline_s=0.05, step_deadline_s=0.05)
    replica.save(range(4))
    store.gate.clear()
    assert replica.load(range(4), 9).failed
    wait_until(replica.loader._is_stuck)
    store.gate.set()
    wait_until(lambda: not replica.loader._is_stuck())
    assert replica.load_slabs.leased == 0
    replica.close()


def test_the_store_is_told_how_long_a_load_may_take() -> None:
    told = []

    class Asked(MemoryStore):
        def get_into(
            self,
            key: str,
            buffer: memoryview,
            arrived: Arrived | None = None,
            start: int | None = None,
        ) -> int | None:
            told.append(ends_s())
            return super().get_into(key, buffer, arrived, start)

    replica = Replica(Asked(), MemoryIndex(), seed=1)
    replica.save(range(1))
    replica.load(range(1), 9)
    assert told[0] < math.inf
    assert ends_s() == math.inf
    replica.close()


def test_saves_give_way_while_loads_go_on() -> None:
    class Busy(MemoryStore):
        is_busy = False

        def put_if_absent(self, key: str, value: Buffer) -> bool:
            if self.is_busy:
                raise StoreBusy("503")
            return super().put_if_absent(key, value)

    store = Busy()
    replica = Replica(FlakyStore(store), MemoryIndex(), seed=1)
    replica.save(range(1))
    store.is_busy = True
    replica.save(range(1, 2))
    wait_until(lambda: replica.recorder.value("saves_shed") == 1)
    crew = replica.saver._pool
    crew._shed_until = math.inf
    store.is_busy = False
    assert replica.save(range(2, 4)) == set()  # no drop: nobody plans them again
    assert replica.recorder.value("saves_shed") == 3
    assert replica.save_slabs.leased == 0
    assert not replica.load(range(1), 9).failed
    crew._shed_until = -math.inf
    replica.save(range(1, 4))
    assert replica.recorder.value("saves") == 4
    replica.close()
