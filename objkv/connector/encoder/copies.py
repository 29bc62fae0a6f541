"""Copies encoder outputs between host memory and the worker's device.

On a device nothing here blocks the forward thread: outputs are copied from page-locked memory, on
the compute stream, so that the model reads them afterwards. Save threads copy on a stream of their
own, so that they and the model do not wait for each other.
"""

import logging
from time import monotonic, sleep
from typing import Any

import numpy as np
import torch

from objkv.connector.encoder.items import Pages
from objkv.errors import TransferError
from objkv.transfer.devices import driver_of

logger = logging.getLogger(__name__)

_COPY_S_MAX = 30.0
"""How long a save waits for its copy, which waits for the kernels that compute the output."""
_POLL_S = 1e-3


class OutputCopies:
    """Copies outputs, which are in host memory here. The forward thread calls ``to_device`` and
    ``mark``, the thread that saves calls the other methods."""

    def adopt_thread(self) -> None:
        """Prepare the calling thread, which calls it once, before ``to_host``."""

    def to_device(self, pages: Pages, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a new tensor of ``pages``, ``[rows, width]``, for work of the current compute
        stream. Does not wait for the device. ``pages`` may change when this returns."""
        tensor = torch.empty((rows, width), dtype=dtype)
        np.copyto(_bytes_of(tensor).numpy(), pages)
        return tensor

    def mark(self) -> Any:
        """Return a mark after all work submitted to the current compute stream so far."""

    def to_host(self, tensor: torch.Tensor, computed: Any, pages: memoryview) -> None:
        """Copy the bytes of ``tensor``, C-contiguous, to ``pages``, which has as many. Waits for
        the device, but only for work before ``computed``, a mark. Raises ``TransferError`` if that
        takes too long."""
        _copy(_bytes_of(tensor.contiguous()), pages)


class DeviceCopies(OutputCopies):
    """For outputs in the memory of an accelerator.

    Page-locked memory is PyTorch's: it records the streams that read or write a piece, and reuses
    the piece only when they have passed. Memory of our own would need an event for each copy. vLLM
    copies the pixels of each image in the same way, from the same pool.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._driver = driver_of(device)
        self._api = torch.get_device_module(device)
        # One for all saves: PyTorch deals out a few streams in turn, and one per save would soon
        # be the stream that another part of objkv loads on.
        self.stream = self._api.Stream(device)
        self._warned = False

    def adopt_thread(self) -> None:
        """Select the device. A new thread is on device 0, and would open a context there for every
        other rank."""
        self._api.set_device(self._device)

    def to_device(self, pages: Pages, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """See ``OutputCopies.to_device``."""
        memory = self._staged(pages.nbytes)
        np.copyto(memory.numpy(), pages)
        staged = memory.view(dtype).view(rows, width)
        return staged.to(self._device, non_blocking=memory.is_pinned())

    def mark(self) -> Any:
        """See ``OutputCopies.mark``."""
        event = self._driver.event()
        event.record(self._api.current_stream(self._device))
        return event

    def to_host(self, tensor: torch.Tensor, computed: Any, pages: memoryview) -> None:
        """See ``OutputCopies.to_host``."""
        memory = torch.empty(tensor.nbytes, dtype=torch.uint8, pin_memory=True)
        with self._api.stream(self.stream):
            computed.wait(self.stream)
            memory.copy_(_bytes_of(tensor.contiguous()), non_blocking=True)
            copied = self._driver.event()
            copied.record(self.stream)
        end = monotonic() + _COPY_S_MAX
        while not copied.query():
            if monotonic() >= end:  # the copy may go on: nothing else gets its memory before
                raise TransferError(f"the device copied no output within {_COPY_S_MAX:g} s")
            sleep(_POLL_S)
        _copy(memory, pages)

    def _staged(self, nbytes: int) -> torch.Tensor:
        """Return memory to copy from, page-locked if the system has enough."""
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as exc:  # vLLM relies on the output, so it is copied in any case
            if not self._warned:
                logger.warning("encoder outputs block the model, page-locking failed error=%s", exc)
            self._warned = True
            return torch.empty(nbytes, dtype=torch.uint8)


def open_copies(device: torch.device) -> OutputCopies:
    """Return the copies for outputs on ``device``. Raises ``ConfigError`` for an unsupported
    device."""
    return OutputCopies() if device.type == "cpu" else DeviceCopies(device)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as ``[n]`` uint8, without a copy."""
    return tensor.view(torch.uint8).view(-1)


def _copy(memory: torch.Tensor, pages: memoryview) -> None:
    np.copyto(np.frombuffer(pages, np.uint8), memory.numpy())  # without the GIL
