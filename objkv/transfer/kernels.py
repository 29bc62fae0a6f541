"""Kernels that distribute staged pages to blocks of a paged cache, and collect them from there."""

from typing import Protocol

import torch

from objkv.transfer.lanes import PagedLayers, Recast


class PageKernels(Protocol):
    """Moves pages within device memory, on the current stream. Layers have one shape, strides and
    dtype."""

    def scatter(
        self, staged: torch.Tensor, layers: PagedLayers, ids: torch.Tensor, recast: Recast
    ) -> None:
        """Write ``recast(staged[l])`` into blocks ``ids`` of each layer ``l``.

        ``staged``: ``[layers, blocks', heads', size', content]`` words. ``ids``: ``[blocks]``
        int64, all different.
        """

    def gather(self, layers: PagedLayers, ids: torch.Tensor, staged: torch.Tensor) -> None:
        """Write blocks into ``staged``: ``[chunks, layers, blocks, heads, size, content]`` words.
        ``ids``: ``[chunks * blocks]`` int64."""


class TorchKernels:
    """PyTorch's own kernels: one launch per layer, on any device."""

    def scatter(
        self, staged: torch.Tensor, layers: PagedLayers, ids: torch.Tensor, recast: Recast
    ) -> None:
        """See ``PageKernels.scatter``."""
        for pages, cache in zip(staged, layers.caches, strict=True):
            cache.index_copy_(0, ids, recast(pages))

    def gather(self, layers: PagedLayers, ids: torch.Tensor, staged: torch.Tensor) -> None:
        """See ``PageKernels.gather``."""
        chunks, _, blocks = staged.shape[:3]
        for layer, cache in enumerate(layers.caches):
            for chunk in range(chunks):
                chosen = ids[chunk * blocks : (chunk + 1) * blocks]
                staged[chunk, layer].copy_(cache.index_select(0, chosen))


def triton_kernels() -> PageKernels | None:
    """Return kernels with one launch for all layers, or None without Triton."""
    return None
