"""A payload that has rotted is replaced by the process that found it, whatever happens between."""

from objkv.errors import StoreUnavailable
from objkv.stores.memory import MemoryStore
from objkv.testing.flaky import FlakyStore
from tests.transfer.world import Replica, stores


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
