"""Prompts that arrive together share chunks that nobody knows to be stored: each is saved once."""

from collections.abc import Iterator
from threading import Event

import pytest

from objkv.cache.chunks import KEEP_S, InFlightSaves
from objkv.errors import StoreUnavailable
from objkv.index.memory import MemoryIndex
from objkv.keys.prefix import token_digest
from objkv.stores.base import Buffer
from objkv.stores.memory import MemoryStore
from objkv.testing.clock import ManualClock
from objkv.transfer.plan import SaveMove, SavePlan
from tests.transfer.world import CHUNK, NAMESPACE, PATIENCE_S, TOKENS, Replica, stores, wait_until


class SlowStore(MemoryStore):
    """Counts puts, which wait until ``go`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.go = Event()
        self.puts = 0

    def put_if_absent(self, key: str, value: Buffer) -> bool:
        self.puts += 1
        assert self.go.wait(PATIENCE_S)
        return super().put_if_absent(key, value)


@pytest.fixture
def store() -> SlowStore:
    return SlowStore()


@pytest.fixture
def replica(store: SlowStore) -> Iterator[Replica]:
    replica = Replica(store, MemoryIndex(), seed=1, slabs=1)
    # What was saved is remembered, however long a busy machine takes.
    replica.cache._saves = InFlightSaves(clock=ManualClock())
    yield replica
    replica.close()


def gather(replica: Replica, request: str) -> set[tuple[str, int]]:
    save = SaveMove(replica.move(0, 1), token_digest(TOKENS[:CHUNK]), None)
    return replica.saver.gather((SavePlan(request, NAMESPACE, (save,)),))


def test_requests_of_one_step_save_their_common_chunk_once(
    replica: Replica, store: SlowStore
) -> None:
    dropped = [gather(replica, f"r{i}") for i in range(20)]
    store.go.set()
    assert replica.saver.drain(PATIENCE_S)
    assert not any(dropped), "a repeat needs no slab of its own, and is no drop"
    assert store.puts == 1
    assert replica.recorder.value("saves") == 1
    assert replica.recorder.value("save_repeats") == 19


def test_a_chunk_that_was_just_saved_is_not_saved_again(replica: Replica, store: SlowStore) -> None:
    store.go.set()
    replica.save(range(1))
    replica.save(range(1), request="later")
    assert store.puts == 1


@pytest.mark.parametrize("what", ["lost", "corrupt"])
def test_a_chunk_that_was_found_bad_is_saved_again(
    replica: Replica, store: SlowStore, what: str
) -> None:
    store.go.set()
    replica.save(range(1))
    if what == "lost":
        store.delete(replica.path(0))
    else:
        store.put(replica.path(0), b"not a payload")
    assert replica.load(range(1), first_block=9).failed
    replica.save(range(1))
    assert replica.recorder.value("saves") == 2
    assert not replica.load(range(1), first_block=9).failed


def test_a_chunk_that_is_found_corrupt_while_it_is_being_saved_is_mended_by_the_next_request(
    replica: Replica, store: SlowStore
) -> None:
    """The save under way has looked before that was known, and takes what is there for good."""
    store.go.set()
    other = Replica(store, replica.index, seed=2)
    other.save(range(1))
    payload = bytearray(store.get(replica.path(0)) or b"")
    payload[-1] ^= 1
    store.put(replica.path(0), payload)
    store.go.clear()
    gather(replica, "while it is loaded")
    wait_until(lambda: store.puts == 2)
    assert replica.load(range(1), first_block=9).failed
    store.go.set()
    assert replica.saver.drain(PATIENCE_S)
    replica.save(range(1), request="recomputed")
    assert not replica.load(range(1), first_block=9).failed
    other.close()


def test_a_save_that_failed_may_be_tried_by_the_next_request(
    replica: Replica, store: SlowStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_key: str, _value: Buffer) -> bool:
        raise StoreUnavailable("gone")

    with monkeypatch.context() as broken:
        broken.setattr(store, "put_if_absent", fail)
        replica.save(range(1))
    store.go.set()
    replica.save(range(1))
    assert replica.recorder.value("saves") == 1


def test_a_save_that_was_not_announced_may_be_tried_by_the_next_request(
    replica: Replica, store: SlowStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise StoreUnavailable("gone")

    store.go.set()
    with monkeypatch.context() as broken:
        broken.setattr(replica.index, "publish", fail)
        replica.save(range(1))
    replica.save(range(1))
    assert not replica.load(range(1), first_block=9).failed


def test_a_drop_leaves_the_chunk_to_the_next_request(replica: Replica, store: SlowStore) -> None:
    with replica.save_slabs.lease():
        assert gather(replica, "without a slab") == {("without a slab", 0)}
    store.go.set()
    assert gather(replica, "with one") == set()
    assert replica.saver.drain(PATIENCE_S)
    assert store.puts == 1


def test_two_replicas_remember_for_themselves() -> None:
    store, index = stores()
    one, two = Replica(store, index, seed=1), Replica(store, index, seed=2)
    one.save(range(1))
    two.save(range(1))
    assert two.recorder.value("save_existed") == 1
    one.close()
    two.close()


def test_what_was_saved_is_remembered_for_a_while() -> None:
    clock = ManualClock()
    repeats = InFlightSaves(clock=clock)
    assert repeats.begin("a")
    repeats.keep("a")
    repeats.end("a")
    assert not repeats.begin("a")
    clock.advance(KEEP_S)
    assert repeats.begin("a")
    assert not repeats.begin("a")
    repeats.end("a")
    assert repeats.begin("a")
