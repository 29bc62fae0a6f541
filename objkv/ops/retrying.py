"""Retries transient failures in long commands.

Scans are not retried: they cannot be resumed, and a scan that ends early would look complete.
"""

import random
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

from objkv.errors import StoreError

T = TypeVar("T")

PATIENCE_S = 30.0
"""Longer than the default pause of any circuit breaker."""
_FIRST_S = 0.2
_LONGEST_S = 5.0
_NOT_REPEATED = ("scan", "unfinished", "discard", "check", "close")


def retrying(place: T, *, sleep: Callable[[float], None] = time.sleep) -> T:
    """Wrap a store or an index so that its calls are retried for ``PATIENCE_S``."""
    return cast(T, _Retrying(place, sleep))


def once(place: T) -> T:
    """Return the store or index without retries, for calls that must not be repeated blindly."""
    return cast(T, place.inner) if isinstance(place, _Retrying) else place


def pauses() -> Iterator[float]:
    """Yield the seconds to wait before each further attempt, for ``PATIENCE_S`` in all."""
    waited_s, next_s = 0.0, _FIRST_S
    while waited_s < PATIENCE_S:
        pause_s = next_s * random.uniform(0.5, 1.0)  # noqa: S311  # not a secret
        yield pause_s
        waited_s, next_s = waited_s + pause_s, min(2 * next_s, _LONGEST_S)


class _Retrying:
    """Forwards all methods of ``inner``."""

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
