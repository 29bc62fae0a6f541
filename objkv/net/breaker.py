"""Leaves a failing server alone for a while, so that nobody waits for what will not come.

One breaker each for reading and for writing: a full disk, a replica that may only read, a primary
that is gone stop writes, and reads go on. pybreaker keeps the state and counts. It is told outcomes
rather than given calls to make, because its own ``call`` holds one lock for as long as the call
lasts: every get would queue behind another. When to try again, and by how many calls at once, is
decided here. See ``docs/decisions/0020``.
"""

import math
import random
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from threading import Lock
from typing import Literal, TypeVar

import pybreaker

from objkv.errors import LeftAlone, StoreBusy, StoreDenied, StoreError
from objkv.net.deadline import Trial, ends_s
from objkv.telemetry import Recorder

# Tells what happens again and again from what happens now and then.


class Burst:
    """Whether ``times`` of something lie within ``seconds`` and within ``calls``. Safe from many
    threads."""

    def __init__(self, times: int, *, seconds: float, calls: int) -> None:
        self._seconds = seconds
        self._calls = calls
        self._seen: deque[tuple[float, int]] = deque(maxlen=times)
        self._lock = Lock()

    def add(self, now_s: float, number: int) -> bool:
        """It happened to the call of that ``number``, of all that are made; True if that completes
        a burst, after which the next one begins."""
        with self._lock:
            self._seen.append((now_s, number))
            (first_s, first), is_full = self._seen[0], len(self._seen) == self._seen.maxlen
            if not is_full or now_s - first_s > self._seconds or number - first > self._calls:
                return False
            self._seen.clear()
            return True


T = TypeVar("T")
Direction = Literal["read", "write"]
DIRECTIONS: tuple[Direction, ...] = ("read", "write")
_PROBES_MAX = 2
"""Calls that try a server again and do not return, before others do so seldom: a file system that
hangs keeps the threads of all who ask it."""
_SELDOM = 10
"""Such others begin so many longest pauses after each other."""
_CUT_SHARE = 1 / 4
"""In the last part of a caller's time nothing more is begun (``objkv.stores.s3.client``)."""
_BUSY_MAX = 3
"""Reads that are answered ``StoreBusy`` close to each other before writes give way. One alone says
little: servers that grow, and those with many clients, answer so now and then."""
_BUSY_WITHIN_S = 3.0
_BUSY_WITHIN_READS = 30


@dataclass(frozen=True, slots=True)
class Patience:
    """When a server is given up, and when it is tried again."""

    failures: int = 5
    """So many in a row."""
    reset_s: float = 1.0
    """The longest first pause. Each pause is twice as long as the one before at most."""
    reset_max_s: float = 15.0
    """The longest pause: so long after a server is back, at the latest, it is tried."""
    enough_s: float = 1.0
    """A call whose caller had less time, and that ends with it, says nothing of the server."""


@dataclass(frozen=True, slots=True)
class Change:
    """News of one breaker."""

    end: str
    """``bulk``, ``hot`` or ``index``."""
    direction: Direction
    error: StoreError | None
    """Why it was given up; None: it is back."""


OnChange = Callable[[Change], None]
"""Told when something was given up, when it turned out to be refused rather than unanswered, and
when it is back. From any thread, under a lock: it only logs or counts."""


