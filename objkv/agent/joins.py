"""Joins: payloads that the ranks of a replica hand over in parts.

A join is whole or not at all. It begins with the part that comes first, and ends with the last, or
when a rank drops its part, at its deadline, or when the replica has gone. What is known of it then
is kept for the parts that are still to come: they are not copied.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from time import monotonic
from typing import Final, NamedTuple

from objkv.agent.arena_cache import ArenaCache, CachedPayload
from objkv.agent.messages import Commit, CommitStatus, Drop, SavedPart
from objkv.agent.outbox import ClientOutbox
from objkv.cache.chunks import InFlightSaves
from objkv.codec.join import Join, check_moved
from objkv.codec.payload import Claim, Header
from objkv.errors import PayloadError
from objkv.telemetry import Recorder

JOINS_MAX: Final = 16_384
"""Joins that an agent knows, those that have ended included."""
_SHARE = 4
"""Divisor: open joins take at most this fraction of the arena."""
Name = tuple[bytes, str]
"""Replica, and path of the payload."""


@dataclass(eq=False, slots=True)
class Wish:
    """What a client wants to have saved, and what was decided about it."""

    path: str
    claim: Claim
    puts: bool
    """Whether to save it at once if that is possible, and to hold it back only if not."""
    may_save: bool
    was_held_back: bool = False
    holds_back: bool = False
    """Whether it is not to be saved until it is seen again, or there is room."""
    waits: bool = False
    """Whether it is saved as soon as there is room, unless its memory is needed before that."""

    @property
    def waiting(self) -> CommitStatus:
        """What to answer if it waits: no promise."""
        return CommitStatus.ACCEPTED if self.puts else CommitStatus.HELD_BACK


@dataclass(eq=False, slots=True)
class _Open:
    """A join. Guarded by the lock of ``Joins``, except for its memory."""

    number: int
    parts: int
    deadline: float
    status: CommitStatus | None = None
    """What further parts are answered; None as long as they are wanted."""
    wish: Wish | None = None
    """The one of the part that came first."""
    join: Join | None = None
    memory: CachedPayload | None = None
    seen: int = 0
    """Parts that were handed over or dropped."""
    copying: int = 0
    """Threads that copy a part into the memory."""


class Joined(NamedTuple):
    """A whole payload in reserved memory, which the caller adopts or releases."""

    wish: Wish
    header: Header
    memory: CachedPayload


class Joins:
    """The joins of one agent. Thread-safe. Copies in the calling thread."""

    def __init__(
        self,
        arena_cache: ArenaCache,
        in_flight: InFlightSaves,
        admit: Callable[[Wish, int], CommitStatus | None],
        recorder: Recorder,
        deadline_s: float,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """``admit``: decides once for each join whether a payload of some length is wanted: returns
        None if it is, and has begun its save in ``in_flight``, or else what to answer."""
        self._arena_cache, self._in_flight, self._recorder = arena_cache, in_flight, recorder
        self._admit = admit
        self._deadline_s, self._clock = deadline_s, clock
        self._lock = Lock()
        self._known: dict[Name, _Open] = {}
        """Oldest first."""
        self._reserved_bytes = 0
        self._replicas = Counter[bytes]()
        """Connections of each replica."""

    def __len__(self) -> int:
        return len(self._known)

    def add(
        self,
        replica: bytes,
        outbox: ClientOutbox,
        commit: Commit,
        header: Header,
        wish: Wish,
    ) -> CommitStatus | Joined:
        """Take a copy of a part. Returns the whole payload if it was the last, or what to answer.
        ``header``: of the part. Raises ``PayloadError``."""
        part, path = commit.part, wish.path
        assert part is not None
        part.place.check()
        with self._lock:
            self._expire()
            one = self._find((replica, path), part.number, part.place.parts)
            if one is None:
                return CommitStatus.DROPPED
            if one.join is None and one.status is None:
                one.status = self._begin(one, header, part, wish)
            one.seen += 1
            if one.status is not None:
                self._forget_seen((replica, path), one)
                return one.status
            assert one.join is not None
            assert one.memory is not None
            try:
                moves = one.join.add(header, part.place)
            except PayloadError:
                self._drop(one, "refused")
                raise
            one.copying += 1
        memory, fault = self._arena_cache.view(one.memory), "refused"
        try:
            places = [memory[to : to + nbytes] for _, to, nbytes in moves]
            outbox.read_pieces(places, commit.offset + moves[0].source)
            check_moved(header, moves, memory)
            fault = ""
        finally:
            with self._lock:
                one.copying -= 1
                if fault:
                    self._drop(one, fault)
                status = self._status_of((replica, path), one)
        return self._finish(one) if status is None else status

    def _status_of(self, name: Name, one: _Open) -> CommitStatus | None:
        """Return what to answer a part that was copied; None if it completes the payload, which is
        the caller's then."""
        if one.status is not None:
            self._free(one)
            self._forget_seen(name, one)
            return one.status
        assert one.join is not None
        if not one.join.is_complete or one.copying:
            return CommitStatus.PART
        if self._known.get(name) is one:
            del self._known[name]
        return None

    def _finish(self, one: _Open) -> CommitStatus | Joined:
        assert one.join is not None
        assert one.wish is not None
        assert one.memory is not None
        try:
            header = one.join.finish(self._arena_cache.view(one.memory))
        except PayloadError:
            with self._lock:
                self._drop(one, "refused")
            raise
        with self._lock:
            self._reserved_bytes -= one.memory.nbytes
        self._recorder.count("joins")
        return Joined(one.wish, header, one.memory)

    def drop(self, replica: bytes, drop: Drop) -> None:
        """Record that a rank does not hand over its part."""
        with self._lock:
            self._expire()
            name = replica, drop.path
            if (one := self._find(name, drop.number, drop.parts)) is None:
                return
            if one.join is None and one.status is None:
                one.status = CommitStatus.DROPPED
            self._drop(one, "rank")
            one.seen += 1
            self._forget_seen(name, one)

    def joined(self, replica: bytes) -> None:
        """Record a connection of a replica."""
        with self._lock:
            self._replicas[replica] += 1

    def left(self, replica: bytes) -> None:
        """Record that a connection has ended. With the last one the replica's open joins do."""
        with self._lock:
            self._replicas[replica] -= 1
            if self._replicas[replica] > 0:
                return
            del self._replicas[replica]
            for name in [name for name in self._known if name[0] == replica]:
                self._drop(self._known.pop(name), "gone")

    def expire(self) -> None:
        """Drop the joins whose deadline has passed."""
        with self._lock:
            self._expire()

    def _expire(self) -> None:
        now = self._clock()
        while self._known:
            name = next(iter(self._known))
            if self._known[name].deadline > now:
                return
            self._drop(self._known.pop(name), "late")

    def _find(self, name: Name, number: int, parts: int) -> _Open | None:
        """Return the join that a part belongs to; None if a newer one has replaced it, or there are
        too many."""
        one = self._known.get(name)
        if one is not None and one.number >= number:
            return one if one.number == number else None
        if one is not None:
            self._drop(self._known.pop(name), "replaced")
        if len(self._known) >= JOINS_MAX:
            self._recorder.count("joins_dropped_full")
            return None
        one = self._known[name] = _Open(number, parts, self._clock() + self._deadline_s)
        return one

    def _begin(
        self,
        one: _Open,
        header: Header,
        part: SavedPart,
        wish: Wish,
    ) -> CommitStatus | None:
        """Give a join its memory. Returns what to answer if it gets none."""
        join = Join(header, part.place)
        if (status := self._admit(wish, join.nbytes)) is not None:
            return status
        key = wish.path
        is_much = (self._reserved_bytes + join.nbytes) * _SHARE > self._arena_cache.total_bytes
        memory = None if is_much else self._arena_cache.reserve(key, join.nbytes)
        if memory is None:
            self._in_flight.end(key)
            self._recorder.count("save_drops")
            return CommitStatus.NO_ROOM
        self._reserved_bytes += join.nbytes
        one.join, one.memory, one.wish = join, memory, wish
        return None

    def _forget_seen(self, name: Name, one: _Open) -> None:
        """Forget a join that has ended, once all parts are known of."""
        if one.seen >= one.parts and self._known.get(name) is one:
            del self._known[name]

    def _drop(self, one: _Open, reason: str) -> None:
        """End a join that is open. Its memory goes when nothing is being copied there."""
        if one.status is not None:
            return
        one.status = CommitStatus.DROPPED
        self._recorder.count("save_drops")
        self._recorder.count(f"joins_dropped_{reason}")
        if one.memory is not None:
            self._in_flight.end(one.memory.key)
        self._free(one)

    def _free(self, one: _Open) -> None:
        if one.memory is not None and not one.copying:
            self._reserved_bytes -= one.memory.nbytes
            self._arena_cache.release(one.memory)
            one.memory = None
