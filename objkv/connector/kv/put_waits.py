"""Holds requests back for a moment, while another node puts what they need.

A lookup may answer that chunks are coming (``objkv.agent.unsaved.requests``). A request waits at
most as long as loading those chunks would save, so even in vain its prompt takes at most twice as
long as computing it, and at most ``_WAIT_S_MAX`` longer. Others are scheduled meanwhile.
"""

from collections.abc import Callable
from time import monotonic
from typing import Final

from objkv.cache.lookup import LookupService
from objkv.connector.kv.requests import TrackedRequest
from objkv.connector.kv.timing import Timing
from objkv.telemetry import Recorder

_WAIT_S_MAX: Final = 5.0
_WAIT_S_UNMEASURED: Final = 0.5
"""As long as it is not known how fast this replica computes."""


class PutWaits:
    """For the scheduler's thread only. Never waits itself."""

    def __init__(
        self,
        lookups: LookupService,
        timing: Timing,
        chunk_tokens: int,
        recorder: Recorder,
        *,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._lookups, self._timing = lookups, timing
        self._chunk_tokens, self._recorder, self._clock = chunk_tokens, recorder, clock
        self._until: dict[str, float] = {}
        """Until when each waiting request may wait."""
        self._ended: set[str] = set()
        """Requests that wait no more."""

    def __len__(self) -> int:
        return len(self._until)

    def holds(self, tracked: TrackedRequest, computed: int) -> bool:
        """Whether a request whose lookup has answered should wait for chunks beyond its
        ``computed`` tokens. The lookup is repeated meanwhile."""
        request_id, hashes = tracked.request.request_id, tracked.hashes
        if request_id in self._ended or hashes is None:
            return False
        coming, now = self._lookups.coming(request_id), self._clock()
        tokens = coming.stop * self._chunk_tokens - max(computed, coming.start * self._chunk_tokens)
        if not coming or tokens <= 0:
            self._end(request_id)
            return False
        if request_id not in self._until:
            spare_s = self._timing.spare_s(tokens)
            wait_s = _WAIT_S_UNMEASURED if spare_s is None else min(spare_s, _WAIT_S_MAX)
            if not wait_s:
                return False
            self._until[request_id] = now + wait_s
            self._recorder.count("put_waits")
        if now >= self._until[request_id]:
            self._recorder.count("put_waits_given_up")
            self._end(request_id)
            return False
        self._lookups.repeat(request_id, tracked.namespace, hashes, tracked.traceparent)
        return True

    def forget(self, request_id: str) -> None:
        """Forget a request that ended."""
        self._until.pop(request_id, None)
        self._ended.discard(request_id)

    def _end(self, request_id: str) -> None:
        if self._until.pop(request_id, None) is not None:
            self._ended.add(request_id)
