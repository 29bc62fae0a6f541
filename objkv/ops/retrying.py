"""Both ends as operators' long commands see them: calls that may be mended by time are repeated.

Not scans: one that broke off cannot go on, and one that seemed to end early would be a lie.
"""

import random
import time
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

from objkv.errors import StoreError
from objkv.index.base import PruneIndex, Usage, WriteIndex
from objkv.index.guarded import GuardedIndex, for_operators
from objkv.net.guard import Unguarded
from objkv.stores.base import PruneStore
from objkv.stores.guarded import GuardedStore

P = ParamSpec("P")
T = TypeVar("T")

PATIENCE_S = 30.0
"""Longer than any breaker's pause by default."""
_FIRST_S = 0.2
_LONGEST_S = 5.0


class PatientStore(GuardedStore):
    """Repeats calls that failed transiently, for ``PATIENCE_S`` each."""

    def __init__(self, inner: PruneStore, *, sleep: Callable[[float], None] = time.sleep) -> None:
        super().__init__(inner, _Repeating(sleep))

    def once(self) -> PruneStore:
        """The store that repeats nothing, for calls that must not be repeated blindly."""
        return self._inner


def once(store: PruneStore) -> PruneStore:
    """``store``, or what it repeats the calls of."""
    return store.once() if isinstance(store, PatientStore) else store


def pauses() -> Iterator[float]:
    """Seconds to wait before each further attempt, until patience ends."""
    waited_s, next_s = 0.0, _FIRST_S
    while waited_s < PATIENCE_S:
        pause_s = next_s * random.uniform(0.5, 1.0)  # noqa: S311  # not a secret
        yield pause_s
        waited_s, next_s = waited_s + pause_s, min(2 * next_s, _LONGEST_S)


class PatientIndex(GuardedIndex):
    """Repeats calls that failed transiently, for ``PATIENCE_S`` each."""

    def __init__(
        self,
        inner: WriteIndex,
        admin: PruneIndex | None,
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(inner, _Repeating(sleep))
        self._admin = admin

    def pin(self, namespace: str, prefix_hash: bytes, *, until_s: int, ttl_s: int) -> bool:
        """See ``PruneIndex``."""
        pin = for_operators(self._admin).pin
        return self._guard.call("pin", pin, namespace, prefix_hash, until_s=until_s, ttl_s=ttl_s)

    def drop(self, namespace: str, prefix_hash: bytes) -> bool:
        """See ``PruneIndex``."""
        return self._guard.call("drop", for_operators(self._admin).drop, namespace, prefix_hash)

    def set_usage(self, usage: Usage) -> None:
        """See ``PruneIndex``."""
        self._guard.call("set_usage", for_operators(self._admin).set_usage, usage)


class _Repeating(Unguarded):
    def __init__(self, sleep: Callable[[float], None]) -> None:
        self._sleep = sleep

    def call(self, verb: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if verb != "scan":
            for pause_s in pauses():
                try:
                    return call(*args, **kwargs)
                except StoreError as exc:
                    if not exc.transient:
                        raise
                self._sleep(pause_s)
        return call(*args, **kwargs)
