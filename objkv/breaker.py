"""Leaves a failing server alone for a while, so that nobody waits for what will not come.

pybreaker keeps the state and counts. It is told outcomes rather than given calls to make, because
its own ``call`` holds one lock for as long as the call lasts: every get would queue behind another.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from typing import TypeVar

import pybreaker

from objkv.errors import StoreError, StoreUnavailable

T = TypeVar("T")


class Breaker:
    """After ``failures`` transient errors in a row, answers ``StoreUnavailable`` at once.

    ``reset_s`` later one call is let through as a probe: if it succeeds the server is back, if not
    it is left alone for another ``reset_s``. Errors that time does not mend prove that the server
    answers, and count as success. ``on_change(True)`` is called once when it is given up,
    ``on_change(False)`` once when it is back: from the calling thread, under a lock, so it only
    logs or counts. Safe from many threads.
    """

    def __init__(
        self,
        what: str,
        *,
        failures: int,
        reset_s: float,
        clock: Callable[[], float] = time.monotonic,
        on_change: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self._what = what
        self._reset_s = reset_s
        self._clock = clock
        self._on_change = on_change
        self._lock = Lock()
        self._probing = False
        self._opened_s = 0.0
        self._breaker = pybreaker.CircuitBreaker(
            fail_max=failures,
            exclude=[lambda exc: not (isinstance(exc, StoreError) and exc.transient)],
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
        """Make ``call``, or raise ``StoreUnavailable`` without making it."""
        probe = self.is_open and self._enter(verb)
        try:
            value = call()
        except StoreError as exc:
            self._leave(exc, probe=probe)
            raise
        except BaseException:  # an interrupt says nothing of the server
            if probe:
                self._probing = False
            raise
        self._leave(None, probe=probe)
        return value

    def _enter(self, verb: str) -> bool:
        """Whether the call about to be made is the probe; refuses all others."""
        with self._lock:
            if not self.is_open:
                return False
            if self._probing or self._clock() < self._opened_s + self._reset_s:
                raise StoreUnavailable(
                    f"{verb}: the {self._what} keeps failing and is left alone for a while"
                )
            self._probing = True
            self._breaker.half_open()
            return True

    def _leave(self, error: StoreError | None, *, probe: bool) -> None:
        if error is None and not probe and not self._breaker.fail_counter:
            return  # the usual case, without a lock

        def outcome() -> None:
            if error is not None:
                raise error

        with self._lock:
            if self.is_open and not probe:
                return  # a call that began before the server was given up
            with suppress(StoreError):
                self._breaker.call(outcome)
            if self.is_open:
                self._opened_s = self._clock()
            if self.is_open != probe:
                self._on_change(self.is_open)
            self._probing = self._probing and not probe
