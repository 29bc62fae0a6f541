"""Payloads are verified and written while they arrive; whatever arrives, only the truth is."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from objkv.codec.payload import read_header
from objkv.errors import PayloadError, StoreUnavailable
from objkv.index.memory import MemoryIndex
from objkv.keys.identity import GroupIdentity
from objkv.stores.base import Arrived
from objkv.stores.memory import MemoryStore
from objkv.transfer.fetch import Landing, Strip
from objkv.transfer.job import LoadJob
from objkv.transfer.lanes import HostLane
from objkv.transfer.plan import LoadPlan
from objkv.transfer.queue import FetchSpan, opening_bytes
from objkv.transfer.sources import Sources
from tests.transfer.arriving import PiecewiseStore
from tests.transfer.paged_cache import same_blocks
from tests.transfer.world import BLOCKS, CHUNK, HASHES, IN_SPANS, NAMESPACE, Replica, stores

LARGE = GroupIdentity(
    "full", None, tuple(f"l{i}" for i in range(6)), heads=4, content=64, block_size=32
)
"""Layers large enough that a header's upper bound does not bring the next one as well."""
CODECS = ("none", "zstd", "blosc")
MINE, THEIRS = [9, 10], [1, 2]


class World:
    """A payload in bulk, and a replica to load it, in one request or in spans."""

    def __init__(self, codec: str) -> None:
        self.store, index = PiecewiseStore(), MemoryIndex()
        self.writer = Replica(self.store, index, seed=1, codec=codec, group=LARGE)
        for layer in self.writer.caches:
            layer.round_()  # compressible
        self.writer.save(range(1))
        self.reader = Replica(self.store, index, seed=2, group=LARGE, cuts=IN_SPANS)
        self.path = self.writer.path(0)
        self.payload = self.store.get(self.path) or b""
        self.plan = self.reader.load_plan(range(1), MINE[0])

    def load(self, payload: bytes, *, sync: bool) -> bool:
        """Put, load; True if it is told to be fine. Blocks hold the truth, or what they held."""
        self.store.put(self.path, payload)
        for layer in self.reader.caches:
            layer.zero_()
        loader = self.reader.loader
        loader.submit(replace(self.plan, sync=sync))
        (outcome,) = loader.take_finished(sync=True) if sync else [self.reader.outcome()]
        for mine, theirs in zip(self.reader.caches, self.writer.caches, strict=True):
            for block, other in zip(MINE, THEIRS, strict=True):
                assert torch.equal(mine[block], theirs[other]) or not mine[block].any()
        fine = not outcome.failed
        if fine:
            assert same_blocks(self.reader.caches, MINE, self.writer.caches, THEIRS)
        return fine


@cache
def world(codec: str) -> World:
    return World(codec)


@pytest.fixture(scope="module", autouse=True)
def ended() -> Iterator[None]:
    yield
    for codec in CODECS:
        world(codec).writer.close()
        world(codec).reader.close()
    world.cache_clear()


pieces = st.lists(st.integers(1, 40_000), max_size=30)


@pytest.mark.parametrize("codec", CODECS)
def test_layers_are_stored_as_this_test_wants_them(codec: str) -> None:
    found = world(codec).reader.index.lookup(NAMESPACE, [HASHES[0]])[0]
    assert found is not None
    assert [record.codec for record in found.shards.values()] == [codec]


@given(st.sampled_from(CODECS), st.booleans(), pieces)
@settings(max_examples=30, deadline=None)
def test_a_payload_is_loaded_however_it_arrives(codec: str, sync: bool, sizes: list[int]) -> None:
    place = world(codec)
    place.store.pieces = lambda: iter(sizes)
    assert place.load(place.payload, sync=sync)


