"""Pieces of large payloads, and threads that help callers with them.

The buffer belongs to the caller: no thread touches it after the call has returned.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from objkv.errors import StoreUnavailable
from objkv.stores.s3.http import ConnectionFailed, HttpConnection

_CLOSE_S = 5.0
"""A thread that is still busy after this ends with its call's deadline, and its result is
discarded."""


class HelperPool:
    """At most ``threads_max`` threads, started on demand and joined by ``close``. At most half of
    them write, so reads always find free ones."""

    def __init__(self, threads_max: int) -> None:
        self.threads_max = threads_max
        self._changed = threading.Condition()
        self._jobs: deque[tuple[Callable[[], None], bool]] = deque()
        self._threads: list[threading.Thread] = []
        self._taken = self._writing = 0
        self._is_closed = False

    def offer(self, job: Callable[[], None], *, writes: bool = False) -> bool:
        """Run ``job``, which must not raise, on a free thread. Return False if there is none."""
        with self._changed:
            if self._is_closed or self._taken >= self.threads_max:
                return False
            if writes and self._writing >= (self.threads_max + 1) // 2:
                return False
            if len(self._threads) <= self._taken:
                name = f"objkv-range-{len(self._threads)}"
                thread = threading.Thread(target=self._run, name=name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the machine has no more threads
                    return False
                self._threads.append(thread)
            self._taken += 1
            self._writing += writes
            self._jobs.append((job, writes))
            self._changed.notify()
            return True

    def close(self) -> None:
        """Wait at most ``_CLOSE_S`` for running jobs, and end the threads. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            threads = list(self._threads)
        end_s = time.monotonic() + _CLOSE_S
        for thread in threads:
            thread.join(max(0.0, end_s - time.monotonic()))

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._jobs:
                    if self._is_closed:
                        return
                    self._changed.wait()
                job, writes = self._jobs.popleft()
            try:
                job()
            finally:
                del job  # it holds a reference to the caller's buffer
                with self._changed:
                    self._taken -= 1
                    self._writing -= writes


@dataclass(slots=True)
class Piece:
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


Work = Callable[[Piece, "Team"], object]
"""Does one piece on a thread of the pool, and attaches its connection to the team before touching
the buffer. If it fails, the caller does the piece, and meets the reason itself."""


class Team:
    """The pieces of one payload, which the caller and the free threads of ``pool`` work on.

    A context manager. After it exits, no thread of the pool touches the payload's buffer.
    """

    def __init__(
        self, pool: HelperPool, pieces: list[Piece], work: Work, *, writes: bool = False
    ) -> None:
        self._pool = pool
        self._writes = writes
        self._work = work
        self._changed = threading.Condition()
        self._pending = deque(pieces)
        self._under_way = 0
        self._touching: dict[int, HttpConnection | None] = {}
        """Threads that may have a view of the buffer, which one that is still connecting has not,
        and their connections, None once released."""
        self._is_over = False

    def __enter__(self) -> "Team":
        for _ in range(min(len(self._pending), self._pool.threads_max)):
            if not self._pool.offer(self._help, writes=self._writes):
                break
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._is_over = True
            self._pending.clear()
            for connection in self._touching.values():
                if connection is not None:
                    connection.shut()
            while self._touching:
                self._changed.wait()

    def take(self) -> Piece | None:
        """Return a piece that no thread has started, for the caller to do, or None."""
        with self._changed:
            return self._pending.popleft() if self._pending else None

    def wait(self, deadline_s: float, on_progress: Callable[[], None]) -> None:
        """Wait until no helper works on a piece, calling ``on_progress`` as pieces grow. Pieces
        that a helper could not do are then not ``is_done``. Raises ``StoreUnavailable`` if the
        deadline passes."""
        while True:
            with self._changed:
                if not self._under_way:
                    return
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise StoreUnavailable("the deadline passed before all pieces were transferred")
                self._changed.wait(left_s)
            on_progress()

    def attach(self, connection: HttpConnection) -> None:
        """Allow the caller to shut this thread's ``connection`` until its release. Raises
        ``ConnectionFailed`` if the caller has finished."""
        with self._changed:
            if self._is_over:
                raise ConnectionFailed("the caller has finished")
            self._touching[threading.get_ident()] = connection
        connection.on_release = self._released

    def _released(self) -> None:
        with self._changed:
            self._touching[threading.get_ident()] = None

    def grew(self) -> None:
        """Wake the waiting caller, because a helper's piece has grown."""
        with self._changed:
            self._changed.notify_all()

    def _help(self) -> None:
        while (piece := self._begin()) is not None:
            with suppress(Exception):
                self._work(piece, self)
            with self._changed:  # no exception holds a reference to the buffer now
                self._under_way -= 1
                self._touching.pop(threading.get_ident(), None)
                self._changed.notify_all()

    def _begin(self) -> Piece | None:
        with self._changed:
            if not self._pending:
                return None
            self._under_way += 1
            return self._pending.popleft()
