"""Sealed payloads from one replica to another: pages for who holds the keys, else a miss."""

import pytest

from objkv.cache.chunks import ChunkCache
from objkv.codec.header import digest
from objkv.codec.payload import read_header
from objkv.keys.chunk import ChunkKey
from objkv.stores.memory import MemoryStore
from tests.codec.seals import SEALS, other_seal, rechecked
from tests.transfer.paged_cache import same_blocks
from tests.transfer.test_promotion_by_loads import SETTINGS
from tests.transfer.world import (
    HASHES,
    IN_SPANS,
    NAMESPACE,
    PATIENCE_S,
    WHOLE,
    Replica,
    stores,
    wait_until,
)

KINDS = sorted(SEALS)


def promised(replica: Replica, chunk: int) -> bool:
    return replica.index.lookup(NAMESPACE, [HASHES[chunk]]) != [None]


@pytest.mark.parametrize(("sync", "cuts"), [(False, WHOLE), (True, IN_SPANS)])
@pytest.mark.parametrize("codec", ["none", "blosclz4"])
@pytest.mark.parametrize("kind", ["signed", "signed and encrypted"])
def test_what_one_replica_sealed_another_one_loads(
    kind: str, codec: str, *, sync: bool, cuts: object
) -> None:
    store, index = stores()
    writer = Replica(store, index, seed=1, codec=codec, seal=SEALS[kind])
    reader = Replica(store, index, seed=2, cuts=cuts, seal=SEALS[kind])
    for cache in writer.caches:
        cache[1:5] = 0.5  # so that a codec has something to do
    writer.save(range(2))
    assert not reader.load(range(2), first_block=9, sync=sync).failed
    assert same_blocks(writer.caches, [1, 2, 3, 4], reader.caches, [9, 10, 11, 12])
    header = read_header(store.get(writer.path(0)) or b"")
    assert header.codec == codec + "+aes256gcm" * SEALS[kind].encrypts
    assert header.marks.signed_by
    assert writer.recorder.value(f"save_codec_{codec}") == 2
    writer.close()
    reader.close()


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
    for replica in (forger, reader, saver):
        replica.close()


@pytest.mark.parametrize("kind", KINDS)
def test_what_another_replica_sealed_before_is_left_as_it_is(kind: str) -> None:
    store, index = stores()
    first, second = (Replica(store, index, seed=i, seal=SEALS[kind]) for i in (1, 2))
    first.save(range(1))
    stored = store.get(first.path(0))
    second.save(range(1))
    assert second.recorder.value("save_existed") == 1
    assert store.get(first.path(0)) == stored
    first.close()
    second.close()


def forged_frames(payload: bytes) -> bytes:
    """Other bytes in the last layer, and every checksum made right again."""
    header = read_header(payload)
    changed = bytearray(payload)
    changed[-1] ^= 1
    frame = header.frames[len(header.frames) - 1]
    now = digest(changed[frame.offset :])
    head = changed[: header.data_start].replace(frame.checksum.encode(), now.encode())
    return rechecked(head) + bytes(changed[header.data_start :])


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_forger_who_makes_checksums_right_gets_nothing_loaded(kind: str, *, sync: bool) -> None:
    store, index = stores()
    writer = Replica(store, index, seed=1, seal=SEALS[kind])
    reader = Replica(store, index, seed=2, cuts=IN_SPANS, seal=SEALS[kind])
    writer.save(range(2))
    first, second = (store.get(writer.path(chunk)) or b"" for chunk in (0, 1))
    assert isinstance(store, MemoryStore)
    before = reader.snapshot()
    for forged in (forged_frames(first), second):  # the other one is signed, and of another chunk
        store.put(writer.path(0), forged)
        outcome = reader.load(range(1), first_block=9, sync=sync)
        assert outcome.failed_blocks >= {9, 10}
        writer.cache.reject(ChunkKey.parse(writer.path(0)), {}, corrupt=True)
        store.put(writer.path(0), first)
        writer.save(range(1))
    # The layers before it were good, and are of no use: their blocks were told as failed.
    after = reader.snapshot()
    assert all((a[:9] == b[:9]).all() for a, b in zip(before, after, strict=True))
    assert not reader.load(range(2), first_block=9, sync=sync).failed
    writer.close()
    reader.close()


def test_without_a_seal_encrypted_payloads_are_misses() -> None:
    store, index = stores()
    writer = Replica(store, index, seed=1, seal=SEALS["encrypted"])
    reader = Replica(store, index, seed=2)
    writer.save(range(1))
    assert reader.load(range(1), first_block=9).failed
    writer.close()
    reader.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_hot_copy_is_made_of_what_was_sealed_only_and_as_it_is(kind: str) -> None:
    (store, index), hot = stores(), MemoryStore()
    writer = Replica(store, index, seed=1, seal=SEALS[kind])
    reader = Replica(store, index, seed=2, seal=SEALS[kind])
    ChunkCache.__init__(
        reader.cache, store, hot, index, SETTINGS, reader.recorder, seal=SEALS[kind]
    )
    promoter = reader.cache._promoter
    assert promoter is not None
    writer.save(range(2))
    paths = [writer.path(chunk) for chunk in (0, 1)]
    payloads = [store.get(path) or b"" for path in paths]
    for _ in range(SETTINGS.hot_promote_loads):
        assert not reader.load(range(2), first_block=9).failed
        # In time for the copy, and too late for the load: the header is right, a frame is not.
        store.put(paths[1], payloads[1][:-1] + bytes([payloads[1][-1] ^ 1]))
        promoter.drain(PATIENCE_S)
        store.put(paths[1], payloads[1])
    wait_until(lambda: hot.get(paths[0]) is not None)
    assert hot.get(paths[0]) == payloads[0]
    assert hot.get(paths[1]) in (None, payloads[1])
    reader.cache.close(PATIENCE_S)
    writer.close()
    reader.close()
