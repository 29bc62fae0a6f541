"""The paged cache as transfers see it: one ``[B, H, N, C]`` tensor per layer of each group.

Source of the shape: vLLM 0.31-0.33, ``register_kv_caches``. The dimensions are blocks, heads, block
size and content (K and V fused), in any physical order. Only whole blocks are copied: on the CPU
the layout inside a block is private to the attention kernel.

Some attention kernels divide each of vLLM's blocks into smaller ones, and vLLM registers views of
those. If their memory allows it, they are viewed as whole blocks again. If not (HND), the group's
pages have the kernel's block size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import torch

from objkv.codec.join import PartPosition
from objkv.codec.values import LayerSpec
from objkv.errors import ConfigError
from objkv.keys.states import PartView, part_names
from objkv.keys.topology import RankShard, Shard, frame_name
from objkv.transfer.lanes import Ints, Lane, PagedLayers, as_words, distinct, offsets_of, upload

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
    """The element type and scales of one layer's cache. The tensor does not have them: vLLM stores
    fp8 as plain bytes, and keeps the scales in the layer."""

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
    """Whether blocks may have another size: pages are canonical, and no token is left out."""
    payload: Shard | None = None
    """What the payloads have that the rank writes, alone or with others. None: all of the group."""
    joined: int = 1
    """How many different shards of ranks become one payload."""
    parts: tuple[PartView, ...] = ()
    """Parts of a state that is split over ranks. Each is a frame of a payload, and ``[heads, rows,
    nbytes]`` of a page. Empty: a layer is one frame."""

    @property
    def whole(self) -> Shard:
        """All of the group."""
        own = self.rank_shard.shard
        return Shard(0, len(self.model_layers) or own.layer_end, 0, self.heads or own.head_end)

    @property
    def columns(self) -> int:
        """How many of the joined shards have different parts of one layer."""
        if self.joined == 1:
            return 1
        own, payload = self.rank_shard.shard, self.payload or self.whole
        heads = payload.head_end - payload.head_start
        return heads // (own.head_end - own.head_start) * own.tokens.size

    @property
    def rows(self) -> int:
        """How many frames a payload has for a layer of one rank."""
        return len(self.parts) or 1


NOT_QUANTISED: Mapping[str, Quantised] = MappingProxyType({})
"""No layer is quantised."""


class PagedGroup:
    """One group's layers on this rank. vLLM owns the tensors."""

    def __init__(
        self,
        shape: GroupShape,
        caches: Sequence[torch.Tensor],
        quantised: Mapping[str, Quantised] = NOT_QUANTISED,
    ) -> None:
        """``quantised``: layers whose element type or scales differ from their tensor's dtype."""
        assert len(caches) == len(shape.layers)
        names = part_names(shape.layers, len(shape.parts))
        if shape.parts:
            both = zip(shape.layers, caches, strict=True)
            caches = [one for layer in both for one in _part_caches(*layer, shape.parts)]
        else:
            caches = [_whole_blocks(cache, shape.block_size) for cache in caches]
        self.split = _split(shape, caches[0])
        """Blocks of the kernel per block of vLLM. 1 unless it divides them in HND."""
        if self.split > 1:
            size = shape.block_size // self.split
            shape = replace(shape, blocks=shape.blocks * self.split, block_size=size)
        self.shape = shape
        """The shape in blocks of the kernel."""
        self.layers = tuple(
            _layer_spec(name, cache, shape, quantised.get(name))
            for name, cache in zip(names, caches, strict=True)
        )
        """The frames that this rank writes of a payload, in forward order of the layers."""
        self.raw_bytes = sum(layer.nbytes for layer in self.layers)
        """Uncompressed bytes that this rank has of one chunk of this group."""
        self.position = self._position() if shape.joined > 1 else None
        """Where these frames belong in the payload that ranks join."""
        self.pages = PagedLayers([as_words(cache) for cache in caches])
        """Each layer's ``[num_blocks, heads, block_size, content]`` as integer words."""

    def _position(self) -> PartPosition:
        shape, own = self.shape, self.shape.rank_shard.shard
        payload, columns, rows = shape.payload or shape.whole, shape.columns, shape.rows
        layers = payload.layer_end - payload.layer_start
        before = own.layer_start - payload.layer_start
        layer_bytes = columns * sum(layer.nbytes for layer in self.layers[:rows])
        head = (own.head_start - payload.head_start) // (own.head_end - own.head_start)
        column = head * own.tokens.size + own.tokens.rank
        return PartPosition(
            shape.joined,
            layers * rows * columns,
            before * rows * columns + column,
            columns,
            before * layer_bytes,
            layers * layer_bytes,
        )

    @property
    def device(self) -> torch.device:
        return self.caches[0].device

    @property
    def caches(self) -> tuple[torch.Tensor, ...]:
        """The tensors of ``pages``."""
        return self.pages.caches

    def blocks(self, ids: Ints) -> Ints:
        """Return the kernel's blocks, ``[n, split * blocks]``, of vLLM's, ``[n, blocks]``."""
        if self.split == 1:
            return ids
        return (ids[..., None] * self.split + np.arange(self.split)).reshape(len(ids), -1)

    def clear(self, block_ids: Sequence[int]) -> None:
        """Zero vLLM's blocks in all layers, in stream order. IndexError if one does not exist."""
        ids = self.blocks(np.array([block_ids], np.int64))
        if ids.max() >= self.pages.blocks:
            raise IndexError(f"block {ids.max()} of {self.pages.blocks}")
        cleared = upload(ids, self.device)
        for cache in self.caches:
            cache.index_fill_(0, cleared, 0)


