"""At most so many calls at once: one replica cannot drown a store, nor itself in sockets."""

from collections.abc import Callable
from threading import BoundedSemaphore
from typing import TypeVar

from objkv.errors import StoreUnavailable
from objkv.stores.base import PruneStore
from objkv.stores.wrapped import Verb, WrappedStore

T = TypeVar("T")


class LimitStore(WrappedStore):
    """Lets ``calls_max`` calls through; who waits longer than ``wait_s`` gets StoreUnavailable."""

    def __init__(self, inner: PruneStore, *, calls_max: int, wait_s: float) -> None:
        assert calls_max > 0
        assert wait_s >= 0
        super().__init__(inner)
        self._calls_max = calls_max
        self._wait_s = wait_s
        self._slots = BoundedSemaphore(calls_max)

    def __repr__(self) -> str:
        return f"<LimitStore {self._calls_max} calls of {self._inner!r}>"

    def _around(self, verb: Verb, call: Callable[[], T]) -> T:
        if not self._slots.acquire(timeout=self._wait_s):
            limit = f"{self._calls_max} calls under way for {self._wait_s:g} s"
            raise StoreUnavailable(f"{verb}: {limit}")
        try:
            return call()
        finally:
            self._slots.release()
