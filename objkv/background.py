"""Background threads: a pool runs what it is handed in order, and ends within a bound.

All of objkv's queues of background work are pools, so what is easily wrong is decided once: no
thread dies from what it runs, nothing finished is kept alive by a waiting thread, and closing
a pool hands back what no thread began. What a job is, how many may wait and how long, is the
owner's business. The threads are daemons: an interpreter that ends waits for none of them, which
``ThreadPoolExecutor`` would do for ever where a file system does not answer.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from threading import Condition, Lock, Thread, get_ident
from time import monotonic
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

JOIN_S = 1.0
"""How long to wait at least, when closing, for threads that have nothing left to do."""
Job = TypeVar("Job")


class Pool(Generic[Job]):
    """Safe from many threads. Nothing waits except ``drain`` and ``close``, and no method calls
    back while it holds the pool's lock, so callers may hold one of their own."""

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
            name: what threads are called, with a number behind it.
            run: does one job, on a thread of the pool.
            failed: takes what ``run`` raised; without it, that is logged as an error.
            begin: called by each thread before its first job.
            lazy: start a thread only when a job comes and all others are busy.
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
        """When each thread that is busy took its job."""
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
        """Jobs under way."""
        return len(self._begun)

    @property
    def is_closed(self) -> bool:
        """Whether nothing more is taken."""
        return self._closed

    def put(self, jobs: Iterable[Job], *, first: bool = False) -> bool:
        """Queue them all, before those that wait if ``first``. False, and none is, once ``close``
        was called, or where no thread can be started for them."""
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
        """Remove waiting jobs that are ``unwanted``; they are the caller's again."""
        removed: list[Job] = []
        kept: deque[Job] = deque()
        with self._lock:
            for job in self._jobs:  # looked at once: the answer may change meanwhile
                (removed if unwanted(job) else kept).append(job)
            if removed:
                self._jobs = kept
                self._ended.notify_all()
        return removed

    def hanging(self, seconds: float) -> int:
        """How many threads have been at one job for at least ``seconds``."""
        with self._lock:
            since = self._clock() - seconds
            return sum(begun <= since for begun in self._begun.values())

    def drain(self, seconds: float) -> bool:
        """Wait until no job waits or is under way, at most ``seconds``; whether that is so."""
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
        """Take nothing more, hand ``give_up`` what no thread began, and wait for the rest, at most
        ``join_s``. The names of threads that are still busy then: they end with their job.
        Idempotent."""
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

    def _has_threads_for(self, more: int) -> bool:
        needed = min(self._threads_max, len(self._jobs) + len(self._begun) + more)
        while len(self._threads) < needed:
            try:
                self._start_thread()
            except RuntimeError:  # the process may have no more threads, or is about to end
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
            except Exception as exc:  # a dead thread would let the queue fill up for ever
                self._take_error(job, exc)
            finally:
                del job  # what it holds must not live until the next one comes
                with self._lock:
                    del self._begun[get_ident()]
                    self._ended.notify_all()

    def _take_error(self, job: Job, error: Exception) -> None:
        try:
            if self._failed is None:
                raise error
            self._failed(job, error)
        except Exception:
            logger.exception("job failed unexpectedly pool=%s", self._name)


def join_all(threads: Sequence[Thread], seconds: float) -> list[str]:
    """Wait for the threads, at most ``seconds`` for all; the names of those still running."""
    end = monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - monotonic()))
    return [thread.name for thread in threads if thread.is_alive()]
