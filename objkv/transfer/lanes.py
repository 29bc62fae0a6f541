"""Lanes copy pages between slabs and the paged cache, and their marks show when copies are done.

A host lane, which is here, copies at once. A device lane is a stream of its own, see
``objkv.transfer.devices``: its copies run concurrently with the model's kernels, ordered by events.
"""

import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import attrgetter, itemgetter
from threading import Lock
from time import monotonic
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from objkv.agent.memory.arena import Arena
from objkv.errors import TransferError

Ints = np.ndarray[Any, np.dtype[np.int64]]
"""Offsets, addresses, sizes or block ids."""

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
    """Number of blocks to take."""
    tokens: tuple[int, int] = (0, 1)
    """First token of the frame to take, and the distance to the next ones."""

    def __call__(self, pages: PagesT, block_size: int) -> PagesT:
        """Return ``[blocks, heads, block_size, content]`` of ``pages`` in the reader's blocks.

        A view of ``pages`` if the block size is the same, otherwise a copy. Any ratio works, if the
        tokens fill whole blocks.
        """
        start, end = self.heads
        assert 0 <= start < end <= pages.shape[1]
        pages = pages[:, start:end]
        blocks, heads, size, content = pages.shape
        first, step = self.tokens
        if (block_size, first, step) != (size, 0, 1):
            tokens = blocks * size // step
            assert tokens % block_size == 0
            assert blocks * size % step == 0
            rows = pages.swapaxes(0, 1).reshape(heads, blocks * size, content)[:, first::step]
            pages = rows.reshape(heads, tokens // block_size, block_size, content).swapaxes(0, 1)
        until = self.first_block + self.blocks
        assert until <= pages.shape[0]  # otherwise a single page would be broadcast
        return pages[self.first_block : until]


Pages = np.ndarray[Any, np.dtype[Any]]
"""Pages of one layer in host memory, ``[n, heads, block_size, content]`` words."""
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""Integer types by size. Pages are copied as integers, because numpy has neither bf16 nor fp8, and
torch copies fp8 by index only on some devices."""
ARRAY_WORDS = {torch.int64: np.int64, torch.int32: np.int32, torch.int16: np.int16}
ARRAY_WORDS[torch.uint8] = np.uint8
"""The same integer types in numpy."""
_RUNS_MAX = 16
"""Up to this many runs of consecutive blocks are copied one by one. A call costs 0.4 us and lets
other threads run in between, unlike one call for all runs."""
_COPY_BYTES_PER_S = 2e9
_WAITED_S = 1e-3
"""Copies that take this much longer than at the speed above have waited for the interpreter."""
_LAYERS_AT_ONCE = 4
_nbytes = attrgetter("nbytes")
_PIECES_MAX = 1024
"""The most pieces that one call of ``preadv`` may read into."""


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
        """``caches``: ``[num_blocks, heads, block_size, content]`` integer words of each layer, in
        any physical order."""
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
        """Ranges of consecutive layers with one shape, strides and dtype, which is almost always
        all of them. Kernels take one range at a time."""
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
    def arrays(self) -> list[Pages]:
        """The caches as numpy arrays. Only for caches in host memory."""
        return [cache.numpy() for cache in self.caches]

    def frame_bytes(self, blocks: int, recast: Recast | None = None) -> Ints:
        """Return the bytes of a frame of each layer, ``[layers]``: of ``blocks`` pages, or of what
        ``recast`` reads."""
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
        """The same addresses in the memory of the layers' device. The upload blocks: other streams
        may use it at once. For a rank's own pages it is done by ``Lane.prepare``."""
        if self._pointers is None:
            with self._uploading:
                if self._pointers is None:
                    self._pointers = torch.from_numpy(self.addresses).to(self.caches[0].device)
        return self._pointers


class Mark:
    """A point in the work of a lane, or of the compute stream. This one is of host memory, where
    work is done when its call returns."""

    def __init__(self, number: int = 0) -> None:
        self.number = number
        """Grows within one lane. A later mark of a lane covers all its earlier ones."""

    def done(self) -> bool:
        """Whether all work before the mark has finished. Does not wait."""
        return True

    def wait(self) -> None:
        """Block this thread until all work before the mark has finished. Releases the GIL. Only
        for shutdown and self-tests, because a device that hangs never returns."""

    def hold_compute(self) -> None:
        """Make the current compute stream wait for the mark. The calling thread does not wait."""


_DONE = Mark()


class Lane(Protocol):
    """Copies pages. Thread-safe. Pages must stay alive and unchanged until a later mark is done."""

    per_span: bool
    """Whether to pass all layers of a span to ``scatter`` at once, because each call costs a
    launch. If not, layers are better copied as they arrive, while they are in the CPU's cache."""

    def adopt_thread(self) -> None:
        """Prepare the calling thread. Each thread that uses the lane or its marks calls it once."""

    def prepare(self, layers: PagedLayers) -> None:
        """Compile and upload what copies of these layers need, so that no request waits for it."""

    def mark_compute(self) -> Mark:
        """Return a mark after all work submitted so far to the current compute stream."""

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

    def gather(self, layers: PagedLayers, ids: Ints, memory: memoryview, starts: Ints) -> None:
        """Copy the blocks of ``n`` chunks to ``memory``: for each chunk all its blocks of the first
        layer, then of the second, and so on.

        Raises as ``scatter`` does.

        Args:
            layers: the layers that are read.
            ids: ``[n, blocks]`` block ids.
            memory: bytes, one after another, writable; pinned for a device lane.
            starts: ``[n]``: where the pages of each chunk start in ``memory``.
        """

    def mark(self) -> Mark:
        """Return a mark after all work submitted to the lane so far."""


def check_reach(
    memory: memoryview, starts: Ints, nbytes: Ints, layers: PagedLayers, ids: Ints
) -> None:
    """Raise IndexError if blocks are not in the cache, or bytes not in ``memory``: it would be
    other memory. ``nbytes``: from each of ``starts`` on, of the same shape or broadcast to it."""
    if starts.shape not in ((len(ids),), (len(ids), len(layers))):  # they would be broadcast
        raise ValueError(f"starts of {starts.shape} for {len(ids)} times {len(layers)} layers")
    if ids.min() < 0 or ids.max() >= layers.blocks:
        raise IndexError(f"blocks {ids.min()} to {ids.max()} of {layers.blocks}")
    if starts.min() < 0 or (len(memory) - nbytes - starts).min() < 0:
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
    found = torch.from_numpy(np.ascontiguousarray(ids).reshape(-1))
    if device.type == "cpu":
        return found
    # A copy from unpinned memory would block this thread until the stream has caught up. PyTorch
    # keeps the pinned memory until the copy is done.
    pinned = torch.empty(len(found), dtype=torch.int64, pin_memory=True).copy_(found)
    return pinned.to(device, non_blocking=True)


class HostLane:
    """Copies within host memory, in the calling thread.

    numpy gives up the interpreter's lock for each layer and waits for it afterwards, up to 5 ms if
    another thread computes in Python. So where a copy from an arena waited, the remaining layers
    are read from the arena's file in one call: 2.1 GB/s while such a thread runs, against 0.2.
    Alone that takes 2.4 times as long as numpy (2 cores, 2026-11).
    """

    per_span = False

    def __init__(self) -> None:
        self._fd, self._base, self._end = -1, 0, 0
        self._at_once = 1
        """Layers copied before the time is taken: one where the last copies waited."""

    def attach(self, arena: Arena) -> None:
        """Copy from ``arena`` from now on, besides other memory."""
        self._fd = arena.fd
        self._base = np.frombuffer(arena.view, np.uint8).ctypes.data
        self._end = self._base + arena.nbytes

    def adopt_thread(self) -> None:
        """Do nothing: any thread can use the lane."""

    def prepare(self, layers: PagedLayers) -> None:
        """Do nothing: there is nothing to compile."""

    def mark_compute(self) -> Mark:
        """Return a mark that is done: on the CPU the forward pass has ended, or its thread is in
        this call."""
        return _DONE

    def follow(self, mark: Mark) -> None:
        """Do nothing, see ``mark_compute``."""

    def scatter(
        self,
        memory: memoryview,
        starts: Ints,
        layers: PagedLayers,
        ids: Ints,
        recast: Recast | None = None,
    ) -> None:
        """See ``Lane.scatter``.

        Uses numpy, which copies whole blocks: 1 MiB takes 25 us. A plain copy takes 23 us, and
        torch's ``index_copy_`` 115 to 170 us on threads that the model computes with (2 cores,
        2026-11-21). Many non-consecutive blocks are written with one call, which blocks all other
        threads.
        """
        check_reach(memory, starts, layers.frame_bytes(ids.shape[1], recast), layers, ids)
        for of_payload, blocks in zip(starts, ids, strict=True):
            self._write(
                _frames(memory, of_payload.tolist(), layers, blocks, recast), layers, blocks, recast
            )

    def _write(
        self, frames: list[Pages], layers: PagedLayers, ids: Ints, recast: Recast | None
    ) -> None:
        count, done = len(frames), 0
        runs, begun = _runs(ids), monotonic()
        while done < count:
            some = frames[done : done + self._at_once]
            arrays = layers.arrays[done : done + len(some)]
            if recast is not None:
                some = [recast(f, a.shape[2]) for f, a in zip(some, arrays, strict=True)]
            scatter_layers(some, arrays, ids, runs)
            done += len(some)
            ended = monotonic()
            has_waited = ended - begun > _WAITED_S + sum(map(_nbytes, some)) / _COPY_BYTES_PER_S
            self._at_once, begun = 1 if has_waited else _LAYERS_AT_ONCE, ended
            if has_waited and recast is None and self._read(frames[done:], layers, done, runs):
                return

    def gather(self, layers: PagedLayers, ids: Ints, memory: memoryview, starts: Ints) -> None:
        """See ``Lane.gather``.

        Copies piece by piece in this thread. torch's ``index_select`` would use the threads that
        the model computes with and wait for them: up to a second for 128 MiB while they are busy,
        against 50 ms here (2 cores, 2026-11-21).
        """
        sizes = layers.frame_bytes(ids.shape[1])
        check_reach(memory, starts, sizes.sum(), layers, ids)
        for at, blocks in zip((starts[:, None] + offsets_of(sizes)).tolist(), ids, strict=True):
            runs = _runs(blocks)
            for target, source in zip(
                _frames(memory, at, layers, blocks, None), layers.arrays, strict=True
            ):
                for block, first, count in runs:
                    np.copyto(target[first : first + count], source[block : block + count])

    def mark(self) -> Mark:
        """Return a mark that is done."""
        return _DONE

    def _read(
        self, frames: list[Pages], layers: PagedLayers, first: int, runs: list[tuple[int, int, int]]
    ) -> bool:
        """Read pages of the layers from ``first`` on. Returns False if that is impossible."""
        if not frames:
            return True
        at = frames[0].ctypes.data
        nbytes = sum(frame.nbytes for frame in frames)
        follows = frames[-1].ctypes.data + frames[-1].nbytes == at + nbytes
        inside = self._base <= at and at + nbytes <= self._end
        if not (follows and inside and layers.has_whole_blocks):
            return False
        if len(frames) * len(runs) > _PIECES_MAX:
            return False
        room = []
        for array in layers.arrays[first:]:
            for block, _, blocks in runs:
                row = array[block : block + blocks]
                # If layers share blocks, the pages of one layer do not follow each other.
                pieces = [row] if row.flags.c_contiguous else list(row)
                room += [piece.data.cast("B") for piece in pieces]
        if len(room) > _PIECES_MAX or sum(map(len, room)) != nbytes:
            return False
        if os.preadv(self._fd, room, at - self._base) != nbytes:
            raise TransferError("the arena is shorter than its payloads")
        return True


def _frames(
    memory: memoryview, starts: list[int], layers: PagedLayers, ids: Ints, recast: Recast | None
) -> list[Pages]:
    """Return the frame of each layer in ``memory``."""
    frames = []
    for start, array in zip(starts, layers.arrays, strict=True):
        _, heads, size, content = array.shape
        blocks = len(ids)
        if recast is not None:
            blocks, heads, given = recast.frame
            size = given or size
        frames.append(np.ndarray((blocks, heads, size, content), array.dtype, memory, start))
    return frames


def _runs(ids: Ints) -> list[tuple[int, int, int]]:
    """Return runs of consecutive ids: first id, its index, and how many."""
    starts = run_starts(ids[None])
    counts = np.diff(starts, append=len(ids))
    return list(zip(ids[starts].tolist(), starts.tolist(), counts.tolist(), strict=True))


def scatter_layers(
    pages: Sequence[Pages],
    arrays: Sequence[Pages],
    ids: Ints,
    runs: Sequence[tuple[int, int, int]],
) -> None:
    """Write pages of each layer into blocks of its cache, both in host memory."""
    blocks = len(ids)
    if set(map(len, pages)) != {blocks}:  # no assertion: a single page would be broadcast
        raise ValueError(f"pages for {blocks} blocks")
    if len(runs) > _RUNS_MAX:
        for given, array in zip(pages, arrays, strict=True):
            array[ids] = given
        return
    for block, at, count in runs:
        # No loop in Python, which would hold the interpreter's lock for longer.
        is_all = count == blocks
        parts = pages if is_all else map(itemgetter(slice(at, at + count)), pages)
        targets = map(itemgetter(slice(block, block + count)), arrays)
        deque(map(np.copyto, targets, parts), maxlen=0)
