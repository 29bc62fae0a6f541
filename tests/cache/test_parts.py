"""Payloads that have only a part of a group are found, and where there are none it costs little."""

from collections.abc import Sequence

import pytest

from objkv.background import Steps
from objkv.cache.lookup import OtherShapesIndex
from objkv.cache.match import ENTRIES_MAX, covered
from objkv.errors import StoreUnavailable
from objkv.index.base import ChunkEntry, Record, ShardRecord, ShardRecords
from objkv.keys.identity import GroupIdentity
from tests.contracts.clock import ManualClock
from tests.contracts.memory_index import MemoryIndex
from tests.support.steps import complete

NS = "0" * 32
HASHES = [bytes([i]) * 20 for i in range(1, 9)]
SHARD = ShardRecord(100, 80, True, False, "0" * 32, 1)
GROUP = GroupIdentity("full", None, ("a", "b", "c", "d"), heads=4, content=16, block_size=16)
HALVES = ("0.L0-4_H0-2", "0.L0-4_H2-4")
STAGES = ("0.L0-2_H0-4", "0.L2-4_H0-4")


class World:
    """An index in another process, whose calls are noted, and a replica's lookups."""

    def __init__(self) -> None:
        self.index, self.clock, self.calls = MemoryIndex(), ManualClock(), list[str]()
        self.fault: Exception | None = None
        self.parts = OtherShapesIndex(
            self, lambda shards: covered(shards, 0, GROUP), clock=self.clock
        )  # fmt: skip

    def find(
        self, namespace: str, prefix_hashes: Sequence[bytes], fields: Sequence[str]
    ) -> Steps[list[ShardRecords | None]]:
        assert fields
        self.calls.append(f"find {len(prefix_hashes)}")
        yield None
        return self.index.find(namespace, prefix_hashes, fields)

    def lookup(self, namespace: str, prefix_hashes: Sequence[bytes]) -> Steps[list[Record | None]]:
        self.calls.append(f"lookup {len(prefix_hashes)}")
        yield None
        if self.fault is not None:
            raise self.fault
        return self.index.lookup(namespace, prefix_hashes)

    def save(self, chunks: Sequence[int], *fields: str, namespace: str = NS) -> None:
        for chunk in chunks:
            entry = ChunkEntry(namespace, HASHES[chunk], bytes(20), 16 * chunk, 16 * chunk + 16)
            self.index.publish(entry, dict.fromkeys(fields, SHARD), ttl_s=10**6)

    def ask(self, namespace: str = NS) -> tuple[list[set[str]], list[str]]:
        """What is found of each chunk, and the calls for it."""
        self.calls.clear()
        found = complete(self.parts.find(namespace, HASHES, ["0"]))
        return [set(one or ()) for one in found], self.calls


def test_whole_payloads_cost_one_call() -> None:
    world = World()
    world.save(range(8), "0", *HALVES)
    assert world.ask() == ([{"0"}] * 8, ["find 8"])


def test_parts_are_found_from_the_first_chunk_on_that_lacks_something() -> None:
    world = World()
    world.save(range(3), "0")
    world.save(range(3, 6), *HALVES)
    due = [*[{"0"}] * 3, *[{*HALVES}] * 3, set(), set()]
    assert world.ask() == (due, ["find 8", "lookup 1", "find 4"])
    # From then on by their names, and one question more shows what is not stored.
    assert world.ask() == (due, ["find 8", "find 5", "lookup 1"])
    assert world.ask() == (due, ["find 8", "find 5"])


def test_parts_of_several_shapes_follow_each_other() -> None:
    world = World()
    world.save(range(3), *HALVES)
    world.save(range(3, 6), *STAGES)
    world.save([6, 7], "0")
    # The first prompt that has both ends where the second shape begins.
    assert world.ask()[0] == [*[{*HALVES}] * 3, *[set()] * 3, {"0"}, {"0"}]
    due = [*[{*HALVES}] * 3, *[{*STAGES}] * 3, {"0"}, {"0"}]
    assert world.ask() == (due, ["find 8", "find 8", "lookup 1", "find 4"])
    assert world.ask() == (due, ["find 8", "find 8"])


def test_where_nothing_is_in_parts_one_record_is_read_in_half_a_minute() -> None:
    world = World()
    world.save([0], "0")
    asked = []
    for _ in range(61):
        found, calls = world.ask()
        assert found == [{"0"}, *[set()] * 7]
        asked += calls
        world.clock.advance(1)
    assert (asked.count("find 8"), asked.count("lookup 1")) == (61, 3)
    assert len(asked) == 64


def test_parts_that_do_not_suffice_end_the_match() -> None:
    world = World()
    world.save(range(8), HALVES[0])
    found, calls = world.ask()
    assert found == [{HALVES[0]}, *[set()] * 7]
    assert calls == ["find 8", "lookup 1"]
    assert world.ask()[1] == ["find 8"]


@pytest.mark.parametrize(("entries", "is_found"), [(ENTRIES_MAX, True), (ENTRIES_MAX + 1, False)])
def test_a_record_with_too_many_entries_is_a_miss(entries: int, is_found: bool) -> None:
    assert ENTRIES_MAX == 64
    world = World()
    more = (f"7.L0-{number}_H0-1" for number in range(1, entries - 1))
    world.save([0], *HALVES, *more)
    found, _ = world.ask()
    assert ({*HALVES} <= found[0]) is is_found
    assert found[0] or not is_found


def test_what_an_index_does_not_answer_costs_only_the_parts() -> None:
    world = World()
    world.save([0], "0")
    world.save([1], *HALVES)
    world.fault = StoreUnavailable("the result is too long")
    assert world.ask()[0] == [{"0"}, *[set()] * 7]
    world.fault = None
    assert world.ask()[1] == ["find 8"]
    world.clock.advance(31)
    assert world.ask()[0][1] == {*HALVES}


def test_names_of_parts_that_are_found_no_more_are_forgotten() -> None:
    world = World()
    world.save([0], *HALVES)
    world.ask()
    world.index.drop(NS, HASHES[0])
    assert world.ask()[1] == ["find 8", "find 8", "lookup 1"]
    assert world.ask()[1] == ["find 8", "find 8"]
    world.clock.advance(601)
    assert world.ask()[1] == ["find 8", "lookup 1"]
    assert world.ask()[1] == ["find 8"]
