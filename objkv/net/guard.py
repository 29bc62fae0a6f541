"""One guard around each store and index: what every call passes, in one method and one order.

    read-only role → slot → circuit breaker → recorder → deadline → the store or index itself

A call that the role forbids does nothing else. Waiting for a slot is neither recorded nor held
against the server: only this process is busy. Metrics count the calls that reach the store, not
those that a breaker refuses. The deadline is innermost, so that it bounds the call alone. See
``docs/decisions/0026``.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, Final, ParamSpec, TypeVar

from objkv.errors import StoreDenied, StoreError, StoreUnavailable
from objkv.net.breaker import Breakers, Direction
from objkv.net.deadline import EndsBy, ends_s
from objkv.telemetry import Recorder

P = ParamSpec("P")
T = TypeVar("T")

Outcome = Callable[[Any, tuple[Any, ...]], Iterable[tuple[str, float]]]
"""The counters to add to after a call, from its result and its arguments."""

_WALK_FACTOR = 12
_READER = "role is reader, and this would write: set role to writer or sweeper where it may"
_NOTHING: Final = nullcontext()


@dataclass(frozen=True, slots=True)
class Verb:
    """How a guard treats the calls of one verb. Counters are named without the guard's name."""

    direction: Direction
    totals: tuple[str, str] | None = None
    """Counters of all calls of this kind, and of those that failed."""
    walks: bool = False
    """Operators' calls that may look at many keys of others before they find one."""
    outcome: Outcome | None = None


