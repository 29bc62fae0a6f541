"""Kernels that distribute staged pages to blocks of a paged cache, and collect them from there.

Triton is optional and imported only when it is used: vLLM brings it on GPUs.
"""

# Triton and its interpreter read annotations of kernels as text. Without this line ``tl`` would
# have to exist when this module is imported.
from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from objkv.transfer.lanes import PagedLayers, Recast, distinct

if TYPE_CHECKING:
    import triton.language as tl


class PageKernels:
    """Moves pages within device memory, on the current stream. Layers have one shape, strides and
    dtype. Thread-safe. No call waits for the device, except ``prepare``.

    These are PyTorch's own kernels, compiled already: one launch per layer or more, on any device.
    """

    def prepare(self, layers: PagedLayers) -> None:
        """Compile and load all kernels for these layers, which may have several shapes, and upload
        their addresses. Takes a second for each new shape. Raises any exception of the compiler."""

    def scatter(
        self, staged: torch.Tensor, layers: PagedLayers, ids: torch.Tensor, recast: Recast
    ) -> None:
        """Write ``recast(staged[i, l])`` into the ``i``-th blocks of each layer ``l``.

        ``staged``: ``[n, layers, blocks', heads', size', content]`` words, contiguous. ``ids``:
        ``[n * recast.blocks]`` int64, all different.
        """
        for frames, blocks in zip(staged, ids.split(recast.blocks), strict=True):
            for pages, cache in zip(frames, layers.caches, strict=True):
                cells, given = distinct(cache), recast(pages, cache.shape[2])
                cells.index_copy_(0, blocks, given[:, : cells.shape[1]])

    def gather(self, layers: PagedLayers, ids: torch.Tensor, staged: torch.Tensor) -> None:
        """Write blocks into ``staged``: ``[chunks, layers, blocks, heads, size, content]`` words,
        contiguous. ``ids``: ``[chunks * blocks]`` int64."""
        chunks, count, *shape = staged.shape
        assert (count, len(ids)) == (len(layers), chunks * shape[0])
        for layer, cache in enumerate(layers.caches):
            staged[:, layer].copy_(cache.index_select(0, ids).view(chunks, *shape))


# A program of a Triton kernel copies one tile of one page: up to 2,048 words, one after another in
# the page as it is staged. With 128 threads, each has eight loads of 16 bytes in flight, enough to
# saturate memory with the programs that fit on a GPU, and a chunk of 16 MiB is 1,000 programs,
# enough to fill it. Smaller tiles would mean more programs that each begin with two dependent loads
# (of the block's number and of the layer's address). The last tile of a page may be partly empty:
# threads without words skip their loads and stores.
_TILE_WORDS_MAX = 2048
_ACCESS_BYTES_MAX = 16
"""The widest load and store of one thread. Wider alignment does not help."""
_ACTIONS = ("gather", "scatter", "recast")
"""Recasting is scattering pages of another shape, which takes divisions."""


class _Form(NamedTuple):
    """The layout of a layer, a constant of the compiled kernels: divisions become multiplications,
    and the compiler, which knows what words are adjacent, combines their loads and stores."""

    block: int
    """Strides in words, also ``head``, ``token`` and ``word``."""
    head: int
    token: int
    word: int
    size: int
    """Tokens in a block."""
    content: int
    """Words of one token and head."""
    page: int
    """Words in a block."""
    tile: int
    """Words that one program copies, a power of two."""
    align: int
    """Bytes that the addresses of all layers are multiples of."""
    action: str


class _Frame(NamedTuple):
    """The shape of staged frames, and what is taken of each, as in ``Recast``.

    Kernels receive each number ``n`` as ``2 * n + 3``. Triton compiles again when a number in a
    tuple becomes 1 or a multiple of 16, whatever ``do_not_specialize`` lists. These never do.
    """

    blocks: int
    heads: int
    size: int
    first_head: int
    first_block: int
    taken: int
    """Blocks that are taken of a frame, or collected for it."""


