"""One get for many: a burst of requests for one new prefix fetches each payload once.

The first caller (the leader) makes the call; callers that come while it is under way (followers)
wait and share its outcome. For ``get_into`` the leader copies its buffer into each follower's,
under the flight's lock, before it returns: no thread ever reads a buffer whose owner has gone on,
and none is written after its owner gave up waiting.
"""

import time
from threading import Condition, Lock
from types import TracebackType
from typing import Any

from objkv.errors import StoreError, StoreUnavailable
from objkv.net.deadline import ends_s
from objkv.stores.base import Arrived, Buffer, Entry, PruneStore, copy_bytes
from objkv.stores.guarded import GuardedStore

_Call = tuple[str | int | None, ...]


class SharedGets(GuardedStore):
    """Shares ``head`` and all ``get`` verbs among callers of the same moment.

    A follower waits ``wait_s`` at most, then gets ``StoreUnavailable``; when the store fails the
    leader, its followers fail with it. What ends a leader otherwise, as its own ``arrived`` may,
    concerns the leader alone: one of its followers leads then. A read that begins after a put or
    delete returned sees its effect: it never joins a call that began before.
    """

    def __init__(self, inner: PruneStore, *, wait_s: float) -> None:
        assert wait_s >= 0
        super().__init__(inner)
        self._wait_s = wait_s
        self._lock = Lock()
        self._flights: dict[str, dict[_Call, _Flight]] = {}

    def __repr__(self) -> str:
        return f"<SharedGets {len(self._flights)} keys under way, of {self._inner!r}>"

    def get(self, key: str) -> bytes | None:
        """See ``ReadStore``; all callers get the same object."""
        flight, value = self._join(key, ("get",))
        if flight is not None:
            with flight:
                value = flight.value = self._inner.get(key)
        found: bytes | None = value
        return found

    def get_range(self, key: str, start: int, end: int) -> bytes | None:
        """See ``ReadStore``; all callers get the same object."""
        flight, value = self._join(key, ("get_range", start, end))
        if flight is not None:
            with flight:
                value = flight.value = self._inner.get_range(key, start, end)
        found: bytes | None = value
        return found

    def get_into(
        self, key: str, buffer: memoryview, arrived: Arrived | None = None, start: int | None = None
    ) -> int | None:
        """See ``ReadStore``; shared among buffers of equal length, so that a value which is too
        long for one is too long for all. A follower's bytes arrive all at once."""
        flight, nbytes = self._join(key, ("get_into", start, len(buffer)), buffer)
        if flight is not None:
            with flight:
                nbytes = flight.value = self._inner.get_into(key, buffer, arrived, start)
        elif nbytes is not None and arrived is not None:
            arrived(nbytes)
        found: int | None = nbytes
        return found

    def head(self, key: str) -> Entry | None:
        """See ``ReadStore``."""
        flight, value = self._join(key, ("head",))
        if flight is not None:
            with flight:
                value = flight.value = self._inner.head(key)
        found: Entry | None = value
        return found

    def put_if_absent(self, key: str, value: Buffer) -> bool:
        """See ``WriteStore``."""
        try:
            return self._inner.put_if_absent(key, value)
        finally:
            self._leave_behind(key)

    def put(self, key: str, value: Buffer) -> None:
        """See ``WriteStore``."""
        try:
            self._inner.put(key, value)
        finally:
            self._leave_behind(key)

    def delete(self, key: str) -> bool:
        """See ``PruneStore``."""
        try:
            return self._inner.delete(key)
        finally:
            self._leave_behind(key)

    def _leave_behind(self, key: str) -> None:
        with self._lock:
            self._flights.pop(key, None)

    def _join(
        self, key: str, call: _Call, buffer: memoryview | None = None
    ) -> "tuple[_Flight | None, Any]":
        """A flight of the caller's own, in which to make the call; or None, and the value that
        another caller's brought."""
        deadline_s = None
        while True:
            with self._lock:
                flights = self._flights.setdefault(key, {})
                flight = flights.get(call)
                if flight is None:
                    flight = flights[call] = _Flight(self, key, call, buffer)
                    return flight, None
                seat = flight.board(buffer)
            if deadline_s is None:
                deadline_s = min(time.monotonic() + self._wait_s, ends_s())
            if not flight.wait(seat, deadline_s):
                raise StoreUnavailable(f"{key}: no answer for {self._wait_s:g} s")
            if seat.error is not None:
                raise type(seat.error)(*seat.error.args) from seat.error
            if not seat.again:
                return None, seat.value

    def _land(self, flight: "_Flight") -> None:
        """Let no further call join."""
        with self._lock:
            flights = self._flights.get(flight.key)
            if flights is not None and flights.get(flight.call) is flight:
                del flights[flight.call]
                if not flights:
                    del self._flights[flight.key]


class _Seat:
    """One follower: where its copy goes, and what came of it."""

    def __init__(self, buffer: memoryview | None) -> None:
        self.buffer = buffer
        self.done = False
        self.value: Any = None
        self.error: StoreError | None = None
        self.again = False
        """The leader ended without the store's outcome: this follower tries again."""


class _Flight:
    """One call under way and those who wait for it. The leader enters it as a context manager, and
    sets ``value``; leaving it hands out the outcome."""

    __slots__ = ("_buffer", "_changed", "_seats", "_store", "call", "key", "value")

    def __init__(self, store: SharedGets, key: str, call: _Call, buffer: memoryview | None) -> None:
        self._store, self.key, self.call, self._buffer = store, key, call, buffer
        self.value: Any = None
        self._changed: Condition | None = None
        """Made when the first follower boards: most leaders are alone."""
        self._seats: list[_Seat] = []

    def board(self, buffer: memoryview | None) -> _Seat:
        """A seat; called under the store's lock, only while the flight can be joined."""
        if self._changed is None:
            self._changed = Condition()
        seat = _Seat(buffer)
        with self._changed:
            self._seats.append(seat)
        return seat

    def wait(self, seat: _Seat, deadline_s: float) -> bool:
        """Until the seat's outcome is there, or the deadline has passed: False. The seat's buffer
        is not touched after this returns."""
        assert self._changed is not None
        with self._changed:
            while not seat.done:
                if not self._changed.wait(deadline_s - time.monotonic()) and not seat.done:
                    self._seats.remove(seat)
                    return False
        return True

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give all followers the value, with the bytes if there are any, or the store's error. Any
        other error (an interrupt of the leader's thread, the end of its time, what its ``arrived``
        raised) is the leader's own: its followers try again."""
        self._store._land(self)
        if self._changed is None:  # and from now on nothing joins
            return
        again = error is not None and (
            not isinstance(error, StoreError) or time.monotonic() >= ends_s()
        )
        with self._changed:
            for seat in self._seats:
                if error is not None:
                    seat.error = error if isinstance(error, StoreError) and not again else None
                    seat.again = again
                elif seat.buffer is not None and self.value is not None:
                    assert self._buffer is not None
                    copy_bytes(seat.buffer, self._buffer, self.value)
                seat.value, seat.done = self.value, True
            self._changed.notify_all()
