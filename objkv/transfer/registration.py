"""Memory of an arena, as a device can read it: registered in windows, or by way of pinned slabs.

A worker maps the arena read-only. Registering it with a device takes time, and memory for its
pages, so it is done in the background, in windows, when a payload in them is first read. Until then
and where a device refuses, frames are copied to a slab. Pageable memory is never given to a device.

The driver lets no thread launch a kernel while it registers memory: 3 ms for 64 MiB on a machine
with an H200, and nine times as long if the pages do not exist yet. So windows are small, their
pages are mapped before, and pauses follow.
"""

import ctypes
import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from threading import Condition, Thread
from time import monotonic, sleep
from typing import Final

import numpy as np

from objkv.agent.memory.arena import Arena
from objkv.background import join_all
from objkv.transfer.devices import SEAM_BYTES
from objkv.transfer.slabs import Slab, SlabPool

logger = logging.getLogger(__name__)
WINDOW_BYTES: Final = SEAM_BYTES
_PAUSES = 4
"""After each call of the driver, launches get so many times the time that it took."""
_POPULATE_READ = 22
"""``MADV_POPULATE_READ`` of Linux 5.14."""
_STEP_BYTES = 2 << 20
_LIBC = ctypes.CDLL(None)

PinReadOnly = Callable[[int, int], Callable[[], None]]
"""Page-locks mapped memory and returns what unlocks it, see ``DeviceDriver.pin_read_only``."""


def _nothing() -> None:
    pass


class Windows:
    """The windows of one mapping that are registered with a device. Thread-safe.

    They end at addresses that are multiples of their size, as the copies of a ``DeviceLane`` do.
    ``close`` must be called before the mapping is removed, and when no copy from it is left.
    """

    def __init__(
        self,
        address: int,
        nbytes: int,
        pin: PinReadOnly,
        *,
        window_bytes: int = WINDOW_BYTES,
        begin: Callable[[], None] = _nothing,
    ) -> None:
        """``address`` and ``nbytes``: the mapping, whole pages. ``begin``: prepares the thread that
        registers."""
        self._address, self._nbytes, self._window = address, nbytes, window_bytes
        self._pin, self._begin = pin, begin
        self._changed = Condition()
        self._wanted: deque[int] = deque()
        self._known: set[int] = set()
        """Windows that were ever wanted."""
        self._undo: dict[int, Callable[[], None]] = {}
        """For each registered window, what unlocks it."""
        self._refused = False
        self._end: Callable[[], None] | None = None
        self._keeps = False
        self._thread: Thread | None = None

    @property
    def is_registering(self) -> bool:
        """Whether a window that was wanted is not registered yet, and may still be."""
        return not self._refused and len(self._undo) < len(self._known)

    def has(self, address: int, nbytes: int) -> bool:
        """Whether the device can read these bytes in place. If not, their windows are registered in
        the background. Never waits."""
        numbers = range(address // self._window, (address + nbytes - 1) // self._window + 1)
        if all(number in self._undo for number in numbers):
            return True
        for number in numbers:
            if number not in self._known and not self._refused:
                self._want(number)
        return False

    def close(self, then: Callable[[], None]) -> None:
        """Unlock all windows in the background, then call ``then``, which may remove the mapping.
        Never waits. Called once."""
        with self._changed:
            self._end = then
            self._changed.notify_all()
            if self._thread is not None:
                return
        then()

    def abandon(self) -> None:
        """Register no more, and leave all windows as they are: a device may read them until the
        process ends. Never waits."""
        self._keeps = True
        self.close(_nothing)

    def join(self, seconds: float) -> bool:
        """Wait until ``close`` is done, for at most ``seconds``. Returns whether it is."""
        return self._thread is None or not join_all([self._thread], seconds)

    def _want(self, number: int) -> None:
        with self._changed:
            if self._end is not None or number in self._known:
                return
            self._known.add(number)
            self._wanted.append(number)
            self._changed.notify_all()
            if self._thread is None:
                thread = Thread(target=self._work, name="objkv-register", daemon=True)
                try:
                    thread.start()
                    self._thread = thread
                except RuntimeError as exc:
                    self._refuse(exc)

    def _work(self) -> None:
        try:
            self._begin()
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._end is not None or bool(self._wanted))
                    if self._end is not None:
                        break
                    number = self._wanted.popleft()
                self._register(number)
        except Exception:  # the mapping must still be removed
            logger.exception("memory of the agent not registered, unexpectedly")
            with self._changed:
                self._changed.wait_for(lambda: self._end is not None)
        if self._keeps:
            return
        for undo in self._undo.values():
            began = monotonic()
            try:
                undo()
            except RuntimeError:  # no caller can act; the driver unlocks pages with their mapping
                logger.warning("memory of the agent not unlocked", exc_info=True)
            sleep(_PAUSES * (monotonic() - began))
        assert self._end is not None
        self._end()

    def _register(self, number: int) -> None:
        if self._refused:
            return
        start, end = self._span(number)
        _map_pages(start, end)
        began = monotonic()
        try:
            undo = self._pin(start, end - start)
        except RuntimeError as exc:  # others would be refused, too
            self._refuse(exc)
            return
        self._undo[number] = undo
        with self._changed:  # leave the driver alone for some time
            self._changed.wait_for(lambda: self._end is not None, _PAUSES * (monotonic() - began))

    def _refuse(self, reason: RuntimeError) -> None:
        self._refused = True
        logger.warning(
            "memory of the agent not registered with the device, copying loads twice reason=%s",
            reason,
        )

    def _span(self, number: int) -> tuple[int, int]:
        """Return the addresses of a window, ``[start, end)``."""
        start = number * self._window
        return max(start, self._address), min(start + self._window, self._address + self._nbytes)


