"""Lanes copy pages between a slab and the paged cache, and their marks show when copies are done.

A CUDA lane is a separate stream: its copies run concurrently with the model's kernels, ordered by
events. A host lane copies at once. A lane belongs to one thread at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from objkv.errors import ConfigError

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
    """How to read a frame that a rank of another shape wrote."""

    heads: tuple[int, int]
    """Heads of the frame to take, ``[start, end)``."""
    block_size: int
    """The reader's block size in tokens."""
    first_block: int
    """First block to take, counted in blocks of the reader's size."""
    blocks: int
    """Number of blocks to take."""

    def __call__(self, pages: PagesT) -> PagesT:
        """Return ``[blocks, heads, block_size, content]`` of ``pages`` in the reader's blocks.

        A view of ``pages`` if the block size is the same, otherwise a copy.
        """
        start, end = self.heads
        assert 0 <= start < end <= pages.shape[1]
        dealt = deal_tokens(pages[:, start:end], self.block_size)
        until = self.first_block + self.blocks
        assert until <= dealt.shape[0]  # otherwise a single page would be broadcast
        return dealt[self.first_block : until]


def deal_tokens(pages: PagesT, block_size: int) -> PagesT:
    """Return the same tokens in blocks of ``block_size``: ``[tokens // block_size, heads,
    block_size, content]``. Any ratio works, if the tokens fill whole blocks."""
    blocks, heads, size, content = pages.shape
    if size == block_size:
        return pages
    tokens = blocks * size
    assert tokens % block_size == 0
    rows = pages.swapaxes(0, 1).reshape(heads, tokens // block_size, block_size, content)
    return rows.swapaxes(0, 1)


Pages = np.ndarray[Any, np.dtype[Any]]
"""Pages of one layer, ``[n, heads, block_size, content]``, in host memory, pinned for a CUDA
lane."""
_RUNS_MAX = 16
"""Up to this many runs of consecutive blocks are copied one by one. A call costs 0.4 us and lets
other threads run in between, unlike one call for all runs."""
_URGENT, _LEISURELY = -1, 0
"""Priorities of CUDA streams. A step may wait for a load, but nothing waits for a save."""


class Mark(Protocol):
    """A point in a lane's work."""

    def done(self) -> bool:
        """Whether all work before the mark has finished. Does not wait."""

    def wait(self) -> None:
        """Block this thread until all work before the mark has finished. Releases the GIL."""

    def hold_compute(self) -> None:
        """Make the current compute stream wait for the mark. The calling thread does not wait."""


class Lane(Protocol):
    """Copies pages. Arguments must stay alive and unchanged until a later mark is done."""

    def adopt_thread(self) -> None:
        """Prepare the calling thread. Each thread that uses the lane or its marks calls it once."""

    def follow_compute(self) -> None:
        """Order the lane's next work after all work submitted to the current compute stream."""

    def place(self, block_ids: Sequence[int]) -> Any:
        """Convert ``n`` block ids for ``scatter`` and ``gather`` of this lane, so that they are
        uploaded once for all layers. The result has length ``n`` and does not expire."""

    def scatter(
        self, pages: Pages, cache: torch.Tensor, placed: Any, recast: Recast | None = None
    ) -> None:
        """Write ``pages`` into ``cache`` at the placed block ids.

        Args:
            pages: an array, because making a tensor from bytes takes twice as long.
            cache: ``[num_blocks, heads, block_size, content]``, any strides, one layer or some of
                its heads, with the dtype of ``pages``.
            placed: ``n`` block ids, all different, from ``place``.
            recast: turns ``pages`` into the ``n`` pages to write. If that needs a copy, the copy is
                on the device of ``cache``. None: ``pages`` are written unchanged.
        """

    def gather(self, cache: torch.Tensor, placed: Any, pages: Sequence[torch.Tensor]) -> None:
        """Write ``cache`` at the placed block ids into ``pages``.

        ``pages`` has one piece per chunk, ``[blocks of the chunk, heads, block_size, content]``.
        Together they are as long as ``placed``.
        """

    def mark(self) -> Mark:
        """Return a mark after all work submitted to the lane so far."""


class HostMark:
    """The mark of a host lane, whose work is done when the call returns."""

    def done(self) -> bool:
        """Return True."""
        return True

    def wait(self) -> None:
        """Return at once."""

    def hold_compute(self) -> None:
        """Do nothing."""


_DONE = HostMark()


class HostBlocks:
    """Block ids, and the runs of consecutive ids among them."""

    def __init__(self, block_ids: Sequence[int]) -> None:
        assert min(block_ids) >= 0
        self.ids = block_ids
        starts = [0]
        starts += [at for at in range(1, len(block_ids)) if block_ids[at] != block_ids[at - 1] + 1]
        self.runs: list[tuple[int, int, int]] = [
            (block_ids[start], start, end - start)
            for start, end in pairwise([*starts, len(block_ids)])
        ]
        """First block, index in the pages, number of blocks."""

    def __len__(self) -> int:
        return len(self.ids)


class HostLane:
    """Copies within host memory, in the calling thread."""

    def adopt_thread(self) -> None:
        """Do nothing: any thread can use the lane."""

    def follow_compute(self) -> None:
        """Do nothing: on the CPU the forward pass has ended, or its thread is in this call."""

    def place(self, block_ids: Sequence[int]) -> HostBlocks:
        """See ``Lane.place``."""
        return HostBlocks(block_ids)

    def scatter(
        self, pages: Pages, cache: torch.Tensor, placed: HostBlocks, recast: Recast | None = None
    ) -> None:
        """See ``Lane.scatter``.

        Uses numpy, which copies whole blocks: 1 MiB takes 25 us. A plain copy takes 23 us, and
        torch's ``index_copy_`` 115 to 170 us on threads that the model computes with (2 cores,
        2026-11-21). Many non-consecutive blocks are written with one call, which blocks all other
        threads.
        """
        array = cache.numpy()
        if recast is not None:
            pages = recast(pages)
        assert len(pages) == len(placed.ids)  # otherwise a single page would be broadcast
        if len(placed.runs) > _RUNS_MAX:
            array[list(placed.ids)] = pages
            return
        for block, at, count in placed.runs:
            if block > len(array) - count:  # slicing would silently shorten the range
                raise IndexError(f"block {block + count - 1} of {len(array)}")
            np.copyto(array[block : block + count], pages[at : at + count])

    def gather(
        self, cache: torch.Tensor, placed: HostBlocks, pages: Sequence[torch.Tensor]
    ) -> None:
        """See ``Lane.gather``.

        Copies piece by piece in this thread. torch's ``index_select`` would use the threads that
        the model computes with and wait for them: up to a second for 128 MiB while they are busy,
        against 50 ms here (2 cores, 2026-11-21).
        """
        source, runs = cache.numpy(), iter(placed.runs)
        block, left = 0, 0
        for piece in pages:
            target, at = piece.numpy(), 0
            while at < len(target):
                if not left:
                    block, _, left = next(runs)
                    if block > len(source) - left:
                        raise IndexError(f"block {block + left - 1} of {len(source)}")
                count = min(left, len(target) - at)
                np.copyto(target[at : at + count], source[block : block + count])
                at, block, left = at + count, block + count, left - count

    def mark(self) -> Mark:
        """Return a mark that is done."""
        return _DONE


class CudaMark:
    """An event on a lane's stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        # Use a blocking event: the default spins a core that the engine may need, until the
        # model's earlier kernels have finished.
        self._event = torch.cuda.Event(blocking=True)
        self._event.record(stream)

    def done(self) -> bool:
        """Whether the event has passed."""
        return bool(self._event.query())

    def wait(self) -> None:
        """Block this thread until the event has passed."""
        self._event.synchronize()

    def hold_compute(self) -> None:
        """Make the current stream wait for the event."""
        torch.cuda.current_stream().wait_event(self._event)


class CudaLane:
    """A separate stream on ``device``, which also owns its block tables and staging memory.

    ``urgent``: its copies and kernels run before those of other streams, such as the model's.
    """

    def __init__(self, device: torch.device, *, urgent: bool) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=_URGENT if urgent else _LEISURELY)
        self._staging: torch.Tensor | None = None

    def adopt_thread(self) -> None:
        """Select the device. A new thread is on device 0, and would open a context there for every
        other rank."""
        torch.cuda.set_device(self._device)

    def follow_compute(self) -> None:
        """See ``Lane.follow_compute``."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def place(self, block_ids: Sequence[int]) -> torch.Tensor:
        """See ``Lane.place``."""
        # A copy from unpinned memory would wait for the whole lane, and so the forward thread would
        # wait for the model's kernels. PyTorch keeps the pinned memory until the copy is done.
        with torch.cuda.stream(self._stream):
            ids = torch.tensor(block_ids, dtype=torch.int64).pin_memory()
            return ids.to(self._device, non_blocking=True)

    def scatter(
        self, pages: Pages, cache: torch.Tensor, placed: torch.Tensor, recast: Recast | None = None
    ) -> None:
        """See ``Lane.scatter``. One PCIe copy per layer into staging memory, then one kernel."""
        given = torch.from_numpy(pages)
        with torch.cuda.stream(self._stream):
            staged = self._staged(given.shape, given.dtype)
            staged.copy_(given, non_blocking=True)
            cache.index_copy_(0, placed, staged if recast is None else recast(staged))

    def gather(
        self, cache: torch.Tensor, placed: torch.Tensor, pages: Sequence[torch.Tensor]
    ) -> None:
        """See ``Lane.gather``. One kernel copies all blocks into staging memory, then there is one
        PCIe copy per piece."""
        with torch.cuda.stream(self._stream):
            staged = self._staged(torch.Size((len(placed), *cache.shape[1:])), cache.dtype)
            torch.index_select(cache, 0, placed, out=staged)
            at = 0
            for piece in pages:
                piece.copy_(staged[at : at + len(piece)], non_blocking=True)
                at += len(piece)

    def mark(self) -> Mark:
        """Record an event after all work submitted so far."""
        return CudaMark(self._stream)

    def _staged(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return device memory of that form. Calls share it: work on a stream runs in order, so the
        next use writes after the previous one has read."""
        nbytes = shape.numel() * dtype.itemsize
        if self._staging is None or self._staging.numel() < nbytes:
            self._staging = None  # free it first, so that both need not fit at once
            self._staging = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return self._staging[:nbytes].view(dtype).view(shape)


def open_lane(device: torch.device, *, urgent: bool = False) -> Lane:
    """Return a lane for caches on ``device``. Raises ``ConfigError`` for an unsupported device.

    ``urgent``: the forward pass may wait for its copies.
    """
    if device.type == "cuda":
        return CudaLane(device, urgent=urgent)
    if device.type == "cpu":
        return HostLane()
    raise ConfigError(
        f"objkv supports CUDA and CPU but not {device.type}: run the model without the objkv "
        "connector"
    )
