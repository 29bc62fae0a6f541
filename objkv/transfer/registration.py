"""Memory of an arena, as a device can read it: registered in windows, or by way of pinned slabs.

A worker maps the arena read-only. Registering it with a device takes time, and memory for its
pages, so it is done in the background, in windows, when a payload in them is first read. Until then
and where a device refuses, frames are copied to a slab. Pageable memory is never given to a device.

The driver lets no thread launch a kernel while it registers memory: 3 ms for 64 MiB on a machine
with an H200, and nine times as long if the pages do not exist yet. So windows are small, their
pages are mapped before, and pauses follow.
"""

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from threading import Condition, Thread
from time import monotonic, sleep

import numpy as np

from objkv.agent.memory.arena import Arena, map_pages
from objkv.background import join_all
from objkv.transfer.devices import SEAM_BYTES
from objkv.transfer.lanes import Bools, Ints, address_of, offsets_of
from objkv.transfer.slabs import Slab, SlabPool

logger = logging.getLogger(__name__)
_PAUSES = 4
"""After each call of the driver, launches get so many times the time that it took."""
_STEP_BYTES = 2 << 20

PinReadOnly = Callable[[int, int], Callable[[], None]]
"""Page-locks mapped memory and returns what unlocks it, see ``DeviceDriver.pin_read_only``."""


