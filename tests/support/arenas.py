"""Whether an arena is sound, and ones whose leases and connections end at the worst moment."""

from collections.abc import Callable
from typing import Any

from objkv.agent.arena_cache import ArenaCache, CachedPayload
from objkv.agent.client import AgentConnection
from objkv.errors import TransferError

POISON = 0xEE


class SpoilingArenaCache(ArenaCache):
    """Overwrites a payload when its last lease ends, and forgets it."""

    def __init__(self, *given: Any, keeps: bool = False) -> None:
        super().__init__(*given)
        self._keeps = keeps

    def release(self, one: CachedPayload, *waiter: Any) -> None:
        self._spoil(one)
        super().release(one, *waiter)

    def failed(self, one: CachedPayload, *why: Any) -> None:
        self._spoil(one)
        super().failed(one, *why)

    def _spoil(self, one: CachedPayload) -> None:
        if one.leases > 1 or self._keeps or self._closed:  # closed, it allots nothing any more
            return
        self.forget(one.key)
        if one.leases == 1 and one.offset >= 0:  # nobody has found it meanwhile
            self.view(one)[:] = bytes([POISON]) * one.nbytes


class CanBeLost:
    """A connection that fails once ``is_lost``, which its agent does not know."""

    is_lost = False

    @property
    def is_open(self) -> bool:
        return super().is_open and not self.is_lost

    def open(self, *wanted: Any, **how: Any) -> Any:
        self._check()
        return super().open(*wanted, **how)

    def release(self, leases: Any) -> None:
        self._check()
        super().release(leases)

    def wait(self, seconds: float, also: Any = None) -> bool:
        return not self.is_lost and super().wait(seconds, also)

    def _check(self) -> None:
        if self.is_lost:
            raise TransferError("the connection is lost")


def refuse_pin(address: int, nbytes: int) -> Callable[[], None]:
    """Page-lock nothing, as a device that registers no such memory."""
    raise RuntimeError(f"{nbytes} bytes are not registered")


class LossyConnection(CanBeLost, AgentConnection):
    """A connection that can be lost."""
