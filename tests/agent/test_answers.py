"""Answers to lookups in shared memory: always what a lookup without them returns."""

import itertools
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from threading import Event, Thread

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from objkv.agent.calls import LookUp, NodeLookups
from objkv.agent.memory.answers import (
    BLOCK_MAX,
    FIELDS_MAX,
    TEXT_AT,
    TEXT_BYTES_MAX,
    AnswerBoard,
    Scope,
)
from objkv.agent.messages import (
    find_max,
    pack_find,
    pack_found,
    read_block,
    unpack_find,
    unpack_found,
)
from objkv.errors import TransferError
from objkv.index.base import ChunkEntry, ShardRecord, Shards
from objkv.index.fields import WrittenShards, encode_shard, written_rows
from objkv.index.memory import MemoryIndex

NAMESPACE = "0123456789abcdef" * 2
FIELDS = ("0.L0-2_H0-2", "1.L0-2_H0-2")
TTL_S = 30.0


def hashed(number: int) -> bytes:
    return number.to_bytes(20, "little")


def record(number: int) -> ShardRecord:
    return ShardRecord(number + 1, number + 1, "none", False, f"{number:032x}", 1)


class World:
    """An index, what an agent keeps of it, and clients that read it."""

    def __init__(self) -> None:
        self.now = 1e9
        self.index = MemoryIndex(clock=lambda: self.now)
        self.asked = 0
        self.board = AnswerBoard.create()
        self.board.vouch(2e9)
        self.lookups = NodeLookups(self.index, self.board, ttl_s=TTL_S, clock=lambda: self.now)
        self.scope = Scope(NAMESPACE, FIELDS)
        self.reader = AnswerBoard.join(os.dup(self.board.fd))

    def close(self) -> None:
        self.board.close()
        self.reader.close()

    def publish(self, *numbers: int, version: int = 0) -> None:
        for number in numbers:
            entry = ChunkEntry(NAMESPACE, hashed(number), bytes(20), 0, 16)
            shards = {name: record(number + 1000 * version) for name in FIELDS}
            self.index.publish(entry, shards, ttl_s=3_600)

    def invalidate(self, number: int) -> None:
        self.lookups.invalidate(NAMESPACE, hashed(number))

    def find(self, numbers: Sequence[int]) -> list[Shards | None]:
        """Look up chunks by a message."""
        texts = self.lookups.find(NAMESPACE, joined(numbers), FIELDS, self.complete)
        return self._read(numbers, unpack_found(pack_found(texts), len(texts)))

    def kept(self, numbers: Sequence[int]) -> list[Shards | None] | None:
        """Read the same from the board; None if it lacks a block."""
        texts = []
        for block in self.scope.blocks(joined(numbers)):
            key = self.scope.key(block)
            found = self.reader.find(self.scope, key, self.now)
            text = None if found is None else self.reader.read(key, found)
            if text is None:
                return None
            texts.append(text)
        return self._read(numbers, texts)

    def complete(self, hashes: Sequence[bytes], look_up: LookUp) -> Sequence[Shards | None]:
        """Ask the index only."""
        self.asked += len(hashes)
        return look_up(hashes)

    def _read(self, numbers: Sequence[int], texts: Sequence[bytes]) -> list[Shards | None]:
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


def plain(found: Sequence[Shards | None] | None) -> list[dict[str, ShardRecord] | None]:
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
            if None not in due:
                assert plain(world.kept(question)) == due
            else:
                assert world.kept(question) is None


def test_what_was_looked_up_is_read_without_a_message(world: World) -> None:
    numbers = range(3 * BLOCK_MAX + 5)
    world.publish(*numbers)
    world.find(numbers[: 2 * BLOCK_MAX])
    assert world.asked == 2 * BLOCK_MAX
    first = world.find(numbers)
    assert world.asked == len(numbers), "a longer prompt asks only for its new blocks"
    assert plain(world.kept(numbers)) == plain(first)
    assert plain(world.kept(numbers[: 2 * BLOCK_MAX])) == plain(first[: 2 * BLOCK_MAX])
    world.find(numbers)
    assert world.asked == len(numbers)


@pytest.mark.parametrize("change", ["invalidated", "ended", "clock set back"])
def test_a_block_ends_with_its_records(world: World, change: str) -> None:
    numbers = range(BLOCK_MAX)
    world.publish(*numbers)
    world.find(numbers)
    world.publish(3, version=1)
    assert plain(world.kept(numbers))[3] == dict.fromkeys(FIELDS, record(3))
    if change == "invalidated":
        world.invalidate(3)
    else:
        world.now += TTL_S if change == "ended" else -1
    assert world.kept(numbers) is None
    for _ in range(3):
        assert plain(world.find(numbers))[3] == dict.fromkeys(FIELDS, record(1003))
    assert plain(world.kept(numbers))[3] == dict.fromkeys(FIELDS, record(1003))


def test_a_record_that_is_discarded_while_it_is_looked_up_is_not_kept(world: World) -> None:
    numbers = range(BLOCK_MAX)
    world.publish(*numbers)

    def complete(hashes: Sequence[bytes], look_up: LookUp) -> Sequence[Shards | None]:
        found = look_up(hashes)
        world.publish(3, version=1)
        world.invalidate(3)
        return found

    world.lookups.find(NAMESPACE, joined(numbers), FIELDS, complete)
    assert world.kept(numbers) is None
    assert plain(world.find(numbers))[3] == dict.fromkeys(FIELDS, record(1003))