class RegistrationWindows:
    """The windows of one mapping that are registered with a device. Thread-safe. They end at
    multiples of their size, as the copies of a ``DeviceLane`` do. ``close`` must be called before
    the mapping is removed, and when no copy from it is left."""

    def __init__(
        self,
        address: int,
        nbytes: int,
        pin: PinReadOnly,
        *,
        window_bytes: int,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        """``address``, ``nbytes``: of the mapping, whole pages. ``begin``: prepares the thread."""
        self._address, self._nbytes, self._window = address, nbytes, window_bytes
        self._pin, self._begin = pin, begin
        self._changed = Condition()
        self._wanted: deque[int] = deque()
        first, end = address // window_bytes, -(-(address + nbytes) // window_bytes)
        self._first = first
        self._known: set[int] = set()
        """Windows that were ever wanted."""
        self._undo: list[Callable[[], None]] = []
        """What unlocks each registered window."""
        self._lacking = np.arange(end - first + 1)
        """How many windows before each are not registered. Replaced as a whole."""
        self._refused = False
        self._end: Callable[[], None] | None = None
        self._keeps = False
        self._thread: Thread | None = None

    def are_readable(self, starts: Ints, nbytes: int) -> Bools:
        """Return for each of these addresses whether the device can read ``nbytes`` from there in
        place, ``[n]``. Where it cannot, windows are registered in the background. Never waits."""
        firsts = starts // self._window
        ends = (starts + (nbytes - 1)) // self._window + 1
        lacking = self._lacking[ends - self._first] - self._lacking[firsts - self._first]
        found: Bools = lacking == 0
        if not (found.all() or self._refused):
            for first, end in zip(firsts[~found].tolist(), ends[~found].tolist(), strict=True):
                for number in range(first, end):
                    if number not in self._known:
                        self._want(number)
        return found

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
        """Register no more, and unlock nothing: a device may still read. Never waits."""
        self._keeps = True
        self.close(lambda: None)

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
        for undo in self._undo:
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
        start = number * self._window
        end = min(start + self._window, self._address + self._nbytes)
        start = max(start, self._address)
        for at in range(start, end, _STEP_BYTES):  # meanwhile no other thread can map or unmap
            map_pages(at, min(_STEP_BYTES, end - at), writable=False)
        began = monotonic()
        try:
            undo = self._pin(start, end - start)
        except RuntimeError as exc:  # others would be refused, too
            self._refuse(exc)
            return
        self._undo.append(undo)
        lacking = self._lacking.copy()
        lacking[number - self._first + 1 :] -= 1
        self._lacking = lacking
        with self._changed:  # leave the driver alone for some time
            self._changed.wait_for(lambda: self._end is not None, _PAUSES * (monotonic() - began))

    def _refuse(self, reason: RuntimeError) -> None:
        self._refused = True
        logger.warning(
            "memory of the agent not registered with the device, copying loads twice reason=%s",
            reason,
        )


class ArenaRegistration:
    """Frames in an agent's arena, where a device can read them. Belongs to one thread."""

    def __init__(
        self,
        slabs: SlabPool,
        pin: PinReadOnly,
        *,
        window_bytes: int = SEAM_BYTES,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        """``slabs``: pinned, no smaller than any frame. The rest: see ``RegistrationWindows``."""
        self._slabs = slabs
        self._open = partial(RegistrationWindows, pin=pin, window_bytes=window_bytes, begin=begin)
        self.windows: RegistrationWindows | None = None
        """Those of the arena that is read now."""
        self._arena: memoryview | None = None
        self._ending: RegistrationWindows | None = None

    def attach(self, arena: Arena) -> None:
        """Read from ``arena`` from now on. None may be attached."""
        assert self.windows is None
        self.windows = self._open(address_of(arena.view), arena.nbytes)
        self._arena = arena.view

    def detach(self, then: Callable[[], None]) -> None:
        """Unlock the arena, from which no copy is left, in the background, then call ``then``."""
        self._ending, self.windows, self._arena = self.windows, None, None
        if self._ending is None:
            then()
        else:
            self._ending.close(then)

    def abandon(self) -> None:
        """Leave the arena as it is, until the process ends."""
        if self.windows is not None:
            self.windows.abandon()
        self.windows = self._arena = None

    def join(self, seconds: float) -> bool:
        """Wait until ``detach`` is done, for at most ``seconds``. Returns whether. Thread-safe."""
        return self._ending is None or self._ending.join(seconds)

    def readable(
        self, starts: Ints, sizes: Ints
    ) -> tuple[list[int], memoryview, Ints, Slab | None]:
        """Return memory in which the device can read spans of some payloads. Never waits for it.

        Either all spans of payloads that it can read in the arena, or a slab with all spans of the
        first payloads; if not even those of one fit, with the first spans of the first payload.
        Raises ``SlabsExhaustedError`` if all slabs are being read, and IndexError for a span
        outside the arena.

        Args:
            starts: ``[n, spans]``: where they start in the arena, in order; neither is 0.
            sizes: ``[spans]``: their bytes.

        Returns:
            which payloads, the memory, where their spans start in it, ``[payloads, spans]`` or
            fewer, and the slab that has it, if any, which the caller returns when the device
            has read it.
        """
        windows, arena = self.windows, self._arena
        assert windows is not None
        assert arena is not None
        extent = int(starts[0, -1] - starts[0, 0] + sizes[-1])
        first, last = int(starts[:, 0].min()), int(starts[:, 0].max())
        if first < 0 or last > len(arena) - extent:  # numpy would cut the span, or repeat a byte
            raise IndexError(f"spans from {first} to {last} of {len(arena)} bytes")
        in_place = windows.are_readable(starts[:, 0] + address_of(arena), extent)
        if in_place.any():
            return np.flatnonzero(in_place).tolist(), arena, starts[in_place], None
        spans = int(np.searchsorted(np.cumsum(sizes), self._slabs.slab_bytes, side="right"))
        assert spans, "a row is larger than a slab"
        taken = sizes[:spans]
        each, count = int(taken.sum()), 1
        if spans == len(sizes):
            count = min(len(starts), self._slabs.slab_bytes // each)
        slab = self._slabs.lease()
        room, source = np.frombuffer(slab.view, np.uint8), np.frombuffer(arena, np.uint8)
        places = np.arange(count)[:, None] * each + offsets_of(taken)
        columns = places, starts[:count, :spans], np.tile(taken, (count, 1))
        for place, start, nbytes in np.stack(columns, -1).reshape(-1, 3).tolist():
            np.copyto(room[place : place + nbytes], source[start : start + nbytes])
        return list(range(count)), slab.view, places, slab
