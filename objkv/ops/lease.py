"""A lease whose holder knows when it ends: calls that are repeated may last longer than it does."""

import time
from collections.abc import Callable

from objkv.ops.ends import Ends


class Lease:
    """The lease of what lies at ``path``. For one thread. Raises ``StoreError``."""

    def __init__(
        self, ends: Ends, path: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._index = ends.index
        self._owner = ends.owner
        self._ms = ends.lease_ms
        self._path = path
        self._clock = clock
        self._end_s = 0.0

    def take(self) -> bool:
        """Whether nobody else holds it."""
        began_s = self._clock()
        if not self._index.lease(self._path, self._owner, ttl_ms=self._ms):
            return False
        self._end_s = began_s + self._ms / 1000
        return True

    def renew(self) -> bool:
        """Hold it for its whole time from now; False if it may have ended before: then somebody
        else may have had it, and what was read under it is no longer known to be so."""
        end_s = self._end_s
        return self._clock() < end_s and self.take() and self._clock() < end_s

    def release(self) -> None:
        """Give it back."""
        self._index.release(self._path, self._owner)
