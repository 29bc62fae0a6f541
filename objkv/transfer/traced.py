"""Where the time of one payload goes, as spans: got, decoded while it came, copied at the end."""

from objkv.stores.base import Arrived
from objkv.tracing import NO_SPAN, Span, now_ns

_PAYLOADS_MAX = 64
"""Of one load; a prompt of hundreds of chunks tells the same hundreds of times."""


class PayloadTrace:
    """One get of a payload, or of a span of its layers. Belongs to one thread."""

    def __init__(self, load: Span, chunk: int, index: int) -> None:
        """``index``: of the move in its plan."""
        self._get: Span = NO_SPAN
        if load.is_on and index < _PAYLOADS_MAX:
            self._get = load.child("objkv.get", chunk=chunk)
        self._first_ns = self._last_ns = self._busy_ns = 0
        self.hot = False
        """Whether the bytes came from the hot store."""

    def came_hot(self) -> None:
        """The hot copy is what was read."""
        self.hot = True

    def decoding(self, arrived: Arrived) -> Arrived:
        """``arrived``, which decodes what has come, and is timed if anybody wants to know."""
        if not self._get.is_on:
            return arrived

        def timed(nbytes: int) -> None:
            begun_ns = now_ns()
            try:
                arrived(nbytes)
            finally:
                self._first_ns = self._first_ns or begun_ns
                self._last_ns = now_ns()
                self._busy_ns += self._last_ns - begun_ns

        return timed

    def copied(self, nbytes: int, codec: str) -> None:
        """All was verified, and is in its blocks."""
        if not self._get.is_on:
            return
        # Frames are decoded, and given to the lane, as they come: the copy is what was left to do.
        busy_ms = self._busy_ns / 1e6
        self._get.part("objkv.decode", self._first_ns, self._last_ns, busy_ms=busy_ms, codec=codec)
        self._get.part("objkv.copy", self._last_ns, now_ns())
        self._get.end(store=self._store, bytes=nbytes)

    def failed(self, reason: str) -> None:
        """It is a miss."""
        self._get.end(reason, store=self._store)

    @property
    def _store(self) -> str:
        return "hot" if self.hot else "bulk"
