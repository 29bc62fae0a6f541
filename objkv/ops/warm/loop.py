"""Calls of an asynchronous client from threads, which another thread can end at any time.

A thread that waits for a socket cannot be told to stop; a task can. A server hears at once that
nobody waits for its answer any more.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError
from threading import Lock, Thread
from typing import Any, TypeVar

T = TypeVar("T")


class LoopClosed(Exception):
    """The call was ended, or came too late."""


class Loop:
    """An event loop on a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._lock = Lock()
        self._closed = False
        self._thread = Thread(target=self._loop.run_forever, name="objkv-warm-http", daemon=True)
        self._thread.start()

    def call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What ``work`` returns; waits. Raises what it raises, and ``LoopClosed``."""
        with self._lock:
            if self._closed:
                raise LoopClosed
            future = asyncio.run_coroutine_threadsafe(work(), self._loop)
        try:
            return future.result()
        except CancelledError as exc:
            raise LoopClosed from exc

    def close(self, last: Callable[[], Awaitable[None]]) -> None:
        """End all calls, then do ``last``. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True

        async def end() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await last()

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