def _whole_blocks(cache: torch.Tensor, block_size: int) -> torch.Tensor:
    """View kernel blocks ``[n, heads, size, content]`` as blocks of ``block_size`` tokens if the
    tokens of a block follow one another at one distance. Otherwise return ``cache``."""
    if cache.dim() != 4:
        return cache
    count, heads, size, content = cache.shape
    ratio = block_size // size
    if ratio * size != block_size or count % ratio or cache.stride(0) != size * cache.stride(2):
        return cache
    strides = (cache.stride(0) * ratio, *cache.stride()[1:])
    return cache.as_strided((count // ratio, heads, block_size, content), strides)


def _part_caches(name: str, cache: torch.Tensor, parts: tuple[PartView, ...]) -> list[torch.Tensor]:
    """Return views of the parts of a state, ``[blocks, heads, rows, nbytes]``."""
    nbytes = max(part.end for part in parts)
    if cache.element_size() != 1 or cache.shape[1:] != (1, 1, nbytes) or cache.stride(-1) != 1:
        raise ConfigError(
            f"the state of {name} has shape {tuple(cache.shape)} of {cache.dtype}; objkv expects "
            f"[blocks, 1, 1, {nbytes} bytes]: this layer is not supported, run the model without "
            "the objkv connector"
        )
    return [
        cache.as_strided(
            (len(cache), part.heads, part.rows, part.nbytes),
            (cache.stride(0), part.head_stride, part.row_stride, 1),
            cache.storage_offset() + part.offset,
        )
        for part in parts
    ]


def _split(shape: GroupShape, cache: torch.Tensor) -> int:
    if cache.dim() != 4 or shape.parts or shape.block_size % cache.shape[2]:
        return 1
    return shape.block_size // int(cache.shape[2])


def _layer_spec(
    name: str, cache: torch.Tensor, shape: GroupShape, quantised: Quantised | None
) -> LayerSpec:
    shard = shape.rank_shard.shard
    heads = shard.head_end - shard.head_start
    size = cache.shape[2] if shape.parts else shape.block_size
    if cache.dim() != 4 or cache.shape[1] != heads or cache.shape[2] != size:
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
    pages = (shape.blocks, heads, size, cache.shape[3])
    name = frame_name(name, shard) if shape.columns > 1 else name
    if quantised is None:
        return LayerSpec(name, DTYPE_NAMES[cache.dtype], pages)
    assert cache.element_size() == 1
    return LayerSpec(name, quantised.dtype or DTYPE_NAMES[cache.dtype], pages, quantised.scales)


# A self-test of a rank's pages before the first request. A layout that objkv misreads is refused
# instead of corrupted.

_BLOCKS = 2
"""Number of blocks written. Their neighbours are checked too."""


def check_pages(group: PagedGroup, lane: Lane) -> None:
    """Write a pattern of its own into blocks of every layer. The lane and plain indexing must both
    read it back, and neighbouring blocks must be unchanged. Otherwise raises ``ConfigError``. The
    blocks, which must not be in use, are restored. Block 0 is not touched."""
    blocks = group.pages.blocks
    if blocks <= _BLOCKS:
        return  # too few to serve a request
    lane.prepare(group.pages)
    written = [blocks - 1, blocks // 2]
    watched = sorted({b for w in written for b in (w - 1, w, w + 1) if 0 <= b < blocks})
    before = [distinct(cache)[watched].clone() for cache in group.caches]
    try:
        _check(group, lane, written, watched)
    finally:
        for cache, pages in zip(group.caches, before, strict=True):
            distinct(cache)[watched] = pages


def _check(group: PagedGroup, lane: Lane, written: list[int], watched: list[int]) -> None:
    neighbours = sorted({*watched} - {*written})
    untouched = [cache[neighbours].cpu() for cache in group.caches]
    ids = np.array([written], np.int64)
    sizes = (len(written) * group.pages.nbytes).tolist()
    pinned = group.device.type != "cpu"
    given, back = (torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned) for _ in range(2))
    given.random_(0, 256, generator=torch.Generator().manual_seed(1))
    patterns = [
        piece.view(cache.dtype).view(len(written), *cache.shape[1:])
        for piece, cache in zip(given.split(sizes), group.caches, strict=True)
    ]
    for cache, pattern in zip(group.caches, patterns, strict=True):
        if group.shape.parts and cache.stride(1) == 0:  # units share the bytes
            pattern[:] = pattern[:, :1].clone()
    lane.follow(lane.mark_compute())
    starts = offsets_of(np.array(sizes, np.int64))[None]
    lane.scatter(given.numpy().data, starts, group.pages, ids)
    lane.gather(group.pages, ids, back.numpy().data, starts[:, 0])
    lane.mark().wait()  # plain indexing below is on another stream
    all_layers = zip(group.layers, group.caches, patterns, untouched, strict=True)
    for layer, cache, pattern, beside in all_layers:
        if not (
            torch.equal(back, given)
            and torch.equal(cache[written].cpu(), pattern)
            and torch.equal(cache[neighbours].cpu(), beside)
        ):
            raise ConfigError(
                f"the KV cache of {layer.name} does not return the blocks written "
                f"to it (shape {tuple(cache.shape)}, strides {cache.stride()}): this layout "
                "is not supported, run the model without the objkv connector or choose another "
                "attention backend"
            )
