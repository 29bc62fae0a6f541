"""Lanes copy pages between slabs and the paged cache, and their marks show when copies are done.

The lane of host memory, which is here, copies at once. A device lane is a stream of its own, see
``objkv.transfer.devices``: its copies run concurrently with the model's kernels, ordered by events.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from operator import mul
from threading import Lock
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided

Ints = np.ndarray[Any, np.dtype[np.int64]]
"""Offsets, addresses, sizes or block ids."""
Bools = np.ndarray[Any, np.dtype[np.bool_]]

# Recasting turns pages of one shape into pages of another, as views if possible. Pages are
# ``[blocks, heads, block_size, content]``, with each token's content of each head contiguous, so
# heads can be selected and tokens moved into blocks of another size. Only canonical pages can be
# recast: pages that an attention kernel packed in its own layout are copied unchanged. Source of
# the semantics: vLLM 0.14, ``kv_postprocess_*_on_receive`` in
# ``distributed/kv_transfer/kv_connector/utils.py``, which does the same in place for some ratios.

PagesT = TypeVar("PagesT", np.ndarray[Any, np.dtype[Any]], torch.Tensor)
"""A numpy array or a torch tensor. Only operations that both have are used."""


@dataclass(frozen=True, slots=True)
class Recast:
    """How to read frames that a rank of another shape wrote."""

    frame: tuple[int, int, int]
    """Blocks of a frame, heads, and tokens in a block. No tokens: as many as in the reader's."""
    heads: tuple[int, int]
    """Heads of the frame to take, ``[start, end)``."""
    first_block: int
    """First block to take, counted in blocks of the reader's size."""
    blocks: int
    tokens: tuple[int, int] = (0, 1)
    """First token of the frame to take, and the distance to the next ones."""

    def __call__(self, pages: PagesT, block_size: int) -> PagesT:
        """Return ``[..., blocks, heads, block_size, content]`` of ``pages`` in the reader's blocks:
        a view if the block size is the same, otherwise a copy. The tokens must fill whole blocks.
        """
        start, end = self.heads
        assert 0 <= start < end <= pages.shape[-3]
        pages = pages[..., start:end, :, :]
        *layers, blocks, heads, size, content = pages.shape
        first, step = self.tokens
        if (block_size, first, step) != (size, 0, 1):
            count = blocks * size // step // block_size
            assert count * block_size * step == blocks * size
            rows = pages.swapaxes(-4, -3).reshape(*layers, heads, blocks * size, content)
            rows = rows[..., first::step, :].reshape(*layers, heads, count, block_size, content)
            pages = rows.swapaxes(-4, -3)
        until = self.first_block + self.blocks
        assert until <= pages.shape[-4]  # otherwise a single page would be broadcast
        return pages[..., self.first_block : until, :, :, :]


