"""The device on which tests keep paged caches: the host, or the simulated device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from objkv.transfer.devices import driver_of

HOST = torch.device("cpu")
ON_HOST = pytest.mark.parametrize("device", ["host"], indirect=True)
"""For transfers that need no device, or bring their own lane."""
_device = HOST


def current_device() -> torch.device:
    return _device


@contextmanager
def caches_on(device: torch.device) -> Iterator[None]:
    global _device
    before, _device = _device, device
    try:
        yield
    finally:
        _device = before


def pinning() -> Callable[[torch.Tensor], Callable[[], None]] | None:
    """How slabs are page-locked for the device. None on the host."""
    return None if _device == HOST else driver_of(_device).pin


def host_bytes(data: torch.Tensor) -> torch.Tensor:
    """A copy of the bytes of ``data``, ``[n]`` uint8, where a lane may read and write them."""
    flat = data.cpu().contiguous().view(torch.uint8).flatten()
    memory = torch.empty(len(flat), dtype=torch.uint8, pin_memory=_device != HOST)
    memory.copy_(flat)
    return memory
