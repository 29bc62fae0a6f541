"""A store behind a breaker: see ``objkv.breaker``."""

import time
from collections.abc import Callable
from typing import TypeVar

from objkv.breaker import Breaker
from objkv.stores.base import PruneStore
from objkv.stores.wrapped import Verb, WrappedStore

T = TypeVar("T")


class BreakerStore(WrappedStore):
    """Every verb goes through one breaker, whose settings these are."""

    def __init__(
        self,
        inner: PruneStore,
        *,
        failures: int,
        reset_s: float,
        clock: Callable[[], float] = time.monotonic,
        on_change: Callable[[bool], None] = lambda _: None,
    ) -> None:
        super().__init__(inner)
        self._breaker = Breaker(
            "store", failures=failures, reset_s=reset_s, clock=clock, on_change=on_change
        )

    def __repr__(self) -> str:
        return f"<BreakerStore {self._breaker.state} of {self._inner!r}>"

    @property
    def is_open(self) -> bool:
        """Whether the store is being left alone."""
        return self._breaker.is_open

    def _around(self, verb: Verb, call: Callable[[], T]) -> T:
        return self._breaker.call(verb, call)
