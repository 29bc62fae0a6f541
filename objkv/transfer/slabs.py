"""Slabs: a bounded pool of equal buffers that payloads pass through, pinned where a GPU reads them.

A slab is leased, never waited for: an empty pool is ``SlabsExhaustedError``, a miss or a drop. Only
those for payloads of other shapes, which are few and may be huge, are taken in turns.
"""

import logging
from collections import deque
from threading import Lock
from types import TracebackType
from typing import Generic, Self, TypeVar

import torch

from objkv.errors import TransferError

logger = logging.getLogger(__name__)

T = TypeVar("T")


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
    """``count`` buffers of ``slab_bytes`` each. Safe from many threads.

    Free and leased slabs make the total: counted at every lease and every release. What does not
    add up is a bug, logged once as an error, and raises nowhere: a lost slab costs misses
    and drops, and an exception where slabs are given back would cost whatever comes after it.
    """

    def __init__(self, name: str, *, count: int, slab_bytes: int, pinned: bool) -> None:
        assert count > 0
        assert slab_bytes > 0
        self._name = name
        self._total = count
        self._leased = 0
        self._slab_bytes = slab_bytes
        self._lock = Lock()
        self._adds_up = True
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
        """How many slabs are not leased."""
        with self._lock:
            self._check()
            return len(self._free)

    @property
    def leased(self) -> int:
        """How many slabs are leased; 0 when nothing is under way."""
        with self._lock:
            self._check()
            return self._leased

    @property
    def adds_up(self) -> bool:
        """Whether free and leased slabs made the total at every lease and release so far."""
        return self._adds_up

    def lease(self) -> Slab:
        """A free slab, with undefined contents. Raises ``SlabsExhaustedError``; never waits."""
        with self._lock:
            if not self._free:
                raise SlabsExhaustedError(f"{self!r}: raise pinned_bytes_max")
            memory = self._free.pop()
            self._leased += 1
            self._check()
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
        free, leased = len(self._free), self._leased
        if leased >= 0 and free + leased == self._total:
            return
        news, self._adds_up = self._adds_up, False
        if news:
            logger.error("slabs do not add up free=%d leased=%d pool=%r", free, leased, self)


class WideSlabs(Generic[T]):
    """Slabs for payloads larger than this rank's own. Made when the first comes: in most fleets
    none ever does. Safe from many threads, none of which waits here: tasks do."""

    def __init__(self, *, pairs: int, slab_bytes: int, pinned: bool) -> None:
        """``pairs``: how many loads at once, each with a slab for the payload and one to decode
        into."""
        assert pairs > 0
        self._pairs = self._free = pairs
        self._entered = 0
        self._adds_up = True
        self._slab_bytes = slab_bytes
        self._pinned = pinned
        self._waiting: deque[T] = deque()
        self._lock = Lock()
        self._pool: SlabPool | None = None

    def enter(self, task: T) -> bool:
        """Ask for a pair of slabs; after True, ``leave`` must follow. Otherwise the task waits for
        the ``leave`` that gives it back."""
        with self._lock:
            if not self._free:
                self._waiting.append(task)
                return False
            self._free -= 1
            self._entered += 1
            self._check()
            return True

    def leave(self) -> T | None:
        """Give the pair back; a task that waits for it is the caller's to queue again."""
        with self._lock:
            self._free += 1
            self._entered -= 1
            self._check()
            return self._waiting.popleft() if self._waiting else None

    @property
    def adds_up(self) -> bool:
        """As of ``SlabPool``, of the pairs and of their slabs."""
        return self._adds_up and (self._pool is None or self._pool.adds_up)

    def pool(self) -> SlabPool:
        """Two slabs for each who has entered. Raises ``SlabsExhaustedError`` where there is no
        memory for them."""
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
            "payloads of replicas of another shape take slabs of their own, beside "
            "pinned_bytes_max nbytes=%d",
            count * size,
        )
        try:
            return SlabPool("wide", count=count, slab_bytes=size, pinned=self._pinned)
        except (RuntimeError, MemoryError) as exc:  # torch's way to say that there is none
            raise SlabsExhaustedError(f"{self!r}: {exc}") from exc
