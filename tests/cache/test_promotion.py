"""Payloads that are loaded often are copied to the hot store, hot first and the record last."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Event, Thread

import pytest

from objkv.cache.chunks import CacheSettings, ChunkCache
from objkv.codec.payload import Header, read_header
from objkv.errors import StoreUnavailable
from objkv.index.base import ChunkEntry, Record, ShardRecord
from objkv.index.memory import MemoryIndex
from objkv.stores.base import Buffer
from objkv.stores.memory import MemoryStore
from objkv.telemetry import MemoryRecorder
from tests.codec.payloads import CLAIM, sample

PATIENCE_S = 120.0
PATH = CLAIM.key.path()
PAYLOAD = bytes(sample("none"))
HEADER = read_header(PAYLOAD)
SETTINGS = CacheSettings(
    "w",
    ttl_s=3600,
    lease_ms=1000,
    hot_payload_bytes_max=1 << 20,
    hot_save_bytes_max=0,
    hot_promote_loads=2,
    hot_promote_bytes_max=1 << 20,
)


class WatchedStore(MemoryStore):
    """Records puts, with a gate and a fault for tests that need them."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log
        self.go = Event()
        self.go.set()
        self.asked = Event()
        self.broken = False

    def put(self, key: str, value: Buffer) -> None:
        self.asked.set()
        assert self.go.wait(PATIENCE_S)
        if self.broken:
            raise StoreUnavailable("put: gone")
        super().put(key, value)
        self.log.append("hot")


