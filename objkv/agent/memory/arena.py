"""The arena: memory that the agent writes and replicas read, and the division of it into extents.

It is a memfd: it has no name, needs no ``/dev/shm``, and lives as long as a process maps it. The
agent maps it, then seals it: its size is fixed, and no other process can map it writable. It begins
with the board, the progress of payloads that are being filled. The rest holds payloads, each
contiguous and beginning at a page.
"""

import ctypes
import fcntl
import mmap
import os
import struct
from bisect import bisect_left, insort
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from threading import Event, Thread
from typing import Final

from xxhash import xxh3_64_intdigest

from objkv.background import JOIN_S
from objkv.errors import ConfigError, TransferError
from objkv.stores.base import map_memory

PAGE: Final = 4096
_CELL = struct.Struct("<QQQQ")
CELLS: Final = 32_768
"""Most payloads that are being filled, or have been leased ever since."""
BOARD_BYTES: Final = CELLS * _CELL.size
_READS_MAX = 10_000
"""How often a cell is read that does not match its checksum. A write takes a microsecond."""
_WORDS = struct.Struct("<QQQ")
# Constants of Linux that Python 3.11 does not name.
_POPULATE_READ, _POPULATE_WRITE = 22, 23
_FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_READ_ONLY = _FIXED_SIZE | 0x10  # F_SEAL_FUTURE_WRITE
AHEAD_BYTES: Final = 32 << 20, 1 << 30
"""Fewest and most bytes that are provided ahead: as many as payloads have used so far."""
_STEP_BYTES = 1 << 20
_LIBC = ctypes.CDLL(None)
_LIBC.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


def map_pages(start: int, nbytes: int, *, writable: bool = True) -> bool:
    """Map the pages at this address, and make those that do not exist yet. Returns False if the
    system cannot (Linux before 5.14): then each page comes when it is first used."""
    return not _LIBC.madvise(start, nbytes, _POPULATE_WRITE if writable else _POPULATE_READ)


