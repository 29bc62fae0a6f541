"""Both ends as operators' long commands see them: calls that may be mended by time are repeated.

Not scans: one that broke off cannot go on, and one that seemed to end early would be a lie.
"""

import random
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from objkv.errors import StoreError
from objkv.index.base import PruneIndex, Usage
from objkv.index.guarded import Verb as IndexVerb
from objkv.index.guarded import WrappedIndex
from objkv.stores.base import PruneStore
from objkv.stores.guarded import Verb, WrappedStore

T = TypeVar("T")

PATIENCE_S = 30.0
"""Longer than any breaker's pause by default."""
_FIRST_S = 0.2
_LONGEST_S = 5.0


class PatientStore(WrappedStore):
    """Repeats calls that failed transiently, for ``PATIENCE_S`` each."""

    def __init__(self, inner: PruneStore, *, sleep: Callable[[float], None] = time.sleep) -> None:
        super().__init__(inner)
        self._prune = inner
        self._sleep = sleep

    def _around(self, verb: Verb, call: Callable[[], T]) -> T:
        return call() if verb == "scan" else _repeated(call, self._sleep)

    def once(self) -> PruneStore:
        """The store that repeats nothing, for calls that must not be repeated blindly."""
        return self._prune


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


class PatientIndex(WrappedIndex):
    """Repeats calls that failed transiently, for ``PATIENCE_S`` each."""

    def __init__(self, inner: PruneIndex, *, sleep: Callable[[float], None] = time.sleep) -> None:
        super().__init__(inner)
        self._prune = inner
        self._sleep = sleep

    def pin(self, namespace: str, prefix_hash: bytes, *, until_s: int, ttl_s: int) -> bool:
        """As the inner index."""
        return _repeated(
            lambda: self._prune.pin(namespace, prefix_hash, until_s=until_s, ttl_s=ttl_s),
            self._sleep,
        )

    def drop(self, namespace: str, prefix_hash: bytes) -> bool:
        """As the inner index."""
        return _repeated(lambda: self._prune.drop(namespace, prefix_hash), self._sleep)

    def set_usage(self, usage: Usage) -> None:
        """As the inner index."""
        _repeated(lambda: self._prune.set_usage(usage), self._sleep)

    def _around(self, verb: IndexVerb, call: Callable[[], T]) -> T:
        return call() if verb == "scan" else _repeated(call, self._sleep)


def _repeated(call: Callable[[], T], sleep: Callable[[float], None]) -> T:
    for pause_s in pauses():
        try:
            return call()
        except StoreError as exc:
            if not exc.transient:
                raise
        sleep(pause_s)
    return call()