class WatchedIndex(MemoryIndex):
    """Records publishes."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log

    def publish(self, chunk: ChunkEntry, shards: Mapping[str, ShardRecord], *, ttl_s: int) -> None:
        super().publish(chunk, shards, ttl_s=ttl_s)
        self.log.append("record")


@dataclass
class World:
    """A cache in which one payload is saved."""

    cache: ChunkCache
    bulk: MemoryStore
    hot: WatchedStore
    index: WatchedIndex
    recorder: MemoryRecorder
    log: list[str]

    def load(self, times: int, *, hot: bool = False, header: Header = HEADER) -> None:
        """Report a load like a loader, and wait for its effects."""
        for _ in range(times):
            self.cache.note_load(CLAIM, header, hot=hot)
        assert self.cache._promoter is not None
        assert self.cache._promoter.drain(PATIENCE_S)

    def shard(self) -> ShardRecord:
        (record,) = self.index.lookup(CLAIM.key.namespace, [CLAIM.key.prefix_hash])
        assert record is not None
        return record.shards[CLAIM.key.field]


Make = Callable[..., World]


@pytest.fixture
def make() -> Iterator[Make]:
    caches: list[ChunkCache] = []

    def world(**changes: int) -> World:
        log: list[str] = []
        bulk, hot, index = MemoryStore(), WatchedStore(log), WatchedIndex(log)
        recorder = MemoryRecorder()
        cache = ChunkCache(bulk, hot, index, replace(SETTINGS, **changes), recorder)
        caches.append(cache)
        cache.save(CLAIM, PAYLOAD, HEADER)
        log.clear()
        return World(cache, bulk, hot, index, recorder, log)

    yield world
    for cache in caches:
        assert cache.close(PATIENCE_S)


def test_a_payload_that_is_loaded_often_becomes_hot_once_and_its_record_says_so_last(
    make: Make,
) -> None:
    world = make()
    before = world.shard()
    world.load(1)
    assert world.hot.get(PATH) is None
    world.load(1)
    assert world.hot.get(PATH) == PAYLOAD
    assert world.shard() == replace(before, hot=True)
    assert world.recorder.value("hot_promotions") == 1
    assert world.recorder.value("hot_promoted_bytes") == len(PAYLOAD)
    buffer = memoryview(bytearray(len(PAYLOAD)))
    assert world.cache.get_into(CLAIM.key, buffer, hot=True) == len(PAYLOAD)
    assert world.recorder.value("hot_hits") == 1
    world.load(10)
    assert world.log == ["hot", "record"]
    assert world.cache.close(PATIENCE_S)


def test_loads_that_found_a_hot_copy_promised_do_not_count(make: Make) -> None:
    world = make()
    world.load(10, hot=True)
    assert world.log == []


@pytest.mark.parametrize("limit", ["hot_payload_bytes_max", "hot_promote_bytes_max"])
def test_what_is_larger_than_a_limit_stays_where_it_is(make: Make, limit: str) -> None:
    world = make(**{limit: len(PAYLOAD) - 1})
    world.load(10)
    assert world.log == []


def test_nothing_is_promoted_without_a_budget_and_no_thread_is_there(make: Make) -> None:
    assert make(hot_promote_bytes_max=0).cache._promoter is None


def test_a_copy_that_another_replica_made_is_not_made_again(make: Make) -> None:
    world = make()
    chunk = ChunkEntry(CLAIM.key.namespace, CLAIM.key.prefix_hash, CLAIM.parent_hash, 256, 512)
    world.index.publish(chunk, {CLAIM.key.field: replace(world.shard(), hot=True)}, ttl_s=60)
    world.hot.put(PATH, PAYLOAD)
    world.log.clear()
    world.load(2)
    assert world.log == []


def test_a_hot_copy_that_the_server_evicted_is_made_again(make: Make) -> None:
    world = make()
    world.load(2)
    assert world.shard().hot
    world.hot.delete(PATH)
    world.log.clear()
    again = ChunkCache(world.bulk, world.hot, world.index, SETTINGS, world.recorder)
    world = replace(world, cache=again)
    buffer = memoryview(bytearray(len(PAYLOAD)))
    for _ in range(2):
        assert world.cache.get_into(CLAIM.key, buffer, hot=True) == len(PAYLOAD)
        world.cache.note_load(CLAIM, HEADER, hot=True, seconds=1.0)
    world.load(0)
    assert world.log == ["hot", "record"]
    assert world.cache.link.gets.count == 0  # the time was not bulk's alone
    assert world.cache.get_into(CLAIM.key, buffer, hot=True) == len(PAYLOAD)
    assert world.recorder.value("hot_hits") == 1
    world.load(10, hot=True)
    assert world.log == ["hot", "record"]
    assert again.close(PATIENCE_S)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_record_that_changes_while_its_payload_is_copied_stays_as_it_is(
    make: Make, replaced: bool
) -> None:
    world = make(hot_promote_loads=1)
    newer = replace(world.shard(), header_checksum="0" * 32)
    world.hot.go.clear()
    world.cache.note_load(CLAIM, HEADER, hot=False)
    assert world.hot.asked.wait(PATIENCE_S)
    if replaced:
        chunk = ChunkEntry(CLAIM.key.namespace, CLAIM.key.prefix_hash, CLAIM.parent_hash, 256, 512)
        world.index.publish(chunk, {CLAIM.key.field: newer}, ttl_s=60)
    else:
        world.index.drop(CLAIM.key.namespace, CLAIM.key.prefix_hash)
    world.hot.go.set()
    world.load(0)
    (record,) = world.index.lookup(CLAIM.key.namespace, [CLAIM.key.prefix_hash])
    assert (None if record is None else record.shards[CLAIM.key.field]) == (
        newer if replaced else None
    )


def changed_at(at: int) -> bytes:
    return PAYLOAD[:at] + bytes([PAYLOAD[at] ^ 1]) + PAYLOAD[at + 1 :]


NOT_COPIED: dict[str, Callable[[World], object]] = {
    "its record was withdrawn": lambda world: world.index.drop(
        CLAIM.key.namespace, CLAIM.key.prefix_hash
    ),
    "gone": lambda world: world.bulk.delete(PATH),
    "another one": lambda world: world.bulk.put(PATH, sample("blosc")),
    "cut short": lambda world: world.bulk.put(PATH, PAYLOAD[:-1]),
    "corrupt header": lambda world: world.bulk.put(PATH, changed_at(100)),
    "corrupt frame": lambda world: world.bulk.put(PATH, changed_at(len(PAYLOAD) - 1)),
    "far too long": lambda world: world.bulk.put(PATH, bytes(10_000_000)),
}


@pytest.mark.parametrize("what", NOT_COPIED)
def test_what_is_not_the_payload_on_record_is_neither_copied_nor_promised(
    make: Make, what: str
) -> None:
    world = make()
    NOT_COPIED[what](world)
    world.load(2)
    assert world.log == []
    if "corrupt" in what or "long" in what:
        assert world.recorder.value("hot_promote_errors") == 1


def test_a_hot_store_that_fails_leaves_the_record_alone_and_is_tried_again(make: Make) -> None:
    world = make()
    world.hot.broken = True
    world.load(2)
    assert not world.shard().hot
    assert world.recorder.value("hot_promote_errors") == 1
    world.hot.broken = False
    world.load(2)
    assert world.shard().hot


def test_a_load_does_not_wait_for_the_copy_and_what_does_not_fit_the_queue_is_dropped(
    make: Make,
) -> None:
    world = make(hot_promote_loads=1, hot_promote_bytes_max=1 << 30)
    world.hot.go.clear()
    for i in range(100):
        key = replace(CLAIM.key, group=i)
        world.cache.note_load(replace(CLAIM, key=key), HEADER, hot=False)
    assert world.recorder.value("hot_promote_drops") >= 100 - 64 - 1
    world.hot.go.set()
    world.load(0)


def test_without_another_thread_nothing_is_copied_and_nothing_raised(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_thread: Thread) -> None:
        raise RuntimeError("can't start new thread")

    world = make()
    with monkeypatch.context() as patched:
        patched.setattr(Thread, "start", refuse)
        world.load(2)
    assert world.recorder.value("hot_promote_drops") == 1
    assert world.cache.close(0.0)
    assert world.log == []


def test_closing_ends_the_thread_and_later_loads_change_nothing(make: Make) -> None:
    before = threading.enumerate()
    world = make()
    world.load(2)
    assert world.cache.close(PATIENCE_S)
    assert not [t for t in threading.enumerate() if t not in before]
    world.bulk.put(PATH, b"x")
    for _ in range(10):
        world.cache.note_load(replace(CLAIM, token_start=0), HEADER, hot=False)
    assert world.cache.close(0.0)


def test_what_a_sweep_deletes_meanwhile_is_not_announced_again(make: Make) -> None:
    """The sweep comes between the last look at the record and its announcement, if it may."""
    world = make()
    lookup, shard, swept = world.index.lookup, world.shard(), []

    def sweep() -> None:
        key = CLAIM.key
        if not world.index.lease(PATH, "sweep", ttl_ms=1_000):
            swept.append("busy")
            return
        world.index.forget(key.namespace, key.prefix_hash, key.field, shard)
        world.bulk.delete(PATH)
        world.index.release(PATH, "sweep")

    def meddled(namespace: str, prefix_hashes: Sequence[bytes]) -> list[Record | None]:
        found = lookup(namespace, prefix_hashes)
        if world.hot.get(PATH) is not None and not swept:
            sweep()
        return found

    world.index.lookup = meddled  # type: ignore[method-assign]
    world.load(2)
    assert swept == ["busy"]
    assert world.bulk.head(PATH) is not None
    assert world.shard().hot
    assert world.index.lease(PATH, "sweep", ttl_ms=1), "the lease was given back"


def test_what_somebody_saves_or_deletes_right_now_is_promoted_later(make: Make) -> None:
    world = make()
    world.index.lease(PATH, "sweep", ttl_ms=100_000)
    world.load(2)
    assert not world.shard().hot
    world.index.release(PATH, "sweep")
    world.load(2)
    assert world.shard().hot


def test_a_lease_that_cannot_be_given_back_ends_by_itself(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(name: str, owner: str) -> None:
        raise StoreUnavailable("gone")

    world = make()
    monkeypatch.setattr(world.index, "release", gone)
    world.load(2)
    assert world.shard().hot
    assert world.recorder.value("lease_errors") == 1
    assert world.recorder.value("hot_promotions") == 1
