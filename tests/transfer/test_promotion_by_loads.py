"""From loads to the hot store: what a replica loads often, it and others get from there."""

import pytest

from objkv.cache.chunks import CacheSettings, ChunkCache
from objkv.stores.memory import MemoryStore
from tests.transfer.paged_cache import same_blocks
from tests.transfer.world import HASHES, NAMESPACE, PATIENCE_S, Replica, stores, wait_until

SETTINGS = CacheSettings(
    "reader",
    ttl_s=3600,
    lease_ms=600_000,
    hot_payload_bytes_max=1 << 20,
    hot_save_bytes_max=0,
    hot_promote_loads=2,
    hot_promote_bytes_max=1 << 20,
)


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("codec", ["none", "blosclz4"])
def test_a_chunk_that_is_loaded_often_comes_from_the_hot_store_then(
    codec: str, *, sync: bool
) -> None:
    (store, index), hot = stores(), MemoryStore()
    writer, reader = Replica(store, index, seed=1, codec=codec), Replica(store, index, seed=2)
    ChunkCache.__init__(reader.cache, store, hot, index, SETTINGS, reader.recorder)
    promoter = reader.cache._promoter
    assert promoter is not None
    writer.save(range(1))
    path = writer.path(0)
    assert not reader.load(range(1), first_block=9, sync=sync).failed
    wait_until(lambda: path in promoter._often._loads)
    assert promoter.drain(PATIENCE_S)
    assert hot.get(path) is None
    assert not reader.load(range(1), first_block=9, sync=sync).failed
    wait_until(lambda: reader.recorder.value("hot_promotions") == 1)
    assert hot.get(path) == store.get(path)
    (record,) = index.lookup(NAMESPACE, [HASHES[0]])
    assert record is not None
    assert all(shard.hot for shard in record.shards.values())
    store.delete(path)
    outcome = reader.load(range(1), first_block=9, sync=sync)
    assert not outcome.failed
    assert reader.recorder.value("hot_hits") >= 1
    assert same_blocks(writer.caches, [1, 2], reader.caches, [9, 10])
    hot.delete(path)
    assert reader.load(range(1), first_block=9, sync=sync).failed
    assert reader.cache.close(PATIENCE_S)
    writer.close()
    reader.close()
