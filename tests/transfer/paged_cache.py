"""A paged KV cache as vLLM registers it, without vLLM: for tests of transfers."""

from collections.abc import Sequence

import torch

from objkv.cache.match import stored_blocks
from objkv.keys.identity import GroupIdentity
from objkv.keys.topology import rank_shard
from objkv.transfer.paging import GroupShape, PagedGroup


def paged_group(
    identity: GroupIdentity,
    *,
    chunk_tokens: int,
    num_blocks: int,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    tp: tuple[int, int] = (0, 1),
) -> tuple[PagedGroup, list[torch.Tensor]]:
    """A rank's group over random blocks, and its tensors ``[num_blocks, H, N, C]``, one a layer.

    ``tp`` is (rank, size). Block 0 is the null block, as in vLLM.
    """
    rank = rank_shard(
        layers=len(identity.layers), heads=identity.heads, tp_rank=tp[0], tp_size=tp[1]
    )
    heads = rank.shard.head_end - rank.shard.head_start
    generator = torch.Generator().manual_seed(seed)
    shape = (num_blocks, heads, identity.block_size, identity.content)
    caches = [torch.randn(shape, generator=generator).to(dtype) for _ in identity.layers]
    blocks = stored_blocks(identity, chunk_tokens)
    paged = PagedGroup(GroupShape(identity.layers, blocks, identity.block_size, rank), caches)
    return paged, caches


def same_blocks(
    left: Sequence[torch.Tensor],
    left_ids: Sequence[int],
    right: Sequence[torch.Tensor],
    right_ids: Sequence[int],
) -> bool:
    """Whether the blocks hold the same bytes, layer by layer."""
    return all(
        torch.equal(
            a[list(left_ids)].contiguous().view(torch.uint8),
            b[list(right_ids)].contiguous().view(torch.uint8),
        )
        for a, b in zip(left, right, strict=True)
    )
