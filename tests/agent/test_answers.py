"""Answers to lookups in shared memory: always what a lookup without them returns."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from objkv.agent import answering
from objkv.agent.answering import NodeLookups
from objkv.agent.core import FoundRecords
from objkv.agent.held_back import HeldBackPayloads
from objkv.agent.memory.answers import BLOCK_MAX, TEXT_AT, AnswerBoard, LookupScope
from objkv.agent.messages import pack_found, read_block, unpack_found
from objkv.cache.lookup import LOOKUP_TTL_S
from objkv.codec.payload import Claim
from objkv.errors import StoreUnavailable
from objkv.index.base import ChunkEntry, ShardRecord, ShardRecords
from objkv.keys.chunk import ChunkKey
from objkv.keys.topology import Shard
from objkv.telemetry import NullRecorder
from tests.agent.world import Paused
from tests.contracts.memory_index import MemoryIndex
from tests.support.waiting import PATIENCE_S

NAMESPACE = "0123456789abcdef" * 2
FIELDS = ("0.L0-2_H0-2", "1.L0-2_H0-2")


def hashed(number: int) -> bytes:
    return number.to_bytes(20, "little")


def record(number: int) -> ShardRecord:
    return ShardRecord(number + 1, number + 1, True, False, f"{number:032x}", 1)


class WatchedIndex(MemoryIndex):
    """Counts the chunks that it is asked for."""

    asked = 0

    def find(
        self, namespace: str, prefix_hashes: Sequence[bytes], fields: Sequence[str]
    ) -> list[ShardRecords | None]:
        self.asked += len(prefix_hashes)
        return super().find(namespace, prefix_hashes, fields)


class World:
    """An index, what an agent keeps of it, and clients that read it."""

    def __init__(self) -> None:
        self.now = 1e9
        self.index = WatchedIndex(clock=lambda: self.now)
        self.board = AnswerBoard.create()
        self.board.vouch(2e9)
        self.held = HeldBackPayloads(NullRecorder(), self.board.discard)
        self.lookups = NodeLookups(
            self.index, self.held, FoundRecords(), self.board, clock=lambda: self.now
        )
        self.scope = LookupScope(NAMESPACE, FIELDS)
        self.reader = AnswerBoard.join(os.dup(self.board.fd))

    def close(self) -> None:
        self.board.close()
        self.reader.close()

    def publish(self, *numbers: int, version: int = 0) -> None:
        for number in numbers:
            entry = ChunkEntry(NAMESPACE, hashed(number), bytes(20), 0, 16)
            shards = {name: record(number + 1000 * version) for name in FIELDS}
            self.index.publish(entry, shards, ttl_s=3_600)

    def hold_back(self, number: int, field: str = FIELDS[0]) -> str:
        """Have a payload of the chunk on this node only; its path."""
        group, _, shard = field.partition(".")
        key = ChunkKey(NAMESPACE, hashed(number), int(group), Shard.parse(shard))
        self.held.add(Claim(key, bytes(20), 0, 16), record(number), is_due=False)
        return key.path()

    def find(self, numbers: Sequence[int]) -> list[ShardRecords | None]:
        """Look up chunks by a message."""
        texts = self.lookups.find(NAMESPACE, joined(numbers), FIELDS)
        return self._read(numbers, unpack_found(pack_found(texts), len(texts)))

    def kept(self, numbers: Sequence[int]) -> list[ShardRecords | None] | None:
        """Read the same from the board; None if it lacks a block."""
        texts = []
        for block in self.scope.blocks(joined(numbers)):
            key = self.scope.key(block)
            found = self.reader.find(key, self.now)
            text = None if found is None else self.reader.read(key, found)
            if text is None:
                return None
            texts.append(text)
        return self._read(numbers, texts)

    def _read(self, numbers: Sequence[int], texts: Sequence[bytes]) -> list[ShardRecords | None]:
        blocks = self.scope.blocks(joined(numbers))
        both = zip(texts, blocks, strict=True)
        return [one for text, part in both for one in read_block(text, len(part) // 20, FIELDS)]


def joined(numbers: Sequence[int]) -> bytes:
    return b"".join(map(hashed, numbers))


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


def plain(found: Sequence[ShardRecords | None] | None) -> list[dict[str, ShardRecord] | None]:
    assert found is not None
    return [None if one is None else dict(one) for one in found]


@given(st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=50), max_size=8), st.data())
@settings(max_examples=60, deadline=None)
def test_repeated_lookups_find_what_is_stored(
    questions: list[list[int]], data: st.DataObject
) -> None:
    with closing(World()) as world:
        stored = data.draw(st.sets(st.integers(0, 60)))
        world.publish(*stored)
        for question in questions:
            due = [dict.fromkeys(FIELDS, record(n)) if n in stored else None for n in question]
            for _ in range(data.draw(st.integers(1, 3))):
                assert plain(world.find(question)) == due
            assert plain(world.kept(question)) == due


def test_what_was_looked_up_is_read_without_a_message(world: World) -> None:
    numbers = range(3 * BLOCK_MAX + 5)
    world.publish(*numbers)
    world.find(numbers[: 2 * BLOCK_MAX])
    assert world.index.asked == 2 * BLOCK_MAX
    first = world.find(numbers)
    assert world.index.asked == len(numbers), "a longer prompt asks only for its new blocks"
    assert plain(world.kept(numbers)) == plain(first)
    assert plain(world.kept(numbers[: 2 * BLOCK_MAX])) == plain(first[: 2 * BLOCK_MAX])
    world.find(numbers)
    assert world.index.asked == len(numbers)


@pytest.mark.parametrize("change", ["invalidated", "ended", "clock set back"])
def test_a_block_ends_with_its_records(world: World, change: str) -> None:
    numbers = range(BLOCK_MAX)
    world.publish(*numbers)
    world.find(numbers)
    world.publish(3, version=1)
    assert plain(world.kept(numbers))[3] == dict.fromkeys(FIELDS, record(3))
    if change == "invalidated":
        world.board.discard(hashed(3))
    else:
        world.now += LOOKUP_TTL_S if change == "ended" else -1
    assert world.kept(numbers) is None
    for _ in range(3):
        assert plain(world.find(numbers))[3] == dict.fromkeys(FIELDS, record(1003))
    assert plain(world.kept(numbers))[3] == dict.fromkeys(FIELDS, record(1003))


def test_a_record_that_is_discarded_while_it_is_looked_up_is_not_kept(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers, find = range(2 * BLOCK_MAX), world.index.find
    world.publish(*numbers)

    def slow(*question: Any) -> list[ShardRecords | None]:
        found = find(*question)
        world.publish(3, version=1)
        world.board.discard(hashed(3))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(world.index, "find", slow)
        world.find(numbers)
    assert world.kept(numbers[:BLOCK_MAX]) is None
    assert world.kept(numbers[BLOCK_MAX:]) is not None, "nothing changed there"
    assert plain(world.find(numbers))[3] == dict.fromkeys(FIELDS, record(1003))


@pytest.mark.parametrize("stored", [(), FIELDS[:1]])
def test_what_the_index_does_not_have_of_all_fields_is_asked_for_soon(
    world: World, stored: Sequence[str]
) -> None:
    """Another node may save it, or the shard of two that will follow."""
    numbers = range(BLOCK_MAX)
    world.publish(*(number for number in numbers if number != 3))
    if stored:
        entry = ChunkEntry(NAMESPACE, hashed(3), bytes(20), 0, 16)
        world.index.publish(entry, dict.fromkeys(stored, record(3)), ttl_s=3_600)
    world.find(numbers)
    assert world.kept(numbers) is not None
    world.publish(3)
    world.now += 0.6
    assert world.kept(numbers) is None
    assert plain(world.find(numbers))[3] == dict.fromkeys(FIELDS, record(3))


def test_what_the_node_saves_or_loses_is_known_at_once(world: World) -> None:
    numbers = range(BLOCK_MAX)
    world.publish(*(number for number in numbers if number != 3))

    def third() -> set[str]:
        found = world.find(numbers)[3]
        assert plain(world.kept(numbers))[3] == (None if found is None else dict(found))
        return set(found or ())

    assert third() == set()
    paths = [world.hold_back(3, field) for field in FIELDS]
    assert third() == set(FIELDS)
    world.held.dropped(paths[1])
    assert third() == {FIELDS[0]}
    world.publish(3, version=1)
    world.held.saved(paths[0])
    assert plain(world.find(numbers))[3] == dict.fromkeys(FIELDS, record(1003))


def test_the_board_remembers_no_more_blocks_than_it_has_slots(world: World) -> None:
    for first in range(0, 50_000, 10):
        key = world.scope.key(joined(range(first, first + 2)))
        draft = world.board.begin(key, [hashed(first), hashed(first + 1)])
        world.board.write(draft, b"text", (0.0, 2e9))
    assert len(world.board._at) <= 1024
    assert len(world.board._by_chunk) == 2 * len(world.board._at)


def test_an_agent_that_hangs_vouches_for_nothing(world: World) -> None:
    numbers = range(BLOCK_MAX)
    world.publish(*numbers)
    world.find(numbers)
    world.board.vouch(world.now + 1)
    assert world.kept(numbers) is not None
    world.board.vouch(world.now)
    assert world.kept(numbers) is None


def test_a_block_answers_for_its_chunks_namespace_and_fields_alone(world: World) -> None:
    key = world.scope.key(joined(range(5)))
    assert LookupScope("f" * 32, FIELDS).key(joined(range(5))) != key
    assert LookupScope(NAMESPACE, FIELDS[:1]).key(joined(range(5))) != key
    assert world.scope.key(joined(range(4))) != key


def test_a_change_of_one_chunk_voids_only_blocks_that_have_it(world: World) -> None:
    world.publish(*range(3 * BLOCK_MAX))
    world.find(range(3 * BLOCK_MAX))
    world.find(range(5))
    world.board.discard(hashed(BLOCK_MAX))
    assert world.kept(range(BLOCK_MAX)) is not None
    assert world.kept(range(BLOCK_MAX, 2 * BLOCK_MAX)) is None
    world.board.discard(hashed(0))
    assert world.kept(range(BLOCK_MAX)) is None
    assert world.kept(range(5)) is None
    assert world.kept(range(2 * BLOCK_MAX, 3 * BLOCK_MAX)) is not None
    assert len(world.board._by_chunk) == BLOCK_MAX


def test_what_is_damaged_is_not_read(world: World) -> None:
    key = world.scope.key(b"x")
    board, span, now = world.board, (0.0, 2e9), world.now
    board.write(board.begin(key, ()), bytes(range(256)) * 100, span)
    found = world.reader.find(key, now)
    assert found is not None
    at = bytes(board._view).find(key)
    assert at > 0
    for place in range(at, at + 400):
        board._view[place] ^= 1
        now_found = world.reader.find(key, now)
        assert now_found is None or world.reader.read(key, now_found) is None
        assert world.reader.read(key, found) is None or place < at + TEXT_AT
        board._view[place] ^= 1
    assert world.reader.read(key, found) is not None
    board.write(board.begin(key, ()), b"another text", span)
    assert world.reader.read(key, found) is None, "it was written anew"


def test_an_index_that_hangs_holds_a_bounded_number_of_lookups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each holds a client's thread, and with those of clients that have gone there would be none
    left for others."""
    monkeypatch.setattr(answering, "_LOOKUPS_MAX", 2)
    with closing(World()) as world, ThreadPoolExecutor(2) as pool:
        waiting, finds = [], []
        for number in (1, 2):
            finds.append(Paused(world.index, "find"))
            waiting.append(pool.submit(world.find, [number]))
            assert finds[-1].begun.wait(PATIENCE_S)
        with pytest.raises(StoreUnavailable, match="2 lookups have no answer"):
            world.find([3])
        for find in finds:
            find.go.set()
        assert [one.result(PATIENCE_S) for one in waiting] == [[None], [None]]
        assert world.find([3]) == [None]


def test_a_chunk_of_two_answers_is_not_absent_while_the_earlier_one_is_replaced() -> None:
    """``discard`` looks for it without the lock, and would leave a stale answer valid."""

    class Watched(dict[bytes, Any]):
        def pop(self, *key: Any) -> Any:
            raise AssertionError("absent")

    with closing(AnswerBoard.create()) as board:
        key, chunk = bytes(16), hashed(1)
        board.write(board.begin(key, [chunk]), b"old", (0, 2e9))
        later = board.begin(key, [chunk])
        board._by_chunk = Watched(board._by_chunk)
        board.write(later, b"new", (0, 2e9))
    assert chunk in board._by_chunk
