"""Bounds every call on an index that has time-outs only."""

import time
from collections.abc import Callable
from typing import TypeVar

from objkv.index.base import WriteIndex
from objkv.index.guarded import Verb, WrappedIndex
from objkv.net.deadline import EndsBy

T = TypeVar("T")

_WALKS: frozenset[Verb] = frozenset({"scan", "namespaces", "usage"})
"""Operators' calls that may have to look at many keys of others before they find one."""
_WALK_FACTOR = 12


class DeadlineIndex(WrappedIndex):
    """Each call ends ``seconds`` after it began, what operators use to look around (each record of
    a scan) after twelve times as long, if its sockets keep deadlines: ``objkv.net.deadline``."""

    def __init__(self, inner: WriteIndex, seconds: float) -> None:
        super().__init__(inner)
        self._seconds = seconds

    def __repr__(self) -> str:
        return f"<DeadlineIndex {self._seconds:g} s for {self._inner!r}>"

    def check(self) -> None:
        """As the inner index, within the time."""
        with EndsBy(time.monotonic() + self._seconds):
            super().check()

    def _around(self, verb: Verb, call: Callable[[], T]) -> T:
        seconds = self._seconds * _WALK_FACTOR if verb in _WALKS else self._seconds
        with EndsBy(time.monotonic() + seconds):
            return call()
