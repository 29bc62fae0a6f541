"""Slabs: a bounded pool of equal buffers for payloads, page-locked if a device reads them.

An empty pool raises ``SlabsExhaustedError``, which becomes a miss or a drop. A caller may wait, but
only for slabs that a device is copying. The slabs for payloads of other shapes, which are few and
may be huge, have a queue.
"""

import logging
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from types import TracebackType
from typing import Self

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
    """One leased buffer. Return it once, with one of the three methods or at the end of
    ``with``."""

    def __init__(self, pool: "SlabPool", memory: torch.Tensor) -> None:
        self._pool = pool
        self._released = False
        self.tensor = memory
        """``[slab_bytes]`` uint8, contiguous; owned by the pool, valid until released."""
        self.view = memory.numpy().data
        """The same memory, writable, as a memoryview of format ``B``."""

    def release(self) -> None:
        """Return the slab to its pool. A second call is a bug."""
        self._end()
        self._pool.take_back(self.tensor)

    def release_after(self, mark: Mark) -> None:
        """Return the slab once ``mark`` is done. Does not wait."""
        self._end()
        self._pool.take_back(self.tensor, mark)

    def strand(self) -> None:
        """Never return the slab: a device may copy it, and no mark shows until when."""
        self._end()
        self._pool.take_back(self.tensor, _NEVER)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def _end(self) -> None:
        assert not self._released
        self._released = True


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    """Memory that is free once the mark is done."""

    mark: Mark
    memory: torch.Tensor


class SlabPool:
    """A pool of ``count`` buffers of ``slab_bytes`` each. Thread-safe.

    Every lease and release checks that free, leased and pending slabs add up to the total. A
    mismatch is a bug. It is logged once as an error and never raised: a lost slab only costs misses
    and drops, but an exception in ``release`` would break the caller's clean-up.
    """

    def __init__(
        self, name: str, *, count: int, slab_bytes: int, pin: Pin | None = None, fd: int = -1
    ) -> None:
        """``pin``: page-locks the memory, which is unlocked when the pool and all its slabs are
        gone. ``fd``: a memfd that is the memory, so that other processes have it too. Raises
        ``OSError``, ``MemoryError`` or ``RuntimeError`` if memory is short."""
        assert count > 0
        assert slab_bytes > 0
        self._name = name
        self._total = count
        self._leased = 0
        self._slab_bytes = slab_bytes
        self._lock = Lock()
        self._pending: dict[_Pending, None] = {}
        self._adds_up = True
        memory = self.memory = _allocate(count * slab_bytes, pin, fd)
        """All slabs, ``[count * slab_bytes]`` uint8."""
        # Last in, first out: the most recently used slab is leased first, and on a host without a
        # GPU unused slabs never take physical memory.
        self._free = [memory[i * slab_bytes : (i + 1) * slab_bytes] for i in range(count)]
        weakref.finalize(self, _keep_pending, name, self._pending).atexit = False

    @property
    def slab_bytes(self) -> int:
        """Size of each slab."""
        return self._slab_bytes

    @property
    def total(self) -> int:
        """Number of slabs. ``free + leased == total`` at every moment."""
        return self._total

    @property
    def free(self) -> int:
        """Number of free slabs."""
        self._reclaim()
        with self._lock:
            self._check()
            return len(self._free)

    @property
    def leased(self) -> int:
        """Number of slabs that are leased or pending, 0 when no transfer is in flight. Pending
        slabs were returned, but a device still copies them."""
        self._reclaim()
        with self._lock:
            self._check()
            return self._leased + len(self._pending)

    @property
    def adds_up(self) -> bool:
        """Whether free, leased and pending slabs have always added up to the total."""
        return self._adds_up

    def lease(self) -> Slab:
        """Lease a free slab with undefined contents. Raises ``SlabsExhaustedError``."""
        memory = self._take()
        if memory is None and self._reclaim():
            memory = self._take()
        if memory is None:
            raise SlabsExhaustedError(f"{self!r}: raise pinned_bytes_max")
        return Slab(self, memory)

    def take_back(self, memory: torch.Tensor, mark: Mark | None = None) -> None:
        """Called by ``Slab`` only. ``mark``: when the memory is free, None if it is."""
        if mark is None or _is_done(mark):
            self._put_back(memory)
            return
        with self._lock:
            self._leased -= 1
            self._pending[_Pending(mark, memory)] = None
            self._check()

    def __repr__(self) -> str:
        pending = f", {len(self._pending)} pending" if self._pending else ""
        leased = f"{self._leased}/{self._total} leased{pending}"
        return f"<SlabPool {self._name} {leased}, {self._slab_bytes} B>"

    def _take(self) -> torch.Tensor | None:
        with self._lock:
            return self._pop() if self._free else None

    def _pop(self) -> torch.Tensor:
        memory = self._free.pop()
        self._leased += 1
        self._check()
        return memory

    def _put_back(self, memory: torch.Tensor) -> None:
        """Free the memory of a leased slab. Called once for each lease."""
        with self._lock:
            self._free.append(memory)
            self._leased -= 1
            self._check()

    def _reclaim(self) -> bool:
        """Free the pending slabs that no device copies any more. Returns whether there were any.

        Looks at all of them, because lanes do not end in the order in which they began. The driver
        is called without the lock: it may be busy with another thread's call.
        """
        if not self._pending:
            return False
        with self._lock:
            pending = list(self._pending)
        marks = {id(p.mark): p.mark for p in pending}  # gathered together, marked together
        done = {key for key, mark in marks.items() if _is_done(mark)}
        freed: list[torch.Tensor] = []
        with self._lock:
            for p in pending:
                if id(p.mark) in done and p in self._pending:  # no other thread was faster
                    del self._pending[p]
                    self._leased += 1
                    freed.append(p.memory)
        for memory in freed:
            self._put_back(memory)
        return bool(freed)

    def _check(self) -> None:
        free, leased, pending = len(self._free), self._leased, len(self._pending)
        if leased >= 0 and free + leased + pending == self._total:
            return
        news, self._adds_up = self._adds_up, False
        if news:
            logger.error("slabs do not add up free=%d leased=%d pool=%r", free, leased, self)


_STRANDED: list[torch.Tensor] = []
"""Memory that a hung device may still read or write. It stays allocated and page-locked until the
process ends."""


class _NeverDone:
    """The mark of copies whose end no mark shows."""

    number = 0

    def done(self) -> bool:
        return False

    def wait(self) -> None:
        raise AssertionError("never done")

    def hold_compute(self) -> None:
        raise AssertionError("never done")


_NEVER = _NeverDone()


def _is_done(mark: Mark) -> bool:
    try:
        return mark.done()
    except Exception:  # the device has failed, and what it still copies is unknown
        logger.debug("mark not read", exc_info=True)
        return False


def _keep_pending(name: str, pending: dict[_Pending, None]) -> None:
    """Keep the memory that is still being copied when its pool is gone."""
    left = [p.memory for p in pending if not _is_done(p.mark)]
    if left:
        logger.error("slabs kept for copies that never ended pool=%s count=%d", name, len(left))
        _STRANDED.extend(left)


def _allocate(nbytes: int, pin: Pin | None, fd: int = -1) -> torch.Tensor:
    """Return ``[nbytes]`` uint8 that begins a page, page-locked if ``pin`` is given.

    Pages of its own, exactly as many as needed: PyTorch's pinned memory is rounded up to a power of
    two, so that 1 GiB in slabs of 33 MiB takes 1.5.
    """
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
