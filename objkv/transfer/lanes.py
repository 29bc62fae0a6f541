"""Lanes: how pages travel between a slab and the paged cache, and how to know that they arrived.

On CUDA a lane is a stream of its own: copies run beside the model's kernels, ordered by events.
On the host a lane copies at once. A lane belongs to one thread at a time.
"""

from typing import Protocol

import torch

from objkv.errors import ConfigError


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

    def scatter(self, pages: torch.Tensor, cache: torch.Tensor, block_ids: torch.Tensor) -> None:
        """Write ``pages`` into ``cache`` at ``block_ids``.

        Args:
            pages: ``[n, heads, block_size, content]``, host memory, pinned when the lane is CUDA.
            cache: ``[num_blocks, heads, block_size, content]``, any strides, one layer.
            block_ids: ``[n]`` int64 on the host, all different.
        """

    def gather(self, cache: torch.Tensor, block_ids: torch.Tensor, pages: torch.Tensor) -> None:
        """Write ``cache`` at ``block_ids`` into ``pages``; shapes as for ``scatter``."""

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


class HostLane:
    """Copies within host memory, in the calling thread."""

    def adopt_thread(self) -> None:
        """Any thread will do."""

    def follow_compute(self) -> None:
        """On the CPU the forward pass has ended, or waits in this call."""

    def scatter(self, pages: torch.Tensor, cache: torch.Tensor, block_ids: torch.Tensor) -> None:
        """See ``Lane.scatter``."""
        cache.index_copy_(0, block_ids, pages)

    def gather(self, cache: torch.Tensor, block_ids: torch.Tensor, pages: torch.Tensor) -> None:
        """See ``Lane.gather``."""
        torch.index_select(cache, 0, block_ids, out=pages)

    def mark(self) -> Mark:
        """A mark that is done."""
        return HostMark()


class CudaMark:
    """An event on a lane's stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()
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
    """A stream of its own on ``device``; block tables and staging live on that stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def adopt_thread(self) -> None:
        """A new thread is on device 0, and would open a context there for every other rank."""
        torch.cuda.set_device(self._device)

    def follow_compute(self) -> None:
        """See ``Lane.follow_compute``."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def scatter(self, pages: torch.Tensor, cache: torch.Tensor, block_ids: torch.Tensor) -> None:
        """See ``Lane.scatter``. One PCIe copy per layer into staging, then one kernel."""
        with torch.cuda.stream(self._stream):
            ids = self._on_device(block_ids)
            cache.index_copy_(0, ids, pages.to(self._device, non_blocking=True))

    def gather(self, cache: torch.Tensor, block_ids: torch.Tensor, pages: torch.Tensor) -> None:
        """See ``Lane.gather``. One kernel into staging, then one PCIe copy per layer."""
        with torch.cuda.stream(self._stream):
            ids = self._on_device(block_ids)
            pages.copy_(torch.index_select(cache, 0, ids), non_blocking=True)

    def mark(self) -> Mark:
        """An event after everything given so far."""
        return CudaMark(self._stream)

    def _on_device(self, block_ids: torch.Tensor) -> torch.Tensor:
        # From memory that is not pinned the copy would wait for the whole lane, and with it the
        # forward thread for the model's kernels. PyTorch keeps the pinned piece until it is copied.
        return block_ids.pin_memory().to(self._device, non_blocking=True)


def open_lane(device: torch.device) -> Lane:
    """The lane for caches on ``device``. Raises ``ConfigError`` where there is none."""
    if device.type == "cuda":
        return CudaLane(device)
    if device.type == "cpu":
        return HostLane()
    raise ConfigError(
        f"objkv cannot copy from and to {device.type}: run the model without the objkv connector"
    )
