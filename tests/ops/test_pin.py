"""Pinning and unpinning: pinned chunks survive, and interrupted commands can be repeated."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from objkv.cache.pins import read_pins
from objkv.errors import ConfigError, StoreUnavailable
from objkv.index.base import Record
from objkv.keys.chunk import ChunkKey
from objkv.ops.pin import (
    PinList,
    PinnedPrefix,
    Pinner,
    chain_of,
    list_pins,
    remove_ended_pins,
)
from objkv.ops.runs import Counters
from objkv.ops.sweep.remove import Remover, SweepLimits
from tests.contracts.clock import ManualClock
from tests.contracts.memory_index import MemoryIndex
from tests.contracts.memory_store import MemoryStore
from tests.support.samples import CHUNK, NAMESPACE, TOKENS, save, view_of

DAY_S = 86_400


class World:
    """Both ends in memory, with three chunks of one prompt."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.bulk, self.index = MemoryStore(), MemoryIndex(clock=self.clock)
        self.pinner = Pinner(self.bulk, self.index, 3_600, self.clock)
        self.chunks = self.save()

    def save(self, tokens: Sequence[int] = TOKENS) -> list[bytes]:
        return [key.prefix_hash for key in save(self.bulk, self.index, tokens)]

    def chain(self, leaf: bytes) -> list[Record]:
        return chain_of(self.index, NAMESPACE, leaf)

    def in_s(self, seconds: int) -> int:
        return int(self.clock()) + seconds

    def pin(self, leaf: bytes, seconds: int) -> PinnedPrefix:
        return self.pinner.pin(NAMESPACE, self.chain(leaf), until_s=self.in_s(seconds))

    def unpin(self, leaf: bytes) -> PinnedPrefix | None:
        return self.pinner.unpin(NAMESPACE, leaf)

    def until(self, *more: bytes) -> list[int | None]:
        records = self.index.lookup(NAMESPACE, [*self.chunks, *more])
        return [None if record is None else record.pinned_until_s for record in records]

    def listed(self) -> PinList:
        return list_pins(self.bulk, self.index, [NAMESPACE], now_s=self.clock())

    def remove_ended(self, grace_s: float = 0.0) -> int:
        return remove_ended_pins(self.bulk, NAMESPACE, now_s=self.clock(), grace_s=grace_s)


@pytest.fixture
def world() -> World:
    return World()


def test_a_prefix_is_pinned_with_all_that_comes_before_it(world: World) -> None:
    leaf, end = world.chunks[1], world.in_s(DAY_S)
    done = world.pin(leaf, DAY_S)
    assert (done.leaf, done.tokens, done.chunks, done.missing) == (leaf.hex(), 2 * CHUNK, 2, 0)
    assert world.until() == [end, end, 0]
    assert read_pins(world.bulk, NAMESPACE) == dict.fromkeys(world.chunks[:2], end)
    world.clock.advance(2 * 3_600)
    assert world.until() == [end, end, None]


def test_what_prefixes_share_is_pinned_as_long_as_one_of_them(world: World) -> None:
    other = world.save((*TOKENS[:CHUNK], *range(500, 500 + CHUNK)))[1]
    soon, late = world.in_s(DAY_S), world.in_s(2 * DAY_S)
    world.pin(other, 2 * DAY_S)
    world.pin(world.chunks[2], DAY_S)
    assert world.until(other) == [late, soon, soon, late]
    assert world.unpin(other) is not None
    assert world.until(other) == [soon, soon, soon, 0]
    assert world.unpin(world.chunks[2]) is not None
    assert world.until() == [0, 0, 0]
    assert read_pins(world.bulk, NAMESPACE) == {}


@contextmanager
def breaking(index: MemoryIndex) -> Iterator[None]:
    """Within the block, the second call of the index's ``pin`` fails, which ends the block."""
    pin, called = index.pin, list[object]()

    def broken(*told: Any, **options: Any) -> bool:
        called.append(told)
        if len(called) > 1:
            raise StoreUnavailable("gone")
        return pin(*told, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "pin", broken)
        with pytest.raises(StoreUnavailable):
            yield


def test_what_broke_off_is_completed_by_saying_it_again(world: World) -> None:
    leaf, end = world.chunks[2], world.in_s(DAY_S)
    with breaking(world.index):
        world.pin(leaf, DAY_S)
    pins = read_pins(world.bulk, NAMESPACE)
    assert pins == dict.fromkeys(world.chunks, end), "a sweep spares it already"
    world.pin(leaf, DAY_S)
    assert world.until() == [end] * 3
    with breaking(world.index):
        world.unpin(leaf)
    assert world.unpin(leaf) is not None
    assert world.until() == [0] * 3
    assert world.unpin(leaf) is None