Pages = np.ndarray[Any, np.dtype[Any]]
"""Pages of one layer in host memory, ``[n, heads, block_size, content]`` words."""
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""Integer types by size. Pages are copied as integers, because numpy has neither bf16 nor fp8, and
torch copies fp8 by index only on some devices."""


def as_words(cache: torch.Tensor) -> torch.Tensor:
    """Return a view of ``cache`` as the largest integers that its layout allows, because index
    kernels take time per element. The last dimension shrinks accordingly."""
    size = cache.element_size()
    cuts = (cache.shape[-1], cache.storage_offset(), *cache.stride()[:-1])
    for nbytes, word in _WORDS.items():
        fits = nbytes > size and cache.stride(-1) == 1
        if nbytes == size or (fits and all(cut * size % nbytes == 0 for cut in cuts)):
            return cache.view(word)
    raise AssertionError(cache.dtype)


def distinct(pages: torch.Tensor) -> torch.Tensor:
    """Return pages with one head if all heads are the same memory, which torch does not write."""
    return pages[:, :1] if pages.stride(1) == 0 else pages


class PagedLayers:
    """Some layers of a paged cache, as lanes and kernels address them. vLLM owns the memory."""

    def __init__(self, caches: Sequence[torch.Tensor]) -> None:
        """``caches``: integer words of each layer, ``[num_blocks, heads, block_size, content]``."""
        self.caches = tuple(caches)
        self.nbytes = np.array([c[0].numel() * c.element_size() for c in self.caches], np.int64)
        """Bytes of one block of each layer, ``[layers]``."""
        self._cuts: dict[tuple[int, int], PagedLayers] = {}
        self._pointers: torch.Tensor | None = None
        self._uploading = Lock()

    def __len__(self) -> int:
        return len(self.caches)

    def cut(self, layers: range) -> "PagedLayers":
        """Return these layers only. The same object for the same range, in all threads: a second
        one would be freed while a kernel of another thread's lane still reads its ``pointers``."""
        key = layers.start, layers.stop
        if key == (0, len(self.caches)):
            return self
        if key not in self._cuts:
            part = PagedLayers(self.caches[layers.start : layers.stop])
            if self._pointers is not None:
                part._pointers = self._pointers[layers.start : layers.stop]
            self._cuts.setdefault(key, part)
        return self._cuts[key]

    @cached_property
    def runs(self) -> tuple[range, ...]:
        """Ranges of layers with one shape, strides and dtype, mostly one. Kernels take one each."""
        forms = [(c.shape, c.stride(), c.dtype) for c in self.caches]
        starts = [at for at in range(len(forms)) if not at or forms[at] != forms[at - 1]]
        return tuple(range(a, b) for a, b in pairwise([*starts, len(forms)]))

    @cached_property
    def has_whole_blocks(self) -> bool:
        """Whether the bytes of each block of a layer are contiguous: HND, MLA, or one head."""
        return all(cache[:1].is_contiguous() for cache in self.caches)

    @cached_property
    def follows(self) -> bool:
        """Whether the blocks of each layer follow one another in memory."""
        return self.has_whole_blocks and bool((self.strides == self.nbytes).all())

    @cached_property
    def blocks(self) -> int:
        """Number of blocks that all layers have."""
        return min(len(cache) for cache in self.caches)

    @cached_property
    def stacks(self) -> list[tuple[range, Pages, range]]:
        """The caches as few numpy arrays, ``[layers, blocks, heads, block_size, content]``, each
        with its layers before and the addresses that it spans behind. Layers of one array follow
        one another, have one form, and are at one distance in memory. For host memory only."""
        stacks = []
        for run in self.runs:
            steps = np.diff(self.addresses[run.start : run.stop]).tolist()
            start = run.start
            while start < run.stop:
                step = steps[start - run.start] if start + 1 < run.stop else 0
                end = start + 1
                while end < run.stop and steps[end - 1 - run.start] == step:
                    end += 1
                first = self.caches[start].numpy()
                shape, strides = (end - start, *first.shape), (step, *first.strides)
                cells = as_strided(first, shape, strides)
                stacks.append((range(start, end), cells, _span_of(cells)))
                start = end
        return stacks

    def frame_bytes(self, blocks: int, recast: Recast | None = None) -> Ints:
        """Return the bytes of each layer's frame of ``blocks`` pages, or as ``recast`` reads it."""
        if recast is None:
            return blocks * self.nbytes
        count, heads, size = recast.frame
        _, own_heads, own_sizes, _ = np.array([cache.shape for cache in self.caches], np.int64).T
        of_tokens: Ints = self.nbytes // (own_heads * own_sizes)
        return of_tokens * (count * heads) * (size or own_sizes)

    @cached_property
    def strides(self) -> Ints:
        """Bytes from one block of each layer to the next, ``[layers]``."""
        return np.array([c.stride(0) * c.element_size() for c in self.caches], np.int64)

    @cached_property
    def addresses(self) -> Ints:
        """Address of block 0 of each layer, ``[layers]``."""
        return np.array([cache.data_ptr() for cache in self.caches], np.int64)

    @property
    def pointers(self) -> torch.Tensor:
        """The same addresses in the memory of the layers' device. The upload blocks, because other
        streams may use it at once; ``Lane.prepare`` does it for a rank's own pages."""
        if self._pointers is None:
            with self._uploading:
                if self._pointers is None:
                    self._pointers = torch.from_numpy(self.addresses).to(self.caches[0].device)
        return self._pointers


