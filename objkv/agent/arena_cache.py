"""Payloads in the arena: their states, their readers, and their eviction.

A payload is filled by one fetch, however many readers want it. In the arena it is always
uncompressed and unsealed, of format 2, and its frames are verified. Memory under a lease is never
evicted or reused, and a lease ends only by a release or with its holder's connection.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from threading import Lock
from typing import Final, Protocol

from objkv.agent.disk import Disk
from objkv.agent.held_back import HeldBackPayloads
from objkv.agent.memory.arena import (
    BOARD_BYTES,
    CELLS,
    Arena,
    CellState,
    Extents,
    PagesAhead,
    Progress,
)
from objkv.agent.messages import MissReason
from objkv.agent.ranking import Ranking
from objkv.codec.values import Claim
from objkv.index.base import ShardRecord
from objkv.telemetry import Recorder

_SHARE = 4
"""Divisor: a payload takes at most this fraction of the arena."""
_AHEAD_SHARE = 4
"""Divisor: prefetched payloads that nothing has read take at most this fraction of the arena."""
Origin = tuple[bytes, int, int]
"""What a payload's claim has besides its key: the parent's hash, start and end of its tokens."""
NO_ORIGIN: Final[Origin] = (b"", 0, 0)


class Waiter(Protocol):
    """Wakes a client that waits for progress."""

    def wake(self) -> None:
        """Wake it. Never waits, never raises."""


@dataclass(eq=False, slots=True)
class CachedPayload:
    """One payload in the arena. Its fields are guarded by the lock of ``ArenaCache``."""

    key: str
    """Its path in the bulk store."""
    cell: int
    """-1 if it is complete and was free of leases since: no reader waits for it."""
    state: CellState = CellState.FILLING
    leases: int = 0
    offset: int = -1
    """-1 as long as it has no memory."""
    nbytes: int = 0
    extent_bytes: int = 0
    """The memory that it takes, in whole pages."""
    origin: Origin = NO_ORIGIN
    layout: int = 0
    """See ``KnownLayouts``; known once its header is verified."""
    reason: MissReason = MissReason.NONE
    is_unused: bool = False
    """Whether it was prefetched and not read yet."""
    is_spilled: bool = False
    """Whether it was offered to the disk. ``Spill`` sets it, without the lock."""
    is_listed: bool = True
    """Whether new readers may find it."""
    deadline: float = 0.0
    """The latest one of those who opened it. ``Core`` sets it, without the lock."""
    waiters: set[Waiter] = field(default_factory=set)


class ArenaCache:
    """All payloads of one arena. Thread-safe. Nothing waits."""

    def __init__(
        self,
        arena: Arena,
        recorder: Recorder,
        changed: Callable[[bytes], object] = lambda prefix_hash: None,
        came_due: Callable[[], object] = lambda: None,
        disk: Disk | None = None,
    ) -> None:
        """``changed``, ``came_due``, ``disk``: see ``HeldBackPayloads``."""
        self._arena, self._recorder = arena, recorder
        self.held_back = HeldBackPayloads(recorder, changed, came_due, disk)
        """Those that no store has yet."""
        self._extents = Extents(BOARD_BYTES, arena.nbytes)
        self._pages = PagesAhead(arena)
        self.total_bytes = self._extents.total_bytes
        self.payload_bytes_max = self.total_bytes // _SHARE
        """Largest payload that gets memory. A larger one would evict most others."""
        self.ahead_bytes_max = self.total_bytes // _AHEAD_SHARE
        """Most bytes of prefetched payloads that are under way or were not read yet."""
        self._ranking = Ranking(self.total_bytes)
        self._unread: dict[CachedPayload, None] = {}
        """Payloads that were prefetched and not read yet, oldest first."""
        self.unread_bytes = 0
        self._lock = Lock()
        self._by_key: dict[str, CachedPayload] = {}
        self._at: dict[int, CachedPayload] = {}
        """Every payload that has memory, by its offset."""
        self._all: set[CachedPayload] = set()
        """Those, and failed or forgotten ones that are still leased."""
        self._cells = deque(range(CELLS))
        self._idle_bytes = 0
        """Memory of payloads without a lease: all that can be evicted."""
        self._closed = False

    @property
    def free_bytes(self) -> int:
        """Room that nothing uses."""
        return self._extents.free_bytes

    def __len__(self) -> int:
        return len(self._by_key)

    def peek(self, keys: Iterable[str]) -> list[CachedPayload | None]:
        """Return the payloads that are resident or being filled. None is leased: any may change."""
        return [self._by_key.get(key) for key in keys]

    def contains_ready(self, keys: Iterable[str]) -> list[bool]:
        """Whether each payload can be read now. Takes no lease."""
        get = self._by_key.get
        return [(one := get(key)) is not None and one.state is CellState.READY for key in keys]

    def open(
        self, key: str, origin: Origin, waiter: Waiter, *, ahead: bool = False
    ) -> tuple[CachedPayload, bool] | MissReason:
        """Take a lease of a payload. ``ahead``: for a prefetch, which does not count as a read.

        Returns it, and whether it is new: the caller must fill it then, and holds a second lease
        for that, see ``ready`` and ``failed``. NO_ROOM if too many are leased, CORRUPT if the
        payload here is of another ``origin``.
        """
        with self._lock:
            one = self._by_key.get(key)
            if one is not None:
                if one.origin != origin:
                    return MissReason.CORRUPT
                self._lease(one)
                is_first = one.is_unused and not ahead
                if is_first:  # it counts like the read for which another payload is loaded
                    one.is_unused = False
                    self._forget_unread(one)
                    self._recorder.count("agent_prefetch_used")
                if one.state is CellState.READY and not ahead:
                    if not is_first:
                        self._ranking.use(key)
                    self.held_back.seen_again(key)
                elif one.state is CellState.FILLING:
                    one.waiters.add(waiter)
                return one, False
            if not self._cells:
                return MissReason.NO_ROOM
            cell = self._cells.popleft()
            one = CachedPayload(key, cell, leases=2, origin=origin, is_unused=ahead)
            self._by_key[key] = one
            self._all.add(one)
            one.waiters.add(waiter)
            self._arena.board.write(one.cell, Progress(CellState.FILLING, 0, 0, 0, 0))
            return one, True

    def reserve(self, key: str, nbytes: int) -> CachedPayload | None:
        """Return a leased payload with memory that the caller fills, evicting others if need be.
        No reader finds it before ``adopt``. None as in ``allocate``."""
        one = CachedPayload(key, -1, leases=1, is_listed=False)
        with self._lock:
            if self._take_memory(one, nbytes, is_sure=True):
                self._all.add(one)
                return one
        self._recorder.count("agent_no_room")
        return None

    def adopt(self, one: CachedPayload, origin: Origin, layout: int) -> tuple[CachedPayload, bool]:
        """Let others find a reserved, complete and verified payload. Returns it, or one that came
        there meanwhile instead, with the caller's lease, and whether it is the reserved one."""
        with self._lock:
            known = self._by_key.get(one.key)
            if known is not None:
                self._lease(known)
                self._release(one)
                return known, False
            one.origin, one.layout = origin, layout
            one.is_listed, one.state = True, CellState.READY
            self._by_key[one.key] = one
            self.held_back.arrived(one.key)
            self._ranking.add(one.key, one.nbytes, is_unread=False)
            return one, True

    def lease_ready(self, key: str) -> CachedPayload | None:
        """Take a lease of a payload if it is complete. It does not count as a read."""
        with self._lock:
            one = self._by_key.get(key)
            if one is None or one.state is not CellState.READY:
                return None
            self._lease(one)
            return one

    def add_held_back(
        self, one: CachedPayload, claim: Claim, record: ShardRecord, *, is_due: bool
    ) -> None:
        """Let lookups find a complete, leased payload. ``is_due``: False to hold it back."""
        with self._lock:
            if one.is_listed:
                self.held_back.add(claim, record, is_due=is_due)

    def release(self, one: CachedPayload, waiter: Waiter | None = None) -> None:
        """End a lease. ``waiter``: a client that holds no other lease of it."""
        with self._lock:
            if waiter is not None:
                one.waiters.discard(waiter)
            self._release(one)

    def cancel_fill(self, one: CachedPayload) -> bool:
        """End a fill, and its lease, if no client has one. Returns whether it did."""
        with self._lock:
            if one.leases > 1:
                return False
            self._unlist(one)
            one.state, one.reason = CellState.FAILED, MissReason.LATE
            self._release(one)
            return True

    def view(self, one: CachedPayload) -> memoryview:
        """Return the memory of a leased payload. Only a fill may write it."""
        return self._arena.view[one.offset : one.offset + one.nbytes]

    def allocate(
        self, one: CachedPayload, nbytes: int, spare: int = 0, *, is_sure: bool = True
    ) -> memoryview | None:
        """Give a payload that is being filled its memory, evicting others if need be. None if the
        arena is full of leased payloads, or closed, or the payload is too large.

        ``spare``: further bytes of memory that are not the payload's. ``is_sure``: False if the
        payload may not exist: None, too, if others would be lost for it that only this node has.
        """
        assert one.offset < 0
        with self._lock:
            if self._take_memory(one, nbytes + spare, is_sure=is_sure):
                one.nbytes = nbytes
                return self._arena.view[one.offset : one.offset + nbytes + spare]
        if is_sure:
            self._recorder.count("agent_no_room")
        return None

    def _take_memory(self, one: CachedPayload, nbytes: int, *, is_sure: bool) -> bool:
        if self._closed or nbytes > self.payload_bytes_max:
            return False
        if (offset := self._extents.allocate(nbytes)) is not None:
            self._pages.used(offset + nbytes)
        elif (offset := self._make_room(nbytes, is_sure=is_sure)) is None:
            return False
        one.offset, one.nbytes, one.extent_bytes = offset, nbytes, self._extents.size(offset)
        self._at[offset] = one
        return True

    def deallocate(self, one: CachedPayload) -> None:
        """Take back the memory of a payload that is being filled, whose place no reader knows."""
        with self._lock:
            self._give_back(one)

    def advance(self, one: CachedPayload, layers: int) -> None:
        """Report that the header and this many leading frames are verified."""
        self._report(one, CellState.FILLING, layers)

    def ready(self, one: CachedPayload, layers: int) -> None:
        """End a fill that succeeded, and its lease."""
        with self._lock:
            one.state = CellState.READY
            if one.is_listed:
                self.held_back.arrived(one.key)
                self._ranking.add(one.key, one.nbytes, is_unread=one.is_unused)
                if one.is_unused:
                    self._add_unread(one)
        self._report(one, CellState.READY, layers)

    def failed(self, one: CachedPayload, reason: MissReason, layers: int = 0) -> None:
        """End a fill that failed, and its lease. Readers keep the frames that were verified."""
        with self._lock:
            self._unlist(one)
            one.state, one.reason = CellState.FAILED, reason
        self._report(one, CellState.FAILED, layers)

    def forget(self, key: str) -> None:
        """Make a payload unavailable to new readers, also if it is being filled."""
        with self._lock:
            one = self._by_key.get(key)
            if one is not None:
                self._unlist(one)
                if not one.leases:
                    self._free(one)

    def note_lost(self, key: str) -> None:
        """A payload that was held back is nowhere else any more, unless it is here."""
        with self._lock:
            if key not in self._by_key:
                self.held_back.dropped(key)

    def close(self) -> None:
        """Allot no memory from now on: connections may outlast their leases, and still read it."""
        with self._lock:
            self._closed = True
        self._pages.close()

    def leased(self) -> int:
        """Return the number of payloads under a lease."""
        with self._lock:
            return sum(one.leases > 0 for one in self._all)

    def leased_bytes(self) -> int:
        """Return the bytes of payloads under a lease."""
        with self._lock:
            return sum(one.nbytes for one in self._all if one.leases)

    def _report(self, one: CachedPayload, state: CellState, layers: int) -> None:
        """Write a fill's progress, wake its waiters, end its lease unless it is FILLING."""
        offset = max(0, one.offset)
        progress = Progress(state, layers, offset, one.nbytes, one.reason, one.layout)
        self._arena.board.write(one.cell, progress)
        with self._lock:
            waiters = list(one.waiters)
            if state is not CellState.FILLING:
                one.waiters.clear()
                self._release(one)
        for waiter in waiters:
            waiter.wake()

    def _lease(self, one: CachedPayload) -> None:
        if not one.leases:
            self._idle_bytes -= one.extent_bytes
        one.leases += 1

    def _release(self, one: CachedPayload) -> None:
        assert one.leases > 0
        one.leases -= 1
        if not one.leases:
            if one.is_listed:
                self._idle_bytes += one.extent_bytes
                if one.cell >= 0:
                    self._cells.append(one.cell)
                    one.cell = -1
            else:
                self._free(one)

    def _make_room(self, nbytes: int, *, is_sure: bool) -> int | None:
        """Evict by the ranking until there is a gap, else the cheapest row of neighbours."""
        if nbytes > self._extents.free_bytes + self._idle_bytes:
            return None
        evicted = 0
        while evicted < 2 * nbytes:
            key = self._ranking.victim(lambda key: not self._by_key[key].leases)
            if key is None:
                break
            if not is_sure and key in self.held_back and not self.held_back.keep_on_disk(key):
                return None
            evicted += self._by_key[key].nbytes
            self._evict(self._by_key[key])
            offset = self._extents.allocate(nbytes)
            if offset is not None:
                return offset
        if not is_sure and len(self.held_back):
            return None
        movable = {
            offset
            for offset, one in self._at.items()
            if not one.leases and one.state is CellState.READY
        }
        row = min(self._extents.evictable_spans(nbytes, movable), default=None)
        if row is None:
            return None
        for offset in row[1]:
            self._evict(self._at[offset])
        return self._extents.allocate(nbytes)

    def _evict(self, one: CachedPayload) -> None:
        if one.is_unused:
            self._recorder.count("agent_prefetch_unused")
            self._recorder.count("agent_prefetch_unused_bytes", one.nbytes)
        self._recorder.count("agent_evictions")
        self._recorder.count("agent_evicted_bytes", one.nbytes)
        self._unlist(one)
        self._free(one)

    def _unlist(self, one: CachedPayload) -> None:
        if one.is_listed:
            one.is_listed = False
            if not one.leases:
                self._idle_bytes -= one.extent_bytes
            del self._by_key[one.key]
            self._ranking.remove(one.key, was_read=not one.is_unused)
            self._forget_unread(one)
            self.held_back.left_arena(one.key)

    def _add_unread(self, one: CachedPayload) -> None:
        """Add a prefetched payload, and evict the oldest ones beyond ``ahead_bytes_max``."""
        self._unread[one] = None
        self.unread_bytes += one.nbytes
        for older in list(self._unread):
            if self.unread_bytes <= self.ahead_bytes_max:
                break
            if not older.leases and older is not one:
                self._evict(older)

    def _forget_unread(self, one: CachedPayload) -> None:
        if one in self._unread:
            del self._unread[one]
            self.unread_bytes -= one.nbytes

    def _free(self, one: CachedPayload) -> None:
        self._give_back(one)
        self._all.remove(one)
        if one.cell >= 0:
            self._cells.append(one.cell)

    def _give_back(self, one: CachedPayload) -> None:
        if one.offset >= 0:
            del self._at[one.offset]
            self._extents.free(one.offset)
            one.offset, one.nbytes, one.extent_bytes = -1, 0, 0
