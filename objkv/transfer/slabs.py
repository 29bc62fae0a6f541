"""Slabs: a bounded pool of equal buffers for payloads, page-locked if a device reads them.

An empty pool raises ``SlabsExhaustedError``, which becomes a miss or a drop. A caller may wait, but
only for slabs that a device is copying. The slabs for payloads of other shapes, which are few and
may be huge, have a queue.
"""

import logging
import math
import weakref
from collections import deque
from collections.abc import Callable
from threading import Condition, Lock
from time import monotonic
from types import TracebackType
from typing import Generic, Self, TypeVar

import torch

from objkv.errors import TransferError
from objkv.transfer.lanes import Mark

logger = logging.getLogger(__name__)
Pin = Callable[[torch.Tensor], Callable[[], None]]
_PAGE = 4096
_POLL_S, _POLL_MAX_S = 3e-4, 2e-3
"""How often a thread that needs a slab looks whether a copy has ended. A large payload takes about
a millisecond."""

T = TypeVar("T")


class SlabsExhaustedError(TransferError):
    """Every slab is leased."""


class Slab:
    """One leased buffer. Return it once, with ``release`` or at the end of ``with``."""

    def __init__(self, pool: "SlabPool", memory: torch.Tensor) -> None:
        self._pool = pool
        self._released = False
        self.tensor = memory
        """``[slab_bytes]`` uint8, contiguous; owned by the pool, valid until released."""
        self.view = memory.numpy().data
        """The same memory, writable, as a memoryview of format ``B``."""

    def release(self) -> None:
        """Return the slab to its pool. A second call is a bug."""
        assert not self._released
        self._released = True
        self._pool.take_back(self.tensor)

    def release_after(self, mark: Mark) -> None:
        """Return the slab when ``mark`` is done, instead of ``release``. Does not wait."""
        assert not self._released
        self._released = True
        self._pool.take_back(self.tensor, mark)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class SlabPool:
    """A pool of ``count`` buffers of ``slab_bytes`` each. Thread-safe.

    Every lease and release checks that free and leased slabs add up to the total. A mismatch is a
    bug. It is logged once as an error and never raised: a lost slab only costs misses and drops,
    but an exception in ``release`` would break the caller's clean-up.
    """

    def __init__(self, name: str, *, count: int, slab_bytes: int, pin: Pin | None = None) -> None:
        """``pin``: page-locks the memory, see ``DeviceDriver.pin``. It is unlocked when the pool
        and all its slabs are gone. Raises ``RuntimeError`` or ``MemoryError`` if memory is short.
        """
        assert count > 0
        assert slab_bytes > 0
        self._name = name
        self._total = count
        self._leased = 0
        self._slab_bytes = slab_bytes
        self._changed = Condition()
        self._pending: deque[tuple[Mark, torch.Tensor]] = deque()
        self._is_polled = False
        self._adds_up = True
        memory = torch.empty(count * slab_bytes + _PAGE, dtype=torch.uint8)
        memory = memory[-memory.data_ptr() % _PAGE :][: count * slab_bytes]
        if pin is not None:
            weakref.finalize(self, pin(memory))
        # Last in, first out: the most recently used slab is leased first, and on a host without a
        # GPU unused slabs never take physical memory.
        self._free = [memory[i * slab_bytes : (i + 1) * slab_bytes] for i in range(count)]

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
        with self._changed:
            self._reclaim()
            self._check()
            return len(self._free)

    @property
    def leased(self) -> int:
        """Number of slabs that are leased or that a device still copies, 0 when no transfer is in
        flight."""
        with self._changed:
            self._reclaim()
            self._check()
            return self._leased + len(self._pending)

    @property
    def adds_up(self) -> bool:
        """Whether the slabs have always added up to the total."""
        return self._adds_up

    def lease(self, until: float = -math.inf, *, wanted: Callable[[], bool] = lambda: True) -> Slab:
        """Lease a free slab with undefined contents. Raises ``SlabsExhaustedError``.

        Args:
            until: time of ``time.monotonic`` until which to wait for slabs that are being copied.
                By default this never waits.
            wanted: ends the wait if it returns False.
        """
        with self._changed:
            self._reclaim()
            if not self._free:
                self._wait(until, wanted)
            if not self._free:
                raise SlabsExhaustedError(f"{self!r}: raise pinned_bytes_max")
            memory = self._free.pop()
            self._leased += 1
            self._check()
        return Slab(self, memory)

    def take_back(self, memory: torch.Tensor, mark: Mark | None = None) -> None:
        """Called by ``Slab`` only."""
        with self._changed:
            self._leased -= 1
            if mark is None or mark.done():
                self._free.append(memory)
            else:
                self._pending.append((mark, memory))
            self._check()
            self._changed.notify()

    def _wait(self, until: float, wanted: Callable[[], bool]) -> None:
        """Wait for a slab that is being copied. One thread polls the device for all."""
        pause_s = _POLL_S
        while not self._free and (self._pending or self._is_polled):
            left_s = until - monotonic()
            if left_s <= 0 or not wanted():
                return
            if self._is_polled:
                self._changed.wait(min(left_s, _POLL_MAX_S))
                continue
            self._is_polled = True
            try:
                self._changed.wait(min(left_s, pause_s))
            finally:
                self._is_polled = False
            pause_s = min(2 * pause_s, _POLL_MAX_S)
            self._reclaim()

    def _reclaim(self) -> None:
        """Free the slabs whose copies have ended. Copies end about in order, so the first one that
        has not ends the search."""
        while self._pending and self._pending[0][0].done():
            self._free.append(self._pending.popleft()[1])
            self._changed.notify()

    def __repr__(self) -> str:
        return f"<SlabPool {self._name} {self._leased}/{self._total} leased, {self._slab_bytes} B>"

    def _check(self) -> None:
        free, leased = len(self._free), self._leased
        if leased >= 0 and free + leased + len(self._pending) == self._total:
            return
        news, self._adds_up = self._adds_up, False
        if news:
            logger.error("slabs do not add up free=%d leased=%d pool=%r", free, leased, self)