class Mark:
    """A point in the work of a lane, or of the compute stream. A later mark of a lane covers all
    its earlier ones. This one is of host memory, where work is done when its call returns."""

    def done(self) -> bool:
        """Whether all work before the mark has finished. Does not wait."""
        return True

    def wait(self) -> None:
        """Block this thread until all work before the mark has finished. Releases the GIL. Only
        for shutdown and self-tests, because a device that hangs never returns."""

    def hold_compute(self) -> None:
        """Make the current compute stream wait for the mark. The calling thread does not wait."""


_DONE = Mark()


def check_reach(
    memory: memoryview, starts: Ints, nbytes: Ints, layers: PagedLayers, ids: Ints
) -> None:
    """Raise IndexError if blocks are not in the cache, or bytes not in ``memory``. ``nbytes``: from
    each of ``starts`` on, of the same shape or broadcast to it."""
    if starts.shape not in ((len(ids),), (len(ids), len(layers))):  # they would be broadcast
        raise ValueError(f"starts of {starts.shape} for {len(ids)} times {len(layers)} layers")
    if ids.view(np.uint64).max() >= layers.blocks:  # those below 0 are huge numbers there
        raise IndexError(f"blocks {ids.min()} to {ids.max()} of {layers.blocks}")
    room = len(memory) - nbytes
    if (starts | room | (room - starts)).min() < 0:  # the sign of any of them
        raise IndexError(f"pages from {starts.min()} to {starts.max()} of {len(memory)} bytes")


def address_of(memory: memoryview) -> int:
    """Return where ``memory`` starts."""
    return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])


def offsets_of(nbytes: Ints) -> Ints:
    """Return where each of some pieces starts if they follow one another."""
    return np.cumsum(nbytes) - nbytes


def run_starts(ids: Ints) -> Ints:
    """Return where runs of consecutive ids start in ``ids.flat``. Each row starts one."""
    starts = np.ones(ids.shape, bool)
    starts[:, 1:] = ids[:, 1:] != ids[:, :-1] + 1
    return np.flatnonzero(starts)


def upload(ids: Ints, device: torch.device) -> torch.Tensor:
    """Return ``ids`` on ``device``, ``[ids.size]`` int64, for work of its current stream."""
    # A copy from unpinned memory would block this thread until the stream has caught up. PyTorch
    # keeps the pinned memory until the copy is done.
    pinned = torch.empty(ids.size, dtype=torch.int64, pin_memory=device.type != "cpu")
    pinned.numpy()[:] = ids.reshape(-1)
    return pinned.to(device, non_blocking=True)


class Lane:
    """Copies pages. Thread-safe. Pages must stay alive and unchanged until a later mark is done.

    This one copies within host memory, in the calling thread. numpy gives up the interpreter's lock
    for each copy and waits for it afterwards, up to 5 ms if another thread computes in Python. So
    consecutive blocks of all layers are one copy: a payload of 32 MiB is one call, which takes that
    long anyway. torch's copies would use the threads that the model computes with and wait for
    them: up to a second for 128 MiB while they are busy, against 50 ms here (2 cores, 2026-11-21).
    """

    per_span = False
    """Whether to pass all layers of a span to ``scatter`` at once, because each call costs a
    launch. If not, layers are better copied as they arrive, while they are in the CPU's cache."""

    def adopt_thread(self) -> None:
        """Prepare the calling thread. Each thread that uses the lane or its marks calls it once."""

    def prepare(self, layers: PagedLayers) -> None:
        """Compile and upload what copies of these layers need, so that no request waits for it."""

    def mark_compute(self) -> Mark:
        """Return a mark after all work submitted so far to the current compute stream. On the CPU
        the forward pass has ended, or its thread is in this call."""
        return _DONE

    def follow(self, mark: Mark) -> None:
        """Order the lane's next work after ``mark``."""

    def scatter(
        self,
        memory: memoryview,
        starts: Ints,
        layers: PagedLayers,
        ids: Ints,
        recast: Recast | None = None,
    ) -> None:
        """Write the pages of ``n`` payloads into blocks.

        Raises IndexError for a block that a layer does not have, and for pages outside ``memory``.

        Args:
            memory: bytes, one after another. For a device lane pinned, or registered in pieces
                that end at the lane's seams.
            starts: ``[n, layers]``: where the frame of each layer starts in ``memory``.
            layers: the layers that are written. A frame has words of its layer's cache.
            ids: ``[n, blocks]`` block ids, all different. Must not change any more.
            recast: how to make ``blocks`` pages of a frame of another shape. If that needs a copy,
                the copy is on the device of the caches. None: frames are ``blocks`` pages, and are
                written unchanged.
        """
        assert recast is None or recast.blocks == ids.shape[1]
        check_reach(memory, starts, layers.frame_bytes(ids.shape[1], recast), layers, ids)
        for cells, pages in _moves(memory, starts, layers, ids, recast):
            np.copyto(cells, pages)

    def gather(self, layers: PagedLayers, ids: Ints, memory: memoryview, starts: Ints) -> None:
        """Copy the blocks of ``n`` chunks to ``memory``: for each chunk all its blocks of the first
        layer, then of the second, and so on. They are complete when a later mark is done.

        Raises as ``scatter`` does.

        Args:
            ids: ``[n, blocks]`` block ids.
            memory: bytes, one after another, writable; pinned for a device lane.
            starts: ``[n]``: where the pages of each chunk start in ``memory``.
        """
        nbytes = layers.frame_bytes(ids.shape[1])
        check_reach(memory, starts, nbytes.sum(), layers, ids)
        of_layers = starts[:, None] + offsets_of(nbytes)
        for cells, pages in _moves(memory, of_layers, layers, ids):
            np.copyto(pages, cells)

    def mark(self) -> Mark:
        """Return a mark after all work submitted to the lane so far."""
        return _DONE