@given(st.sampled_from(CODECS), st.booleans(), pieces, st.data())
@settings(max_examples=80, deadline=None)
def test_no_flipped_bit_reaches_the_model_however_it_arrives(
    codec: str, sync: bool, sizes: list[int], data: st.DataObject
) -> None:
    place = world(codec)
    place.store.pieces = lambda: iter(sizes)
    payload = bytearray(place.payload)
    near_head = st.integers(0, 6000 * 8)
    bit = data.draw(st.one_of(near_head, st.integers(0, len(payload) * 8 - 1)))
    payload[bit // 8] ^= 1 << (bit % 8)
    assert not place.load(bytes(payload), sync=sync)


@given(st.sampled_from(CODECS), st.booleans(), pieces, st.data())
@settings(max_examples=30, deadline=None)
def test_a_payload_of_another_length_is_refused_however_it_arrives(
    codec: str, sync: bool, sizes: list[int], data: st.DataObject
) -> None:
    place = world(codec)
    place.store.pieces = lambda: iter(sizes)
    cut = data.draw(st.one_of(st.integers(0, 5000), st.integers(0, len(place.payload) - 1)))
    assert not place.load(place.payload[:cut], sync=sync)
    more = data.draw(st.binary(min_size=1, max_size=3))
    assert not place.load(place.payload + more, sync=sync)


def test_a_header_that_promises_more_than_there_is_room_for_is_refused_at_once() -> None:
    place = world("none")
    header, layers = read_header(place.payload), place.reader.paged.layers
    job = LoadJob(place.plan, lambda _: range(len(layers)), 1.0, lambda: 0.0)
    memory = memoryview(bytearray(place.payload[:-1]))
    source = Sources({0: place.reader.paged}).of(place.plan.moves[0])
    strip = Strip(job, 0, source, HostLane(), memory, lambda: memory)
    landing = Landing(strip, FetchSpan(0, 0, len(layers), 0, len(memory), last=False))
    landing.open(header.data_start - 1, header.claim)
    with pytest.raises(PayloadError, match="can be"):
        landing.open(header.data_start, header.claim)
    landing.arrived(len(memory))
    assert landing.layer == 0


def test_a_header_longer_than_any_can_be_is_refused_by_its_first_bytes() -> None:
    """Otherwise a span could bring no more than a part of it."""
    place = world("none")
    payload = bytearray(place.payload)
    room = opening_bytes(place.reader.paged.layers, 4, tokens=CHUNK)
    payload[:8] = (-(-room // 4096) * 4096 + 4096 - 8).to_bytes(8, "little")
    before = len(place.store.requests)
    assert not place.load(bytes(payload), sync=True)
    assert len(place.store.requests) == before + 1


def test_a_payload_that_is_replaced_between_two_of_its_spans_is_refused_or_right() -> None:
    """By one with another header, as a replica with another codec writes it."""
    place, other = world("none"), world("zstd")
    requests = place.store.requests
    del requests[:]

    def sizes() -> Iterator[int]:
        if len(requests) == 2:
            place.store.put(place.path, other.payload)
        return iter([])

    place.store.pieces = sizes
    assert not place.load(place.payload, sync=True)


class SpoiledHot(MemoryStore):
    """Fails when some bytes have arrived, or has forgotten by then."""

    def __init__(self, *, forgets: bool) -> None:
        super().__init__()
        self._forgets = forgets

    def get_into(
        self, key: str, buffer: memoryview, arrived: Arrived | None = None, start: int | None = None
    ) -> int | None:
        if start == 0:
            return super().get_into(key, buffer, arrived, start)
        if start and self._forgets:
            return None
        value = self.get(key) or b""
        buffer[:5000] = value[:5000]
        assert arrived is not None
        arrived(5000)
        raise StoreUnavailable("gone in the middle")


@pytest.mark.parametrize("forgets", [False, True])
@pytest.mark.parametrize("sync", [False, True])
def test_what_the_hot_store_begins_and_does_not_end_comes_from_bulk(
    *, sync: bool, forgets: bool
) -> None:
    store, index = stores()
    hot = SpoiledHot(forgets=forgets)
    writer = Replica(store, index, seed=1, group=LARGE)
    reader = Replica(store, index, seed=2, group=LARGE, hot=hot, cuts=IN_SPANS)
    writer.save(range(1))
    hot.put(writer.path(0), store.get(writer.path(0)) or b"")
    plan = _hot(reader.load_plan(range(1), MINE[0], sync=sync))
    reader.loader.submit(plan)
    (outcome,) = reader.loader.take_finished(sync=True) if sync else [reader.outcome()]
    assert not outcome.failed
    assert same_blocks(reader.caches, MINE, writer.caches, THEIRS)
    counted = "hot_misses" if sync and forgets else "hot_errors"
    assert reader.recorder.value(counted)
    assert reader.recorder.value("hot_hits") == (1 if sync else 0)
    writer.close()
    reader.close()


def _hot(plan: LoadPlan) -> LoadPlan:
    (load,) = plan.moves
    records = tuple((field, replace(record, hot=True)) for field, record in load.records)
    return replace(plan, moves=(replace(load, records=records),))


def test_a_load_of_which_bytes_came_tells_how_many_and_when() -> None:
    store, index = PiecewiseStore(), MemoryIndex()
    replica = Replica(store, index, seed=1)
    replica.save(range(2))
    outcome = replica.load(range(2), first_block=9)
    nbytes = sum(len(store.get(replica.path(chunk)) or b"") for chunk in range(2))
    assert outcome.nbytes == nbytes == replica.recorder.value("load_bytes")
    assert outcome.first_s is not None
    assert 0 < outcome.first_s <= outcome.seconds
    replica.close()


def test_a_chunk_in_the_middle_of_which_nobody_waits_any_more_is_not_fetched_to_its_end() -> None:
    store, index = PiecewiseStore(), MemoryIndex()
    replica = Replica(store, index, seed=1, group=LARGE)
    replica.save(range(1))
    before = replica.snapshot()
    seen: list[int] = []

    def sizes() -> Iterator[int]:
        while True:
            if len(seen) == 20:
                replica.loader.cancel("r")
            seen.append(1000)
            yield 1000

    store.pieces = sizes
    outcome = replica.load(range(1), first_block=9)
    assert outcome.failed_blocks == set(range(9, 9 + BLOCKS))
    replica.close()
    assert len(seen) * 1000 < len(store.get(replica.path(0)) or b"")
    assert replica.recorder.value("load_given_up") == 1
    assert replica.recorder.value("load_errors") == 0
    assert replica.load_slabs.leased == 0
    last = len(replica.caches) - 1
    assert same_blocks([before[last]], MINE, [replica.caches[last]], MINE)
