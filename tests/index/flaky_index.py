"""An index that fails on request and records calls."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from objkv.index.base import WriteIndex
from objkv.index.guarded import GuardedIndex
from objkv.net.guard import CallPolicy

P = ParamSpec("P")
T = TypeVar("T")


class FlakyIndex(GuardedIndex, CallPolicy):
    error: Exception | None = None
    after: Callable[[], object] = staticmethod(lambda: None)
    calls: tuple[str, ...] = ()

    def __init__(self, inner: WriteIndex) -> None:
        super().__init__(inner, guard=self)

    def call(self, verb: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        self.calls += (verb,)
        if self.error is not None:
            raise self.error
        result = call(*args, **kwargs)
        self.after()
        return result
