"""What the model is waiting for is fetched before what it is not waiting for."""

from dataclasses import replace
from threading import Event

from objkv.index.memory import MemoryIndex
from objkv.stores.base import Arrived
from objkv.stores.memory import MemoryStore
from tests.transfer.world import PATIENCE_S, Replica, wait_until


class GatedStore(MemoryStore):
    """Each payload is answered when its gate is open; remembers which were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.gates: dict[str, Event] = {}
        self.asked: list[str] = []

    def get_into(
        self, key: str, buffer: memoryview, arrived: Arrived | None = None, start: int | None = None
    ) -> int | None:
        self.asked.append(key)
        assert self.gates[key].wait(2 * PATIENCE_S)
        return super().get_into(key, buffer, arrived, start)


def test_a_load_within_the_step_does_not_wait_behind_loads_between_steps() -> None:
    store = GatedStore()
    replica = Replica(store, MemoryIndex(), seed=1)
    replica.save(range(4))
    first, rest = Event(), Event()
    for chunk in range(4):
        store.gates[replica.path(chunk)] = first if chunk < 2 else rest
    replica.loader.submit(replica.load_plan(range(4), 9))
    wait_until(lambda: len(store.asked) == 2)  # one a thread
    within = replace(replica.load_plan(range(2), 20, sync=True), request_id="within")
    replica.loader.submit(within)
    first.set()
    (outcome,) = replica.loader.take_finished(sync=True)
    rest.set()
    assert not outcome.failed
    assert not replica.outcome().failed
    replica.close()