class Breaker:
    """After enough failures in a row, answers ``LeftAlone`` at once.

    A failure is an error that time may mend, or a denial; any other error proves that the server
    answers, and counts as success. After a pause one call is let through as a probe: if it succeeds
    the server is back, if not the next pause is longer, up to ``reset_max_s``. A probe that does
    not return is not waited for: another follows. Each pause is drawn from its upper half, so that
    many replicas do not probe in step. Safe from many threads.

    A call that its caller's own ``EndsBy`` cuts short is neither failure nor success, unless he had
    ``enough_s``: a server that got so long and gave nothing has failed him.
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
        self._lock = Lock()
        self._numbers = count()
        self._probes: set[int | None] = set()
        self._pauses = 0
        self._pauses_kept: int | None = None
        """Those of before, while it was opened for a moment only."""
        self._again_s = 0.0
        self._seldom_s = 0.0
        self._closed_s = -math.inf
        self._denied = False
        self._breaker = pybreaker.CircuitBreaker(
            fail_max=patience.failures,
            exclude=[lambda exc: not _is_failure(exc)],
            throw_new_error_on_trip=False,
        )

    @property
    def state(self) -> str:
        """``closed``, ``open`` or ``half-open``."""
        return str(self._breaker.current_state)

    @property
    def is_open(self) -> bool:
        """Whether the server is being left alone."""
        return self.state != pybreaker.STATE_CLOSED

    def call(self, verb: str, call: Callable[[], T]) -> T:
        """Make ``call``, or raise ``LeftAlone`` without making it."""
        probe = self._enter(verb) if self.is_open else None
        given_s = ends_s() - self.now_s()
        try:
            if probe is None:
                value = call()
            else:
                with Trial():  # asked once: many may be waiting to hear that it is back
                    value = call()
        except StoreError as exc:
            if self._is_cut(exc, given_s):
                self._let_go(probe)
            else:
                self._leave(probe, exc)
            raise
        except BaseException as exc:  # says nothing of the server
            self._let_go(probe, at_once=isinstance(exc, KeyboardInterrupt))
            raise
        self._leave(probe, None)
        return value

    def _enter(self, verb: str) -> int | None:
        """The number of the probe about to be made; None if the call is none."""
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
            self._pause()  # as if it failed: whether it ever returns nobody knows
            self._breaker.half_open()
            return probe

    def _leave(self, probe: int | None, error: StoreError | None) -> None:
        if error is None and probe is None and not self._breaker.fail_counter:
            return  # the usual case, without a lock

        def outcome() -> None:
            if error is not None:
                raise error

        with self._lock:
            self._probes.discard(probe)
            was_open = self.is_open
            if was_open:
                if probe is None:
                    return  # a call that began before the server was given up
                self._breaker.half_open()
            with suppress(StoreError):
                self._breaker.call(outcome)
            if self.is_open and not was_open:
                self._opened(error)
            elif was_open and not self.is_open:
                self._closed()
            elif was_open:
                self._pauses_kept = None
                if isinstance(error, StoreDenied) and not self._denied:
                    self._denied = True
                    self._tell(error)

    def _is_cut(self, error: StoreError, given_s: float) -> bool:
        """Whether it was the caller who ended the call; he had ``given_s`` when it began."""
        if not error.transient or isinstance(error, StoreBusy):
            return False  # an answer
        left_s = ends_s() - self.now_s()
        return given_s < self._patience.enough_s and left_s <= given_s * _CUT_SHARE

    def _let_go(self, probe: int | None, *, at_once: bool = False) -> None:
        """A call ended without news; if it was a probe another follows, after its pause."""
        with self._lock:
            self._probes.discard(probe)
            if at_once and probe is not None:
                self._again_s = self.clock()

    def open(self, error: StoreError, *, briefly: bool = False) -> None:
        """Give the server up now, however many calls failed. ``briefly``: for the first pause, and
        if it is back then, all is as if it had not been given up."""
        with self._lock:
            if not self.is_open:
                self._breaker.open()
                self._opened(error, briefly=briefly)

    def _opened(self, error: StoreError | None, *, briefly: bool = False) -> None:
        if self.clock() - self._closed_s > self._patience.reset_max_s:
            self._pauses = 0  # else it was back for a moment only
        self._pauses_kept = self._pauses if briefly else None
        self._pauses = 0 if briefly else self._pauses
        self._pause()
        self._denied = isinstance(error, StoreDenied)
        self._recorder.count(f"breaker_openings_{self._change.end}_{self._change.direction}")
        self._tell(error)

    def _closed(self) -> None:
        if self._pauses_kept is None:
            self._closed_s = self.clock()
        else:
            self._pauses, self._pauses_kept = self._pauses_kept, None
        self._probes.clear()  # those that still hang were let through in an outage that is over
        self._denied = False
        self._tell(None)

    def _pause(self) -> None:
        longest_s = min(
            self._patience.reset_max_s, self._patience.reset_s * 2.0 ** min(self._pauses, 60)
        )
        self._pauses += 1
        self._again_s = self.clock() + longest_s * (1 + self.draw()) / 2

    def _tell(self, error: StoreError | None) -> None:
        end, direction = self._change.end, self._change.direction
        self._recorder.level(f"breaker_open_{end}_{direction}", float(self.is_open))
        self._on_change(Change(end, direction, error))


class Breakers:
    """The two breakers of one end: what one direction suffers does not stop the other."""

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

    def call(self, direction: Direction, verb: str, call: Callable[[], T]) -> T:
        """Make ``call`` through the breaker of ``direction``. A server that is asked too much is
        spared all writes from then on: what is read somebody waits for. Reads have to hear so
        several times, and stop writes for a moment only."""
        if direction == "write":
            try:
                return self.write.call(verb, call)
            except StoreBusy as exc:
                self.write.open(exc)
                raise
        number = next(self._reads)
        try:
            return self.read.call(verb, call)
        except StoreBusy as exc:
            if self._busy.add(self.read.clock(), number):
                self.write.open(exc, briefly=True)
            raise

    @property
    def state(self) -> str:
        """Both states: ``reads closed, writes open``."""
        return f"reads {self.read.state}, writes {self.write.state}"


def _is_failure(error: BaseException) -> bool:
    return isinstance(error, StoreDenied) or (isinstance(error, StoreError) and error.transient)