class WideSlabs(Generic[T]):
    """Slabs for payloads larger than this rank's own.

    They are allocated for the first such payload, because most fleets never have one. Thread-safe.
    Threads never wait here; tasks do.
    """

    def __init__(self, *, pairs: int, slab_bytes: int, pin: Pin | None = None) -> None:
        """``pairs``: how many loads may run at once. Each needs one slab for the payload and one to
        decode into. ``pin``: see ``SlabPool``."""
        assert pairs > 0
        self._pairs = self._free = pairs
        self._entered = 0
        self._adds_up = True
        self._slab_bytes = slab_bytes
        self._pin = pin
        self._waiting: deque[T] = deque()
        self._lock = Lock()
        self._pool: SlabPool | None = None

    def enter(self, task: T) -> bool:
        """Reserve a pair of slabs. After True the caller must call ``leave``. After False the task
        is queued until a ``leave`` returns it."""
        with self._lock:
            if not self._free:
                self._waiting.append(task)
                return False
            self._free -= 1
            self._entered += 1
            self._check()
            return True

    def leave(self) -> T | None:
        """Return the pair. The result is a waiting task, which the caller must queue again."""
        with self._lock:
            self._free += 1
            self._entered -= 1
            self._check()
            return self._waiting.popleft() if self._waiting else None

    @property
    def adds_up(self) -> bool:
        """Whether the pairs and their slabs have always added up to their totals."""
        return self._adds_up and (self._pool is None or self._pool.adds_up)

    def pool(self) -> SlabPool:
        """Return the pool, which has two slabs per pair. Raises ``SlabsExhaustedError`` if it
        cannot be allocated."""
        with self._lock:
            if self._pool is None:
                self._pool = self._make()
            return self._pool

    def __repr__(self) -> str:
        made = "none made yet" if self._pool is None else "made"
        return f"<WideSlabs {self._pairs} pairs of {self._slab_bytes} B, {made}>"

    def _check(self) -> None:
        if self._entered >= 0 and self._free + self._entered == self._pairs:
            return
        news, self._adds_up = self._adds_up, False
        if news:
            logger.error("pairs of slabs do not add up entered=%d pool=%r", self._entered, self)

    def _make(self) -> SlabPool:
        count, size = 2 * self._pairs, self._slab_bytes
        logger.warning(
            "payloads of replicas of another shape take extra slabs beyond pinned_bytes_max "
            "nbytes=%d",
            count * size,
        )
        try:
            return SlabPool("wide", count=count, slab_bytes=size, pin=self._pin)
        except (RuntimeError, MemoryError) as exc:  # torch raises these if memory is short
            raise SlabsExhaustedError(f"{self!r}: {exc}") from exc
