"""A rank looks at its pages before the first request."""

import pytest
import torch

from objkv.errors import ConfigError
from objkv.keys.topology import RankShard, Shard
from objkv.transfer.lanes import Lane
from objkv.transfer.paging import GroupShape, PagedGroup, check_pages
from tests.support.paged_cache import stores
from tests.support.paged_shapes import LAYOUTS, Model, ShapedRank, ShapeOfReplica

SHAPE = GroupShape(("l0", "l1"), 2, 4, RankShard(Shard(0, 2, 0, 2), 0, 1))


def group(*caches: torch.Tensor) -> PagedGroup:
    return PagedGroup(SHAPE, caches)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_every_physical_order_passes_and_keeps_what_was_in_it(layout: str) -> None:
    rank = ShapedRank(Model(), ShapeOfReplica(layout=layout), (0, 0), *stores())
    rank.compute()
    before = rank.memory.clone()
    check_pages(rank.paged, Lane())
    assert torch.equal(rank.memory.view(torch.int32), before.view(torch.int32))
    rank.close()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float8_e4m3fn]
)
def test_every_dtype_passes(dtype: torch.dtype) -> None:
    caches = [torch.zeros(9, 2, 4, 8).to(dtype) for _ in range(2)]
    check_pages(group(*caches), Lane())
    assert not any(cache.view(torch.uint8).any() for cache in caches)


def test_padded_states_pass() -> None:
    memory = torch.zeros(9, 2, 1, 8, 100, dtype=torch.int8)
    shape = GroupShape(("l0", "l1"), 1, 1, RankShard(Shard(0, 2, 0, 1), 0, 1))
    paged = PagedGroup(shape, [memory[:, i, :, :1, :90] for i in range(2)])
    check_pages(paged, Lane())
    assert not memory.any()


ZEROS = torch.zeros(9, 2, 4, 8)


@pytest.mark.parametrize(
    ("caches", "reason"),
    [
        ([ZEROS, ZEROS], "KV cache of l0 does not return the blocks"),
        ([torch.zeros(4096).as_strided((9, 2, 4, 8), (32, 32, 8, 1)) for _ in range(2)], "strides"),
        ([torch.zeros(9, 1, 4, 8).expand(9, 2, 4, 8) for _ in range(2)], "not supported"),
    ],
    ids=["layers share their memory", "blocks overlap", "heads are one and the same"],
)
def test_memory_that_is_used_twice_is_refused(caches: list[torch.Tensor], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_pages(group(*caches), Lane())
    assert not ZEROS.any()


def test_cleared_blocks_are_zero_in_all_layers_and_others_stay() -> None:
    caches = [torch.ones(6, 2, 4, 8, dtype=torch.bfloat16) for _ in range(2)]
    shape = GroupShape(("a", "b"), 1, 4, RankShard(Shard(0, 2, 0, 2), 0, 1))
    PagedGroup(shape, caches).clear([1, 4])
    for cache in caches:
        assert not cache[[1, 4]].any()
        assert cache[[0, 2, 3, 5]].all()


def test_kernel_blocks_of_a_cleared_block_are_all_cleared() -> None:
    halves = torch.ones(12, 2, 2, 8).transpose(1, 2).contiguous().transpose(1, 2)
    shape = GroupShape(("a",), 1, 4, RankShard(Shard(0, 1, 0, 2), 0, 1))
    PagedGroup(shape, [halves]).clear([3])
    assert [bool(block.any()) for block in halves] == [True] * 6 + [False] * 2 + [True] * 4
