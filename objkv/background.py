"""Background threads: pools that run jobs in order, and alarms that wake a waiting thread.

All of objkv's background queues are pools, so they share three guarantees: an exception in a job
never ends a thread, a waiting thread keeps no finished job alive, and closing a pool returns the
jobs that no thread has started. The owner defines the jobs and limits their number and age. The
threads are daemons, so a process can exit while a file system hangs. ``ThreadPoolExecutor`` would
wait forever.
"""

import logging
import os
import select
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from threading import Condition, Lock, Thread, get_ident
from time import monotonic
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

JOIN_S = 1.0
"""The shortest time to wait for idle threads when closing."""
Job = TypeVar("Job")


class Pool(Generic[Job]):
    """Safe from many threads. Only ``drain`` and ``close`` block. No method runs a callback while
    it holds the pool's lock, so callers may hold their own locks."""

    def __init__(
        self,
        name: str,
        threads_max: int,
        run: Callable[[Job], None],
        *,
        failed: Callable[[Job, Exception], None] | None = None,
        begin: Callable[[], None] | None = None,
        lazy: bool = False,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """
        Args:
            name: name of the threads, followed by a number.
            run: runs one job on a thread of the pool.
            failed: receives exceptions of ``run``; by default they are logged as errors.
            begin: called by each thread before its first job.
            lazy: start a thread only when a job arrives while all others are busy.
            clock: for ``hanging``.
        """
        self._name = name
        self._threads_max = threads_max
        self._run = run
        self._failed = failed
        self._begin = begin
        self._clock = clock
        self._lock = Lock()
        self._came, self._ended = Condition(self._lock), Condition(self._lock)
        self._jobs: deque[Job] = deque()
        self._begun: dict[int, float] = {}
        """Start time of each busy thread's job, by thread."""
        self._threads: list[Thread] = []
        self._closed = False
        for _ in range(0 if lazy else threads_max):
            self._start_thread()

    @property
    def waiting(self) -> int:
        """Jobs that no thread has taken yet."""
        return len(self._jobs)

    @property
    def busy(self) -> int:
        """Jobs that are running."""
        return len(self._begun)

    @property
    def threads(self) -> int:
        """Threads that have not ended."""
        return sum(thread.is_alive() for thread in self._threads)

    @property
    def is_closed(self) -> bool:
        """Whether the pool refuses new jobs."""
        return self._closed

    def put(self, jobs: Iterable[Job], *, first: bool = False) -> bool:
        """Queue all jobs, ahead of waiting ones if ``first``. Return False and queue none after
        ``close``, or if a needed thread cannot be started."""
        jobs = list(jobs)
        with self._lock:
            if self._closed or not self._has_threads_for(len(jobs)):
                return False
            if first:
                self._jobs.extendleft(reversed(jobs))
            else:
                self._jobs.extend(jobs)
            self._came.notify(len(jobs))
        return True

    def take_back(self, unwanted: Callable[[Job], bool]) -> list[Job]:
        """Remove waiting jobs that are ``unwanted`` and return them to the caller."""
        removed: list[Job] = []
        kept: deque[Job] = deque()
        with self._lock:
            for job in self._jobs:  # call ``unwanted`` once per job: its answer may change
                (removed if unwanted(job) else kept).append(job)
            if removed:
                self._jobs = kept
                self._wake_drained()
        return removed

    def hanging(self, seconds: float) -> int:
        """Return the number of threads that have run their job for at least ``seconds``."""
        with self._lock:
            since = self._clock() - seconds
            return sum(begun <= since for begun in self._begun.values())

    def drain(self, seconds: float) -> bool:
        """Wait at most ``seconds`` until no job is waiting or running; return whether that
        happened."""
        end = monotonic() + seconds
        with self._lock:
            while self._jobs or self._begun:
                left_s = end - monotonic()
                if left_s <= 0:
                    return False
                self._ended.wait(left_s)
        return True

    def close(
        self,
        join_s: float = JOIN_S,
        *,
        give_up: Callable[[Sequence[Job]], object] = lambda _: None,
    ) -> list[str]:
        """Refuse new jobs, pass jobs that have not started to ``give_up``, and wait for the running
        ones, at most ``join_s``. Return the names of threads that are still busy; they end with
        their job. Idempotent."""
        with self._lock:
            self._closed = True
            left = list(self._jobs)
            self._jobs.clear()
            self._came.notify_all()
            self._ended.notify_all()
        give_up(left)
        return join_all(self._threads, join_s)

    def __str__(self) -> str:
        return f"{self.waiting} waiting, {self.busy} under way"

    def __repr__(self) -> str:
        return f"<Pool {self._name}: {self}>"

    def _wake_drained(self) -> None:
        """Wake the callers of ``drain`` if nothing is left. The lock must be held."""
        if not self._jobs and not self._begun:
            self._ended.notify_all()

    def _has_threads_for(self, more: int) -> bool:
        needed = min(self._threads_max, len(self._jobs) + len(self._begun) + more)
        while len(self._threads) < needed:
            try:
                self._start_thread()
            except RuntimeError:  # thread limit reached, or the interpreter is shutting down
                return False
        return True

    def _start_thread(self) -> None:
        name = f"{self._name}-{len(self._threads)}"
        thread = Thread(target=self._work, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _work(self) -> None:
        if self._begin is not None:
            self._begin()
        while True:
            with self._lock:
                while not self._jobs and not self._closed:
                    self._came.wait()
                if not self._jobs:
                    return
                job = self._jobs.popleft()
                self._begun[get_ident()] = self._clock()
            try:
                self._run(job)
            except Exception as exc:  # a dead thread would let the queue fill up
                self._take_error(job, exc)
            finally:
                del job  # release its memory now rather than when the next job arrives
                with self._lock:
                    del self._begun[get_ident()]
                    self._wake_drained()

    def _take_error(self, job: Job, error: Exception) -> None:
        try:
            if self._failed is None:
                raise error
            self._failed(job, error)
        except Exception:
            logger.exception("job failed unexpectedly pool=%s", self._name)


def join_all(threads: Sequence[Thread], seconds: float) -> list[str]:
    """Wait for the threads, at most ``seconds`` in all; return the names of those still running."""
    end = monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - monotonic()))
    return [thread.name for thread in threads if thread.is_alive()]


