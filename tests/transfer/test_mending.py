"""A payload that has rotted is replaced by the process that found it, whatever happens between."""

from objkv.errors import StoreUnavailable
from objkv.stores.memory import MemoryStore
from objkv.testing.flaky import FlakyStore
from tests.transfer.world import HASHES, NAMESPACE, Replica, stores


def test_a_corrupt_payload_is_replaced_also_if_the_first_save_after_it_failed() -> None:
    inner, index = stores()
    assert isinstance(inner, MemoryStore)
    store = FlakyStore(inner)
    replica = Replica(store, index, seed=1)
    replica.save(range(1))
    payload = bytearray(inner.get(replica.path(0)) or b"")
    payload[-1] ^= 1
    inner.put(replica.path(0), payload)
    assert replica.load(range(1), first_block=9).failed
    store.fail_next(StoreUnavailable("gone"))
    replica.save(range(1))
    replica.save(range(1))
    assert not replica.load(range(1), first_block=20).failed
    replica.close()


def spoil(store: MemoryStore, path: str) -> None:
    payload = bytearray(store.get(path) or b"")
    payload[-1] ^= 1
    store.put(path, payload)


def promises_hot(replica: Replica) -> bool:
    (record,) = replica.index.lookup(NAMESPACE, [HASHES[0]])
    return record is not None and all(shard.hot for shard in record.shards.values())


def test_a_hot_copy_that_has_rotted_is_replaced_by_who_found_it() -> None:
    (store, index), hot = stores(), MemoryStore()
    replica, other = (Replica(store, index, seed=i, hot=hot) for i in (1, 2))
    replica.save(range(1))
    path = replica.path(0)
    spoil(hot, path)
    assert replica.load(range(1), first_block=9).failed
    assert index.lookup(NAMESPACE, [HASHES[0]]) == [None]
    replica.save(range(1))
    assert promises_hot(replica)
    assert hot.get(path) == store.get(path)
    for loading in (replica, other):
        assert not loading.load(range(1), first_block=9).failed
        assert loading.recorder.value("hot_hits") >= 1
    replica.close()
    other.close()


def test_a_hot_copy_that_has_rotted_costs_one_miss_also_where_nobody_who_saves_has_seen_it() -> (
    None
):
    """The next one who saves the chunk finds both copies, and promises them as they are."""
    (store, index), hot = stores(), MemoryStore()
    reader, first, second = (Replica(store, index, seed=i, hot=hot) for i in (1, 2, 3))
    first.save(range(1))
    spoil(hot, first.path(0))
    assert reader.load(range(1), first_block=9).failed
    second.save(range(1))
    assert second.recorder.value("save_existed") == 1
    for _ in range(3):
        assert promises_hot(reader)
        assert not reader.load(range(1), first_block=9).failed
    for replica in (reader, first, second):
        replica.close()