def make_memory(name: str, nbytes: int) -> int:
    """Return a memfd of a fixed size, without memory. Raises ``OSError`` and ``OverflowError``."""
    fd = os.memfd_create(f"objkv-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _FIXED_SIZE)
    except (OSError, OverflowError):
        os.close(fd)
        raise
    return fd


def make_mapped(name: str, nbytes: int) -> tuple[int, mmap.mmap]:
    """Return such a memfd and its mapping, which gets no other writers. Raises the same."""
    fd = make_memory(name, nbytes)
    try:
        mapping = map_memory(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _READ_ONLY)
    except OSError:
        os.close(fd)
        raise
    return fd, mapping


def check_size(fd: int, what: str, *, writable: bool = False) -> int:
    """Return the size of memory that was sent. Raises ``TransferError`` unless it is fixed, since
    one that shrinks kills its readers, and gets no new writers unless ``writable``."""
    seals = _FIXED_SIZE if writable else _READ_ONLY
    try:
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & seals == seals:
            return os.fstat(fd).st_size
    except OSError as exc:
        raise TransferError(f"{what}: no memfd: {exc}") from exc
    raise TransferError(f"{what}: not sealed")


def map_sent(fd: int, what: str, sizes: range) -> mmap.mmap:
    """Map memory that the agent sent, or close it. Raises ``TransferError``."""
    try:
        nbytes = check_size(fd, what)
        if nbytes not in sizes:
            raise TransferError(f"{what}: an invalid size")
        return map_memory(fd, nbytes, writable=False)
    except (OSError, TransferError) as exc:
        os.close(fd)
        raise TransferError(f"the agent's memory cannot be mapped: {exc}") from exc


class CellState(IntEnum):
    """State of a cell's payload."""

    FILLING = 1
    READY = 2
    FAILED = 3


@dataclass(frozen=True, slots=True)
class Progress:
    """One reading of a cell."""

    state: CellState
    frames: int
    """Leading frames of the payload that are verified. If not 0, the header is too."""
    offset: int
    """Position of the payload in the arena; valid if ``frames`` is not 0."""
    nbytes: int
    reason: int
    """A ``MissReason`` if the state is FAILED."""
    layout: int = 0
    """The number of its layout if ``frames`` is not 0, see ``KnownLayouts``. 0: not known."""


ALL_FRAMES: Final = 0xFFFF_FFFF


class ProgressBoard:
    """Progress cells at the start of an arena. The agent writes them, replicas read them.

    A cell is three words and their checksum: a reader on another core may see them change in any
    order, and then reads again. The writer's eventfd call after it, and the reader's before it,
    make all of them visible, and the payload's bytes.
    """

    def __init__(self, memory: memoryview) -> None:
        """``memory``: the arena, or at least its first ``BOARD_BYTES``."""
        self._cells = memory[:BOARD_BYTES]

    def write(self, cell: int, progress: Progress) -> None:
        """Write a cell. Only the agent can."""
        word = progress.layout << 48 | progress.state << 40 | progress.reason << 32
        words = word | progress.frames, progress.offset, progress.nbytes
        _CELL.pack_into(self._cells, cell * _CELL.size, *words, _check(*words))

    def read(self, cell: int) -> Progress:
        """Read a cell. One that is never valid, of a killed agent, has no new frames."""
        for _ in range(_READS_MAX):
            word, offset, nbytes, check = _CELL.unpack_from(self._cells, cell * _CELL.size)
            if check == _check(word, offset, nbytes):
                frames, reason, state = word & 0xFFFF_FFFF, word >> 32 & 0xFF, word >> 40 & 0xFF
                return Progress(CellState(state), frames, offset, nbytes, reason, word >> 48)
        return Progress(CellState.FILLING, 0, 0, 0, 0)


def _check(*words: int) -> int:
    return xxh3_64_intdigest(_WORDS.pack(*words))


class Arena:
    """One mapping of the arena. The agent's is writable, a replica's is not."""

    def __init__(self, fd: int, mapping: mmap.mmap) -> None:
        self.fd = fd
        """The memfd. This object closes it."""
        self.view = memoryview(mapping)
        """``[nbytes]`` bytes of format ``B``, valid until ``close``, or as long as referenced."""
        self.board = ProgressBoard(self.view)
        self._mapping: mmap.mmap | None = mapping

    @classmethod
    def create(cls, nbytes: int) -> "Arena":
        """Make an arena with ``nbytes`` for payloads, rounded down to pages. No memory is taken
        until it is written. Raises ``ConfigError`` if the system refuses."""
        total = BOARD_BYTES + nbytes // PAGE * PAGE
        if total <= BOARD_BYTES:
            raise ConfigError(f"agent_memory_bytes={nbytes} is less than a page: raise it")
        try:
            fd, mapping = make_mapped("arena", total)
        except (OSError, OverflowError) as exc:
            why = getattr(exc, "strerror", None) or "too large"
            raise ConfigError(
                f"no arena of {total >> 20:,} MiB ({why}): lower agent_memory_bytes"
            ) from exc
        with suppress(OSError):  # they map and register faster, but most systems grant none
            mapping.madvise(mmap.MADV_HUGEPAGE)
        return cls(fd, mapping)

    @classmethod
    def join(cls, fd: int) -> "Arena":
        """Map the arena that an agent sent. Takes over ``fd``. Raises ``TransferError``."""
        return cls(fd, map_sent(fd, "arena", range(BOARD_BYTES + PAGE, 1 << 62, PAGE)))

    @property
    def nbytes(self) -> int:
        """Its size, the board included."""
        return len(self.view)

    def close(self) -> None:
        """Unmap it, or let the last reference to a part do so. Idempotent. Thread-safe, since a
        descriptor that is closed twice may be another file's by then."""
        fd, self.fd = self.fd, -1
        if fd < 0:
            return
        os.close(fd)
        self.board = ProgressBoard(memoryview(bytearray(BOARD_BYTES)))  # for who is late
        mapping, self._mapping = self._mapping, None
        view, self.view = self.view, memoryview(b"")
        with suppress(BufferError):  # with its last part, which is not this object's
            view.release()
            if mapping is not None:
                mapping.close()


class PagesAhead:
    """Has the system provide pages of an arena before payloads need them.

    The first write to a page waits until the system has found and cleared it: 0.1 to 0.8 ms per
    MiB, as long as the fetch itself. A thread does that ahead of payloads, which use the arena from
    its start on. Memory that they have used once stays.
    """

    def __init__(self, arena: Arena) -> None:
        self._reached, self._closed = BOARD_BYTES, False
        self._changed = Event()
        # The first byte keeps the arena mapped.
        run = ctypes.c_char.from_buffer(arena.view), arena.nbytes, *AHEAD_BYTES
        self._thread = Thread(target=self._run, args=run, name="objkv-pages", daemon=True)
        self._thread.start()

    def used(self, end: int) -> None:
        """Payloads take the arena's bytes up to ``end`` now. Never waits."""
        if end > self._reached:
            self._reached = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE  # as madvise takes it
            self._changed.set()

    def close(self) -> None:
        """End the thread after its step, of a millisecond if memory is free. Idempotent."""
        self._closed = True
        self._changed.set()
        self._thread.join(JOIN_S)

    def _run(self, memory: ctypes.c_char, nbytes: int, least: int, most: int) -> None:
        done, start = BOARD_BYTES, ctypes.addressof(memory)
        while not self._closed:
            reached = self._reached
            end = min(reached + min(max(reached - BOARD_BYTES, least), most), nbytes)
            done = max(done, reached)
            step = min(_STEP_BYTES, end - done)
            if step > 0:
                if not map_pages(start + done, step):
                    return
                done += step
            elif done >= nbytes:
                return
            else:
                self._changed.wait()
                self._changed.clear()


class Extents:
    """Divides ``[start, end)`` into extents of whole pages. Thread safety is the caller's.

    Takes the smallest free extent that is large enough: the payloads of a node have few sizes, so
    most extents are reused by payloads of the same size, and little is lost between them.
    """

    def __init__(self, start: int, end: int) -> None:
        assert start % PAGE == 0
        assert end % PAGE == 0
        assert start < end
        self._free = [(start, end)]
        """Free extents by their position. No two of them touch."""
        self._taken: dict[int, int] = {}
        """End of each extent in use, by its start."""
        self.total_bytes = self.free_bytes = end - start

    def allocate(self, nbytes: int) -> int | None:
        """Return the start of a new extent of at least ``nbytes``; None if no gap is as large."""
        assert nbytes > 0
        size = _pages(nbytes)
        best, least = -1, self.total_bytes + 1
        for number, (start, end) in enumerate(self._free):
            if size <= end - start < least:
                best, least = number, end - start
                if least == size:
                    break
        if best < 0:
            return None
        start, end = self._free[best]
        self._free[best : best + 1] = [(start + size, end)] if least > size else []
        self._taken[start] = start + size
        self.free_bytes -= size
        return start

    def size(self, start: int) -> int:
        """Return the size of the extent at ``start``."""
        return self._taken[start] - start

    def free(self, start: int) -> None:
        """Free the extent at ``start``."""
        end = self._taken.pop(start)
        self.free_bytes += end - start
        at = bisect_left(self._free, (start, end))
        if at < len(self._free) and self._free[at][0] == end:
            end = self._free.pop(at)[1]
        if at and self._free[at - 1][1] == start:
            start = self._free.pop(at - 1)[0]
        insort(self._free, (start, end))

    def evictable_spans(
        self, nbytes: int, movable: Collection[int]
    ) -> Iterator[tuple[int, list[int]]]:
        """Yield each row of gaps and ``movable`` extents with room: bytes in use, those to free."""
        size = _pages(nbytes)
        pieces = [(start, end, False) for start, end in self._free]
        pieces += [(start, end, True) for start, end in self._taken.items()]
        pieces.sort()
        first, used = 0, 0
        for last, (start, end, in_use) in enumerate(pieces):
            if in_use and start not in movable:
                first, used = last + 1, 0
                continue
            used += (end - start) * in_use
            while end - pieces[first][1] >= size:  # the row has room without its first piece
                used -= (pieces[first][1] - pieces[first][0]) * pieces[first][2]
                first += 1
            if end - pieces[first][0] >= size:
                yield used, [piece[0] for piece in pieces[first : last + 1] if piece[2]]


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE
