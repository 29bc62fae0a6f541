"""Above the quota nothing is saved, nothing waits, and what is stored is still loaded."""

from objkv.index.memory import MemoryIndex
from objkv.stores.memory import MemoryStore
from tests.transfer.world import NAMESPACE, Replica


class Switch:
    """Room as a test says."""

    def __init__(self) -> None:
        self.is_there = True
        self.added = 0
        self.is_closed = False

    def has_room(self) -> bool:
        return self.is_there

    def add(self, nbytes: int) -> None:
        self.added += nbytes

    def close(self) -> None:
        self.is_closed = True


def test_above_the_quota_nothing_is_saved_and_no_slab_is_held() -> None:
    index, room = MemoryIndex(), Switch()
    replica = Replica(MemoryStore(), index, seed=1)
    replica.cache._room = room
    assert replica.save(range(2)) == set()
    (usage,) = index.usage()
    assert (usage.namespace, usage.nbytes) == (NAMESPACE, room.added)
    room.is_there = False
    assert replica.save(range(4)) == set(), "dropped saves would be planned again at once"
    assert replica.recorder.value("save_over_quota") == 4
    assert index.usage()[0].nbytes == room.added
    assert replica.saver.left_device("r")
    outcome = replica.load(range(2), 10)
    assert not outcome.failed
    room.is_there = True
    replica.save(range(4))
    assert index.usage()[0].payloads == 4
    replica.cache.close(1)
    assert room.is_closed
