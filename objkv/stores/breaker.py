"""A store behind breakers: see ``objkv.net.breaker``."""

from collections.abc import Callable
from typing import TypeVar

from objkv.net.breaker import Breakers
from objkv.stores.base import PruneStore
from objkv.stores.guarded import Verb, WrappedStore

T = TypeVar("T")

_WRITES: frozenset[Verb] = frozenset({"put_if_absent", "put", "delete"})


class BreakerStore(WrappedStore):
    """Every verb goes through the breaker of its direction."""

    def __init__(self, inner: PruneStore, breakers: Breakers) -> None:
        super().__init__(inner)
        self._breakers = breakers

    def __repr__(self) -> str:
        return f"<BreakerStore {self._breakers.state} of {self._inner!r}>"

    @property
    def breakers(self) -> Breakers:
        """Those of both directions."""
        return self._breakers

    def _around(self, verb: Verb, call: Callable[[], T]) -> T:
        return self._breakers.call("write" if verb in _WRITES else "read", verb, call)
