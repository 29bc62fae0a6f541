"""Retries for operators' long commands: calls that failed transiently are repeated for a while.

Not scans: one that broke off cannot go on, and one that seemed to end early would be a lie.
"""

import random
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

from objkv.errors import StoreError

T = TypeVar("T")

PATIENCE_S = 30.0
"""Longer than any breaker's pause by default."""
_FIRST_S = 0.2
_LONGEST_S = 5.0
_NOT_REPEATED = ("scan", "unfinished", "discard", "check", "close")


def retrying(place: T, *, sleep: Callable[[float], None] = time.sleep) -> T:
    """``place``, a store or an index, each of whose calls is repeated for ``PATIENCE_S``."""
    return cast(T, _Retrying(place, sleep))


def once(place: T) -> T:
    """The store or index that repeats nothing, for calls that must not be repeated blindly."""
    return cast(T, place.inner) if isinstance(place, _Retrying) else place


def pauses() -> Iterator[float]:
    """Seconds to wait before each further attempt, until patience ends."""
    waited_s, next_s = 0.0, _FIRST_S
    while waited_s < PATIENCE_S:
        pause_s = next_s * random.uniform(0.5, 1.0)  # noqa: S311  # not a secret
        yield pause_s
        waited_s, next_s = waited_s + pause_s, min(2 * next_s, _LONGEST_S)


class _Retrying:
    """Has the methods of ``inner``."""

    def __init__(self, inner: object, sleep: Callable[[float], None]) -> None:
        self.inner = inner
        self._sleep = sleep

    def __getattr__(self, verb: str) -> Any:
        call = getattr(self.inner, verb)
        if verb in _NOT_REPEATED:
            return call

        def repeated(*args: Any, **named: Any) -> Any:
            for pause_s in pauses():
                try:
                    return call(*args, **named)
                except StoreError as exc:
                    if not exc.transient:
                        raise
                self._sleep(pause_s)
            return call(*args, **named)

        return repeated
