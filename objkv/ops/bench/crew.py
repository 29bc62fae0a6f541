"""Threads that start together, each with a slab of its own."""

import mmap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Self

START_S = 300.0


class Crew:
    """``threads`` threads; a context manager. Whoever uses it is one thread."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="objkv-bench")
        self._start = Barrier(threads)

    def run(self, work: Callable[[int], None]) -> float:
        """Call ``work`` with each thread's number; seconds from the first start to the last end.

        Raises what one of them raised, once all have ended. The threads themselves look at the
        clock: on a busy machine whoever waits for them may wake up late.
        """

        def started(number: int) -> tuple[float, float]:
            self._start.wait(START_S)
            begun = time.perf_counter()
            work(number)
            return begun, time.perf_counter()

        futures = [self._pool.submit(started, number) for number in range(self.threads)]
        errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None:
                raise error
        times = [future.result() for future in futures]
        return max(ended for _, ended in times) - min(begun for begun, _ in times)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._start.abort()  # whoever still waits for the others
        self._pool.shutdown(wait=False, cancel_futures=True)


def make_slab(nbytes: int) -> memoryview:
    """``nbytes`` writable bytes that begin at a page, each of which was touched."""
    memory = mmap.mmap(-1, nbytes)
    slab = memoryview(memory)
    for at in range(0, nbytes, mmap.PAGESIZE):
        slab[at] = 1
    return slab
