"""Saving through the cache: which copies are made, and what it learns of the link."""

import pytest

from objkv.cache.chunks import CacheSettings, ChunkCache, SaveOutcome
from objkv.codec.payload import read_header
from objkv.errors import StoreUnavailable
from objkv.index.base import ShardRecord
from objkv.index.memory import MemoryIndex
from objkv.stores.base import Buffer
from objkv.stores.memory import MemoryStore
from objkv.telemetry import MemoryRecorder
from tests.codec.payloads import CLAIM, sample
from tests.contracts.clock import ManualClock
from tests.contracts.flaky import FlakyStore

PATH = CLAIM.key.path()
PAYLOAD = bytes(sample("none"))
HEADER = read_header(PAYLOAD)


@pytest.mark.parametrize(("save_max", "hot"), [(len(PAYLOAD), True), (len(PAYLOAD) - 1, False)])
def test_only_a_small_payload_becomes_hot_when_it_is_saved(save_max: int, hot: bool) -> None:
    store, index = MemoryStore(), MemoryIndex()
    settings = CacheSettings("w", 60, 1000, save_max)
    cache = ChunkCache(MemoryStore(), store, index, settings, MemoryRecorder())
    assert cache.save(CLAIM, PAYLOAD, HEADER) is SaveOutcome.SAVED
    assert (store.get(PATH) is not None) is hot
    (record,) = index.lookup(CLAIM.key.namespace, [CLAIM.key.prefix_hash])
    assert record is not None
    assert record.shards[CLAIM.key.field].hot is hot


class SlowStore(MemoryStore):
    """Every put takes two seconds of its clock."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self.clock = clock

    def put_if_absent(self, key: str, value: Buffer) -> bool:
        self.clock.advance(2.0)
        return super().put_if_absent(key, value)


def test_a_put_tells_how_fast_the_link_is_and_one_that_sent_nothing_does_not() -> None:
    clock = ManualClock()
    settings = CacheSettings("w", 60, 1000, 0)
    cache = ChunkCache(
        SlowStore(clock), None, MemoryIndex(), settings, MemoryRecorder(), clock=clock
    )
    cache.save(CLAIM, PAYLOAD, HEADER)
    assert cache.link.bytes_per_s == pytest.approx(len(PAYLOAD) / 2.0)
    assert cache.save(CLAIM, PAYLOAD, HEADER) is SaveOutcome.EXISTED
    assert cache.link.puts.count == 1


def test_a_load_tells_how_fast_bulk_is_but_not_when_it_came_from_hot() -> None:
    settings = CacheSettings("w", 60, 1000, 0)
    cache = ChunkCache(MemoryStore(), None, MemoryIndex(), settings, MemoryRecorder())
    cache.note_load(HEADER, hot=True, seconds=1.0)
    cache.note_load(HEADER, hot=False, seconds=None)
    assert cache.link.gets.count == 0
    cache.note_load(HEADER, hot=False, seconds=1.0)
    assert cache.link.gets.bytes_per_s == pytest.approx(HEADER.nbytes)


def shard_of(index: MemoryIndex) -> ShardRecord:
    (record,) = index.lookup(CLAIM.key.namespace, [CLAIM.key.prefix_hash])
    assert record is not None
    return record.shards[CLAIM.key.field]


@pytest.mark.parametrize("evicted", [False, True])
def test_who_finds_the_payload_of_another_writer_promises_the_hot_copy_that_there_is(
    evicted: bool,
) -> None:
    bulk, hot, index = MemoryStore(), MemoryStore(), MemoryIndex()
    settings = CacheSettings("w", 60, 1000, 1 << 20)
    theirs, mine = (ChunkCache(bulk, hot, index, settings, MemoryRecorder()) for _ in range(2))
    assert theirs.save(CLAIM, PAYLOAD, HEADER) is SaveOutcome.SAVED
    assert shard_of(index).hot
    if evicted:
        hot.delete(PATH)
    assert mine.save(CLAIM, PAYLOAD, HEADER) is SaveOutcome.EXISTED
    assert shard_of(index).hot is not evicted


def test_a_hot_copy_that_fails_to_tell_is_not_promised() -> None:
    hot, recorder = FlakyStore(MemoryStore()), MemoryRecorder()
    bulk, index = MemoryStore(), MemoryIndex()
    bulk.put(PATH, PAYLOAD)
    cache = ChunkCache(bulk, hot, index, CacheSettings("w", 60, 1000, 1 << 20), recorder)
    hot.fail_until_mended(StoreUnavailable("gone"))
    assert cache.save(CLAIM, PAYLOAD, HEADER) is SaveOutcome.EXISTED
    assert not shard_of(index).hot
    assert recorder.value("hot_errors") == 1


@pytest.mark.parametrize("save_max", [len(PAYLOAD), 0])
def test_mending_a_corrupt_payload_mends_its_hot_copy_or_promises_none(save_max: int) -> None:
    bulk, hot, index = MemoryStore(), MemoryStore(), MemoryIndex()
    settings = CacheSettings("w", 60, 1000, save_max)
    cache = ChunkCache(bulk, hot, index, settings, MemoryRecorder())
    bulk.put(PATH, PAYLOAD)
    hot.put(PATH, b"not " + PAYLOAD[4:])
    cache.reject(CLAIM.key, {}, corrupt=True)
    cache.save(CLAIM, PAYLOAD, HEADER)
    assert shard_of(index).hot is bool(save_max)
    assert not save_max or hot.get(PATH) == PAYLOAD
