"""Replicas of several shapes learn of each other's shards, and those of one shape pay nothing."""

from collections.abc import Sequence
from typing import cast

import pytest

from objkv.background import Steps
from objkv.errors import StoreUnavailable
from objkv.index.base import ChunkEntry, Record, ShardRecord, Shards
from objkv.index.shapes import SHAPES_HASH, ShapesIndex, is_shapes
from tests.contracts.clock import ManualClock
from tests.contracts.memory_index import MemoryIndex
from tests.support.steps import complete

NAMESPACE = "0123456789abcdef" * 2
OTHER = "f" * 32
TP1 = ("0.L0-2_H0-4",)
TP2 = ("0.L0-2_H0-2", "0.L0-2_H2-4")
CHUNK = bytes(20)
START = 1_000_000.0


class CountingIndex(MemoryIndex):
    """Records its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, ...]] = []
        self.shapes_asked = 0
        self.down = False

    def find(
        self, namespace: str, prefix_hashes: Sequence[bytes], fields: Sequence[str]
    ) -> list[Shards | None]:
        self.asked.append(tuple(fields))
        return super().find(namespace, prefix_hashes, fields)

    def lookup(self, namespace: str, prefix_hashes: Sequence[bytes]) -> list[Record | None]:
        self.shapes_asked += 1
        if self.down:
            raise StoreUnavailable("down")
        return super().lookup(namespace, prefix_hashes)


@pytest.fixture
def index() -> CountingIndex:
    return CountingIndex()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START)


def replica(
    index: MemoryIndex, fields: Sequence[str], clock: ManualClock, *, writes: bool = True
) -> ShapesIndex:
    return ShapesIndex(
        index,
        fields,
        readable=lambda field: field.startswith("0.L"),
        writes=writes,
        ttl_s=3600,
        clock=clock,
    )


def publish(index: MemoryIndex, fields: Sequence[str]) -> None:
    record = ShardRecord(9, 9, "none", False, "0" * 32, 1)
    index.publish(
        ChunkEntry(NAMESPACE, CHUNK, bytes(20), 0, 64), dict.fromkeys(fields, record), ttl_s=60
    )


def found(replica: ShapesIndex, fields: Sequence[str]) -> set[str]:
    (shards,) = complete(replica.find(NAMESPACE, [CHUNK], fields))
    return set(shards or ())


def test_what_another_shape_saved_is_found(index: CountingIndex, clock: ManualClock) -> None:
    one, two = replica(index, TP1, clock), replica(index, TP2, clock)
    assert found(one, TP1) == set()
    publish(index, TP1)
    assert not two.mixed
    assert found(two, TP2) == set(TP1)
    assert two.mixed


def test_a_shape_that_is_new_to_the_fleet_is_heard_of_within_half_a_minute(
    index: CountingIndex, clock: ManualClock
) -> None:
    one = replica(index, TP1, clock)
    assert found(one, TP1) == set()
    two = replica(index, TP2, clock)
    assert found(two, TP2) == set()
    publish(index, TP2)
    assert found(one, TP1) == set()
    clock.advance(31)
    assert found(one, TP1) == set(TP2)


def test_a_fleet_of_one_shape_asks_for_its_own_fields_and_for_shapes_twice_a_minute(
    index: CountingIndex, clock: ManualClock
) -> None:
    one = replica(index, TP1, clock)
    for _ in range(60):
        found(one, TP1)
        clock.advance(1)
    assert set(index.asked) == {TP1}
    assert index.shapes_asked == 2
    assert not one.mixed


def test_one_that_only_reads_announces_nothing(index: CountingIndex, clock: ManualClock) -> None:
    found(replica(index, TP1, clock, writes=False), TP1)
    assert list(index.scan(NAMESPACE)) == []


def test_an_announcement_is_renewed_when_it_gets_old_or_lost(
    index: CountingIndex, clock: ManualClock
) -> None:
    one = replica(index, TP1, clock)
    found(one, TP1)
    (first,) = index.scan(NAMESPACE)
    assert is_shapes(first)
    clock.advance(1000)
    found(one, TP1)
    (second,) = index.scan(NAMESPACE)
    assert second.shards[TP1[0]].created_s == int(START) + 1000
    index.drop(NAMESPACE, SHAPES_HASH)
    clock.advance(31)
    found(one, TP1)
    assert len(list(index.scan(NAMESPACE))) == 1


def test_an_index_that_does_not_tell_costs_other_shapes_only(
    index: CountingIndex, clock: ManualClock
) -> None:
    publish(index, TP2)
    index.down = True
    two = replica(index, TP2, clock)
    assert found(two, TP2) == set(TP2)
    index.down = False
    found(replica(index, TP1, clock), TP1)
    clock.advance(3)
    found(two, TP2)
    assert two.mixed


def test_fields_that_cannot_be_of_this_model_are_not_asked_for(
    index: CountingIndex, clock: ManualClock
) -> None:
    record = ShardRecord(0, 0, "none", False, "", int(START))
    index.publish(
        ChunkEntry(NAMESPACE, SHAPES_HASH, SHAPES_HASH, 0, 1), {"7.nonsense": record}, ttl_s=60
    )
    found(replica(index, TP1, clock), TP1)
    assert index.asked == [TP1]


def test_who_finds_chunks_of_a_shape_that_nobody_writes_any_more_keeps_it_known(
    index: CountingIndex, clock: ManualClock
) -> None:
    found(replica(index, TP1, clock), TP1)
    publish(index, TP1)
    reader = replica(index, TP2, clock, writes=False)
    for _ in range(3 * 24):
        clock.advance(3600 / 8)
        assert found(reader, TP2) == set(TP1)
    (record,) = index.lookup(NAMESPACE, [SHAPES_HASH])
    assert record is not None
    assert set(record.shards) == set(TP1)


def test_a_shape_that_nobody_writes_or_finds_is_forgotten(
    index: CountingIndex, clock: ManualClock
) -> None:
    found(replica(index, TP1, clock), TP1)
    two = replica(index, TP2, clock)
    found(two, TP2)
    assert index.asked[-1] == (*TP2, *TP1)
    for _ in range(10):
        clock.advance(3600 / 8)
        found(two, TP2)
    assert index.asked[-1] == TP2


class FarIndex:
    """Its lookups of shapes are answered later."""

    def __init__(self, index: CountingIndex) -> None:
        self.find, self.publish = index.find, index.publish
        self._lookup = index.lookup

    def lookup(self, namespace: str, prefix_hashes: Sequence[bytes]) -> Steps[list[Record | None]]:
        yield None
        return self._lookup(namespace, prefix_hashes)


def test_while_one_asks_others_go_on_with_what_is_known(
    index: CountingIndex, clock: ManualClock
) -> None:
    one = replica(cast("MemoryIndex", FarIndex(index)), TP1, clock)
    found(one, TP1)
    clock.advance(31)
    first = one.find(NAMESPACE, [CHUNK], TP1)
    next(first)
    with pytest.raises(StopIteration):
        next(one.find(NAMESPACE, [CHUNK], TP1))
    assert complete(first) == [None]


def test_who_comes_second_to_a_namespace_knows_what_the_first_does(
    index: CountingIndex, clock: ManualClock
) -> None:
    found(replica(index, TP1, clock), TP1)
    publish(index, TP1)
    two = replica(cast("MemoryIndex", FarIndex(index)), TP2, clock)
    begun = [two.find(NAMESPACE, [CHUNK], TP2) for _ in range(3)]
    for one in begun:
        next(one)
    for one in reversed(begun):
        (shards,) = complete(one)
        assert set(shards or ()) == set(TP1)


def test_another_namespace_is_asked_about_anew(index: CountingIndex, clock: ManualClock) -> None:
    one = replica(index, TP1, clock)
    found(one, TP1)
    complete(one.find(OTHER, [CHUNK], TP1))
    assert index.shapes_asked == 2
    assert [record.prefix_hash for record in index.scan(OTHER)] == [SHAPES_HASH]
