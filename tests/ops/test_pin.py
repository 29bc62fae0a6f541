"""Pinning and unpinning: pinned chunks survive, and interrupted commands can be repeated."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from objkv.cache.pins import read_pins
from objkv.errors import ConfigError, StoreUnavailable
from objkv.index.base import PruneIndex
from objkv.keys.chunk import ChunkKey
from objkv.ops.pin import Pinner, chain_of, list_pins, remove_ended_pins
from objkv.ops.runs import Counters
from objkv.ops.sweep.remove import Remover, SweepLimits
from tests.contracts.clock import ManualClock
from tests.contracts.memory_index import MemoryIndex
from tests.contracts.memory_store import MemoryStore
from tests.support.samples import CHUNK, NAMESPACE, TOKENS, save, view_of

DAY_S = 86_400


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def index(clock: ManualClock) -> MemoryIndex:
    return MemoryIndex(clock=clock)


@pytest.fixture
def pinner(bulk: MemoryStore, index: MemoryIndex, clock: ManualClock) -> Pinner:
    return Pinner(bulk, index, 3_600, clock)


def hashes(keys: list[ChunkKey]) -> list[bytes]:
    return [key.prefix_hash for key in keys]


def until(index: PruneIndex, wanted: list[bytes]) -> list[int | None]:
    records = index.lookup(NAMESPACE, wanted)
    return [None if record is None else record.pinned_until_s for record in records]


def test_a_prefix_is_pinned_with_all_that_comes_before_it(
    pinner: Pinner, bulk: MemoryStore, index: MemoryIndex, clock: ManualClock
) -> None:
    chunks = hashes(save(bulk, index))
    end = int(clock()) + DAY_S
    done = pinner.pin(NAMESPACE, chain_of(index, NAMESPACE, chunks[1]), until_s=end)
    assert (done.leaf, done.tokens, done.chunks, done.missing) == (chunks[1].hex(), 2 * CHUNK, 2, 0)
    assert until(index, chunks) == [end, end, 0]
    assert read_pins(bulk, NAMESPACE) == dict.fromkeys(chunks[:2], end)
    clock.advance(2 * 3_600)
    assert until(index, chunks) == [end, end, None]


def test_what_prefixes_share_is_pinned_as_long_as_one_of_them(
    pinner: Pinner, bulk: MemoryStore, index: MemoryIndex, clock: ManualClock
) -> None:
    chunks = hashes(save(bulk, index))
    other = hashes(save(bulk, index, (*TOKENS[:CHUNK], *range(500, 500 + CHUNK))))
    soon, late = int(clock()) + DAY_S, int(clock()) + 2 * DAY_S
    pinner.pin(NAMESPACE, chain_of(index, NAMESPACE, other[1]), until_s=late)
    pinner.pin(NAMESPACE, chain_of(index, NAMESPACE, chunks[2]), until_s=soon)
    assert until(index, [*chunks, other[1]]) == [late, soon, soon, late]
    assert pinner.unpin(NAMESPACE, other[1]) is not None
    assert until(index, [*chunks, other[1]]) == [soon, soon, soon, 0]
    assert pinner.unpin(NAMESPACE, chunks[2]) is not None
    assert until(index, chunks) == [0, 0, 0]
    assert read_pins(bulk, NAMESPACE) == {}


def breaking(index: MemoryIndex, after: int) -> Callable[..., bool]:
    """Return the index's ``pin``, which fails after this many calls."""
    left = [after]

    def pin(*arguments: object, **options: object) -> bool:
        left[0] -= 1
        if left[0] < 0:
            raise StoreUnavailable("gone")
        return MemoryIndex.pin(index, *arguments, **options)  # type: ignore[arg-type]

    return pin


