"""A few threads that nobody waits for at the end of the process.

``ThreadPoolExecutor`` joins its threads before the interpreter ends, however long that takes: with
an index on a file system whose server is gone, for ever.
"""

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Lock, Thread
from time import monotonic
from typing import Any, TypeVar

T = TypeVar("T")


class Threads:
    """``count`` of them, started at once. Safe from many threads."""

    def __init__(self, count: int, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = Lock()
        self._waiting: set[Future[Any]] = set()
        self._closed = False
        self._threads = [
            Thread(target=self._work, name=f"{name}_{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Have ``job`` done; what it raises is its future's. Raises RuntimeError once closed."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                outcome = job()
            except BaseException as exc:  # whoever asks for the outcome gets it
                future.set_exception(exc)
            else:
                future.set_result(outcome)

        with self._lock:
            if self._closed:
                raise RuntimeError("no more jobs are taken")
            self._waiting.add(future)
        future.add_done_callback(self._done)
        self._jobs.put(run)
        return future

    def close(self, seconds: float) -> None:
        """Cancel what no thread has begun, and wait for the rest, at most so long. Idempotent."""
        with self._lock:
            self._closed = True
            waiting = list(self._waiting)
        for future in waiting:
            future.cancel()
        for _ in self._threads:
            self._jobs.put(None)
        end = monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - monotonic()))

    def _done(self, future: Future[Any]) -> None:
        with self._lock:
            self._waiting.discard(future)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # what it holds must not live until the next one comes