def test_pins_are_listed_the_next_to_end_first_and_ended_ones_removed(world: World) -> None:
    first, second, third = world.chunks
    world.pin(first, 3 * DAY_S)
    world.pin(third, DAY_S)
    world.bulk.put(f"{NAMESPACE}/pins/{'9' * 40}.json", b"x")
    found = world.listed()
    leaves = [(pin.leaf, pin.chunks) for pin in found.pins]
    assert leaves == [(third.hex(), 3), (first.hex(), 1)]
    assert found.pins[1].nbytes > 0
    assert len(found.problems) == 1
    world.index.drop(NAMESPACE, second)
    assert world.listed().pins[0].missing == 1
    world.clock.advance(2 * DAY_S)
    assert world.remove_ended() == 1
    assert [pin.leaf for pin in world.listed().pins] == [first.hex()]


def test_what_is_pinned_while_a_sweep_is_under_way_stays(world: World) -> None:
    """The sweep selected it earlier and checks again before it deletes."""
    bulk, index, leaf = world.bulk, world.index, world.chunks[2]
    key = ChunkKey(NAMESPACE, leaf, 0)
    [record], entry = index.lookup(NAMESPACE, [leaf]), bulk.head(key.path())
    assert record is not None
    assert entry is not None
    counters, shard = Counters(), record.shards[key.field]
    remover = Remover(view_of(bulk, index), SweepLimits(apply=True, grace_s=0))
    world.pin(leaf, DAY_S)
    remover.payload("over_quota", key, entry, shard, counters)
    assert (counters.counts["changed"], counters.counts["removed"]) == (1, 0)
    assert bulk.head(key.path()) is not None
    world.unpin(leaf)
    remover.payload("over_quota", key, entry, shard, counters)
    assert bulk.head(key.path()) is None


def test_a_pin_that_is_made_longer_while_ended_ones_are_removed_stays(world: World) -> None:
    bulk, leaves = world.bulk, world.chunks[:2]
    for leaf in leaves:
        world.pin(leaf, 100)
    world.clock.advance(200)
    delete, end = bulk.delete, world.in_s(DAY_S)

    def meddled(key: str) -> bool:
        bulk.delete = delete  # type: ignore[method-assign]
        for leaf in leaves:
            if leaf.hex() not in key:
                world.pin(leaf, DAY_S)
        return delete(key)

    bulk.delete = meddled  # type: ignore[method-assign]
    assert world.remove_ended() == 1
    assert [pin.until_s for pin in world.listed().pins] == [end]


def test_an_ended_pin_is_kept_for_the_grace_time(world: World) -> None:
    world.pin(world.chunks[0], 100)
    for passes_s, removed in ((150, 0), (49, 0), (2, 1)):
        world.clock.advance(passes_s)
        assert world.remove_ended(grace_s=100) == removed


@pytest.mark.parametrize("at", ["first scan", "deletion"])
def test_what_is_pinned_while_a_longer_prefix_is_unpinned_stays_pinned(
    world: World, at: str
) -> None:
    world.pin(world.chunks[2], DAY_S)
    near, index, bulk = world.in_s(1_000), world.index, world.bulk
    pin, delete = index.pin, bulk.delete

    def meddled(*told: Any, **options: Any) -> Any:
        index.pin, bulk.delete = pin, delete  # type: ignore[method-assign]
        world.pin(world.chunks[1], 1_000)
        return (delete if at == "deletion" else pin)(*told, **options)

    setattr(*((bulk, "delete") if at == "deletion" else (index, "pin")), meddled)
    assert world.unpin(world.chunks[2]) is not None
    assert world.until() == [near, near, 0]


def test_records_that_name_each_other_as_parents_are_no_chain(world: World) -> None:
    leaf = world.chunks[1]
    [record] = world.index.lookup(NAMESPACE, [leaf])
    assert record is not None
    for changed in (
        replace(record, parent_hash=record.prefix_hash),
        replace(record, token_start=record.token_end),
    ):
        world.index._records[(NAMESPACE, leaf)] = (changed, float("inf"))
        with pytest.raises(ConfigError):
            world.chain(leaf)
