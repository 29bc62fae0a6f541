"""Payloads are verified and written while they arrive; whatever arrives, only the truth is."""

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.trace import StatusCode

from objkv.cache.chunks import shard_record
from objkv.codec.payload import read_header
from objkv.errors import StoreUnavailable
from objkv.index.base import ChunkEntry
from objkv.keys.identity import GroupIdentity
from objkv.stores.base import Arrived, WriteStore
from objkv.stores.local import LocalStore
from objkv.transfer.paging import PagedGroup, Quantised
from tests.codec.seals import SEALS, other_seal
from tests.contracts.memory_index import MemoryIndex
from tests.contracts.memory_store import MemoryStore
from tests.support import paged_cache
from tests.support.device import ON_HOST
from tests.support.paged_cache import (
    BLOCKS,
    CHUNK,
    GROUP,
    HASHES,
    IN_PARTS,
    NAMESPACE,
    WHOLE,
    PiecewiseStore,
    Replica,
    paged_group,
    same_blocks,
    stores,
)
from tests.test_tracing import collected

LARGE = GroupIdentity(
    "full", None, tuple(f"l{i}" for i in range(6)), heads=4, content=64, block_size=32
)
"""Layers large enough that a header's upper bound does not bring the next one as well."""
CODECS = ("none", "blosc")
MINE, THEIRS = [9, 10], [1, 2]


class World:
    """A payload in bulk, and a replica to load it, in one request or in spans."""

    def __init__(self, codec: str) -> None:
        self.store, index = PiecewiseStore(), MemoryIndex()
        self.writer = Replica(self.store, index, seed=1, codec=codec, group=LARGE).keep()
        for layer in self.writer.caches:
            layer.round_()  # compressible
        self.writer.save(range(1))
        self.reader = Replica(self.store, index, seed=2, group=LARGE, part_policy=IN_PARTS).keep()
        self.path = self.writer.path(0)
        self.payload = self.store.get(self.path) or b""
        assert read_header(self.payload).codec == codec
        self.plan = self.reader.load_plan(range(1), MINE[0])

    def load(self, payload: bytes, *, sync: bool) -> bool:
        """Put, load; True if it is told to be fine. Blocks hold the truth, or what they held."""
        self.store.put(self.path, payload)
        publish(self.writer, self.payload)  # the record of one that was refused has gone
        self.reader.forget()
        del self.store.requests[:]
        for layer in self.reader.caches:
            layer.zero_()
        outcome = self.reader.outcome(replace(self.plan, sync=sync))
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


