"""A self-test of a rank's pages, before the first request: what is written is read back, from its
own place and no other. A layout that objkv misunderstands is refused instead of corrupted.
"""

import torch

from objkv.errors import ConfigError
from objkv.transfer.lanes import Lane
from objkv.transfer.paging import PagedGroup

_BLOCKS = 2
"""Pages written; their neighbours are looked at as well."""


def check_pages(group: PagedGroup, lane: Lane) -> None:
    """Write a pattern into blocks of every layer and compare: the same by the lane's own way back,
    the same as plain indexing sees it, different in every layer, and nothing else changed.

    The blocks must be in nobody's use; what was in them is put back. Block 0 is left alone. Raises
    ``ConfigError``.
    """
    blocks = min(len(cache) for cache in group.caches)
    if blocks <= _BLOCKS:
        return  # too few to serve anybody
    written = [blocks - 1, max(1, blocks // 2)][: blocks - 1]
    watched = sorted({b for w in written for b in (w - 1, w, w + 1) if 0 <= b < blocks})
    lane.follow_compute()
    before = [cache[watched].clone() for cache in group.caches]
    try:
        _check(group, lane, written, watched)
    finally:
        for cache, pages in zip(group.caches, before, strict=True):
            cache[watched] = pages


def _check(group: PagedGroup, lane: Lane, written: list[int], watched: list[int]) -> None:
    placed = lane.place(written)
    neighbours = [block for block in watched if block not in written]
    untouched = [cache[neighbours].cpu() for cache in group.caches]
    patterns = [_pattern(cache, layer, len(written)) for layer, cache in enumerate(group.caches)]
    for cache, pattern in zip(group.caches, patterns, strict=True):
        lane.scatter(pattern.numpy(), cache, placed)
    lane.mark().wait()
    for layer, (cache, pattern) in enumerate(zip(group.caches, patterns, strict=True)):
        back = torch.empty_like(pattern, pin_memory=cache.is_cuda)
        lane.gather(cache, placed, [back])
        lane.mark().wait()
        seen = cache[written].cpu()
        beside = cache[neighbours].cpu()
        if not (
            torch.equal(back, pattern)
            and torch.equal(seen, pattern)
            and torch.equal(beside, untouched[layer])
        ):
            raise ConfigError(
                f"the KV cache of {group.shape.layers[layer]} does not hold what is written into "
                f"its blocks (shape {tuple(cache.shape)}, strides {cache.stride()}): this layout "
                "is not supported, run the model without the objkv connector or choose another "
                "attention backend"
            )


def _pattern(cache: torch.Tensor, layer: int, blocks: int) -> torch.Tensor:
    """``[blocks, heads, block_size, content]`` on the host, other values for each layer."""
    generator = torch.Generator().manual_seed(layer + 1)
    bounds = torch.iinfo(cache.dtype)
    shape = (blocks, *cache.shape[1:])
    return torch.randint(bounds.min, bounds.max, shape, dtype=cache.dtype, generator=generator)
