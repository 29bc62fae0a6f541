"""Saves, gets and rejections through the cache: their order, and what a fault costs."""

from dataclasses import replace
from typing import Any

import pytest

from objkv.cache.chunks import KEEP_S, CacheSettings, ChunkCache, InFlightSaves
from objkv.codec.payload import Claim, Header, Provenance, encode, read_header
from objkv.errors import StoreUnavailable
from objkv.index.base import ShardRecord
from objkv.stores.base import Buffer
from objkv.telemetry import MemoryRecorder
from tests.codec.payloads import CLAIM, LAYERS, pages_of
from tests.contracts.clock import ManualClock
from tests.contracts.flaky import FlakyStore
from tests.contracts.memory_index import MemoryIndex
from tests.contracts.memory_store import MemoryStore
from tests.index.flaky_index import FlakyIndex

KEY, PATH = CLAIM.key, CLAIM.key.path()


def payload_of(claim: Claim = CLAIM, writer: str = "tests") -> tuple[bytes, Header]:
    provenance = Provenance("cd" * 32, writer, 1_700_000_000)
    made = bytes(encode(claim, LAYERS, pages_of(LAYERS), codec="none", provenance=provenance))
    return made, read_header(made)


PAYLOAD, HEADER = payload_of()
OTHER_CLAIM = replace(CLAIM, parent_hash=b"\x03" * 20)