def test_what_broke_off_is_completed_by_saying_it_again(
    pinner: Pinner,
    bulk: MemoryStore,
    index: MemoryIndex,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chunks = hashes(save(bulk, index))
    chain, end = chain_of(index, NAMESPACE, chunks[2]), int(clock()) + DAY_S
    monkeypatch.setattr(index, "pin", breaking(index, 1))
    with pytest.raises(StoreUnavailable):
        pinner.pin(NAMESPACE, chain, until_s=end)
    monkeypatch.undo()
    assert read_pins(bulk, NAMESPACE) == dict.fromkeys(chunks, end), "a sweep spares it already"
    pinner.pin(NAMESPACE, chain, until_s=end)
    assert until(index, chunks) == [end] * 3
    monkeypatch.setattr(index, "pin", breaking(index, 1))
    with pytest.raises(StoreUnavailable):
        pinner.unpin(NAMESPACE, chunks[2])
    monkeypatch.undo()
    assert pinner.unpin(NAMESPACE, chunks[2]) is not None
    assert until(index, chunks) == [0] * 3
    assert pinner.unpin(NAMESPACE, chunks[2]) is None


def test_pins_are_listed_the_next_to_end_first_and_ended_ones_removed(
    pinner: Pinner, bulk: MemoryStore, index: MemoryIndex, clock: ManualClock
) -> None:
    chunks = hashes(save(bulk, index))
    for days, leaf in ((3, chunks[0]), (1, chunks[2])):
        chain = chain_of(index, NAMESPACE, leaf)
        pinner.pin(NAMESPACE, chain, until_s=int(clock()) + days * DAY_S)
    bulk.put(f"{NAMESPACE}/pins/{'9' * 40}.json", b"x")
    found = list_pins(bulk, index, [NAMESPACE], now_s=clock())
    leaves = [(pin.leaf, pin.chunks) for pin in found.pins]
    assert leaves == [(chunks[2].hex(), 3), (chunks[0].hex(), 1)]
    assert found.pins[1].nbytes > 0
    assert len(found.problems) == 1
    index.drop(NAMESPACE, chunks[1])
    assert list_pins(bulk, index, [NAMESPACE], now_s=clock()).pins[0].missing == 1
    clock.advance(2 * DAY_S)
    assert remove_ended_pins(bulk, NAMESPACE, now_s=clock()) == 1
    listed = list_pins(bulk, index, [NAMESPACE], now_s=clock()).pins
    assert [pin.leaf for pin in listed] == [chunks[0].hex()]


def test_what_is_pinned_while_a_sweep_is_under_way_stays(
    pinner: Pinner, bulk: MemoryStore, index: MemoryIndex, clock: ManualClock
) -> None:
    """The sweep selected it earlier and checks again before it deletes."""
    keys = save(bulk, index)
    remover = Remover(view_of(bulk, index), SweepLimits(apply=True, grace_s=0))
    [record] = index.lookup(NAMESPACE, [keys[2].prefix_hash])
    entry = bulk.head(keys[2].path())
    assert record is not None
    assert entry is not None
    chain = chain_of(index, NAMESPACE, keys[2].prefix_hash)
    pinner.pin(NAMESPACE, chain, until_s=int(clock()) + DAY_S)
    counters = Counters()
    remover.payload("over_quota", keys[2], entry, record.shards[keys[2].field], counters)
    assert (counters.counts["changed"], counters.counts["removed"]) == (1, 0)
    assert bulk.head(keys[2].path()) is not None
    pinner.unpin(NAMESPACE, keys[2].prefix_hash)
    remover.payload("over_quota", keys[2], entry, record.shards[keys[2].field], counters)
    assert bulk.head(keys[2].path()) is None


def test_a_pin_that_is_made_longer_while_ended_ones_are_removed_stays(
    pinner: Pinner, bulk: MemoryStore, index: MemoryIndex, clock: ManualClock
) -> None:
    chunks = hashes(save(bulk, index))
    chains = [chain_of(index, NAMESPACE, leaf) for leaf in chunks[:2]]
    for chain in chains:
        pinner.pin(NAMESPACE, chain, until_s=int(clock()) + 100)
    clock.advance(200)
    delete, end = bulk.delete, int(clock()) + DAY_S

    def meddled(key: str) -> bool:
        bulk.delete = delete  # type: ignore[method-assign]
        for chain in chains:
            if chain[-1].prefix_hash.hex() not in key:
                pinner.pin(NAMESPACE, chain, until_s=end)
        return delete(key)

    bulk.delete = meddled  # type: ignore[method-assign]
    assert remove_ended_pins(bulk, NAMESPACE, now_s=clock()) == 1
    assert [pin.until_s for pin in list_pins(bulk, index, [NAMESPACE], now_s=clock()).pins] == [end]


def test_an_ended_pin_is_kept_for_the_grace_time(
    pinner: Pinner, bulk: MemoryStore, index: MemoryIndex, clock: ManualClock
) -> None:
    chunks = hashes(save(bulk, index))
    pinner.pin(NAMESPACE, chain_of(index, NAMESPACE, chunks[0]), until_s=int(clock()) + 100)
    for passes_s, removed in ((150, 0), (49, 0), (2, 1)):
        clock.advance(passes_s)
        now_s = clock()
        assert remove_ended_pins(bulk, NAMESPACE, now_s=now_s, grace_s=100) == removed


@pytest.mark.parametrize("at", ["first scan", "deletion"])
def test_what_is_pinned_while_a_longer_prefix_is_unpinned_stays_pinned(
    pinner: Pinner, bulk: MemoryStore, index: MemoryIndex, clock: ManualClock, at: str
) -> None:
    chunks = hashes(save(bulk, index))
    long, short = (chain_of(index, NAMESPACE, chunks[number]) for number in (2, 1))
    far, near = int(clock()) + DAY_S, int(clock()) + 1_000
    pinner.pin(NAMESPACE, long, until_s=far)
    pin, delete = index.pin, bulk.delete

    def other() -> None:
        index.pin, bulk.delete = pin, delete  # type: ignore[method-assign]
        pinner.pin(NAMESPACE, short, until_s=near)

    def meddled_pin(*told: Any, **options: Any) -> bool:
        other()
        return pin(*told, **options)

    def meddled_delete(key: str) -> bool:
        other()
        return delete(key)

    if at == "deletion":
        bulk.delete = meddled_delete  # type: ignore[method-assign]
    else:
        index.pin = meddled_pin  # type: ignore[method-assign]
    assert pinner.unpin(NAMESPACE, chunks[2]) is not None
    assert until(index, chunks) == [near, near, 0]


def test_records_that_name_each_other_as_parents_are_no_chain(
    bulk: MemoryStore, index: MemoryIndex
) -> None:
    chunks = hashes(save(bulk, index))
    [record] = index.lookup(NAMESPACE, chunks[1:2])
    assert record is not None
    for changed in (
        replace(record, parent_hash=record.prefix_hash),
        replace(record, token_start=record.token_end),
    ):
        index._records[(NAMESPACE, chunks[1])] = (changed, float("inf"))
        with pytest.raises(ConfigError):
            chain_of(index, NAMESPACE, chunks[1])
