"""Bytes go from the store into a slab and from there into blocks: no buffer is made for them."""

import tracemalloc
from pathlib import Path

import pytest

from objkv.index.memory import MemoryIndex
from objkv.keys.identity import GroupIdentity
from objkv.stores.base import WriteStore
from objkv.stores.local import LocalStore
from objkv.stores.memory import MemoryStore
from tests.transfer.paged_cache import same_blocks
from tests.transfer.world import BLOCKS, Replica

PEAK_BYTES_MAX = 256 << 10
CHUNKS = 3
GROUP = GroupIdentity(
    "full", None, tuple(f"l{i}" for i in range(8)), heads=8, content=1024, block_size=32
)
"""Payloads of 8 MiB."""


@pytest.mark.parametrize("kind", [MemoryStore, LocalStore])
def test_no_large_buffer_is_allocated_by_a_load(kind: type, tmp_path: Path) -> None:
    store: WriteStore = LocalStore(tmp_path) if kind is LocalStore else MemoryStore()
    ids = range(CHUNKS * BLOCKS)
    first = 1 + len(ids)
    replica = Replica(store, MemoryIndex(), seed=1, group=GROUP, num_blocks=1 + 2 * len(ids))
    replica.save(range(CHUNKS))
    for sync in (False, True):
        for layer in replica.caches:
            layer[first:].zero_()
        tracemalloc.start()
        try:
            outcome = replica.load(range(CHUNKS), first_block=first, sync=sync)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert not outcome.failed
        assert outcome.nbytes > CHUNKS * 8 << 20
        assert peak < PEAK_BYTES_MAX
        mine, theirs = [first + i for i in ids], [1 + i for i in ids]
        assert same_blocks(replica.caches, theirs, replica.caches, mine)
    replica.close()
