"""A folder as its own index: it finds existing payloads, removes damaged ones, and returns no
others."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objkv.background import at_once
from objkv.cache.bulk_index import BulkIndex
from objkv.cache.chunks import shard_record
from objkv.cache.lookup import OtherShapesIndex
from objkv.cache.match import covered
from objkv.cache.pins import Pin
from objkv.codec.payload import read_header
from objkv.index.base import ShardRecord
from objkv.keys.chunk import payload_path
from objkv.keys.prefix import prefix_hashes, root_hash
from objkv.stores.local import LocalStore
from tests.contracts.clock import ManualClock
from tests.contracts.memory_store import MemoryStore
from tests.support.samples import (
    CHUNK,
    FIELD,
    IDENTITY,
    LEFT,
    NAMESPACE,
    RIGHT,
    TOKENS,
    save,
    save_identity,
)

HASHES = prefix_hashes(NAMESPACE, TOKENS, CHUNK)
SIDES = [f"0.{LEFT}", f"0.{RIGHT}"]


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


@pytest.fixture
def index(store: LocalStore) -> BulkIndex:
    return BulkIndex(store)


def first_shard(index: BulkIndex) -> ShardRecord:
    [shards, *_] = index.find(NAMESPACE, HASHES, [FIELD])
    assert shards is not None
    return shards[FIELD]


def test_what_was_saved_is_found_without_being_announced(
    store: LocalStore, index: BulkIndex
) -> None:
    assert index.find(NAMESPACE, HASHES, [FIELD]) == [None] * 3
    keys = save(store, None)
    found = index.find(NAMESPACE, HASHES, [FIELD])
    for key, shards in zip(keys, found, strict=True):
        assert shards is not None
        entry = store.head(key.path())
        assert entry is not None
        assert shards[FIELD].nbytes == entry.nbytes
        assert shards[FIELD].created_s == int(entry.modified_s)
        assert not shards[FIELD].hot


def test_nothing_is_told_beyond_the_first_chunk_that_is_missing(
    store: LocalStore, index: BulkIndex
) -> None:
    """A match ends there; each further look would cost a request."""
    [_, second, _] = save(store, None)
    store.delete(second.path())
    found = index.find(NAMESPACE, HASHES, [FIELD])
    assert [shards is None for shards in found] == [False, True, True]


def test_parts_before_whole_payloads_are_no_gap(store: LocalStore, index: BulkIndex) -> None:
    save(store, None)
    save(store, None, TOKENS[:CHUNK], shards=(LEFT, RIGHT))
    store.delete(payload_path(NAMESPACE, HASHES[0], FIELD))
    parts = OtherShapesIndex(index, lambda shards: covered(shards, 0, IDENTITY.groups[0]))
    assert [set(one or ()) for one in at_once(parts.find(NAMESPACE, HASHES, [FIELD]))] == [
        {*SIDES},
        {FIELD},
        {FIELD},
    ]


@given(st.integers(0, 3), st.integers(0, 3))
def test_of_a_chunk_those_shards_are_found_that_are_there(left: int, right: int) -> None:
    store = MemoryStore()
    save(store, None, TOKENS[: left * CHUNK], shards=(LEFT,))
    save(store, None, TOKENS[: right * CHUNK], shards=(RIGHT,))
    found = BulkIndex(store).find(NAMESPACE, HASHES, SIDES)
    stored = [zip((left, right), SIDES, strict=True) for _ in range(3)]
    due = [{side for count, side in both if place < count} for place, both in enumerate(stored)]
    assert [set(shards or {}) for shards in found] == due


def test_records_for_operators_are_what_the_headers_say(
    store: LocalStore, index: BulkIndex
) -> None:
    save_identity(store)
    [first, *_] = save(store, None, shards=(LEFT, RIGHT), codec="blosc")
    [record] = index.lookup(NAMESPACE, HASHES[:1])
    assert record is not None
    assert (record.parent_hash, record.token_start, record.token_end) == (
        root_hash(NAMESPACE),
        0,
        CHUNK,
    )
    assert set(record.shards) == set(SIDES)
    payload = store.get(first.path())
    assert payload is not None
    assert record.shards[SIDES[0]] == shard_record(read_header(payload))
    assert not record.shards[SIDES[0]].is_plain
    assert {one.prefix_hash for one in index.scan(NAMESPACE)} == set(HASHES)
    assert index.namespaces() == [NAMESPACE]
    assert index.lookup(NAMESPACE, [b"\x09" * 20]) == [None]


def test_whatever_is_no_payload_is_left_out(store: LocalStore, index: BulkIndex) -> None:
    [first, second, third] = save(store, None)
    payload = store.get(third.path())
    assert payload is not None
    store.put("notes.txt", b"mine")
    store.put(first.path(), b"short")
    store.put(second.path(), payload)  # another's, in the wrong place
    store.put(third.path(), payload[:-1])
    assert list(index.scan(NAMESPACE)) == []


def test_a_payload_that_could_not_be_used_is_gone_for_everybody(
    store: LocalStore, index: BulkIndex
) -> None:
    [first, *_] = save(store, None)
    shard = first_shard(index)
    assert index.forget(NAMESPACE, HASHES[0], FIELD, shard)
    assert store.head(first.path()) is None
    assert not index.forget(NAMESPACE, HASHES[0], FIELD, shard)
    [record] = index.lookup(NAMESPACE, HASHES[1:2])
    assert record is not None
    assert index.forget(NAMESPACE, HASHES[1], FIELD, record.shards[FIELD])


def test_a_payload_that_was_written_anew_meanwhile_stays(
    store: LocalStore, index: BulkIndex, tmp_path: Path
) -> None:
    [first, *_] = save(store, None)
    shard = first_shard(index)
    os.utime(tmp_path / first.path(), (1, 1))
    for other in (shard, replace(shard, nbytes=1)):
        assert not index.forget(NAMESPACE, HASHES[0], FIELD, other)
    assert store.head(first.path()) is not None


def test_dropping_a_chunk_deletes_all_its_payloads(store: LocalStore, index: BulkIndex) -> None:
    keys = save(store, None, shards=(LEFT, RIGHT))
    assert index.drop(NAMESPACE, HASHES[0])
    assert not index.drop(NAMESPACE, HASHES[0])
    assert [store.head(key.path()) is None for key in keys] == [True, True] + [False] * 4


def test_usage_is_what_lies_there(store: LocalStore, index: BulkIndex) -> None:
    assert index.usage() == []
    keys = save(store, None, shards=(LEFT, RIGHT))
    save_identity(store)
    (usage,) = index.usage()
    entries = [store.head(key.path()) for key in keys]
    assert (usage.namespace, usage.payloads) == (NAMESPACE, 6)
    assert usage.nbytes == sum(entry.nbytes for entry in entries if entry is not None)
    index.set_usage(replace(usage, nbytes=1))
    assert index.usage()[0].nbytes == usage.nbytes


def test_pins_are_read_from_their_documents_until_they_end(store: LocalStore) -> None:
    clock = ManualClock(1000.0)
    index = BulkIndex(store, clock=clock)
    save(store, None)
    pin = Pin(NAMESPACE, tuple(HASHES[:2]), 2 * CHUNK, 2000, 0)
    store.put(pin.path(), pin.document())
    for until_s in (2000, 0):
        found = index.lookup(NAMESPACE, HASHES)
        assert [one.pinned_until_s for one in found if one] == [until_s, until_s, 0]
        clock.advance(1000)
