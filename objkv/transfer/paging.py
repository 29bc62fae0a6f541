"""The paged cache as transfers see it: per group, one ``[B, H, N, C]`` tensor per layer.

Source of the shape: vLLM 0.31-0.33, ``register_kv_caches``: blocks, heads, block size, content
(K and V fused), whatever the physical order. Whole blocks only: on the CPU the bytes inside a
block are the attention kernel's own.
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
    """What the elements of one layer's cache mean, which its tensor does not say: vLLM keeps fp8 as
    plain bytes, and scales beside the layer."""

    dtype: str | None
    """A safetensors dtype name of one byte; None: the tensor's own."""
    scales: str
    """Scales of K and V, as payloads have them."""


@dataclass(frozen=True, slots=True)
class GroupShape:
    """What a rank expects of one group before it has seen the tensors."""

    layers: tuple[str, ...]
    """This rank's layers in forward order."""
    blocks: int
    """Blocks that one payload holds."""
    block_size: int
    rank_shard: RankShard
    model_layers: tuple[str, ...] = ()
    """The layers of all ranks in forward order; none: this rank has them all."""
    heads: int = 0
    """Over all ranks; 0: this rank has them all."""
    divisible: bool = False
    """Whether tokens may be dealt into blocks of another size, so that replicas with other ones
    share: pages are canonical, and the group keeps all tokens."""


NOT_QUANTISED: Mapping[str, Quantised] = MappingProxyType({})
"""No layer is quantised."""
_GATHER_CHUNKS_MAX = 16
_GATHER_BYTES_MAX = 32 << 20
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Integers of an element's size, as which pages travel: numpy has neither bf16 nor fp8, and torch
copies fp8 by index on some devices only."""
ARRAY_WORDS = {torch.uint8: np.uint8, torch.int16: np.int16, torch.int32: np.int32}
"""The same as arrays have them."""


class PagedGroup:
    """One group's layers on this rank. The tensors are vLLM's, never freed or resized here."""

    def __init__(
        self,
        shape: GroupShape,
        caches: Sequence[torch.Tensor],
        quantised: Mapping[str, Quantised] = NOT_QUANTISED,
    ) -> None:
        """``quantised``: layers whose elements mean more than their tensor's dtype says."""
        assert len(caches) == len(shape.layers)
        self.shape = shape
        self.layers = tuple(
            _layer_spec(name, cache, shape, quantised.get(name))
            for name, cache in zip(shape.layers, caches, strict=True)
        )
        """What a payload of this group must hold, in forward order."""
        self.layer_bytes = tuple(layer.nbytes for layer in self.layers)
        """Of each layer's pages in a payload, decoded."""
        self._caches = tuple(cache.view(_WORDS[cache.element_size()]) for cache in caches)

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self._caches[0].device

    @property
    def raw_bytes(self) -> int:
        """Bytes of one chunk of this group, uncompressed."""
        return sum(self.layer_bytes)

    @property
    def gather_chunks_max(self) -> int:
        """For how many chunks to ask ``gather_many`` at once, at least one.

        A layer of so many is one kernel; and the lane keeps it in the device's memory, beside what
        vLLM took of that, so it has a bound in bytes as well.
        """
        fitting = _GATHER_BYTES_MAX // max(self.layer_bytes)
        return max(1, min(_GATHER_CHUNKS_MAX, fitting))

    @property
    def caches(self) -> tuple[torch.Tensor, ...]:
        """``[num_blocks, heads, block_size, content]`` of each layer, as integers of an element's
        size."""
        return self._caches

    def gather_many(
        self, lane: Lane, block_ids: Sequence[Sequence[int]], pages: Sequence[torch.Tensor]
    ) -> list[list[memoryview]]:
        """Write all layers of each chunk's blocks into its pages, one layer after the other.

        Args:
            block_ids: per chunk.
            pages: per chunk ``[>= raw_bytes]`` uint8, host memory, pinned when the lane is CUDA.

        Returns:
            Per chunk and layer a view of its bytes, which are there when a later mark is done.
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
        raise ConfigError(f"the KV cache of {name} has dtype {cache.dtype}, unknown to objkv")
    pages = (shape.blocks, heads, shape.block_size, cache.shape[3])
    if quantised is None:
        return LayerSpec(name, DTYPE_NAMES[cache.dtype], pages)
    assert cache.element_size() == 1
    return LayerSpec(name, quantised.dtype or DTYPE_NAMES[cache.dtype], pages, quantised.scales)


# A self-test of a rank's pages, before the first request: what is written is read back, from its
# own place and no other. A layout that objkv misunderstands is refused instead of corrupted.

_BLOCKS = 2
"""Pages written; their neighbours are looked at as well."""


def check_pages(group: PagedGroup, lane: Lane) -> None:
    """Write a pattern into blocks of every layer and compare: the same by the lane's own way back,
    the same as plain indexing sees it, different in every layer, and nothing else changed.

    The blocks must not be in use; what was in them is put back. Block 0 is not touched. Raises
    ``ConfigError``.
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