@given(st.sampled_from(CODECS), st.booleans(), pieces, st.data())
@settings(max_examples=32, deadline=None)
def test_a_payload_is_loaded_however_it_arrives_and_none_that_was_changed_reaches_the_model(
    codec: str, sync: bool, sizes: list[int], data: st.DataObject
) -> None:
    place = world(codec)
    place.store.pieces = lambda: iter(sizes)
    payload = bytearray(place.payload)
    near_head = st.integers(0, 6000 * 8)
    bit = data.draw(st.one_of(near_head, st.integers(0, len(payload) * 8 - 1)))
    change = data.draw(st.sampled_from(["flip", "flip", "cut", "grow", "none"]))
    if change == "flip":
        payload[bit // 8] ^= 1 << (bit % 8)
    elif change == "cut":
        del payload[bit // 8 :]
    elif change == "grow":
        payload += data.draw(st.binary(min_size=1, max_size=3))
    assert place.load(bytes(payload), sync=sync) is (change == "none")


def test_a_payload_that_is_replaced_between_two_of_its_spans_is_refused_or_right() -> None:
    """By one with another header, as a replica with another codec writes it."""
    place, other = world("none"), world("blosc")
    requests = place.store.requests

    def sizes() -> Iterator[int]:
        if len(requests) == 2:
            place.store.put(place.path, other.payload)
        return iter([])

    place.store.pieces = sizes
    assert not place.load(place.payload, sync=True)
    assert len(requests) > 2


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
    reader = Replica(store, index, seed=2, group=LARGE, hot=hot, part_policy=IN_PARTS)
    writer.save(range(1))
    payload = store.get(writer.path(0)) or b""
    hot.put(writer.path(0), payload)
    publish(writer, payload, hot=True)
    assert not reader.outcome(reader.load_plan(range(1), MINE[0], sync=sync)).failed
    assert same_blocks(reader.caches, MINE, writer.caches, THEIRS)
    counted = "hot_misses" if sync and forgets else "hot_errors"
    assert reader.recorder.value(counted)
    assert reader.recorder.value("hot_hits") == (1 if sync else 0)


def publish(replica: Replica, payload: bytes, *, hot: bool = False) -> None:
    """Announce a payload. ``hot``: the hot store has a copy, too."""
    header = read_header(payload)
    claim, record = header.claim, replace(shard_record(header), hot=hot)
    span = claim.token_start, claim.token_end
    entry = ChunkEntry(NAMESPACE, claim.key.prefix_hash, claim.parent_hash, *span)
    replica.index.publish(entry, {claim.key.field: record}, ttl_s=3600)


# Bytes go from blocks into a slab and to the store, and back: no buffer is made for them.


PEAK_BYTES_MAX = 256 << 10
BIG_CHUNKS = 3
BIG = GroupIdentity(
    "full", None, tuple(f"l{i}" for i in range(8)), heads=8, content=1024, block_size=32
)
"""Payloads of 8 MiB."""


@contextmanager
def without_large_buffers() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < PEAK_BYTES_MAX


@ON_HOST
@pytest.mark.parametrize("kind", [MemoryStore, LocalStore])
def test_no_large_buffer_is_allocated_by_a_save_or_a_load(kind: type, tmp_path: Path) -> None:
    store: WriteStore = LocalStore(tmp_path) if kind is LocalStore else MemoryStore()
    ids = range(BIG_CHUNKS * BLOCKS)
    first = 1 + len(ids)
    replica = Replica(store, MemoryIndex(), seed=1, group=BIG, num_blocks=1 + 2 * len(ids), slabs=3)
    with without_large_buffers() if kind is LocalStore else nullcontext():
        assert not replica.save(range(BIG_CHUNKS))
    for sync in (False, True):
        for layer in replica.caches:
            layer[first:].zero_()
        with without_large_buffers():
            outcome = replica.load(range(BIG_CHUNKS), first_block=first, sync=sync)
        assert not outcome.failed
        assert outcome.nbytes > BIG_CHUNKS * 8 << 20
        mine, theirs = [first + i for i in ids], [1 + i for i in ids]
        assert same_blocks(replica.caches, theirs, replica.caches, mine)


# Quantised pages reach only a cache whose scales are theirs: any other is a miss.


def quantised_group(
    *shape: Any, says: dict[str, Quantised], **how: Any
) -> tuple[PagedGroup, list[torch.Tensor]]:
    """As vLLM registers an fp8 cache: plain bytes."""
    group, caches = paged_group(*shape, **how)
    caches = [cache.view(torch.uint8) for cache in caches]
    return PagedGroup(group.shape, caches, says), caches


Opened = Callable[[int, str, str], Replica]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    store, index = MemoryStore(), MemoryIndex()

    def make(seed: int, dtype: str, scales: str) -> Replica:
        says = {name: Quantised(dtype, "1.0 1.0") for name in GROUP.layers}
        says[GROUP.layers[1]] = Quantised(dtype, scales)
        monkeypatch.setattr(paged_cache, "paged_group", partial(quantised_group, says=says))
        return Replica(store, index, seed=seed)

    return make


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize(
    ("dtype", "scales"),
    [
        ("F8_E4M3", "0.5 2.0"),
        ("F8_E4M3", "0.25 2.0"),
        ("F8_E4M3", "0.5 4.0"),
        ("F8_E5M2", "0.5 2.0"),
    ],
)
def test_quantised_pages_arrive_bit_for_bit_where_format_and_scales_are_theirs(
    opened: Opened, dtype: str, scales: str, sync: bool
) -> None:
    writer, reader = opened(1, "F8_E4M3", "0.5 2.0"), opened(2, dtype, scales)
    writer.save(range(1))
    before = [cache.clone() for cache in reader.caches]
    failed = reader.load(range(1), 9, sync=sync).failed_blocks
    if (dtype, scales) == ("F8_E4M3", "0.5 2.0"):
        assert not failed
        assert same_blocks(writer.caches, THEIRS, reader.caches, MINE)
    else:
        assert failed == set(range(9, 9 + BLOCKS))
        assert all(torch.equal(*pair) for pair in zip(before, reader.caches, strict=True))


# Sealed payloads from one replica to another: pages for who holds the keys, else a miss.


KINDS = sorted(SEALS)


def promised(replica: Replica, chunk: int) -> bool:
    return replica.index.lookup(NAMESPACE, [HASHES[chunk]]) != [None]


@pytest.mark.parametrize(("sync", "part_policy"), [(False, WHOLE), (True, IN_PARTS)])
@pytest.mark.parametrize("codec", ["none", "blosclz4"])
@pytest.mark.parametrize("kind", ["signed", "signed and encrypted"])
def test_what_one_replica_sealed_another_one_loads(
    kind: str, codec: str, *, sync: bool, part_policy: object
) -> None:
    store, index = stores()
    writer = Replica(store, index, seed=1, codec=codec, seal=SEALS[kind])
    reader = Replica(store, index, seed=2, part_policy=part_policy, seal=SEALS[kind])
    for pages in writer.caches:
        pages[1:5] = 0.5  # so that a codec has something to do
    writer.save(range(2))
    assert not reader.load(range(2), first_block=9, sync=sync).failed
    assert same_blocks(writer.caches, [1, 2, 3, 4], reader.caches, [9, 10, 11, 12])
    header = read_header(store.get(writer.path(0)) or b"")
    assert header.codec == codec + "+aes256gcm" * bool(SEALS[kind].encrypter)
    assert header.marks.signed_by
    assert writer.recorder.value(f"save_codec_{codec}") == 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("whose", ["nobody's", "somebody else's"])
def test_what_is_not_sealed_with_our_keys_is_not_loaded_but_replaced(whose: str, kind: str) -> None:
    store, index = stores()
    seal = None if whose == "nobody's" else other_seal(kind)
    forger = Replica(store, index, seed=1, seal=seal)
    reader = Replica(store, index, seed=2, seal=SEALS[kind])
    forger.save(range(1))
    before = reader.snapshot()
    assert reader.load(range(1), first_block=9).failed
    assert all((a == b).all() for a, b in zip(before, reader.snapshot(), strict=True))
    assert reader.recorder.value("load_corrupt") == 1
    assert not promised(reader, 0)
    # A replica that has never seen it replaces it as well: it counts as if it were not there.
    saver = Replica(store, index, seed=3, seal=SEALS[kind])
    saver.save(range(1))
    assert saver.recorder.value("saves") == 1
    assert not reader.load(range(1), first_block=9).failed
    assert same_blocks(saver.caches, [1, 2], reader.caches, [9, 10])


# What a load took, and where its bytes came from.


@pytest.mark.parametrize("fault", ["", "missing", "corrupt"])
@pytest.mark.parametrize("sync", [False, True])
def test_a_load_has_a_span_with_its_chunks_and_bytes_or_its_error(sync: bool, fault: str) -> None:
    (store, index), (tracing, exporter) = stores(), collected()
    replica = Replica(store, index, seed=1, tracing=tracing)
    replica.save(range(3))
    replica.forget()
    path = replica.path(1)
    if fault == "missing":
        store.delete(path)
    elif fault == "corrupt":
        store.put(path, (store.get(path) or b"")[:-1] + b"?")
    outcome = replica.load(range(3), 9, sync=sync)
    assert bool(outcome.failed) is bool(fault)
    assert outcome.first_s is not None
    assert 0 < outcome.first_s <= outcome.seconds
    (load,) = [span for span in exporter.get_finished_spans() if span.name == "objkv.load"]
    assert (load.status.status_code is StatusCode.ERROR) is bool(fault)
    told = load.attributes or {}
    assert told["objkv.chunks"] == 3
    nbytes = sum(len(store.get(replica.path(chunk)) or b"") for chunk in range(3))
    loaded = replica.recorder.value("load_bytes")
    assert fault or told["objkv.bytes"] == outcome.nbytes == loaded == nbytes


@pytest.mark.parametrize("whence", ["hot", "bulk"])
def test_hot_bytes_and_bulk_bytes_are_told_apart(whence: str) -> None:
    (store, index), hot = stores(), MemoryStore()
    replica = Replica(store, index, seed=1, hot=hot)
    replica.save(range(1))
    replica.forget()
    if whence == "bulk":
        hot.delete(replica.path(0))
    replica.recorder.drain()
    assert not replica.load(range(1), 9).failed
    numbers = replica.recorder.drain()
    assert numbers[f"{whence}_load_bytes"] == numbers["load_bytes"] > CHUNK
    assert not {"hot_load_bytes", "bulk_load_bytes"} - {f"{whence}_load_bytes"} & numbers.keys()
