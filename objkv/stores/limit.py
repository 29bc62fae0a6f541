"""At most so many calls at once: one replica cannot drown a store, nor itself in sockets."""

from collections.abc import Callable
from threading import BoundedSemaphore
from time import monotonic
from typing import TypeVar

from objkv.errors import StoreUnavailable
from objkv.net.deadline import ends_s
from objkv.stores.base import PruneStore
from objkv.stores.guarded import Verb, WrappedStore

T = TypeVar("T")


_WRITES: frozenset[Verb] = frozenset({"put", "put_if_absent", "delete"})


class LimitStore(WrappedStore):
    """Lets ``calls_max`` calls through, of which half may write, so that loads never wait for
    saves; who waits longer than ``wait_s`` gets StoreUnavailable."""

    def __init__(self, inner: PruneStore, *, calls_max: int, wait_s: float) -> None:
        assert calls_max > 0
        assert wait_s >= 0
        super().__init__(inner)
        self._calls_max = calls_max
        self._wait_s = wait_s
        self._slots = BoundedSemaphore(calls_max)
        self._writes = BoundedSemaphore(max(1, calls_max // 2))

    def __repr__(self) -> str:
        return f"<LimitStore {self._calls_max} calls of {self._inner!r}>"

    def _around(self, verb: Verb, call: Callable[[], T]) -> T:
        if verb not in _WRITES:
            return self._within(self._slots, verb, call)
        return self._within(self._writes, verb, lambda: self._within(self._slots, verb, call))

    def _within(self, slots: BoundedSemaphore, verb: Verb, call: Callable[[], T]) -> T:
        if not slots.acquire(timeout=min(self._wait_s, max(0.0, ends_s() - monotonic()))):
            limit = f"{self._calls_max} calls under way for {self._wait_s:g} s"
            raise StoreUnavailable(f"{verb}: {limit}")
        try:
            return call()
        finally:
            slots.release()
