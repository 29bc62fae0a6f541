"""Slabs: a bounded pool of equal buffers for payloads, page-locked if a device reads them.

An empty pool raises ``SlabsExhaustedError``, which becomes a miss, a drop, or a wait for slabs that
a device is copying.
"""

import logging
import os
import weakref
from collections.abc import Callable
from threading import Lock

import numpy as np
import torch

from objkv.errors import TransferError
from objkv.stores.base import map_memory
from objkv.transfer.lanes import Mark

logger = logging.getLogger(__name__)

Pin = Callable[[torch.Tensor], Callable[[], None]]
"""Page-locks a tensor and returns what unlocks it, see ``DeviceDriver.pin``. The returned function
must not keep the tensor alive."""


class SlabsExhaustedError(TransferError):
    """Every slab is leased, or still being copied."""


class Slab:
    """One leased buffer. Release or abandon it once."""

    def __init__(self, pool: "SlabPool", memory: torch.Tensor) -> None:
        self._pool = pool
        self._released = False
        self.tensor = memory
        """``[slab_bytes]`` uint8, contiguous; owned by the pool, valid until released."""
        self.view = memory.numpy().data
        """The same memory, writable, as a memoryview of format ``B``."""
        self.start = memory.data_ptr() - pool.memory.data_ptr()
        """Where it starts in the pool's memory."""

    def release(self, after: Mark | None = None) -> None:
        """Return the slab to its pool. ``after``: what may still use it, None if nothing."""
        assert not self._released
        self._released = True
        self._pool.take_back(self.tensor, after)

    def abandon(self) -> None:
        """Never return the slab: a device may copy it, and no mark shows until when."""
        assert not self._released
        self._released = True
        _STRANDED.append(self.tensor)


class SlabPool:
    """A pool of ``count`` buffers of ``slab_bytes`` each. Thread-safe."""

    def __init__(
        self, name: str, *, count: int, slab_bytes: int, pin: Pin | None = None, fd: int = -1
    ) -> None:
        """``pin``: page-locks the memory, which is unlocked when the pool and all its slabs are
        gone. ``fd``: a memfd that is the memory, so that other processes have it too. Raises
        ``OSError``, ``MemoryError`` or ``RuntimeError`` if memory is short."""
        assert count > 0
        assert slab_bytes > 0
        self._name = name
        self.total, self.slab_bytes = count, slab_bytes
        self._lock = Lock()
        self._pending: list[tuple[Mark, torch.Tensor]] = []
        """Memory that is free once its mark is done."""
        memory = self.memory = _allocate(count * slab_bytes, pin, fd)
        """All slabs, ``[count * slab_bytes]`` uint8."""
        # Last in, first out: the most recently used slab is leased first, and on a host without a
        # GPU unused slabs never take physical memory.
        self._free = [memory[i * slab_bytes : (i + 1) * slab_bytes] for i in range(count)]
        weakref.finalize(self, _keep_pending, name, self._pending).atexit = False

    @property
    def leased(self) -> int:
        """Number of slabs that are leased, or were returned but are still being copied."""
        self._reclaim()
        return self.total - len(self._free)

    def lease(self) -> Slab:
        """Lease a free slab with undefined contents. Raises ``SlabsExhaustedError``."""
        for _ in range(2):  # another thread may take what was reclaimed
            with self._lock:
                if self._free:
                    return Slab(self, self._free.pop())
            self._reclaim()
        raise SlabsExhaustedError(f"no slab for a {self._name} is free")

    def take_back(self, memory: torch.Tensor, mark: Mark | None) -> None:
        """Called by ``Slab`` only. ``mark``: when the memory is free, None if it is."""
        if mark is None or _is_done(mark):
            self._put_back(memory)
            return
        with self._lock:
            self._pending.append((mark, memory))

    def _put_back(self, memory: torch.Tensor) -> None:
        """Called once for each lease."""
        with self._lock:
            self._free.append(memory)

    def _reclaim(self) -> None:
        """Free the pending slabs that no device copies any more, in any order: lanes do not end in
        the order in which they began. The driver is called without the lock: it may be busy."""
        with self._lock:
            marks = {id(mark): mark for mark, _ in self._pending}  # of chunks gathered together
        done = {key for key, mark in marks.items() if _is_done(mark)}
        with self._lock:
            freed = [memory for mark, memory in self._pending if id(mark) in done]
            self._pending[:] = [one for one in self._pending if id(one[0]) not in done]
        for memory in freed:
            self._put_back(memory)


_STRANDED: list[torch.Tensor] = []
"""Memory that a hung device may still use: allocated and page-locked until the process ends."""


def _is_done(mark: Mark) -> bool:
    try:
        return mark.done()
    except Exception:  # the device has failed, and what it still copies is unknown
        logger.debug("mark not read", exc_info=True)
        return False


def _keep_pending(name: str, pending: list[tuple[Mark, torch.Tensor]]) -> None:
    """Keep the memory that is still being copied when its pool is gone."""
    left = [memory for mark, memory in pending if not _is_done(mark)]
    if left:
        logger.error("slabs kept for copies that never ended pool=%s count=%d", name, len(left))
        _STRANDED.extend(left)


def _allocate(nbytes: int, pin: Pin | None, fd: int = -1) -> torch.Tensor:
    """Return ``[nbytes]`` uint8 that begins a page, page-locked if ``pin`` is given. PyTorch's
    pinned memory is rounded up to a power of two: 1 GiB in slabs of 33 MiB takes 1.5."""
    memory = np.frombuffer(map_memory(fd, nbytes), np.uint8)
    tensor = torch.from_numpy(memory)
    if pin is not None:
        # Views keep the array alive, and so does the tensor. At exit the system unlocks the pages;
        # a device that hangs would hold up that call.
        weakref.finalize(memory, _unpin, pin(tensor), os.getpid()).atexit = False
    return tensor


def _unpin(undo: Callable[[], None], pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child has no device
    try:
        undo()
    except Exception:  # no caller can act: this runs whenever the last view is collected
        logger.warning("slabs not unlocked", exc_info=True)
