"""Bounds every call on a store that has time-outs only."""

import time
from collections.abc import Callable
from typing import TypeVar

from objkv.net.deadline import EndsBy
from objkv.stores.base import PruneStore
from objkv.stores.guarded import Verb, WrappedStore

T = TypeVar("T")


_WALKS: frozenset[Verb] = frozenset({"scan", "folders"})
"""Operators' calls that may have to look at many keys of others before they find one."""
_WALK_FACTOR = 12


class DeadlineStore(WrappedStore):
    """Each call ends ``seconds`` after it began, what operators use to look around (each entry of
    a scan) after twelve times as long, if its sockets keep deadlines: ``objkv.net.deadline``."""

    def __init__(self, inner: PruneStore, seconds: float) -> None:
        super().__init__(inner)
        self._seconds = seconds

    def __repr__(self) -> str:
        return f"<DeadlineStore {self._seconds:g} s for {self._inner!r}>"

    def check(self) -> None:
        """As the inner store, within the time."""
        with EndsBy(time.monotonic() + self._seconds):
            super().check()

    def _around(self, verb: Verb, call: Callable[[], T]) -> T:
        seconds = self._seconds * _WALK_FACTOR if verb in _WALKS else self._seconds
        with EndsBy(time.monotonic() + seconds):
            return call()
