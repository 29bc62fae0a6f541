"""Ranges of a value, which the caller and free threads of the store read together."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from threading import Condition
from time import monotonic

from objkv.errors import StoreUnavailable
from objkv.net.deadline import ends_s
from objkv.stores.s3.http import HttpResponse


@dataclass(slots=True)
class Range:
    """Bytes ``[start, end)`` of a buffer; those before ``at`` are done."""

    start: int
    end: int
    at: int = 0

    def __post_init__(self) -> None:
        self.at = self.start

    @property
    def is_done(self) -> bool:
        """Whether all its bytes are done."""
        return self.at == self.end


class _CallerLeft(Exception):
    """The buffer is no longer to be touched."""


Read = Callable[[Range, "RangeTeam"], None]
"""Reads one range on a thread of a pool, and writes to the buffer within ``RangeTeam.filling``."""


class RangeTeam:
    """The ranges of one value. A context manager: the buffer belongs to the caller, so after it
    exits, no thread touches it."""

    def __init__(self, ranges: list[Range], read: Read) -> None:
        self._context = copy_context()
        """The deadlines of the call."""
        self._changed = Condition()
        self._pending = deque(ranges)
        self._read: Read | None = read
        self._helping = 0
        self._filling: list[HttpResponse] = []
        self._error: Exception | None = None
        self._is_over = False

    def __enter__(self) -> "RangeTeam":
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._is_over = True
            self._read = None  # jobs that no thread has started must not keep the buffer
            self._pending.clear()
            for response in self._filling:
                response.shut()
            while self._filling:
                self._changed.wait()

    def take(self) -> Range | None:
        """Return a range that no thread has started, for the caller to read, or None. Raises what a
        thread raised."""
        with self._changed:
            if self._error is not None:
                raise self._error
            return self._pending.popleft() if self._pending else None

    def wait(self, on_progress: Callable[[], None]) -> None:
        """Wait until no thread works on a range, calling ``on_progress`` as ranges grow. Raises
        what a thread raised, and ``StoreUnavailable`` if the deadline passes."""
        while True:
            with self._changed:
                if self._error is not None:
                    raise self._error
                if not self._helping:
                    return
                left_s = ends_s() - monotonic()
                if left_s <= 0:
                    raise StoreUnavailable("the deadline passed before all ranges were read")
                self._changed.wait(left_s)
            on_progress()

    def grew(self) -> None:
        """Wake the waiting caller, because a range has grown."""
        with self._changed:
            self._changed.notify_all()

    @contextmanager
    def filling(self, response: HttpResponse) -> Iterator[None]:
        """While in it, a thread may write the body of ``response`` to the buffer: the caller waits
        for it, and shuts the connection if it leaves early."""
        with self._changed:
            if self._is_over:
                raise _CallerLeft
            self._filling.append(response)
        try:
            yield
        finally:
            with self._changed:
                self._filling.remove(response)
                self._changed.notify_all()
        if self._is_over:
            raise _CallerLeft

    def help(self) -> None:
        """Read ranges until none is left: the job of a thread of a pool."""
        self._context.copy().run(self._help)

    def _help(self) -> None:
        while True:
            with self._changed:
                read = self._read
                if read is None or not self._pending:
                    return
                self._helping += 1
                one = self._pending.popleft()
            error = None
            try:
                read(one, self)
            except Exception as exc:
                error = exc.with_traceback(None)  # whose frames hold the buffer
            del read
            with self._changed:
                self._helping -= 1
                self._error = self._error or error
                self._changed.notify_all()
