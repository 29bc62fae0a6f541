"""Circuit breakers: a server that keeps failing gets no calls for a while, so callers do not wait
for it. No lock is held during a call. See decision 20 in ``docs/decisions.md``."""

import logging
import math
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from threading import Lock
from typing import Literal

from objkv.errors import LeftAlone, StoreBusy, StoreDenied, StoreError
from objkv.net.deadline import ends_s
from objkv.telemetry import Recorder

logger = logging.getLogger(__name__)


Direction = Literal["read", "write"]
DIRECTIONS: tuple[Direction, ...] = ("read", "write")
_CUT_SHARE = 1 / 4
"""In this last part of a caller's time no attempt starts (``objkv.stores.s3.client``)."""
_BUSY_MAX = 3
"""Number of nearby ``StoreBusy`` replies to reads that pauses writes. Servers that scale up or have
many clients send a single one now and then."""
_BUSY_WITHIN_S = 3.0
_BUSY_WITHIN_READS = 30


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """When a circuit opens, and when it is probed."""

    failures: int = 5
    """Consecutive failures that open it."""
    reset_s: float = 1.0
    """Longest first pause. The limit doubles with each pause."""
    reset_max_s: float = 15.0
    enough_s: float = 1.0
    """If its caller's deadline ends a call that had less time, that is no failure of the server."""


