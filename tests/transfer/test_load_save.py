"""What one replica saves another loads, byte for byte; anything else is a miss."""

from collections.abc import Iterator

import pytest
import torch

from objkv.index.memory import MemoryIndex
from objkv.stores.memory import MemoryStore
from tests.transfer.arriving import StuckStore
from tests.transfer.paged_cache import same_blocks
from tests.transfer.world import (
    BLOCKS,
    HASHES,
    NAMESPACE,
    PATIENCE_S,
    Replica,
    stores,
    wait_until,
)


@pytest.fixture(params=["none", "lz4", "zstd", "blosc", "blosclz4"])
def codec(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def world() -> Iterator[tuple[Replica, Replica, MemoryStore]]:
    store, index = stores()
    writer, reader = Replica(store, index, seed=1), Replica(store, index, seed=2)
    yield writer, reader, store
    writer.close()
    reader.close()


def test_what_one_replica_saves_another_loads_byte_for_byte(codec: str) -> None:
    store, index = stores()
    writer = Replica(store, index, seed=1, codec=codec)
    reader = Replica(store, index, seed=2, codec=codec)
    assert writer.save(range(3)) == set()
    outcome = reader.load(range(3), first_block=9)
    assert not outcome.failed
    ids = range(3 * BLOCKS)
    assert same_blocks(writer.caches, [1 + i for i in ids], reader.caches, [9 + i for i in ids])
    writer.close()
    reader.close()


def test_a_load_touches_no_other_block(world: tuple[Replica, Replica, MemoryStore]) -> None:
    writer, reader, _ = world
    writer.save(range(2))
    before = reader.snapshot()
    reader.load(range(2), first_block=9, skip=1)
    others = [b for b in range(32) if not 10 <= b < 9 + 2 * BLOCKS]
    assert same_blocks(before, others, reader.caches, others)
    assert same_blocks(writer.caches, [2, 3, 4], reader.caches, [10, 11, 12])


def test_a_load_within_the_step_waits_layer_by_layer(
    world: tuple[Replica, Replica, MemoryStore],
) -> None:
    writer, reader, _ = world
    writer.save(range(2))
    reader.loader.submit(reader.load_plan(range(2), 9, sync=True))
    for layer in range(3):
        reader.loader.wait_layer(0, layer)
        ids = range(2 * BLOCKS)
        mine, theirs = [9 + i for i in ids], [1 + i for i in ids]
        assert same_blocks([writer.caches[layer]], theirs, [reader.caches[layer]], mine)
    (outcome,) = reader.loader.take_finished(sync=True)
    assert not outcome.failed


def test_a_missing_payload_fails_its_chunk_and_all_later_ones_and_is_forgotten(
    world: tuple[Replica, Replica, MemoryStore],
) -> None:
    writer, reader, store = world
    writer.save(range(3))
    store.delete(writer.path(1))
    outcome = reader.load(range(3), first_block=9)
    assert outcome.failed_blocks == set(range(9 + BLOCKS, 9 + 3 * BLOCKS))
    assert outcome.rejected == {(NAMESPACE, HASHES[1])}
    assert reader.index.lookup(NAMESPACE, [HASHES[1]]) == [None]
    assert same_blocks(writer.caches, [1, 2], reader.caches, [9, 10])


def test_a_corrupt_payload_never_reaches_the_cache_and_is_replaced_by_the_next_save(
    world: tuple[Replica, Replica, MemoryStore],
) -> None:
    writer, reader, store = world
    writer.save(range(1))
    payload = bytearray(store.get(writer.path(0)) or b"")
    payload[-1] ^= 1
    store.put(writer.path(0), payload)
    before = reader.snapshot()
    outcome = reader.load(range(1), first_block=9)
    assert outcome.failed_blocks == {9, 10}
    assert reader.index.lookup(NAMESPACE, [HASHES[0]]) == [None]
    last = reader.paged.layers[-1]
    assert torch.equal(before[-1], reader.caches[-1]), last.name
    reader.save(range(1), first_block=5)
    outcome = writer.load(range(1), first_block=20)
    assert not outcome.failed
    assert same_blocks(reader.caches, [5, 6], writer.caches, [20, 21])


def test_a_payload_of_another_chunk_under_the_key_is_refused(
    world: tuple[Replica, Replica, MemoryStore],
) -> None:
    writer, reader, store = world
    writer.save(range(2))
    store.put(writer.path(0), store.get(writer.path(1)) or b"")
    before = reader.snapshot()
    assert reader.load(range(1), first_block=9).failed_blocks == {9, 10}
    assert same_blocks(before, range(32), reader.caches, range(32))


def test_a_payload_longer_than_any_can_be_is_corrupt(
    world: tuple[Replica, Replica, MemoryStore],
) -> None:
    writer, reader, store = world
    writer.save(range(1))
    store.put(writer.path(0), bytes(reader.load_slabs.slab_bytes + 1))
    outcome = reader.load(range(1), first_block=9)
    assert outcome.rejected == {(NAMESPACE, HASHES[0])}
    assert reader.index.lookup(NAMESPACE, [HASHES[0]]) == [None]


def test_after_the_deadline_a_late_payload_touches_nothing() -> None:
    store, index = StuckStore(), MemoryIndex()
    replica = Replica(store, index, seed=1, deadline_s=0.05)
    replica.save(range(1))
    before = replica.snapshot()
    outcome = replica.load(range(1), first_block=9)
    assert outcome.failed_blocks == {9, 10}
    assert outcome.rejected == set()
    store.go.set()
    wait_until(lambda: "0/8 leased" in repr(replica.load_slabs))
    assert same_blocks(before, range(32), replica.caches, range(32))
    assert index.lookup(NAMESPACE, [HASHES[0]]) != [None]
    replica.close()


def test_a_step_does_not_wait_as_long_as_a_load_between_steps_may_take() -> None:
    store, index = StuckStore(), MemoryIndex()
    replica = Replica(store, index, seed=1, step_deadline_s=0.05)
    replica.save(range(1))
    assert replica.load(range(1), first_block=9, sync=True).failed
    replica.loader.submit(replica.load_plan(range(1), 9))
    store.go.set()
    assert not replica.outcome().failed
    replica.close()


def test_a_cancelled_load_ends_at_once_and_touches_nothing_later() -> None:
    store, index = StuckStore(), MemoryIndex()
    replica = Replica(store, index, seed=1)
    replica.save(range(1))
    before = replica.snapshot()
    replica.loader.submit(replica.load_plan(range(1), 9))
    assert store.asked.wait(PATIENCE_S)
    replica.loader.cancel("r")
    (outcome,) = replica.loader.take_finished(sync=False)
    assert outcome.failed
    store.go.set()
    wait_until(lambda: "0/8 leased" in repr(replica.load_slabs))
    assert same_blocks(before, range(32), replica.caches, range(32))
    replica.close()


def test_what_does_not_fit_the_queue_is_a_miss() -> None:
    store, index = StuckStore(), MemoryIndex()
    replica = Replica(store, index, seed=1, queue_max=2)
    replica.save(range(2))
    replica.save(range(2, 4))
    store.go.set()
    outcome = replica.load(range(4), first_block=9)
    assert outcome.failed_blocks == set(range(9 + 2 * BLOCKS, 9 + 4 * BLOCKS))
    assert replica.recorder.value("load_refused") == 2
    replica.close()


def test_saves_without_a_slab_are_dropped_and_told() -> None:
    store, index = stores()
    replica = Replica(store, index, seed=1, slabs=1)
    held = replica.save_slabs.lease()
    assert replica.save(range(2)) == {("r", 0), ("r", 1)}
    held.release()
    assert replica.save(range(1)) == set()
    replica.close()


def test_nothing_is_announced_that_the_bulk_store_did_not_take() -> None:
    store, index = StuckStore(), MemoryIndex()
    store.broken = True
    replica = Replica(store, index, seed=1)
    replica.save(range(1))
    assert index.lookup(NAMESPACE, [HASHES[0]]) == [None]
    assert replica.recorder.value("save_errors") == 1
    store.broken = False
    replica.save(range(1))
    assert index.lookup(NAMESPACE, [HASHES[0]]) != [None]
    replica.close()


def test_a_payload_that_another_writer_left_is_announced_as_it_is(
    world: tuple[Replica, Replica, MemoryStore],
) -> None:
    writer, reader, store = world
    writer.save(range(1))
    theirs = store.get(writer.path(0))
    (record,) = writer.index.lookup(NAMESPACE, [HASHES[0]])
    assert record is not None
    writer.index.drop(NAMESPACE, HASHES[0])
    reader.save(range(1), first_block=5)
    assert store.get(writer.path(0)) == theirs
    (again,) = writer.index.lookup(NAMESPACE, [HASHES[0]])
    assert again is not None
    assert dict(again.shards) == dict(record.shards)


def test_a_lease_held_elsewhere_means_skipping(
    world: tuple[Replica, Replica, MemoryStore],
) -> None:
    writer, reader, store = world
    assert writer.index.lease(writer.path(0), "replica-1", ttl_ms=600_000)
    reader.save(range(1), first_block=5)
    assert store.get(writer.path(0)) is None
    assert reader.recorder.value("save_leased_elsewhere") == 1


def test_a_chunk_that_cannot_leave_its_blocks_is_dropped_and_gives_its_slab_back(
    world: tuple[Replica, Replica, MemoryStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, _, _ = world

    def refuse(*_: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as broken:
        broken.setattr(writer.saver._lane, "gather", refuse)
        assert writer.save(range(2)) == {("r", 0), ("r", 1)}
    assert "0/8 leased" in repr(writer.save_slabs)
    assert writer.save(range(2)) == set()
