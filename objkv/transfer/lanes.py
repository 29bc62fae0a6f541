"""Lanes: how pages travel between a slab and the paged cache, and how to know that they arrived.

On CUDA a lane is a stream of its own: copies run beside the model's kernels, ordered by events.
On the host a lane copies at once. A lane belongs to one thread at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from objkv.errors import ConfigError

# Recasting: pages of one shape become pages of another, as views wherever one will do. Pages are
# ``[blocks, heads, block_size, content]``, each token's content of each head in one piece, so heads
# can be taken apart and tokens dealt into blocks of another size. Only where pages are canonical:
# what an attention kernel packed its own way goes as it is. Source of the semantics: vLLM 0.14,
# ``kv_postprocess_*_on_receive`` in ``distributed/kv_transfer/kv_connector/utils.py``, which does
# the same in place, for some ratios.

PagesT = TypeVar("PagesT", np.ndarray[Any, np.dtype[Any]], torch.Tensor)
"""A numpy array or a torch tensor: only operations that both have are used."""


@dataclass(frozen=True, slots=True)
class Recast:
    """How to read a frame of another rank's, or another replica's, shape."""

    heads: tuple[int, int]
    """Those to take, ``[start, end)`` of the frame's."""
    block_size: int
    """Tokens per block that the reader wants."""
    first_block: int
    """The first to take, counted in blocks of the reader's size."""
    blocks: int
    """How many of them."""

    def __call__(self, pages: PagesT) -> PagesT:
        """``[blocks, heads, block_size, content]`` of ``pages``, in the reader's blocks.

        A view of ``pages`` if the block size stays, a copy otherwise.
        """
        start, end = self.heads
        assert 0 <= start < end <= pages.shape[1]
        dealt = deal_tokens(pages[:, start:end], self.block_size)
        until = self.first_block + self.blocks
        assert until <= dealt.shape[0]  # else one page would fill them all
        return dealt[self.first_block : until]


