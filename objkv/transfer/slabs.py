"""Slabs: a bounded pool of equal buffers that payloads pass through, pinned where a GPU reads them.

A slab is leased, never waited for: an empty pool is ``SlabsExhaustedError``, a miss or a drop. Only
those for payloads of other shapes, which are few and may be huge, are taken in turns.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import BoundedSemaphore, Lock
from types import TracebackType
from typing import Self

import torch

from objkv.errors import TransferError


class SlabsExhaustedError(TransferError):
    """Every slab is leased."""


class Slab:
    """One leased buffer. Give it back once, by ``release`` or at the end of ``with``."""

    def __init__(self, pool: "SlabPool", memory: torch.Tensor) -> None:
        self._pool = pool
        self._released = False
        self.tensor = memory
        """``[slab_bytes]`` uint8, contiguous; owned by the pool, valid until released."""
        self.view = memory.numpy().data
        """The same memory, format ``B``, writable."""

    def release(self) -> None:
        """Give it back; twice is a bug."""
        assert not self._released
        self._released = True
        self._pool.take_back(self.tensor)

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
    """``count`` buffers of ``slab_bytes`` each. Safe from many threads."""

    def __init__(self, name: str, *, count: int, slab_bytes: int, pinned: bool) -> None:
        assert count > 0
        assert slab_bytes > 0
        self._name = name
        self._total = count
        self._leased = 0
        self._slab_bytes = slab_bytes
        self._lock = Lock()
        memory = torch.empty(count * slab_bytes, dtype=torch.uint8, pin_memory=pinned)
        # Last in, first out: the warm slab is leased first, and on a host without a GPU pages
        # that were never needed are never touched.
        self._free = [memory[i * slab_bytes : (i + 1) * slab_bytes] for i in range(count)]

    @property
    def slab_bytes(self) -> int:
        """Size of each slab."""
        return self._slab_bytes

    @property
    def total(self) -> int:
        """How many slabs there are; ``free + leased == total`` at every moment."""
        return self._total

    @property
    def free(self) -> int:
        """How many slabs nobody has."""
        with self._lock:
            self._check()
            return len(self._free)

    @property
    def leased(self) -> int:
        """How many slabs somebody has; 0 when nothing is under way."""
        with self._lock:
            self._check()
            return self._leased

    def lease(self) -> Slab:
        """A free slab, with undefined contents. Raises ``SlabsExhaustedError``; never waits."""
        with self._lock:
            if not self._free:
                raise SlabsExhaustedError(f"{self!r}: raise pinned_bytes_max")
            memory = self._free.pop()
            self._leased += 1
        return Slab(self, memory)

    def take_back(self, memory: torch.Tensor) -> None:
        """Called by ``Slab.release`` only."""
        with self._lock:
            self._free.append(memory)
            self._leased -= 1
            self._check()

    def __repr__(self) -> str:
        return f"<SlabPool {self._name} {self._leased}/{self._total} leased, {self._slab_bytes} B>"

    def _check(self) -> None:
        assert self._leased >= 0
        assert len(self._free) + self._leased == self._total


class WideSlabs:
    """Slabs for payloads larger than this rank's own. Made when the first comes: in most fleets
    none ever does. Safe from many threads."""

    def __init__(self, *, pairs: int, slab_bytes: int, pinned: bool) -> None:
        """``pairs``: how many loads at once, each with a slab for the payload and one to decode
        into."""
        assert pairs > 0
        self._pairs = pairs
        self._slab_bytes = slab_bytes
        self._pinned = pinned
        self._permits = BoundedSemaphore(pairs)
        self._making = Lock()
        self._pool: SlabPool | None = None

    @contextmanager
    def admit(self, seconds: float) -> Iterator[SlabPool]:
        """A pool with two slabs for the caller, after waiting for them at most so long. Raises
        ``SlabsExhaustedError``, also where there is no memory for them."""
        if not self._permits.acquire(timeout=max(0.0, seconds)):
            raise SlabsExhaustedError(f"{self!r}: all in use until the deadline")
        try:
            yield self._made()
        finally:
            self._permits.release()

    def __repr__(self) -> str:
        made = "none made yet" if self._pool is None else "made"
        return f"<WideSlabs {self._pairs} pairs of {self._slab_bytes} B, {made}>"

    def _made(self) -> SlabPool:
        with self._making:
            if self._pool is None:
                try:
                    self._pool = SlabPool(
                        "wide",
                        count=2 * self._pairs,
                        slab_bytes=self._slab_bytes,
                        pinned=self._pinned,
                    )
                except (RuntimeError, MemoryError) as exc:  # torch's way to say that there is none
                    raise SlabsExhaustedError(f"{self!r}: {exc}") from exc
            return self._pool
