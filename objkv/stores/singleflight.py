"""One call for many: a burst of requests for one new prefix fetches each payload once.

The caller that comes first (the leader) makes the call; those that come while it is under way
(followers) wait and share its outcome. For ``get_into`` the leader copies its buffer into each
follower's, under the flight's lock, before it returns: no thread ever reads a buffer whose owner
has gone on, and none is written after its owner gave up waiting.
"""

import time
from collections.abc import Callable
from threading import Condition, Lock
from typing import Any

from objkv.errors import StoreError, StoreUnavailable
from objkv.net.deadline import ends_s
from objkv.stores.base import Arrived, Buffer, Entry, PruneStore, copy_bytes
from objkv.stores.guarded import WrappedStore

_Call = tuple[str | int, ...]


class SingleflightStore(WrappedStore):
    """Shares ``head`` and all ``get`` verbs among callers of the same moment.

    A follower waits ``wait_s`` at most, then gets StoreUnavailable; when the store fails the
    leader, its followers fail with it. What ends a leader otherwise, as its own ``arrived`` may,
    is its own affair: one of its followers leads then. Whoever reads after a put or delete
    returned sees its effect: it never joins a call that began before.
    """

    def __init__(self, inner: PruneStore, *, wait_s: float) -> None:
        assert wait_s >= 0
        super().__init__(inner)
        self._wait_s = wait_s
        self._lock = Lock()
        self._flights: dict[str, dict[_Call, _Flight]] = {}

    def __repr__(self) -> str:
        return f"<SingleflightStore {len(self._flights)} keys under way of {self._inner!r}>"

    def get(self, key: str) -> bytes | None:
        """As the inner store; all callers get the same object."""
        found: bytes | None = self._shared(key, ("get",), lambda: self._inner.get(key))
        return found

    def get_range(self, key: str, start: int, end: int) -> bytes | None:
        """As the inner store; all callers get the same object."""
        call = ("get_range", start, end)
        found: bytes | None = self._shared(
            key, call, lambda: self._inner.get_range(key, start, end)
        )
        return found

    def get_into(
        self, key: str, buffer: memoryview, arrived: Arrived | None = None, start: int | None = None
    ) -> int | None:
        """As the inner store; shared among buffers of equal length, so that a value which is too
        long for one is too long for all. A follower's bytes arrive all at once."""
        told = _Told(arrived)
        found: int | None = self._shared(
            key,
            ("get_into", -1 if start is None else start, len(buffer)),
            lambda: self._inner.get_into(key, buffer, told.leading, start),
            buffer,
        )
        return told.finish(found)

    def head(self, key: str) -> Entry | None:
        """As the inner store."""
        found: Entry | None = self._shared(key, ("head",), lambda: self._inner.head(key))
        return found

    def put_if_absent(self, key: str, value: Buffer) -> bool:
        """As the inner store."""
        try:
            return self._inner.put_if_absent(key, value)
        finally:
            self._leave_behind(key)

    def put(self, key: str, value: Buffer) -> None:
        """As the inner store."""
        try:
            self._inner.put(key, value)
        finally:
            self._leave_behind(key)

    def delete(self, key: str) -> bool:
        """As the inner store."""
        try:
            return self._inner.delete(key)
        finally:
            self._leave_behind(key)

    def _leave_behind(self, key: str) -> None:
        with self._lock:
            self._flights.pop(key, None)

    def _shared(
        self,
        key: str,
        call: _Call,
        fetch: Callable[[], Any],
        buffer: memoryview | None = None,
    ) -> Any:
        deadline_s = min(time.monotonic() + self._wait_s, ends_s())
        while True:
            with self._lock:
                flights = self._flights.setdefault(key, {})
                flight = flights.get(call)
                if flight is None:
                    flight = flights[call] = _Flight()
                    break
                seat = flight.board(buffer)
            if not flight.wait(seat, deadline_s):
                raise StoreUnavailable(f"{key}: no answer for {self._wait_s:g} s")
            if seat.error is not None:
                raise type(seat.error)(*seat.error.args) from seat.error
            if not seat.again:
                return seat.value
        try:
            value = fetch()
        except BaseException as exc:
            self._land(key, call, flight)
            # Whoever has more time than the leader had asks again.
            flight.fail(exc if time.monotonic() < ends_s() else TimeoutError())
            raise
        self._land(key, call, flight)
        flight.finish(value, buffer)
        return value

    def _land(self, key: str, call: _Call, flight: "_Flight") -> None:
        """Let nobody join any more; only then is the outcome handed out."""
        with self._lock:
            flights = self._flights.get(key)
            if flights is not None and flights.get(call) is flight:
                del flights[call]
                if not flights:
                    del self._flights[key]


class _Told:
    """Tells a caller what has arrived: the leader as it does, a follower when all is there."""

    def __init__(self, arrived: Arrived | None) -> None:
        self._arrived = arrived
        self.leading = None if arrived is None else self._lead
        self._led = False

    def _lead(self, nbytes: int) -> None:
        assert self._arrived is not None
        self._led = True
        self._arrived(nbytes)

    def finish(self, nbytes: int | None) -> int | None:
        """The call's answer, told now to whoever did not lead."""
        if nbytes is not None and self._arrived is not None and not self._led:
            self._arrived(nbytes)
        return nbytes


class _Seat:
    """One follower: where its copy goes, and what came of it."""

    def __init__(self, buffer: memoryview | None) -> None:
        self.buffer = buffer
        self.done = False
        self.value: Any = None
        self.error: StoreError | None = None
        self.again = False
        """Whether the leader was cut short by what was not the store's fault."""


class _Flight:
    """One call under way and those who wait for it."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._seats: list[_Seat] = []

    def board(self, buffer: memoryview | None) -> _Seat:
        """A seat; asked for only while the flight can be joined."""
        seat = _Seat(buffer)
        with self._changed:
            self._seats.append(seat)
        return seat

    def wait(self, seat: _Seat, deadline_s: float) -> bool:
        """Until the seat is told, or the deadline has passed: False. The seat's buffer is not
        touched after this returns."""
        with self._changed:
            while not seat.done:
                if not self._changed.wait(deadline_s - time.monotonic()) and not seat.done:
                    self._seats.remove(seat)
                    return False
        return True

    def finish(self, value: Any, buffer: memoryview | None) -> None:
        """Give everybody the value, and the bytes if there are any."""
        with self._changed:
            for seat in self._seats:
                if seat.buffer is not None and buffer is not None and value is not None:
                    copy_bytes(seat.buffer, buffer, value)
                seat.value, seat.done = value, True
            self._changed.notify_all()

    def fail(self, exc: BaseException) -> None:
        """Give everybody the store's error; any other (an interrupt of the leader's thread, the end
        of its time, what its ``arrived`` raised) is the leader's own, and its followers try
        again."""
        with self._changed:
            for seat in self._seats:
                seat.error = exc if isinstance(exc, StoreError) else None
                seat.again = seat.error is None
                seat.done = True
            self._changed.notify_all()