class Alarm:
    """An eventfd. Thread-safe: after ``close`` it does nothing."""

    def __init__(self, fd: int | None = None) -> None:
        """``fd``: an eventfd, which this object closes; by default a new one."""
        if fd is None:
            fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._fd = fd
        self._lock = Lock()

    def fileno(self) -> int:
        """Return the descriptor; -1 after ``close``."""
        return self._fd

    def ring(self) -> None:
        """Wake who waits for it, now or next. Never waits, never raises."""
        with self._lock:  # a closed number may name another file
            if self._fd >= 0:
                with suppress(BlockingIOError):  # it has rung 2^64 times, which is enough
                    os.eventfd_write(self._fd, 1)

    def calm(self) -> None:
        """Forget that it has rung."""
        with suppress(BlockingIOError):  # another thread has done so
            os.eventfd_read(self._fd)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def wait_for(alarms: Sequence[Alarm], seconds: float, *, until_hangup: int = -1) -> bool:
    """Wait until an alarm rings, for at most ``seconds``. Those that have rung are calmed.

    Returns False if the other side of the socket ``until_hangup`` has gone, which ends the wait.
    """
    poll = select.poll()
    for alarm in alarms:
        poll.register(alarm.fileno(), select.POLLIN)
    if until_hangup >= 0:
        poll.register(until_hangup, select.POLLRDHUP)
    ready = {fd for fd, _ in poll.poll(max(0.0, 1000 * seconds))}
    for alarm in alarms:
        if alarm.fileno() in ready:
            alarm.calm()
    return until_hangup not in ready