def _copy_pages(
    staged: tl.tensor, addresses: tl.tensor, ids: tl.tensor, numbers: tl.tuple, form: tl.constexpr
) -> None:
    """Copy between blocks of a cache and staging memory. Grid: ``[ids * tiles, layers]``.
    ``addresses``: of each layer's block 0. ``numbers``: see ``_Frame``. Offsets are int64, because
    both can exceed 2^31 words."""
    blocks = (numbers.blocks - 3) // 2
    first_block = (numbers.first_block - 3) // 2
    taken = (numbers.taken - 3) // 2
    tiles: tl.constexpr = (form.page + form.tile - 1) // form.tile
    index = tl.program_id(0) // tiles
    layer = tl.program_id(1)
    at = tl.program_id(0) % tiles * form.tile + tl.arange(0, form.tile)
    exists = at < form.page
    # In pages, tokens of a head follow one another, and then the next head.
    word = at % form.content
    token = at // form.content % form.size
    head = at // form.content // form.size

    align: tl.constexpr = form.align
    start = tl.load(addresses + layer).to(staged.dtype)
    cells = tl.multiple_of(start, align) + tl.load(ids + index) * form.block
    cells += head.to(tl.int64) * form.head + token.to(tl.int64) * form.token
    cells += word.to(tl.int64) * form.word

    # Frames are ordered by payload and layer.
    frame = (index // taken).to(tl.int64) * tl.num_programs(1) + layer
    index = first_block + index % taken
    if form.action == "recast":
        heads = (numbers.heads - 3) // 2
        size = (numbers.size - 3) // 2
        token += index * form.size
        row = frame * blocks + token // size
        row = row * heads + (numbers.first_head - 3) // 2 + head
        words = staged + (row * size + token % size) * form.content + word
    else:
        words = staged + (frame * blocks + index) * form.page + at

    if form.action == "gather":
        tl.store(words, tl.load(cells, mask=exists), mask=exists)
    else:
        tl.store(cells, tl.load(words, mask=exists), mask=exists)


class TritonKernels(PageKernels):
    """One launch, whatever the number of layers. Runs on devices that Triton supports."""

    def __init__(self) -> None:
        """Raises ``ImportError`` without Triton."""
        globals()["tl"] = import_module("triton.language")
        # Otherwise Triton would compile again, in the middle of a request, when the ids begin at
        # an address that is aligned differently.
        varying = ["addresses", "ids"]
        self._copy_pages = import_module("triton").jit(_copy_pages, do_not_specialize=varying)

    def prepare(self, layers: PagedLayers) -> None:
        """See ``PageKernels.prepare``. Launches every kernel with no blocks, which runs nothing."""
        assert len(layers.pointers) == len(layers)  # uploaded for all cuts, whatever their shapes
        for run in layers.runs:
            part = layers.cut(run)
            cache = part.caches[0]
            ids = torch.empty(0, dtype=torch.int64, device=cache.device)
            shape = (0, len(part), 1, *cache.shape[1:])
            staged = torch.empty(shape, dtype=cache.dtype, device=cache.device)
            own = _Frame(1, cache.shape[1], cache.shape[2], 0, 0, 1)
            for action in _ACTIONS:
                self._launch(staged, part, ids, own, action)

    def scatter(
        self, staged: torch.Tensor, layers: PagedLayers, ids: torch.Tensor, recast: Recast
    ) -> None:
        """See ``PageKernels.scatter``."""
        if recast.tokens != (0, 1):  # rare, and not worth a kernel
            super().scatter(staged, layers, ids, recast)
            return
        _, heads, size, content = layers.caches[0].shape
        payloads, count, *own, given = staged.shape
        assert (count, given) == (len(layers), content)
        assert tuple(own) == (*recast.frame[:2], recast.frame[2] or size)
        start, end = recast.heads
        assert 0 <= start <= end - heads
        assert end - start == heads
        assert end <= own[1]
        assert recast.first_block >= 0
        assert (recast.first_block + recast.blocks) * size <= own[0] * own[2]
        assert len(ids) == payloads * recast.blocks
        action = "scatter" if own[1:] == [heads, size] else "recast"
        frame = _Frame(own[0], own[1], own[2], start, recast.first_block, recast.blocks)
        self._launch(staged, layers, ids, frame, action)

    def gather(self, layers: PagedLayers, ids: torch.Tensor, staged: torch.Tensor) -> None:
        """See ``PageKernels.gather``."""
        chunks, count, blocks, *page = staged.shape
        assert (count, len(ids)) == (len(layers), chunks * blocks)
        assert tuple(page) == layers.caches[0].shape[1:]
        frame = _Frame(blocks, page[0], page[1], 0, 0, blocks)
        self._launch(staged, layers, ids, frame, "gather")

    def _launch(
        self,
        staged: torch.Tensor,
        layers: PagedLayers,
        ids: torch.Tensor,
        frame: _Frame,
        action: str,
    ) -> None:
        assert staged.is_contiguous()
        assert staged.dtype == layers.caches[0].dtype
        assert ids.dtype == torch.int64
        assert ids.is_contiguous()
        form = _form_of(layers, action)
        grid = (ids.numel() * -(-form.page // form.tile), len(layers))
        numbers = _Frame(*[2 * number + 3 for number in frame])
        self._copy_pages[grid](staged, layers.pointers, ids, numbers, form)


def _form_of(layers: PagedLayers, action: str) -> _Form:
    assert len(layers.runs) == 1
    cache = layers.caches[0]
    _, heads, size, content = cache.shape
    page = heads * size * content
    align = int(np.gcd.reduce(layers.addresses, initial=_ACCESS_BYTES_MAX))
    tile = min(_TILE_WORDS_MAX, 1 << (page - 1).bit_length())
    block, head, token, word = cache.stride()
    return _Form(block, head, token, word, size, content, page, tile, align, action)


def page_kernels() -> PageKernels:
    """Return kernels with one launch for all layers, or PyTorch's without Triton."""
    return PageKernels() if find_spec("triton") is None else TritonKernels()