@pytest.mark.parametrize("stored", [(), FIELDS[:1]])
def test_what_the_index_does_not_have_of_all_fields_is_not_kept(
    world: World, stored: Sequence[str]
) -> None:
    """A payload that the node holds back, or a shard of two that will follow, may be gone soon."""
    numbers, held = range(BLOCK_MAX), dict.fromkeys(FIELDS, record(3))
    for number in numbers:
        if number != 3:
            world.publish(number)
    if stored:
        entry = ChunkEntry(NAMESPACE, hashed(3), bytes(20), 0, 16)
        world.index.publish(entry, {name: held[name] for name in stored}, ttl_s=3_600)

    def complete(hashes: Sequence[bytes], look_up: LookUp) -> Sequence[Shards | None]:
        found = look_up(hashes)
        return [*found[:3], {**held, **(found[3] or {})}, *found[4:]]

    texts = world.lookups.find(NAMESPACE, joined(numbers), FIELDS, complete)
    assert b"" not in texts[0].split(b"\n")
    assert world.kept(numbers) is None


def test_an_agent_that_hangs_vouches_for_nothing(world: World) -> None:
    numbers = range(BLOCK_MAX)
    world.publish(*numbers)
    world.find(numbers)
    world.board.vouch(world.now + 1)
    assert world.kept(numbers) is not None
    world.board.vouch(world.now)
    assert world.kept(numbers) is None


def test_other_namespaces_keep_their_answers_and_answer_no_others(world: World) -> None:
    numbers = range(5)
    world.publish(*numbers)
    world.find(numbers)
    other = Scope("f" * 32, FIELDS)
    assert other.key(joined(numbers)) != world.scope.key(joined(numbers))
    assert Scope(NAMESPACE, FIELDS[:1]).key(b"") != world.scope.key(b"")
    world.board.discard("f" * 32)
    assert world.kept(numbers) is not None
    world.board.discard(NAMESPACE)
    assert world.kept(numbers) is None


def test_what_is_too_long_or_damaged_is_not_read(world: World) -> None:
    key = world.scope.key(b"x")
    span, now = (0.0, 2e9), world.now
    world.board.write(key, bytes(TEXT_BYTES_MAX + 1), span, 0)
    assert world.reader.find(world.scope, key, now) is None
    world.board.write(key, bytes(range(256)) * 100, span, 0)
    found = world.reader.find(world.scope, key, now)
    assert found is not None
    memory = mmap.mmap(world.board.fd, 0, prot=mmap.PROT_READ)
    at = memory.find(key)
    assert at > 0
    for place in range(at, at + 400):
        with patched(world.board, place):
            now_found = world.reader.find(world.scope, key, now)
            assert now_found is None or world.reader.read(key, now_found) is None
            assert world.reader.read(key, found) is None or place < at + TEXT_AT
    assert world.reader.read(key, found) is not None
    world.board.write(key, b"another text", span, 0)
    assert world.reader.read(key, found) is None, "it was written anew"


@contextmanager
def patched(board: AnswerBoard, place: int) -> Iterator[None]:
    board._view[place] ^= 1
    yield
    board._view[place] ^= 1


def test_a_reader_never_sees_half_of_what_is_written(world: World) -> None:
    key, ended = world.scope.key(b"x"), Event()
    texts = [bytes([n]) * (1000 + 500 * n) for n in range(20)]

    def write() -> None:
        for text in itertools.cycle(texts):
            world.board.write(key, text, (0.0, 2e9), 0)
            if ended.is_set():
                return

    writer = Thread(target=write)
    writer.start()
    seen = set()
    for _ in range(20_000):
        found = world.reader.find(world.scope, key, world.now)
        text = None if found is None else world.reader.read(key, found)
        if text is not None:
            assert text in texts
            seen.add(text)
    ended.set()
    writer.join()
    assert seen


def test_a_board_of_another_kind_is_refused() -> None:
    for nbytes in (0, 4096):
        fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, nbytes)
        with pytest.raises(TransferError, match="answers"):
            AnswerBoard.join(fd)
    with pytest.raises(TransferError, match="answers"):
        AnswerBoard.join(os.open(os.devnull, os.O_RDONLY))


def test_a_replica_cannot_write_answers(world: World) -> None:
    with pytest.raises(PermissionError):
        mmap.mmap(world.board.fd, 0)
    with pytest.raises(TypeError):
        world.reader._view[0] = 1


def test_the_largest_lookup_fits_both_ways() -> None:
    for count in (1, 2, 8, 40, FIELDS_MAX):
        fields = tuple(f"{n}.L0-99_H0-99" for n in range(count))
        step = find_max(count)
        assert step >= 1
        largest = ShardRecord(10**9, 10**9, "blosc", False, "f" * 32, 10**9)
        rows = written_rows([dict.fromkeys(fields, largest)] * step, fields)
        each = Scope(NAMESPACE, fields).chunks
        texts = [b"\n".join(rows[at : at + each]) for at in range(0, step, each)]
        assert max(map(len, texts)) <= TEXT_BYTES_MAX
        answered = unpack_found(pack_found(texts[:1] * 99), 99)
        assert 0 < len(answered) < 99
        assert set(answered) == {texts[0]}
        question = pack_find(NAMESPACE, [bytes(20)] * step, fields)
        assert unpack_find(question) == (NAMESPACE, bytes(20 * step), fields)


def test_rows_are_the_same_however_they_are_held() -> None:
    shards = {FIELDS[1]: record(1)}
    texts = {name: encode_shard(shards[name]) if name in shards else b"" for name in FIELDS}
    turned = WrittenShards(FIELDS[::-1], [texts[name] for name in FIELDS[::-1]])
    straight = WrittenShards(FIELDS, [texts[name] for name in FIELDS])
    rows = written_rows([shards, turned, straight, straight, None], FIELDS)
    assert rows == [b"\n" + texts[FIELDS[1]]] * 4 + [b"\n"]