class Breaker:
    """After enough consecutive failures, raises ``LeftAlone`` at once. Thread-safe.

    A transient error or a denial is a failure; any other proves that the server responds. After a
    pause one call passes as a probe. If it succeeds the circuit closes; otherwise the next pause is
    longer. A probe that hangs does not block the next one. Each pause is drawn from its upper half,
    so that many replicas do not probe in step. A call that its caller's own ``EndsBy`` cuts short
    is neither a failure nor a success, unless the caller had at least ``enough_s``.
    """

    def __init__(
        self,
        end: str,
        direction: Direction,
        limits: BreakerLimits,
        recorder: Recorder,
        *,
        logs: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self._name = f"{end} {direction}s", f"{end}_{direction}"
        self._limits = limits
        self._recorder = recorder
        self._logs = logs
        self.clock = clock
        self.now_s: Callable[[], float] = time.monotonic
        """The clock of ``EndsBy``."""
        self.draw: Callable[[], float] = random.random
        self.is_open = False
        """Whether all calls except probes are refused."""
        self._failures = 0
        self._lock = Lock()
        self._pauses = 0
        self._pauses_kept: int | None = None
        """The number of pauses before it opened briefly."""
        self._again_s = 0.0
        self._closed_s = -math.inf
        self._denied = False

    def begin_call(self, verb: str) -> bool:
        """Whether the call that the caller may make is a probe. Raises ``LeftAlone``."""
        with self._lock:
            if not self.is_open:
                return False
            if self.clock() < self._again_s:
                self._recorder.count(f"breaker_refused_{self._name}")
                raise LeftAlone(
                    f"{verb}: {self._what} keep failing, so they are paused (circuit open)"
                )
            self._pause()  # as if it had failed: it may never return
            return True

    def end_call(self, error: StoreError | None, *, is_probe: bool) -> None:
        if error is None and not is_probe and not self._failures:
            return  # the usual case, without a lock
        failed = error is not None and (error.transient or isinstance(error, StoreDenied))
        with self._lock:
            if not self.is_open:
                self._failures = self._failures + 1 if failed else 0
                if self._failures >= self._limits.failures:
                    self._open(error)
            elif not is_probe:
                pass  # a call that began before the circuit opened
            elif failed:
                self._pauses_kept = None
                if isinstance(error, StoreDenied) and not self._denied:
                    self._denied = True
                    self._report(error)
            else:
                self._close()

    def is_ended_by_caller(self, error: StoreError, given_s: float) -> bool:
        """Whether the caller's own deadline ended the call, for which it had ``given_s``."""
        if not error.transient or isinstance(error, StoreBusy):
            return False  # the server replied
        left_s = ends_s() - self.now_s()
        return given_s < self._limits.enough_s and left_s <= given_s * _CUT_SHARE

    def open(self, error: StoreError, *, briefly: bool = False) -> None:
        """Open now. ``briefly``: for the first pause; if the server responds after it, restore the
        earlier state."""
        with self._lock:
            if not self.is_open:
                self._open(error, briefly=briefly)

    def _open(self, error: StoreError | None, *, briefly: bool = False) -> None:
        self.is_open = True
        if self.clock() - self._closed_s > self._limits.reset_max_s:
            self._pauses = 0  # otherwise it had been closed only briefly
        self._pauses_kept = self._pauses if briefly else None
        self._pauses = 0 if briefly else self._pauses
        self._pause()
        self._denied = isinstance(error, StoreDenied)
        self._recorder.count(f"breaker_openings_{self._name}")
        self._report(error)

    def _close(self) -> None:
        self.is_open, self._failures = False, 0
        if self._pauses_kept is None:
            self._closed_s = self.clock()
        else:
            self._pauses, self._pauses_kept = self._pauses_kept, None
        self._denied = False
        self._report(None)

    def _pause(self) -> None:
        longest_s = min(
            self._limits.reset_max_s, self._limits.reset_s * 2.0 ** min(self._pauses, 60)
        )
        self._pauses += 1
        self._again_s = self.clock() + longest_s * (1 + self.draw()) / 2

    def _report(self, error: StoreError | None) -> None:
        """Under the lock: it only counts and logs."""
        self._recorder.level(f"breaker_open_{self._name}", float(self.is_open))
        if not self._logs:
            return
        if error is None:
            logger.warning("%s work again", self._what)
        elif isinstance(error, StoreDenied):  # only an operator can fix that
            logger.error("%s are refused, serving without them reason=%s", self._what, error)
        else:
            logger.warning("%s keep failing, serving without them reason=%s", self._what, error)


class Attempt:
    """A context manager around one call. Entering raises ``LeftAlone`` if the call must not be
    made. Leaving reports the outcome to the breaker, and a ``StoreBusy`` to ``on_busy``."""

    __slots__ = ("_breaker", "_given_s", "_is_probe", "_on_busy", "_verb")

    def __init__(
        self, breaker: Breaker, verb: str, on_busy: Callable[[StoreBusy], None] = lambda _: None
    ) -> None:
        self._breaker, self._verb, self._on_busy = breaker, verb, on_busy

    def __enter__(self) -> None:
        breaker = self._breaker
        self._is_probe = breaker.is_open and breaker.begin_call(self._verb)
        self._given_s = ends_s() - breaker.now_s()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._breaker.end_call(None, is_probe=self._is_probe)
        elif isinstance(error, StoreError) and not self._breaker.is_ended_by_caller(
            error, self._given_s
        ):
            self._breaker.end_call(error, is_probe=self._is_probe)
        # Anything else proves nothing about the server. After a probe another follows its pause.
        if isinstance(error, StoreBusy):
            self._on_busy(error)


class Breakers:
    """The two breakers of one store or index: a full disk, a read-only replica or a lost primary
    stops writes, and reads continue.

    A server that replies ``StoreBusy`` gets no writes for a pause, because requests wait for reads.
    One such reply to a write is enough. Reads need several, and stop writes only briefly.
    """

    def __init__(
        self,
        end: str,
        limits: BreakerLimits,
        recorder: Recorder,
        *,
        logs: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``end``: ``bulk``, ``hot``, ``index`` or ``disk``. ``logs``: a line at each change."""
        self.read = Breaker(end, "read", limits, recorder, logs=logs, clock=clock)
        self.write = Breaker(end, "write", limits, recorder, logs=logs, clock=clock)
        self._reads = count()
        self._lock = Lock()
        self._busy: deque[tuple[float, int]] = deque(maxlen=_BUSY_MAX)
        """When and at which read the server replied ``StoreBusy``."""

    def attempt(self, direction: Direction, verb: str) -> Attempt:
        if direction == "read":
            next(self._reads)
            return Attempt(self.read, verb, self._busy_read)
        return Attempt(self.write, verb, self.write.open)

    def _busy_read(self, error: StoreBusy) -> None:
        with self._lock:
            self._busy.append((self.read.clock(), next(self._reads)))
            (first_s, first), (last_s, last) = self._busy[0], self._busy[-1]
            is_near = last_s - first_s <= _BUSY_WITHIN_S and last - first <= _BUSY_WITHIN_READS
            if len(self._busy) < _BUSY_MAX or not is_near:
                return
            self._busy.clear()
        self.write.open(error, briefly=True)
