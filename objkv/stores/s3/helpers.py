"""Threads that help callers with the pieces of large payloads.

The buffer belongs to the caller: no thread touches it once the call has returned.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from objkv.errors import StoreUnavailable
from objkv.stores.s3.http import HttpConnection, NoAnswer

_CLOSE_S = 5.0
"""What a thread still does then ends with its call's deadline, and its result is dropped."""


class HelperPool:
    """At most ``threads_max`` threads, started when first needed and joined by ``close``. At most
    half of them write: reads always find some."""

    def __init__(self, threads_max: int) -> None:
        self.threads_max = threads_max
        self._changed = threading.Condition()
        self._jobs: deque[tuple[Callable[[], None], bool]] = deque()
        self._threads: list[threading.Thread] = []
        self._taken = self._writing = 0
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<HelperPool {self._taken}/{self.threads_max} busy>"

    def offer(self, job: Callable[[], None], *, writes: bool = False) -> bool:
        """Run ``job``, which must not raise, on a free thread; False if none is free."""
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
                except RuntimeError:  # the machine has no more
                    return False
                self._threads.append(thread)
            self._taken += 1
            self._writing += writes
            self._jobs.append((job, writes))
            self._changed.notify()
            return True

    def close(self) -> None:
        """Wait for running jobs, at most ``_CLOSE_S``, and end the threads. Idempotent."""
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
                del job  # it refers to the caller's buffer
                with self._changed:
                    self._taken -= 1
                    self._writing -= writes


@dataclass(slots=True)
class Piece:
    """Bytes ``[start, end)`` of a buffer, those before ``at`` done."""

    start: int
    end: int
    at: int = 0
    number: int = 0

    def __post_init__(self) -> None:
        self.at = self.start

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do."""
        return self.at == self.end


Work = Callable[[Piece, "Helper"], None]
"""Do one piece, its connection attached to the helper before the buffer is touched. ``NoAnswer``
leaves the piece to the caller."""


class Team:
    """The pieces of one payload, worked off by the caller and the free threads of ``pool``.

    A context manager; afterwards no thread of the pool touches the payload's buffer.
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
        self._connections: set[HttpConnection] = set()
        self._touching: set[Helper] = set()
        """Those that may have a view of the buffer; one that still connects has none."""
        self._is_over = False
        self._error: BaseException | None = None

    def __enter__(self) -> "Team":
        for _ in range(min(len(self._pending), self._pool.threads_max)):
            if not self._pool.offer(self._help, writes=self._writes):
                break
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._is_over = True
            self._pending.clear()
            for one in self._connections:
                one.shut()
            while self._touching:
                self._changed.wait()

    def take(self) -> Piece | None:
        """A piece that was not begun yet, now the caller's; None if there is none."""
        with self._changed:
            return self._pending.popleft() if self._pending else None

    def wait(self, deadline_s: float, on_progress: Callable[[], None]) -> None:
        """Until no helper works on a piece; ``on_progress`` is called as they grow. Pieces that a
        helper could not do are not ``is_done`` then. Raises what a helper raised, and
        ``StoreUnavailable`` when the deadline passes."""
        while True:
            with self._changed:
                if self._error is not None:
                    raise self._error
                if not self._under_way:
                    return
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise StoreUnavailable("the deadline passed while pieces were under way")
                self._changed.wait(left_s)
            on_progress()

    def grew(self) -> None:
        """Called by a helper whose piece has grown."""
        with self._changed:
            self._changed.notify_all()

    def _help(self) -> None:
        helper = Helper(self)
        while (piece := self._begin()) is not None:
            try:
                self._work(piece, helper)
            except NoAnswer:
                pass  # left to the caller
            except BaseException as exc:
                with self._changed:
                    self._error = self._error or exc  # raised where the caller waits
            with self._changed:  # no exception refers to the buffer any more
                self._under_way -= 1
                self._touching.discard(helper)
                self._changed.notify_all()

    def _begin(self) -> Piece | None:
        with self._changed:
            if not self._pending or self._error is not None:
                return None
            self._under_way += 1
            return self._pending.popleft()


class Helper:
    """One thread of the pool at work for a team. Knows its connection, so that the caller can end
    its use."""

    def __init__(self, team: Team) -> None:
        self._team = team

    def attach(self, connection: HttpConnection) -> None:
        """The caller may shut ``connection`` until it is released. Raises ``NoAnswer`` if the team
        has finished."""
        team = self._team
        with team._changed:
            if team._is_over:
                raise NoAnswer("the caller has finished")
            team._connections.add(connection)
            team._touching.add(self)
        connection.on_release = lambda: self._detach(connection)

    def let_go(self) -> None:
        """The buffer is not touched until the next ``attach``."""
        with self._team._changed:
            self._team._touching.discard(self)
            self._team._changed.notify_all()

    def grew(self) -> None:
        """See ``Team``."""
        self._team.grew()

    def _detach(self, connection: HttpConnection) -> None:
        with self._team._changed:
            self._team._connections.discard(connection)
