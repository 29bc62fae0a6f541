"""Quantised pages reach only a cache whose scales are theirs: any other is a miss."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from objkv.cache.match import stored_blocks
from objkv.index.memory import MemoryIndex
from objkv.keys.identity import GroupIdentity
from objkv.keys.topology import rank_shard
from objkv.stores.memory import MemoryStore
from objkv.transfer.paging import GroupShape, PagedGroup, Quantised
from tests.transfer import world
from tests.transfer.paged_cache import same_blocks
from tests.transfer.world import BLOCKS, GROUP, Replica


def quantised_group(
    identity: GroupIdentity,
    *,
    chunk_tokens: int,
    num_blocks: int,
    seed: int,
    says: dict[str, Quantised],
) -> tuple[PagedGroup, list[torch.Tensor]]:
    """As vLLM registers an fp8 cache: plain bytes."""
    rank = rank_shard(layers=len(identity.layers), heads=identity.heads, tp_rank=0, tp_size=1)
    shape = (num_blocks, identity.heads, identity.block_size, identity.content)
    generator = torch.Generator().manual_seed(seed)
    caches = [
        torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        for _ in identity.layers
    ]
    blocks = stored_blocks(identity, chunk_tokens)
    group = GroupShape(identity.layers, blocks, identity.block_size, rank)
    return PagedGroup(group, caches, says), caches


Opened = Callable[[int, str, str], Replica]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    store, index = MemoryStore(), MemoryIndex()
    replicas: list[Replica] = []

    def make(seed: int, dtype: str, scales: str) -> Replica:
        says = {name: Quantised(dtype, "1.0 1.0") for name in GROUP.layers}
        says[GROUP.layers[1]] = Quantised(dtype, scales)
        monkeypatch.setattr(world, "paged_group", partial(quantised_group, says=says))
        replicas.append(Replica(store, index, seed=seed))
        return replicas[-1]

    yield make
    for replica in replicas:
        replica.close()


@pytest.mark.parametrize("sync", [False, True])
def test_pages_of_equal_scales_come_bit_for_bit(opened: Opened, sync: bool) -> None:
    writer, reader = opened(1, "F8_E4M3", "0.5 2.0"), opened(2, "F8_E4M3", "0.5 2.0")
    writer.save(range(2))
    assert reader.load(range(2), 9, sync=sync).failed_blocks == frozenset()
    count = 2 * BLOCKS
    assert same_blocks(writer.caches, range(1, 1 + count), reader.caches, range(9, 9 + count))


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize(
    ("dtype", "scales"), [("F8_E4M3", "0.25 2.0"), ("F8_E4M3", "0.5 4.0"), ("F8_E5M2", "0.5 2.0")]
)
def test_pages_of_other_scales_or_another_format_never_arrive(
    opened: Opened, dtype: str, scales: str, sync: bool
) -> None:
    writer, reader = opened(1, "F8_E4M3", "0.5 2.0"), opened(2, dtype, scales)
    writer.save(range(1))
    before = [cache.clone() for cache in reader.caches]
    assert reader.load(range(1), 9, sync=sync).failed_blocks == set(range(9, 9 + BLOCKS))
    assert all(torch.equal(*pair) for pair in zip(before, reader.caches, strict=True))
