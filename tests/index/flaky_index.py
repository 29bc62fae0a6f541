"""An index that fails on request and remembers what it was asked."""

from collections.abc import Callable
from typing import TypeVar

from objkv.index.guarded import Verb, WrappedIndex

T = TypeVar("T")


class FlakyIndex(WrappedIndex):
    error: Exception | None = None
    after: Callable[[], object] = staticmethod(lambda: None)
    calls: tuple[Verb, ...] = ()

    def _around(self, verb: Verb, call: Callable[[], T]) -> T:
        self.calls += (verb,)
        if self.error is not None:
            raise self.error
        result = call()
        self.after()
        return result
