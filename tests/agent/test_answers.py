"""Answers to lookups by remembered blocks: always what a lookup without memory returns."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from objkv.agent import messages
from objkv.agent.calls import AnswerBlocks
from objkv.agent.messages import (
    BLOCK,
    MESSAGE_BYTES_MAX,
    AnswerBlock,
    FoundBlocks,
    MessageKind,
    ProtocolError,
    SentBlocks,
    find_max,
    pack_find,
    unpack_find,
)
from objkv.index.base import ChunkEntry, ShardRecord, Shards
from objkv.index.fields import WrittenShards, encode_shard, written_rows
from objkv.index.memory import MemoryIndex
from objkv.index.near import NearIndex

NAMESPACE = "0123456789abcdef" * 2
FIELDS = ("0.L0-2_H0-2", "1.L0-2_H0-2")
TTL_S = 30.0


def hashed(number: int) -> bytes:
    """A prefix hash."""
    return number.to_bytes(20, "little")


def record(number: int) -> ShardRecord:
    """A record that is told from others."""
    return ShardRecord(number + 1, number + 1, "none", False, f"{number:032x}", 1)


class World:
    """An index, what an agent remembers of it, and one client."""

    def __init__(self) -> None:
        self.now = 1e9
        self.index = MemoryIndex(clock=lambda: self.now)
        self.asked = 0
        near = NearIndex(
            self.index, records_max=1000, ttl_s=TTL_S, fields=FIELDS, clock=lambda: self.now
        )
        self.blocks = AnswerBlocks(near, NAMESPACE, FIELDS, clock=lambda: self.now)
        self.sent, self.found = SentBlocks(), FoundBlocks()

    def publish(self, number: int, version: int = 0) -> None:
        """Store a chunk."""
        entry = ChunkEntry(NAMESPACE, hashed(number), bytes(20), 0, 16)
        shards = {name: record(number + 1000 * version) for name in FIELDS}
        self.index.publish(entry, shards, ttl_s=3_600)

    def message(self, numbers: Sequence[int]) -> bytes:
        """The agent's answer."""
        asked = b"".join(hashed(number) for number in numbers)
        message = self.sent.pack(self.blocks.find(asked, self._find))
        assert message is not None
        return message

    def find(self, numbers: Sequence[int]) -> list[Shards | None]:
        """Look up chunks as a client does."""
        return self.found.read(self.message(numbers), len(numbers), FIELDS)

    def _find(self, hashes: Sequence[bytes]) -> Sequence[Shards | None]:
        self.asked += len(hashes)
        return self.blocks.near.find(NAMESPACE, hashes, FIELDS)


@pytest.fixture
def world() -> World:
    return World()


@given(st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=50), max_size=8), st.data())
@settings(max_examples=60, deadline=None)
def test_repeated_lookups_find_what_is_stored(
    questions: list[list[int]], data: st.DataObject
) -> None:
    world = World()
    stored = data.draw(st.sets(st.integers(0, 60)))
    for number in stored:
        world.publish(number)
    for question in questions:
        for _ in range(data.draw(st.integers(1, 3))):
            due = [dict.fromkeys(FIELDS, record(n)) if n in stored else None for n in question]
            assert [None if one is None else dict(one) for one in world.find(question)] == due


def test_what_a_client_has_read_is_not_sent_again(world: World) -> None:
    numbers = range(3 * BLOCK + 5)
    for number in numbers:
        world.publish(number)
    first = [world.find(numbers) for _ in range(3)][-1]
    world.asked = 0
    message = world.message(numbers)
    assert len(message) == 4 + 8 * 4, "a number for each block"
    assert world.asked == 0
    again = world.found.read(message, len(numbers), FIELDS)
    assert all(one is two for one, two in zip(first, again, strict=True))


def test_a_longer_prompt_asks_only_for_its_new_blocks(world: World) -> None:
    for number in range(4 * BLOCK):
        world.publish(number)
    for _ in range(2):
        world.find(range(2 * BLOCK))
    world.asked = 0
    assert len(world.find(range(4 * BLOCK))) == 4 * BLOCK
    assert world.asked == 2 * BLOCK


