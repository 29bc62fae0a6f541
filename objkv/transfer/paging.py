"""The paged cache as transfers see it: one ``[B, H, N, C]`` tensor per layer of each group.

Source of the shape: vLLM 0.31-0.33, ``register_kv_caches``. The dimensions are blocks, heads, block
size and content (K and V fused), in any physical order. Only whole blocks are copied: on the CPU
the layout inside a block is private to the attention kernel.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType

import numpy as np
import torch

from objkv.codec.payload import LayerSpec
from objkv.errors import ConfigError
from objkv.keys.topology import RankShard
from objkv.transfer.lanes import Lane

DTYPE_NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}


@dataclass(frozen=True, slots=True)
class Quantised:
    """The element type and scales of one layer's cache.

    The tensor does not have them: vLLM stores fp8 as plain bytes, and keeps the scales in the
    layer.
    """

    dtype: str | None
    """Name of a one-byte safetensors dtype. None: the tensor's own."""
    scales: str
    """Scales of K and V, in the form that payloads use."""


@dataclass(frozen=True, slots=True)
class GroupShape:
    """The shape of one group on one rank, known before vLLM registers the tensors."""

    layers: tuple[str, ...]
    """This rank's layers in forward order."""
    blocks: int
    """Blocks per payload."""
    block_size: int
    rank_shard: RankShard
    model_layers: tuple[str, ...] = ()
    """The layers of all ranks in forward order. Empty: this rank has all layers."""
    heads: int = 0
    """Heads over all ranks. 0: this rank has all heads."""
    divisible: bool = False
    """Whether tokens can be moved into blocks of another size, so that replicas with different
    block sizes share. True if pages are canonical and the group keeps all tokens."""


NOT_QUANTISED: Mapping[str, Quantised] = MappingProxyType({})
"""No layer is quantised."""
_GATHER_CHUNKS_MAX = 16
_GATHER_BYTES_MAX = 32 << 20
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Integer types by element size. Pages are copied as integers, because numpy has neither bf16 nor
fp8, and torch copies fp8 by index only on some devices."""
ARRAY_WORDS = {torch.uint8: np.uint8, torch.int16: np.int16, torch.int32: np.int32}
"""The same integer types in numpy."""


class PagedGroup:
    """One group's layers on this rank. vLLM owns the tensors. They are never freed or resized
    here."""

    def __init__(
        self,
        shape: GroupShape,
        caches: Sequence[torch.Tensor],
        quantised: Mapping[str, Quantised] = NOT_QUANTISED,
    ) -> None:
        """``quantised``: layers whose element type or scales differ from their tensor's dtype."""
        assert len(caches) == len(shape.layers)
        self.shape = shape
        self.layers = tuple(
            _layer_spec(name, cache, shape, quantised.get(name))
            for name, cache in zip(shape.layers, caches, strict=True)
        )
        """The layers that a payload of this group must contain, in forward order."""
        self.layer_bytes = tuple(layer.nbytes for layer in self.layers)
        """Decoded bytes of each layer's pages in a payload."""
        self._caches = tuple(cache.view(_WORDS[cache.element_size()]) for cache in caches)

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self._caches[0].device

    @property
    def raw_bytes(self) -> int:
        """Uncompressed bytes of one chunk of this group."""
        return sum(self.layer_bytes)

    @property
    def gather_chunks_max(self) -> int:
        """How many chunks to pass to ``gather_many`` at once, at least one.

        One kernel gathers one layer of all of them. The lane stages that layer in device memory,
        which vLLM has mostly taken, so there is also a bound in bytes.
        """
        fitting = _GATHER_BYTES_MAX // max(self.layer_bytes)
        return max(1, min(_GATHER_CHUNKS_MAX, fitting))

    @property
    def caches(self) -> tuple[torch.Tensor, ...]:
        """Each layer's ``[num_blocks, heads, block_size, content]``, as integers of the element
        size."""
        return self._caches

    def gather_many(
        self, lane: Lane, block_ids: Sequence[Sequence[int]], pages: Sequence[torch.Tensor]
    ) -> list[list[memoryview]]:
        """Write all layers of each chunk's blocks into its pages, one layer after the other.

        Args:
            block_ids: the block ids of each chunk.
            pages: per chunk ``[>= raw_bytes]`` uint8, host memory, pinned when the lane is CUDA.

        Returns:
            A view of the bytes of each chunk and layer. They are valid when a later mark is done.
        """
        assert len(block_ids) == len(pages)
        if not pages:
            return []
        placed = lane.place(list(chain.from_iterable(block_ids)))
        views: list[list[memoryview]] = [[] for _ in pages]
        offset = 0
        for cache, layer in zip(self._caches, self.layers, strict=True):
            pieces = [part[offset : offset + layer.nbytes] for part in pages]
            shaped = [piece.view(cache.dtype).view(layer.shape) for piece in pieces]
            lane.gather(cache, placed, shaped)
            for view, piece in zip(views, pieces, strict=True):
                view.append(piece.numpy().data)
            offset += layer.nbytes
        return views


def _layer_spec(
    name: str, cache: torch.Tensor, shape: GroupShape, quantised: Quantised | None
) -> LayerSpec:
    shard = shape.rank_shard.shard
    heads = shard.head_end - shard.head_start
    if cache.dim() != 4 or cache.shape[1] != heads or cache.shape[2] != shape.block_size:
        raise ConfigError(
            f"the KV cache of {name} has shape {tuple(cache.shape)}; objkv expects [blocks, "
            f"{heads} heads, {shape.block_size} tokens, content]: this attention backend is not "
            "supported, run the model without the objkv connector or choose another backend"
        )
    if cache.dtype not in DTYPE_NAMES:
        raise ConfigError(
            f"the KV cache of {name} has dtype {cache.dtype}, which objkv does not support: run "
            "the model without the objkv connector or choose another --kv-cache-dtype"
        )
    pages = (shape.blocks, heads, shape.block_size, cache.shape[3])
    if quantised is None:
        return LayerSpec(name, DTYPE_NAMES[cache.dtype], pages)
    assert cache.element_size() == 1
    return LayerSpec(name, quantised.dtype or DTYPE_NAMES[cache.dtype], pages, quantised.scales)


# A self-test of a rank's pages before the first request. It writes blocks, reads them back, and
# checks that nothing else changed. A layout that objkv misreads is refused instead of corrupted.

_BLOCKS = 2
"""Number of blocks written. Their neighbours are checked too."""


def check_pages(group: PagedGroup, lane: Lane) -> None:
    """Write a pattern into blocks of every layer and check it.

    The lane and plain indexing must both read it back, each layer must have its own pattern, and
    neighbouring blocks must be unchanged. The blocks must not be in use. Their contents are
    restored. Block 0 is not touched. Raises ``ConfigError``.
    """
    blocks = min(len(cache) for cache in group.caches)
    if blocks <= _BLOCKS:
        return  # too few to serve a request
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
                f"the KV cache of {group.shape.layers[layer]} does not return the blocks written "
                f"to it (shape {tuple(cache.shape)}, strides {cache.stride()}): this layout "
                "is not supported, run the model without the objkv connector or choose another "
                "attention backend"
            )


def _pattern(cache: torch.Tensor, layer: int, blocks: int) -> torch.Tensor:
    """Return ``[blocks, heads, block_size, content]`` on the host, different for each layer."""
    generator = torch.Generator().manual_seed(layer + 1)
    bounds = torch.iinfo(cache.dtype)
    shape = (blocks, *cache.shape[1:])
    return torch.randint(bounds.min, bounds.max, shape, dtype=cache.dtype, generator=generator)