def _map_pages(start: int, end: int) -> None:
    """Map memory that may not exist yet, where the system can. In steps: meanwhile no other thread
    can map or unmap memory."""
    for at in range(start, end, _STEP_BYTES):
        nbytes = min(_STEP_BYTES, end - at)
        _LIBC.madvise(ctypes.c_void_p(at), ctypes.c_size_t(nbytes), _POPULATE_READ)


class DeviceFrames:
    """Frames in an agent's arena, where a device can read them. Belongs to one thread."""

    def __init__(
        self,
        slabs: SlabPool,
        pin: PinReadOnly,
        *,
        window_bytes: int = WINDOW_BYTES,
        begin: Callable[[], None] = _nothing,
    ) -> None:
        """``slabs``: pinned, each at least as large as any frame. For the rest see ``Windows``."""
        self._slabs = slabs
        self._open = partial(Windows, pin=pin, window_bytes=window_bytes, begin=begin)
        self.windows: Windows | None = None
        """Those of the arena that is read now."""
        self._ending: Windows | None = None

    def attach(self, arena: Arena) -> None:
        """Read from ``arena`` from now on. None may be attached."""
        assert self.windows is None
        self.windows = self._open(_address(arena.view), arena.nbytes)

    def detach(self, then: Callable[[], None]) -> None:
        """Unlock the arena in the background, then call ``then``, which may unmap it. No copy from
        it may be left."""
        self._ending, self.windows = self.windows, None
        if self._ending is None:
            then()
        else:
            self._ending.close(then)

    def abandon(self) -> None:
        """Leave the arena as it is, until the process ends."""
        windows, self.windows = self.windows, None
        if windows is not None:
            windows.abandon()

    def join(self, seconds: float) -> bool:
        """Wait until the last ``detach`` is done, for at most ``seconds``. Returns whether it is.
        Any thread may call this."""
        return self._ending is None or self._ending.join(seconds)

    def take(
        self, payload: memoryview, starts: Sequence[int], ends: Sequence[int]
    ) -> tuple[memoryview, Sequence[int], Slab | None]:
        """Return memory in which the device can read some of the first spans of a payload now, at
        least one, where each of them starts in it, and the slab that it is in, if any. The caller
        returns that when the device has read it.

        Raises ``SlabsExhaustedError`` if all slabs are being read. Never waits for the device.

        Args:
            payload: in the arena.
            starts: of spans of frames, in order; not empty.
            ends: of the same spans.
        """
        windows = self.windows
        assert windows is not None
        base = _address(payload)
        if windows.has(base + starts[0], ends[-1] - starts[0]):
            return payload, starts, None
        count = _leading(ends, lambda n: windows.has(base + starts[0], ends[n] - starts[0]))
        if count:
            return payload, starts[:count], None
        sizes = [end - start for start, end in zip(starts, ends, strict=True)]
        after = list(accumulate(sizes))
        assert sizes[0] <= self._slabs.slab_bytes, "a row is larger than a slab"

        def needs_slab(n: int) -> bool:
            # The first span does, even if its window has been registered since it was looked up.
            is_near = n and windows.has(base + starts[n], sizes[n])
            return after[n] <= self._slabs.slab_bytes and not is_near

        count = _leading(ends, needs_slab)
        slab = self._slabs.lease()
        copies = list(accumulate(sizes[: count - 1], initial=0))
        room = np.frombuffer(slab.view, np.uint8)
        for at, start, nbytes in zip(copies, starts, sizes, strict=False):
            source = np.frombuffer(payload[start : start + nbytes], np.uint8)
            np.copyto(room[at : at + nbytes], source)
        return slab.view, copies, slab


def _address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])


def _leading(ends: Sequence[int], holds: Callable[[int], bool]) -> int:
    """Return how many of the first frames satisfy ``holds``, which gets their number."""
    return next((n for n in range(len(ends)) if not holds(n)), len(ends))