def _moves(
    memory: memoryview, starts: Ints, layers: PagedLayers, ids: Ints, recast: Recast | None = None
) -> Iterator[tuple[Pages, Pages]]:
    """Yield views of consecutive blocks of some layers, and of their pages in ``memory``, which
    may be a copy if ``recast`` needs one, ``[layers, blocks, heads, block_size, content]``.
    ``starts`` and ``ids``: see ``Lane.scatter``."""
    count = ids.shape[1]
    firsts = run_starts(ids)
    lengths = np.diff(firsts, append=ids.size).tolist()
    runs: list[list[tuple[int, int, int]]] = [[] for _ in ids]
    for first, block, length in zip(
        firsts.tolist(), ids.reshape(-1)[firsts].tolist(), lengths, strict=True
    ):
        runs[first // count].append((block, first % count, length))
    for part, cells in _regular(layers.stacks, starts, memory):
        _, _, heads, size, content = cells.shape
        frame = count, heads, size
        if recast is not None:
            frame = *recast.frame[:2], recast.frame[2] or size
        word = cells.dtype.itemsize
        inner = accumulate((content, *frame[:0:-1]), mul, initial=word)
        strides = tuple(inner)[::-1]
        for of_payload, blocks in zip(
            starts[:, part.start : part.stop].tolist(), runs, strict=True
        ):
            step = of_payload[1] - of_payload[0] if len(part) > 1 else 0
            shape = (len(part), *frame, content)
            pages = np.ndarray(shape, cells.dtype, memory, of_payload[0], (step, *strides))
            if recast is not None:
                pages = recast(pages, size)
            for block, first, length in blocks:
                yield cells[:, block : block + length], pages[:, first : first + length]


def _span_of(cells: Pages) -> range:
    """Return the addresses from the array's first byte in memory to its last."""
    ends = [(n - 1) * stride for n, stride in zip(cells.shape, cells.strides, strict=True)]
    first, last = (sum(edge(end, 0) for end in ends) for edge in (min, max))
    at = cells.__array_interface__["data"][0]
    return range(at + first, at + last + cells.itemsize)


def _regular(
    stacks: list[tuple[range, Pages, range]], starts: Ints, memory: memoryview
) -> Iterator[tuple[range, Pages]]:
    """Yield stacks of layers whose frames are at one distance in memory, as in a payload; others
    layer by layer. So are those between which ``memory`` lies: numpy would take the two for
    overlapping, and copy to a buffer of its own first, which may lie there, too, and so on."""
    first = address_of(memory)
    for part, cells, span in stacks:
        steps = np.diff(starts[:, part.start : part.stop])
        is_apart = first >= span.stop or first + memory.nbytes <= span.start
        if steps.size == 0 or (is_apart and (steps == steps[:, :1]).all()):
            yield part, cells
        else:
            for at, layer in enumerate(part):
                yield range(layer, layer + 1), cells[at : at + 1]
