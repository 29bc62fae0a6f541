"""A index behind a breaker: see ``objkv.breaker``."""

import time
from collections.abc import Callable
from typing import TypeVar

from objkv.breaker import Breaker
from objkv.index.base import WriteIndex
from objkv.index.wrapped import Verb, WrappedIndex

T = TypeVar("T")


class BreakerIndex(WrappedIndex):
    """Every verb goes through one breaker, whose settings these are."""

    def __init__(
        self,
        inner: WriteIndex,
        *,
        failures: int,
        reset_s: float,
        clock: Callable[[], float] = time.monotonic,
        on_change: Callable[[bool], None] = lambda _: None,
    ) -> None:
        super().__init__(inner)
        self._breaker = Breaker(
            "index", failures=failures, reset_s=reset_s, clock=clock, on_change=on_change
        )

    def __repr__(self) -> str:
        return f"<BreakerIndex {self._breaker.state} of {self._inner!r}>"

    @property
    def is_open(self) -> bool:
        """Whether the index is being left alone."""
        return self._breaker.is_open

    def _around(self, verb: Verb, call: Callable[[], T]) -> T:
        return self._breaker.call(verb, call)