class Unguarded:
    """Makes calls as they are. The base of what stands in a guard's place: retries, faults."""

    may_write = True

    @property
    def state(self) -> str:
        """One line, for ``repr``."""
        return "unguarded"

    def call(self, verb: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Make ``call``, which is ``verb`` of a store or an index (for ``scan``: its next item)."""
        return call(*args, **kwargs)

    def check_may_write(self, call: str) -> None:
        """Raise ``StoreDenied`` if the role forbids ``call``."""

    def deadline(self) -> AbstractContextManager[None]:
        """The bound on one call, for calls that nothing else guards."""
        return _NOTHING


class Slots:
    """At most ``calls_max`` calls at once, of which half may write, so that loads never wait for
    saves; a call that waits longer than ``wait_s`` for either is ``StoreUnavailable``."""

    def __init__(self, calls_max: int, wait_s: float) -> None:
        assert calls_max > 0
        assert wait_s >= 0
        self.calls_max = calls_max
        self.wait_s = wait_s
        self._all = _tokens(calls_max)
        self._writes = _tokens(max(1, calls_max // 2))

    def of(self, verb: str, direction: Direction) -> AbstractContextManager[None]:
        """Holds a slot for one call of ``verb``; may be entered by many threads."""
        pools = (self._all,) if direction == "read" else (self._writes, self._all)
        return _Slot(self, verb, pools)


def _tokens(count: int) -> "SimpleQueue[None]":
    # A queue rather than a semaphore: it is written in C, and takes a tenth of the time.
    tokens: SimpleQueue[None] = SimpleQueue()
    for _ in range(count):
        tokens.put(None)
    return tokens


class _Slot:
    def __init__(self, slots: Slots, verb: str, pools: "tuple[SimpleQueue[None], ...]") -> None:
        self._slots, self._verb, self._pools = slots, verb, pools

    def __enter__(self) -> None:
        held = 0
        try:
            for pool in self._pools:
                try:
                    pool.get(False)
                except Empty:
                    self._wait_for(pool)
                held += 1
        except BaseException:
            for pool in self._pools[:held]:
                pool.put(None)
            raise

    def _wait_for(self, pool: "SimpleQueue[None]") -> None:
        wait_s = self._slots.wait_s
        try:
            pool.get(timeout=min(wait_s, max(0.0, ends_s() - monotonic())))
        except Empty:
            limit = f"{self._slots.calls_max} calls under way for {wait_s:g} s"
            raise StoreUnavailable(f"{self._verb}: {limit}") from None

    def __exit__(self, *_: object) -> None:
        for pool in self._pools:
            pool.put(None)


class Guard(Unguarded):
    """Guards the calls of one store or index, and counts them under ``name``. Thread-safe.

    Per verb: ``<name>_<verb>_seconds`` observed, failed calls included, and
    ``<name>_<verb>_errors``, by class too: ``<name>_<verb>_errors_StoreDenied``; the rest is in
    ``verbs``. Names are made here once, not for each call.

    ``slots``: None where the place has a limit of its own. ``seconds``: the deadline of a call
    (twelve times as long for one that walks), heeded by punctual sockets; None where the place has
    its own. ``may_write``: False for the read-only role.
    """

    def __init__(
        self,
        name: str,
        verbs: Mapping[str, Verb],
        recorder: Recorder,
        breakers: Breakers,
        *,
        slots: Slots | None = None,
        seconds: float | None = None,
        may_write: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.breakers = breakers
        self.recorder = recorder
        self.clock = clock
        self.may_write = may_write
        self._slots = slots
        self._seconds = seconds
        self._rows = {verb: _Row(name, verb, how, slots, seconds) for verb, how in verbs.items()}
        self._names = _Names(name)

    @property
    def state(self) -> str:
        """One line: ``reads closed, writes open, 64 calls``."""
        parts = [self.breakers.state]
        parts += [] if self._slots is None else [f"{self._slots.calls_max} calls"]
        parts += [] if self._seconds is None else [f"{self._seconds:g} s"]
        return ", ".join(parts + ([] if self.may_write else ["read-only"]))

    def call(self, verb: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Make ``call`` as the module says, or raise ``StoreError`` without making it."""
        row = self._rows[verb]
        if not self.may_write and row.direction == "write":
            self.check_may_write(f"{verb} {args[0]}")
        with (
            row.slot,
            self.breakers.attempt(row.direction, verb),
            _Recorded(self, row),
            _NOTHING if row.bound_s is None else EndsBy(monotonic() + row.bound_s),
        ):
            result = call(*args, **kwargs)
        if row.outcome is not None:
            for name, amount in row.outcome(result, args):
                self.recorder.count(self._names[name], amount)
        return result

    def check_may_write(self, call: str) -> None:
        """See ``Unguarded``."""
        if not self.may_write:
            raise StoreDenied(f"{call}: {_READER}")

    def deadline(self) -> AbstractContextManager[None]:
        """See ``Unguarded``."""
        return _NOTHING if self._seconds is None else EndsBy(monotonic() + self._seconds)


class _Names(dict[str, str]):
    """Counters with the guard's name in front."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def __missing__(self, name: str) -> str:
        full = self[name] = f"{self._prefix}_{name}"
        return full


class _Row:
    """One verb of one guard, with all names made."""

    __slots__ = ("bound_s", "direction", "errors", "outcome", "seconds", "slot", "totals")

    def __init__(
        self, name: str, verb: str, how: Verb, slots: Slots | None, seconds: float | None
    ) -> None:
        self.direction = how.direction
        self.outcome = how.outcome
        self.seconds, self.errors = f"{name}_{verb}_seconds", f"{name}_{verb}_errors"
        self.totals = how.totals and (f"{name}_{how.totals[0]}", f"{name}_{how.totals[1]}")
        self.slot = _NOTHING if slots is None else slots.of(verb, how.direction)
        self.bound_s = seconds and seconds * (_WALK_FACTOR if how.walks else 1)


class _Recorded:
    """A context manager: one call, counted and timed."""

    __slots__ = ("_begun_s", "_guard", "_row")

    def __init__(self, guard: Guard, row: _Row) -> None:
        self._guard, self._row = guard, row

    def __enter__(self) -> None:
        self._begun_s = self._guard.clock()
        if self._row.totals is not None:
            self._guard.recorder.count(self._row.totals[0])

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        row, recorder = self._row, self._guard.recorder
        if isinstance(error, StoreError):
            if row.totals is not None:
                recorder.count(row.totals[1])
            recorder.count(row.errors)
            recorder.count(f"{row.errors}_{type(error).__name__}")
        recorder.observe(row.seconds, self._guard.clock() - self._begun_s)
