"""A store whose large gets are made by processes.

Python decrypts TLS on one core per process, however many threads it has. A fetching process moves
bytes from its own connections to memory that it shares with this one, and nothing else: guards,
verification and counters stay here. See ``docs/decisions/0040``.
"""

from itertools import count
from time import monotonic
from typing import Final

from objkv.errors import PayloadError, StoreUnavailable
from objkv.net.deadline import EndsBy, ends_s, is_trial
from objkv.stores.base import Arrived, PruneStore, ReadStore, check_key, copy_bytes
from objkv.stores.guarded import GuardedStore
from objkv.stores.processes.child import GetRequest
from objkv.stores.processes.pool import FetchPool
from objkv.stores.processes.process import LANE_BYTES, FetchLane, LaneLost
from objkv.telemetry import Recorder

_BYTES_MIN: Final = 256 << 10
"""Smaller buffers are filled here: two messages would cost more than they free."""
_SLACK_S: Final = 0.1
"""How long after the deadline a process may report why it failed."""


class ProcessGets(GuardedStore):
    """``inner``, whose large ``get_into`` are made by the processes of ``pool``. Closing this store
    closes both.

    A get that finds no process is made by ``inner``, and one whose process ends is continued by
    ``inner`` where it stopped: the caller must verify what it reads, as values may be replaced
    between the two. So if ``arrived`` then raises ``PayloadError``, the get has failed, and proves
    nothing about the value. The counters of a process are added to ``recorder``.
    """

    def __init__(
        self, inner: PruneStore, pool: FetchPool, *, deadline_s: float, recorder: Recorder
    ) -> None:
        """``deadline_s``: of a call, as that of the processes' store."""
        super().__init__(inner)
        self._pool, self._deadline_s, self._recorder = pool, deadline_s, recorder
        self._numbers = count(1)

    def get_into(
        self, key: str, buffer: memoryview, arrived: Arrived | None = None, start: int | None = None
    ) -> int | None:
        """See ``ReadStore``."""
        lane = self._pool.take() if _BYTES_MIN <= len(buffer) <= LANE_BYTES else None
        if lane is None:
            return self.inner.get_into(key, buffer, arrived, start)
        self._recorder.count("fetch_process_gets")
        end_s = min(monotonic() + self._deadline_s, ends_s())
        target = _Target(key, buffer, arrived, start)
        try:
            got = self._follow(lane, target, end_s)
        except LaneLost as exc:
            self._pool.lose(lane, exc)
        except BaseException:
            self._pool.leave(lane, end_s)
            raise
        else:
            self._pool.leave(lane, end_s)
            return got
        try:
            with EndsBy(end_s):
                return target.complete(self.inner)
        except PayloadError as exc:
            if not target.at:
                raise
            raise StoreUnavailable(
                f"get_into {key}: after {target.at} bytes the fetching process ended, and the rest "
                f"does not match them: {exc}"
            ) from exc

    def _follow(self, lane: FetchLane, target: "_Target", end_s: float) -> int | None:
        """Have a process make a get, and take over its bytes as they arrive."""
        key, nbytes = target.key, len(target.buffer)
        check_key(key)
        number = next(self._numbers)
        lane.ask(GetRequest(number, nbytes, target.start, end_s, is_trial(), key))
        while (answer := lane.read(end_s + _SLACK_S)) is not None:
            for name, amount in answer.counts.items():
                self._recorder.count(name, amount)
            answer.raise_error()
            if answer.nbytes is None:
                return None
            target.take(lane.memory, answer.nbytes)
            if answer.is_last:
                return answer.nbytes
        raise StoreUnavailable(
            f"get_into {key}: the deadline passed after {target.at} of {nbytes} bytes, and the "
            "fetching process did not answer"
        )

    def close(self) -> None:
        """End the processes, and close the inner store."""
        self._pool.close()
        super().close()


class _Target:
    """The caller's buffer, and how much of it is filled."""

    def __init__(
        self, key: str, buffer: memoryview, arrived: Arrived | None, start: int | None
    ) -> None:
        self.key, self.buffer, self.start = key, buffer, start
        self.at = 0
        self._arrived = arrived
        self._reported = -1

    def take(self, memory: memoryview, nbytes: int) -> None:
        """Copy and report the bytes that have arrived since the last call. Raises ``LaneLost`` if a
        process cannot have fetched that much."""
        at = self.at
        if not at <= nbytes <= len(self.buffer):
            raise LaneLost(f"{nbytes} bytes after {at}, for {len(self.buffer)}")
        if nbytes > at:
            copy_bytes(self.buffer[at:nbytes], memory[at:nbytes], nbytes - at)
            self.at = nbytes
        if self._arrived is not None and nbytes > self._reported:
            self._reported = nbytes
            self._arrived(nbytes)

    def complete(self, store: ReadStore) -> int | None:
        """Read the rest from ``store``. Bytes that were reported are not written again."""
        at, arrived = self.at, self._arrived
        if not at:
            return store.get_into(self.key, self.buffer, arrived, self.start)
        shifted = None if arrived is None else lambda nbytes: arrived(at + nbytes)
        got = store.get_into(self.key, self.buffer[at:], shifted, (self.start or 0) + at)
        return None if got is None else at + got