def deal_tokens(pages: PagesT, block_size: int) -> PagesT:
    """The same tokens in blocks of ``block_size``: ``[tokens // block_size, heads, block_size,
    content]``. The tokens have to fill whole blocks; larger and smaller ones, any ratio."""
    blocks, heads, size, content = pages.shape
    if size == block_size:
        return pages
    tokens = blocks * size
    assert tokens % block_size == 0
    rows = pages.swapaxes(0, 1).reshape(heads, tokens // block_size, block_size, content)
    return rows.swapaxes(0, 1)


Pages = np.ndarray[Any, np.dtype[Any]]
"""Of one layer, ``[n, heads, block_size, content]``: host memory, pinned when the lane is CUDA."""
_RUNS_MAX = 16
"""Pieces of consecutive blocks that are worth a copy each: a call costs 0.4 us, and lets other
threads run meanwhile, which one call for all does not."""
_URGENT, _LEISURELY = -1, 0
"""Priorities of CUDA streams: a step may be waiting for a load, nothing waits for a save."""


class Mark(Protocol):
    """A point in a lane's work."""

    def done(self) -> bool:
        """Whether all work before the mark has finished. Does not wait."""

    def wait(self) -> None:
        """Block this thread until it has; releases the GIL."""

    def hold_compute(self) -> None:
        """Make the current compute stream wait for the mark; the calling thread does not."""


class Lane(Protocol):
    """Moves pages. What it is given must stay alive and unchanged until a later mark is done."""

    def adopt_thread(self) -> None:
        """Called once by each thread that will use the lane or wait for its marks."""

    def follow_compute(self) -> None:
        """Order the lane's next work after what the current compute stream has been given."""

    def place(self, block_ids: Sequence[int]) -> Any:
        """``n`` block ids as ``scatter`` and ``gather`` of this lane want them: one upload for all
        layers. Valid for as long as it is kept; its length is ``n``."""

    def scatter(
        self, pages: Pages, cache: torch.Tensor, placed: Any, recast: Recast | None = None
    ) -> None:
        """Write ``pages`` into ``cache`` at the placed block ids.

        Args:
            pages: an array, because making a tensor of bytes takes twice as long.
            cache: ``[num_blocks, heads, block_size, content]``, any strides, one layer or some of
                its heads; of the dtype of ``pages``.
            placed: ``n`` block ids, all different, from ``place``.
            recast: what makes ``pages`` the ``n`` pages to write; where it copies, it does so where
                ``cache`` is. None: they are.
        """

    def gather(self, cache: torch.Tensor, placed: Any, pages: Sequence[torch.Tensor]) -> None:
        """Write ``cache`` at the placed block ids into ``pages``: as many pieces as there are
        chunks, each ``[its blocks, heads, block_size, content]``, together as long as ``placed``.
        """

    def mark(self) -> Mark:
        """A mark after everything given to the lane so far."""


class HostMark:
    """The host lane's work is done when the call returns."""

    def done(self) -> bool:
        """True."""
        return True

    def wait(self) -> None:
        """Return at once."""

    def hold_compute(self) -> None:
        """Nothing to hold."""


_DONE = HostMark()


class HostBlocks:
    """Block ids, and the pieces of consecutive ones among them."""

    def __init__(self, block_ids: Sequence[int]) -> None:
        assert min(block_ids) >= 0
        self.ids = block_ids
        starts = [0]
        starts += [at for at in range(1, len(block_ids)) if block_ids[at] != block_ids[at - 1] + 1]
        self.runs: list[tuple[int, int, int]] = [
            (block_ids[start], start, end - start)
            for start, end in pairwise([*starts, len(block_ids)])
        ]
        """First block, place in the pages, number of blocks."""

    def __len__(self) -> int:
        return len(self.ids)


class HostLane:
    """Copies within host memory, in the calling thread."""

    def adopt_thread(self) -> None:
        """Any thread will do."""

    def follow_compute(self) -> None:
        """On the CPU the forward pass has ended, or waits in this call."""

    def place(self, block_ids: Sequence[int]) -> HostBlocks:
        """They are where they are needed."""
        return HostBlocks(block_ids)

    def scatter(
        self, pages: Pages, cache: torch.Tensor, placed: HostBlocks, recast: Recast | None = None
    ) -> None:
        """See ``Lane.scatter``.

        By numpy, which copies whole blocks: 25 us for 1 MiB, where a plain copy takes 23 and
        torch's ``index_copy_`` 115 to 170, on threads that the model computes with (2 cores,
        2026-11-21). Many blocks that are not consecutive are written by one call, which keeps all
        other threads waiting.
        """
        array = cache.numpy()
        if recast is not None:
            pages = recast(pages)
        assert len(pages) == len(placed.ids)  # else one page would fill them all
        if len(placed.runs) > _RUNS_MAX:
            array[list(placed.ids)] = pages
            return
        for block, at, count in placed.runs:
            if block > len(array) - count:  # a slice would be shorter, and that no error
                raise IndexError(f"block {block + count - 1} of {len(array)}")
            np.copyto(array[block : block + count], pages[at : at + count])

    def gather(
        self, cache: torch.Tensor, placed: HostBlocks, pages: Sequence[torch.Tensor]
    ) -> None:
        """See ``Lane.gather``.

        Piece by piece, in this thread: torch's ``index_select`` shares the work out among threads
        that the model computes with, and waits for them, up to a second for 128 MiB where they
        are busy, against 50 ms (2 cores, 2026-11-21).
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
        """A mark that is done."""
        return _DONE


class CudaMark:
    """An event on a lane's stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        # A blocking event: the default spins on a core that the engine may need, for as long as
        # the model's kernels take that come before.
        self._event = torch.cuda.Event(blocking=True)
        self._event.record(stream)

    def done(self) -> bool:
        """Whether the event has passed."""
        return bool(self._event.query())

    def wait(self) -> None:
        """Block this thread until the event has passed."""
        self._event.synchronize()

    def hold_compute(self) -> None:
        """The current stream waits for the event."""
        torch.cuda.current_stream().wait_event(self._event)


class CudaLane:
    """A stream of its own on ``device``; block tables and staging live on that stream.

    ``urgent``: its copies and kernels go before those of streams that are not, e.g. the model's.
    """

    def __init__(self, device: torch.device, *, urgent: bool) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=_URGENT if urgent else _LEISURELY)
        self._staging: torch.Tensor | None = None

    def adopt_thread(self) -> None:
        """A new thread is on device 0, and would open a context there for every other rank."""
        torch.cuda.set_device(self._device)

    def follow_compute(self) -> None:
        """See ``Lane.follow_compute``."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def place(self, block_ids: Sequence[int]) -> torch.Tensor:
        """See ``Lane.place``."""
        # From memory that is not pinned the copy would wait for the whole lane, and with it the
        # forward thread for the model's kernels. PyTorch keeps the pinned piece until it is copied.
        with torch.cuda.stream(self._stream):
            ids = torch.tensor(block_ids, dtype=torch.int64).pin_memory()
            return ids.to(self._device, non_blocking=True)

    def scatter(
        self, pages: Pages, cache: torch.Tensor, placed: torch.Tensor, recast: Recast | None = None
    ) -> None:
        """See ``Lane.scatter``. One PCIe copy per layer into staging, then one kernel."""
        given = torch.from_numpy(pages)
        with torch.cuda.stream(self._stream):
            staged = self._staged(given.shape, given.dtype)
            staged.copy_(given, non_blocking=True)
            cache.index_copy_(0, placed, staged if recast is None else recast(staged))

    def gather(
        self, cache: torch.Tensor, placed: torch.Tensor, pages: Sequence[torch.Tensor]
    ) -> None:
        """See ``Lane.gather``. One kernel into staging for all, then one PCIe copy per piece."""
        with torch.cuda.stream(self._stream):
            staged = self._staged(torch.Size((len(placed), *cache.shape[1:])), cache.dtype)
            torch.index_select(cache, 0, placed, out=staged)
            at = 0
            for piece in pages:
                piece.copy_(staged[at : at + len(piece)], non_blocking=True)
                at += len(piece)

    def mark(self) -> Mark:
        """An event after everything given so far."""
        return CudaMark(self._stream)

    def _staged(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Device memory of that form. The same as last time: the stream has one thing in it after
        the other, so the next user writes when the one before has read."""
        nbytes = shape.numel() * dtype.itemsize
        if self._staging is None or self._staging.numel() < nbytes:
            self._staging = None  # given back first: the two need not fit side by side
            self._staging = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return self._staging[:nbytes].view(dtype).view(shape)


def open_lane(device: torch.device, *, urgent: bool = False) -> Lane:
    """The lane for caches on ``device``; ``urgent`` where computing may wait for what it moves.
    Raises ``ConfigError`` where there is none."""
    if device.type == "cuda":
        return CudaLane(device, urgent=urgent)
    if device.type == "cpu":
        return HostLane()
    raise ConfigError(
        f"objkv cannot copy from and to {device.type}: run the model without the objkv connector"
    )
