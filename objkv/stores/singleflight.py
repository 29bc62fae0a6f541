"""Shares one get among concurrent callers: a burst of requests for a new prefix reads each payload
once.

The first caller (the leader) makes the call. Callers that arrive during it (followers) wait and
share its outcome. For ``get_into`` the leader copies its buffer into each follower's buffer under
the flight's lock before it returns. So no thread reads a buffer that its owner has taken back, and
no buffer is written after its owner stopped waiting.
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
    """Shares ``head`` and all ``get`` verbs among concurrent callers.

    A follower waits at most ``wait_s``, then gets ``StoreUnavailable``. If the store fails for the
    leader, its followers get the same error. Any other exception, such as one from the leader's
    ``arrived``, ends only the leader, and one of its followers becomes the new leader. A read that
    begins after a put or delete returned sees its effect, because it never joins an earlier call.
    """

    def __init__(self, inner: PruneStore, *, wait_s: float) -> None:
        assert wait_s >= 0
        super().__init__(inner)
        self._wait_s = wait_s
        self._lock = Lock()
        self._flights: dict[str, dict[_Call, _Flight]] = {}

    def __repr__(self) -> str:
        return f"<SharedGets {len(self._flights)} keys under way, of {self._inner!r}>"

    @property
    def waiting(self) -> int:
        """The number of callers that wait for another caller's call."""
        with self._lock:
            return sum(len(one._seats) for key in self._flights.values() for one in key.values())

    def get(self, key: str) -> bytes | None:
        """See ``ReadStore``. All callers get the same object."""
        flight, value = self._join(key, ("get",))
        if flight is not None:
            with flight:
                value = flight.value = self._inner.get(key)
        found: bytes | None = value
        return found

    def get_range(self, key: str, start: int, end: int) -> bytes | None:
        """See ``ReadStore``. All callers get the same object."""
        flight, value = self._join(key, ("get_range", start, end))
        if flight is not None:
            with flight:
                value = flight.value = self._inner.get_range(key, start, end)
        found: bytes | None = value
        return found

    def get_into(
        self, key: str, buffer: memoryview, arrived: Arrived | None = None, start: int | None = None
    ) -> int | None:
        """See ``ReadStore``. Only callers with buffers of equal length share a call, so a value
        that is too long for one is too long for all. A follower receives its bytes all at once."""
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
        """Return a new flight in which the caller makes the call, or None and the value that
        another caller's flight returned."""
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
                raise StoreUnavailable(
                    f"get {key}: another thread's read took longer than {self._wait_s:g} s"
                )
            if seat.error is not None:
                raise type(seat.error)(*seat.error.args) from seat.error
            if not seat.again:
                return None, seat.value

    def _land(self, flight: "_Flight") -> None:
        """Stop further calls from joining."""
        with self._lock:
            flights = self._flights.get(flight.key)
            if flights is not None and flights.get(flight.call) is flight:
                del flights[flight.call]
                if not flights:
                    del self._flights[flight.key]


class _Seat:
    """One follower: its buffer and its outcome."""

    def __init__(self, buffer: memoryview | None) -> None:
        self.buffer = buffer
        self.done = False
        self.value: Any = None
        self.error: StoreError | None = None
        self.again = False
        """The leader ended without an outcome from the store, so this follower tries again."""


class _Flight:
    """One call in progress and its followers. The leader enters it as a context manager and sets
    ``value``; leaving it distributes the outcome."""

    __slots__ = ("_buffer", "_changed", "_seats", "_store", "call", "key", "value")

    def __init__(self, store: SharedGets, key: str, call: _Call, buffer: memoryview | None) -> None:
        self._store, self.key, self.call, self._buffer = store, key, call, buffer
        self.value: Any = None
        self._changed: Condition | None = None
        """Created for the first follower, because most leaders have none."""
        self._seats: list[_Seat] = []

    def board(self, buffer: memoryview | None) -> _Seat:
        """Return a seat. Call it under the store's lock, while the flight can still be joined."""
        if self._changed is None:
            self._changed = Condition()
        seat = _Seat(buffer)
        with self._changed:
            self._seats.append(seat)
        return seat

    def wait(self, seat: _Seat, deadline_s: float) -> bool:
        """Wait for the seat's outcome. Return False if the deadline passed first. The seat's buffer
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
        """Give all followers the value (and its bytes, if any) or the store's error. Any other
        error (an interrupt of the leader's thread, the end of its time, an exception from its
        ``arrived``) belongs to the leader alone, and its followers try again."""
        self._store._land(self)
        if self._changed is None:  # no further follower can join now
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
