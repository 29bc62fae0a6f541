"""Circuit breakers: a server that keeps failing gets no calls for a while, so none waits in vain.

One breaker each for reads and for writes: a full disk, a replica that may only read, a primary that
is gone stop writes, and reads go on. No lock is held during a call. See ``docs/decisions/0020`` and
``0026``.
"""

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
from objkv.net.deadline import Trial, ends_s
from objkv.telemetry import Recorder


class Burst:
    """Whether ``times`` events lie within ``seconds`` and within ``calls``: what happens again and
    again, not now and then. Safe from many threads."""

    def __init__(self, times: int, *, seconds: float, calls: int) -> None:
        self._seconds = seconds
        self._calls = calls
        self._seen: deque[tuple[float, int]] = deque(maxlen=times)
        self._lock = Lock()

    def add(self, now_s: float, number: int) -> bool:
        """It happened to call ``number`` of all calls; True if that completes a burst, after which
        the next one begins."""
        with self._lock:
            self._seen.append((now_s, number))
            (first_s, first), is_full = self._seen[0], len(self._seen) == self._seen.maxlen
            if not is_full or now_s - first_s > self._seconds or number - first > self._calls:
                return False
            self._seen.clear()
            return True


Direction = Literal["read", "write"]
DIRECTIONS: tuple[Direction, ...] = ("read", "write")
_PROBES_MAX = 2
"""Probes that do not return before further ones become rare: a file system that hangs keeps the
thread of every call."""
_SELDOM = 10
"""Longest pauses between such further probes."""
_CUT_SHARE = 1 / 4
"""In the last part of a caller's time no attempt begins (``objkv.stores.s3.client``)."""
_BUSY_MAX = 3
"""Reads answered ``StoreBusy`` close to each other before writes pause. One alone says little:
servers that grow, and those with many clients, answer so now and then."""
_BUSY_WITHIN_S = 3.0
_BUSY_WITHIN_READS = 30


@dataclass(frozen=True, slots=True)
class Patience:
    """When a circuit opens, and when it is probed."""

    failures: int = 5
    """Failures in a row that open it."""
    reset_s: float = 1.0
    """The longest first pause. Each pause is at most twice as long as the one before."""
    reset_max_s: float = 15.0
    """The longest pause: the latest time after a server is back when it is probed."""
    enough_s: float = 1.0
    """A call that ends with its caller's time, which was less than this, says nothing of the
    server."""


@dataclass(frozen=True, slots=True)
class Change:
    """One breaker opened or closed."""

    end: str
    """``bulk``, ``hot`` or ``index``."""
    direction: Direction
    error: StoreError | None
    """Why it opened; None: it closed."""


OnChange = Callable[[Change], None]
"""Called when a circuit opens, when a probe is refused rather than unanswered, and when it closes.
From any thread, under a lock: it only logs or counts."""


class Breaker:
    """After enough failures in a row, answers ``LeftAlone`` at once.

    A failure is an error that time may mend, or a denial; any other error proves that the server
    answers, and counts as success. After a pause one call is let through as a probe: if it succeeds
    the circuit closes, if not the next pause is longer, up to ``reset_max_s``. A probe that does
    not return is not waited for: another follows. Each pause is drawn from its upper half, so that
    many replicas do not probe in step. Safe from many threads.

    A call that its caller's own ``EndsBy`` cuts short is neither failure nor success, unless the
    caller had at least ``enough_s``; then the server counts as failed.
    """

    def __init__(
        self,
        end: str,
        direction: Direction,
        patience: Patience,
        recorder: Recorder,
        on_change: OnChange = lambda _: None,
    ) -> None:
        self._change = Change(end, direction, None)
        self._patience = patience
        self._recorder = recorder
        self._on_change = on_change
        self.clock: Callable[[], float] = time.monotonic
        self.now_s: Callable[[], float] = time.monotonic
        """The clock of ``EndsBy``."""
        self.draw: Callable[[], float] = random.random
        """A number in [0, 1)."""
        self.state: Literal["closed", "open", "half-open"] = "closed"
        self._failures = 0
        """In a row, while it is closed."""
        self._lock = Lock()
        self._numbers = count()
        self._probes: set[int | None] = set()
        self._pauses = 0
        self._pauses_kept: int | None = None
        """Those of before, while it is open for a moment only."""
        self._again_s = 0.0
        self._seldom_s = 0.0
        self._closed_s = -math.inf
        self._denied = False

    @property
    def is_open(self) -> bool:
        """Whether calls are refused, but for probes."""
        return self.state != "closed"

    def enter(self, verb: str) -> int | None:
        """The number of the probe about to be made; None if the circuit is closed."""
        with self._lock:
            if not self.is_open:
                return None
            now_s = self.clock()
            if now_s < self._again_s or (
                len(self._probes) >= _PROBES_MAX and now_s < self._seldom_s
            ):
                what = self._change
                self._recorder.count(f"breaker_refused_{what.end}_{what.direction}")
                raise LeftAlone(
                    f"{verb}: {what.end} {what.direction}s keep failing and are left alone for a "
                    "while"
                )
            probe = next(self._numbers)
            self._probes.add(probe)
            self._seldom_s = now_s + _SELDOM * self._patience.reset_max_s
            self._pause()  # as if it failed: it may never return
            self.state = "half-open"
            return probe

    def leave(self, probe: int | None, error: StoreError | None) -> None:
        """The call is over."""
        if error is None and probe is None and not self._failures:
            return  # the usual case, without a lock
        failed = error is not None and (error.transient or isinstance(error, StoreDenied))
        with self._lock:
            self._probes.discard(probe)
            if not self.is_open:
                self._failures = self._failures + 1 if failed else 0
                if self._failures >= self._patience.failures:
                    self._open(error)
            elif probe is None:
                pass  # a call that began before the circuit opened
            elif failed:
                self.state = "open"
                self._pauses_kept = None
                if isinstance(error, StoreDenied) and not self._denied:
                    self._denied = True
                    self._report(error)
            else:
                self._close()

    def is_cut(self, error: StoreError, given_s: float) -> bool:
        """Whether the caller's own deadline ended the call; it had ``given_s`` at its beginning."""
        if not error.transient or isinstance(error, StoreBusy):
            return False  # an answer
        left_s = ends_s() - self.now_s()
        return given_s < self._patience.enough_s and left_s <= given_s * _CUT_SHARE

    def let_go(self, probe: int | None, *, at_once: bool = False) -> None:
        """A call ended and says nothing; if it was a probe another follows, after its pause."""
        with self._lock:
            self._probes.discard(probe)
            if at_once and probe is not None:
                self._again_s = self.clock()

    def open(self, error: StoreError, *, briefly: bool = False) -> None:
        """Open now, however many calls failed. ``briefly``: for the first pause, and if the server
        answers then, all is as if it had not been opened."""
        with self._lock:
            if not self.is_open:
                self._open(error, briefly=briefly)

    def _open(self, error: StoreError | None, *, briefly: bool = False) -> None:
        self.state = "open"
        if self.clock() - self._closed_s > self._patience.reset_max_s:
            self._pauses = 0  # else it was closed for a moment only
        self._pauses_kept = self._pauses if briefly else None
        self._pauses = 0 if briefly else self._pauses
        self._pause()
        self._denied = isinstance(error, StoreDenied)
        self._recorder.count(f"breaker_openings_{self._change.end}_{self._change.direction}")
        self._report(error)

    def _close(self) -> None:
        self.state, self._failures = "closed", 0
        if self._pauses_kept is None:
            self._closed_s = self.clock()
        else:
            self._pauses, self._pauses_kept = self._pauses_kept, None
        self._probes.clear()  # those that still hang belong to an outage that is over
        self._denied = False
        self._report(None)

    def _pause(self) -> None:
        longest_s = min(
            self._patience.reset_max_s, self._patience.reset_s * 2.0 ** min(self._pauses, 60)
        )
        self._pauses += 1
        self._again_s = self.clock() + longest_s * (1 + self.draw()) / 2

    def _report(self, error: StoreError | None) -> None:
        end, direction = self._change.end, self._change.direction
        self._recorder.level(f"breaker_open_{end}_{direction}", float(self.is_open))
        self._on_change(Change(end, direction, error))