@pytest.mark.parametrize("change", ["invalidated", "ended", "clock set back"])
def test_a_block_ends_with_its_records(world: World, change: str) -> None:
    for number in range(BLOCK):
        world.publish(number)
    for _ in range(3):
        world.find(range(BLOCK))
    world.publish(3, version=1)
    found = world.find(range(BLOCK))[3]
    assert found is not None
    assert found[FIELDS[0]] == record(3)  # as a near cache does
    if change == "invalidated":
        world.blocks.near.invalidate(NAMESPACE, hashed(3))
    else:
        world.now += TTL_S + 1 if change == "ended" else -10 * TTL_S
    for _ in range(3):
        found = world.find(range(BLOCK))[3]
        assert found is not None
        assert found[FIELDS[0]] == record(1003)


def test_a_record_that_is_discarded_while_it_is_looked_up_is_not_remembered(world: World) -> None:
    for number in range(BLOCK):
        world.publish(number)
    world.find(range(BLOCK))

    def find(hashes: Sequence[bytes]) -> Sequence[Shards | None]:
        found = world.blocks.near.find(NAMESPACE, hashes, FIELDS)
        world.publish(3, version=1)
        world.blocks.near.invalidate(NAMESPACE, hashed(3))
        return found

    world.now += TTL_S + 1
    world.blocks.find(b"".join(map(hashed, range(BLOCK))), find)
    found = world.find(range(BLOCK))[3]
    assert found is not None
    assert found[FIELDS[0]] == record(1003)


def test_both_sides_forget_together(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "SENT_MAX", 3)
    for number in range(6 * BLOCK):
        world.publish(number)
    for turn in range(20):
        start = turn % 5 * BLOCK
        numbers = range(start, start + BLOCK)
        assert world.find(numbers) == [dict.fromkeys(FIELDS, record(n)) for n in numbers]
        assert len(world.found) <= 3


def test_the_agent_remembers_a_bounded_number_of_blocks(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world.blocks, "_max", 2)
    for number in range(5 * BLOCK):
        world.publish(number)
    for _ in range(3):
        assert None not in map(type, world.find(range(5 * BLOCK)))
    assert len(world.blocks) == 2


def test_an_answer_that_is_too_long_is_none_and_changes_nothing() -> None:
    sent, found = SentBlocks(), FoundBlocks()
    assert sent.pack([AnswerBlock(bytes(MESSAGE_BYTES_MAX), 7)]) is None
    text = b"\n".join(written_rows([dict.fromkeys(FIELDS, record(1))], FIELDS))
    message = sent.pack([AnswerBlock(text, 7)])
    assert message is not None
    assert found.read(message, 1, FIELDS) == [dict.fromkeys(FIELDS, record(1))]


def test_the_largest_lookup_fits_both_ways() -> None:
    for count in (1, 2, 8, 40):
        fields = tuple(f"{n}.L0-99_H0-99" for n in range(count))
        step = find_max(count)
        assert step >= 1
        largest = ShardRecord(10**9, 10**9, "blosc", False, "f" * 32, 10**9)
        rows = written_rows([dict.fromkeys(fields, largest)] * step, fields)
        texts = [b"\n".join(rows[at : at + BLOCK]) for at in range(0, step, BLOCK)]
        assert SentBlocks().pack([AnswerBlock(text) for text in texts]) is not None
        question = pack_find(NAMESPACE, [bytes(20)] * step, fields)
        assert unpack_find(question) == (NAMESPACE, bytes(20 * step), fields)


def test_rows_are_the_same_however_they_are_held() -> None:
    shards = {FIELDS[1]: record(1)}
    texts = {name: encode_shard(shards[name]) if name in shards else b"" for name in FIELDS}
    turned = WrittenShards(FIELDS[::-1], [texts[name] for name in FIELDS[::-1]])
    straight = WrittenShards(FIELDS, [texts[name] for name in FIELDS])
    rows = written_rows([shards, turned, straight, straight, None], FIELDS)
    assert rows == [b"\n" + texts[FIELDS[1]]] * 4 + [b"\n"]


@given(st.lists(st.binary(max_size=120), max_size=3), st.integers(1, 40))
@settings(max_examples=300)
def test_nonsense_is_a_protocol_error(messages: list[bytes], count: int) -> None:
    found = FoundBlocks()
    for message in messages:
        for one in (message, bytes((MessageKind.FOUND, 0, 1, 0)) + message):
            try:
                assert len(found.read(one, count, FIELDS)) == count
            except ProtocolError:
                continue