class SlowStore(MemoryStore):
    """Every put takes two seconds of its clock."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self.clock = clock

    def put_if_absent(self, key: str, value: Buffer) -> bool:
        self.clock.advance(2.0)
        return super().put_if_absent(key, value)


class World:
    def __init__(self, hot_save_bytes_max: int = 1 << 20) -> None:
        self.clock = ManualClock()
        self.bulk, self.hot = SlowStore(self.clock), FlakyStore(MemoryStore())
        self.index, self.recorder = FlakyIndex(MemoryIndex()), MemoryRecorder()
        self.settings = CacheSettings("w", 60, 1000, hot_save_bytes_max)
        self.cache = self.another_cache()

    def another_cache(self) -> ChunkCache:
        return ChunkCache(
            self.bulk, self.hot, self.index, self.settings, self.recorder, clock=self.clock
        )

    def record(self) -> ShardRecord:
        (found,) = self.index.lookup(KEY.namespace, [KEY.prefix_hash])
        assert found is not None
        return found.shards[KEY.field]

    def get(self, arrived: Any = None) -> bytes:
        room = bytearray(len(PAYLOAD))
        got = self.cache.hot.get_into(PATH, memoryview(room), arrived, None)
        assert got or self.cache.get_into(KEY, memoryview(room), arrived)
        return bytes(room)


@pytest.fixture
def world() -> World:
    return World()


def test_a_record_appears_when_its_payload_can_be_read(world: World) -> None:
    stored: list[bytes | None] = []
    world.index.after = lambda: stored.append(world.bulk.get(PATH))
    assert world.cache.save(PATH, PAYLOAD, HEADER)
    assert stored == [PAYLOAD]
    assert world.record().header_checksum == HEADER.checksum[:16]


def test_another_writers_payload_is_published_as_it_is(world: World) -> None:
    theirs, header = payload_of(writer="another")
    world.bulk.put(PATH, theirs)
    assert not world.cache.save(PATH, PAYLOAD, HEADER)
    assert world.record().header_checksum == header.checksum[:16] != HEADER.checksum[:16]


@pytest.mark.parametrize("stored", [payload_of(OTHER_CLAIM)[0], PAYLOAD[:-1], b"garbage"])
def test_an_unusable_payload_is_replaced(world: World, stored: bytes) -> None:
    world.bulk.put(PATH, stored)
    assert world.cache.save(PATH, PAYLOAD, HEADER)
    assert world.bulk.get(PATH) == PAYLOAD


def test_a_corrupt_payload_is_forgotten_and_replaced(world: World) -> None:
    world.cache.save(PATH, PAYLOAD, HEADER)
    world.bulk.put(PATH, PAYLOAD[:-1] + b"?")
    assert not world.cache.in_flight.begin(PATH)
    world.cache.reject(KEY, world.record(), corrupt=True)
    assert world.cache.in_flight.begin(PATH)
    assert world.index.lookup(KEY.namespace, [KEY.prefix_hash]) == [None]
    assert world.cache.save(PATH, PAYLOAD, HEADER)
    assert world.bulk.get(PATH) == PAYLOAD


def test_a_payload_that_is_found_corrupt_while_it_is_saved_is_replaced_by_the_next_save(
    world: World,
) -> None:
    """The save under way has looked before that was known, and takes what is there for good."""
    world.bulk.put(PATH, PAYLOAD[:-1] + b"?")
    world.index.after = lambda: world.cache.reject(KEY, None, corrupt=True)
    assert not world.cache.save(PATH, PAYLOAD, HEADER)
    assert world.cache.in_flight.begin(PATH)
    assert world.cache.save(PATH, PAYLOAD, HEADER)
    assert world.bulk.get(PATH) == PAYLOAD


def test_a_corrupt_hot_copy_is_not_read_again(world: World) -> None:
    world.cache.save(PATH, PAYLOAD, HEADER)
    world.hot.put(PATH, bytes(len(PAYLOAD)))
    assert world.record().hot
    world.cache.reject(KEY, world.record(), corrupt=True)
    assert world.get() == PAYLOAD


def test_a_hot_store_that_fails_is_read_past(world: World) -> None:
    world.cache.save(PATH, PAYLOAD, HEADER)
    world.hot.fail_until_mended(StoreUnavailable("gone"))
    assert world.get() == PAYLOAD


def test_bytes_of_a_hot_copy_are_told_when_it_is_whole(world: World) -> None:
    world.cache.save(PATH, PAYLOAD, HEADER)
    told: list[int] = []
    world.get(told.append)
    assert told == [0, len(PAYLOAD)]


def test_an_unreachable_index_stops_no_save(world: World) -> None:
    world.index.error = StoreUnavailable("gone")
    assert world.cache.take_lease(PATH)
    assert world.cache.save(PATH, PAYLOAD, HEADER)
    assert world.recorder.value("publish_errors") == 1
    assert world.cache.in_flight.begin(PATH), "the next request may save it again"


def test_a_chunk_is_saved_once_at_a_time_and_not_again_for_a_while(world: World) -> None:
    saves = InFlightSaves(clock=world.clock)
    for is_kept in (False, True, False):
        assert saves.begin("a")
        assert not saves.begin("a")
        if is_kept:
            saves.mark_saved("a")
        saves.end("a")
        assert saves.begin("a") is not is_kept
        saves.end("a")
        world.clock.advance(KEEP_S)


@pytest.mark.parametrize(("save_max", "hot"), [(len(PAYLOAD), True), (len(PAYLOAD) - 1, False)])
def test_only_a_small_payload_becomes_hot_when_it_is_saved(save_max: int, hot: bool) -> None:
    world = World(save_max)
    assert world.cache.save(PATH, PAYLOAD, HEADER)
    assert (world.hot.get(PATH) is not None) is hot
    assert world.record().hot is hot


def test_a_put_tells_how_fast_the_link_is_and_one_that_sent_nothing_does_not(world: World) -> None:
    world.cache.save(PATH, PAYLOAD, HEADER)
    assert world.cache.link.bytes_per_s == pytest.approx(len(PAYLOAD) / 2.0)
    assert not world.cache.save(PATH, PAYLOAD, HEADER)
    assert world.cache.link.puts.count == 1


@pytest.mark.parametrize("becomes", ["kept", "evicted", "unreachable"])
def test_who_finds_anothers_payload_promises_the_hot_copy_that_there_is(
    world: World, becomes: str
) -> None:
    assert world.another_cache().save(PATH, PAYLOAD, HEADER)
    if becomes == "evicted":
        world.hot.delete(PATH)
    elif becomes == "unreachable":
        world.hot.fail_until_mended(StoreUnavailable("gone"))
    assert not world.cache.save(PATH, PAYLOAD, HEADER)
    assert world.record().hot is (becomes == "kept")
    assert world.recorder.value("hot_errors") == (becomes == "unreachable")


@pytest.mark.parametrize("save_max", [len(PAYLOAD), 0])
def test_mending_a_corrupt_payload_mends_its_hot_copy_or_promises_none(save_max: int) -> None:
    world = World(save_max)
    world.bulk.put(PATH, PAYLOAD)
    world.hot.put(PATH, b"not " + PAYLOAD[4:])
    world.cache.reject(KEY, None, corrupt=True)
    world.cache.save(PATH, PAYLOAD, HEADER)
    assert world.record().hot is bool(save_max)
    assert not save_max or world.hot.get(PATH) == PAYLOAD