class Attempt:
    """A context manager around one call. Entering it raises ``LeftAlone`` if the call is not to be
    made; leaving it reports the outcome to the breaker, and ``on_busy`` of a ``StoreBusy``."""

    __slots__ = ("_breaker", "_given_s", "_number", "_on_busy", "_probe", "_trial", "_verb")

    def __init__(
        self,
        breaker: Breaker,
        verb: str,
        on_busy: Callable[[StoreBusy, int], None] = lambda _error, _number: None,
        number: int = 0,
    ) -> None:
        self._breaker, self._verb = breaker, verb
        self._on_busy, self._number = on_busy, number

    def __enter__(self) -> None:
        breaker = self._breaker
        self._probe = breaker.enter(self._verb) if breaker.is_open else None
        self._given_s = ends_s() - breaker.now_s()
        if self._probe is not None:  # sent once: many calls may wait for its outcome
            self._trial = Trial()
            self._trial.__enter__()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        breaker, probe = self._breaker, self._probe
        if probe is not None:
            self._trial.__exit__()
        if error is None:
            breaker.leave(probe, None)
        elif not isinstance(error, StoreError):  # says nothing of the server
            breaker.let_go(probe, at_once=isinstance(error, KeyboardInterrupt))
        elif breaker.is_cut(error, self._given_s):
            breaker.let_go(probe)
        else:
            breaker.leave(probe, error)
        if isinstance(error, StoreBusy):
            self._on_busy(error, self._number)


class Breakers:
    """The two breakers of one store or index: failing reads do not stop writes, nor the reverse.

    A server that answers ``StoreBusy`` gets no writes for a pause: requests wait for reads. One
    such answer to a write is enough; reads need several, and stop writes for a moment only.
    """

    def __init__(
        self,
        end: str,
        patience: Patience,
        recorder: Recorder,
        *,
        on_change: OnChange = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.read = Breaker(end, "read", patience, recorder, on_change)
        self.write = Breaker(end, "write", patience, recorder, on_change)
        self.read.clock = self.write.clock = clock
        self._reads = count()
        self._busy = Burst(_BUSY_MAX, seconds=_BUSY_WITHIN_S, calls=_BUSY_WITHIN_READS)

    def attempt(self, direction: Direction, verb: str) -> Attempt:
        """For one call."""
        if direction == "read":
            return Attempt(self.read, verb, self._busy_read, next(self._reads))
        return Attempt(self.write, verb, self._busy_write, 0)

    def _busy_read(self, error: StoreBusy, number: int) -> None:
        if self._busy.add(self.read.clock(), number):
            self.write.open(error, briefly=True)

    def _busy_write(self, error: StoreBusy, _number: int) -> None:
        self.write.open(error)

    @property
    def state(self) -> str:
        """Both states: ``reads closed, writes open``."""
        return f"reads {self.read.state}, writes {self.write.state}"
