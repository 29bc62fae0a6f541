"""A guard around each store and index: all calls pass it in one method and one order.

    read-only role → slot → circuit breaker → recorder → deadline → the store or index itself

A call that the role forbids goes no further. Waiting for a slot is neither recorded nor counted
against the server, because only this process is busy. Metrics count calls that reach the store, and
not those that a breaker refuses. The deadline is innermost, so it bounds only the call itself. See
``docs/decisions/0026``.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, Final, Generic, ParamSpec, Protocol, TypeVar

from objkv.errors import StoreDenied, StoreError, StoreUnavailable
from objkv.net.breaker import Breakers, Direction
from objkv.net.deadline import EndsBy, ends_s
from objkv.telemetry import Recorder

P = ParamSpec("P")
T = TypeVar("T")

Outcome = Callable[[Any, tuple[Any, ...]], Iterable[tuple[str, float]]]
"""Returns the counters to increase after a call, given its result and its arguments."""

_WALK_FACTOR = 12
_READER = "role reader does not allow writes: set role to writer or sweeper"
_NOTHING: Final = nullcontext()


@dataclass(frozen=True, slots=True)
class Verb:
    """How a guard treats the calls of one verb. Counters are named without the guard's name."""

    direction: Direction
    totals: tuple[str, str] | None = None
    """Counters of all calls of this kind, and of the failed ones."""
    walks: bool = False
    """An operator's call that may read many unrelated keys before it finds one."""
    outcome: Outcome | None = None


class CallPolicy:
    """Makes each call directly. The base of guards, retries and fault injection."""

    may_write = True

    @property
    def state(self) -> str:
        """One line for ``repr``."""
        return "unguarded"

    def call(self, verb: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Make ``call``, which is ``verb`` of a store or an index (for ``scan``: its next item)."""
        return call(*args, **kwargs)

    def check_may_write(self, call: str) -> None:
        """Raise ``StoreDenied`` if the role forbids ``call``."""

    def deadline(self) -> AbstractContextManager[None]:
        """Return a context manager that bounds one call, for calls that skip the guard."""
        return _NOTHING


class Closing(Protocol):
    """A store or an index."""

    def close(self) -> None:
        """Release connections. Idempotent."""


B = TypeVar("B", bound=Closing)


class Guarded(Generic[B]):
    """``inner`` behind ``guard``, by methods that ``guarded`` makes. Closing this closes
    ``inner``."""

    def __init__(self, inner: B, guard: CallPolicy | None = None) -> None:
        self.inner = inner
        self.guard = guard or CallPolicy()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.guard.state}, of {self.inner!r}>"

    def close(self) -> None:
        """Close ``inner``."""
        self.inner.close()


def guarded(verb: str) -> Callable[..., Any]:
    """Return a method that calls ``verb`` of ``self.inner`` through ``self.guard``."""

    def method(self: Guarded[Any], *args: Any, **kwargs: Any) -> Any:
        return self.guard.call(verb, getattr(self.inner, verb), *args, **kwargs)

    return method


def guarded_scan(self: Guarded[Any], start: str) -> Iterator[Any]:
    """Scan ``self.inner``. Each item passes ``self.guard``, so its consumer holds no slot while
    it works."""
    items = self.inner.scan(start)
    while (item := self.guard.call("scan", next, items, None)) is not None:
        yield item


class Slots:
    """Limits concurrent calls to ``calls_max``. At most half of them may write, so that loads never
    wait for saves. A call that waits longer than ``wait_s`` for a slot raises ``StoreUnavailable``.
    """

    def __init__(self, calls_max: int, wait_s: float) -> None:
        assert calls_max > 0
        assert wait_s >= 0
        self.calls_max = calls_max
        self.wait_s = wait_s
        self._all = _tokens(calls_max)
        self._writes = _tokens(max(1, calls_max // 2))

    def of(self, verb: str, direction: Direction) -> AbstractContextManager[None]:
        """Return a context manager that holds a slot during one call of ``verb``. Many threads may
        enter it."""
        pools = (self._all,) if direction == "read" else (self._writes, self._all)
        return _Slot(self, verb, pools)


def _tokens(count: int) -> "SimpleQueue[None]":
    # A queue takes a tenth of a semaphore's time, because it is written in C.
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
            limit = f"no free slot within {wait_s:g} s, {self._slots.calls_max} calls in progress"
            raise StoreUnavailable(f"{self._verb}: {limit}") from None

    def __exit__(self, *_: object) -> None:
        for pool in self._pools:
            pool.put(None)


class Guard(CallPolicy):
    """Guards the calls of one store or index, and counts them under ``name``. Thread-safe.

    Per verb it observes ``<name>_<verb>_seconds``, including failed calls, and counts
    ``<name>_<verb>_errors``, also per class as ``<name>_<verb>_errors_StoreDenied``. ``verbs``
    defines the other counters. All names are built here once.

    ``slots``: None if the backend has its own limit. ``seconds``: the deadline of a call (twelve
    times as long for one that walks), which deadline sockets respect; None if the backend has its
    own. ``may_write``: False for the read-only role.
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
        """Make ``call`` in the module's order, or raise ``StoreError`` without making it."""
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
        """See ``CallPolicy``."""
        if not self.may_write:
            raise StoreDenied(f"{call}: {_READER}")

    def deadline(self) -> AbstractContextManager[None]:
        """See ``CallPolicy``."""
        return _NOTHING if self._seconds is None else EndsBy(monotonic() + self._seconds)


class _Names(dict[str, str]):
    """Counters prefixed with the guard's name."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def __missing__(self, name: str) -> str:
        full = self[name] = f"{self._prefix}_{name}"
        return full


class _Row:
    """One verb of one guard, with all names built."""

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
    """A context manager that counts and times one call."""

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
