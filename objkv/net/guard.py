"""A guard around each store and index: all calls pass it in one method and one order.

    read-only role → slot → circuit breaker → recorder → deadline → the store or index itself

A call that the role forbids goes no further. Waiting for a slot is neither recorded nor counted
against the server, because only this process is busy. Metrics count calls that reach the store, and
not those that a breaker refuses. The deadline is innermost, so it bounds only the call itself. See
decision 26 in ``docs/decisions.md``.
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
        self._limit = f"no free slot within {wait_s:g} s, {calls_max} calls in progress"
        self._wait_s = wait_s
        self._all = _tokens(calls_max)
        self._writes = _tokens(max(1, calls_max // 2))

    def of(self, verb: str, direction: Direction) -> AbstractContextManager[None]:
        """Return a context manager that holds a slot during one call of ``verb``. Many threads may
        enter it."""
        pools = (self._all,) if direction == "read" else (self._writes, self._all)
        return _Slot(pools, self._wait_s, f"{verb}: {self._limit}")


def _tokens(count: int) -> "SimpleQueue[None]":
    # A queue takes a tenth of a semaphore's time, because it is written in C.
    tokens: SimpleQueue[None] = SimpleQueue()
    for _ in range(count):
        tokens.put(None)
    return tokens


class _Slot:
    def __init__(self, pools: "tuple[SimpleQueue[None], ...]", wait_s: float, refusal: str) -> None:
        self._pools, self._wait_s, self._refusal = pools, wait_s, refusal

    def __enter__(self) -> None:
        held = 0
        try:
            for pool in self._pools:
                pool.get(timeout=min(self._wait_s, max(0.0, ends_s() - monotonic())))
                held += 1
        except BaseException as exc:
            for pool in self._pools[:held]:
                pool.put(None)
            if isinstance(exc, Empty):
                raise StoreUnavailable(self._refusal) from None
            raise

    def __exit__(self, *_: object) -> None:
        for pool in self._pools:
            pool.put(None)


class Guard(CallPolicy):
    """Guards the calls of one store or index, and counts them under ``name``. Thread-safe.

    Per verb it observes ``<name>_<verb>_seconds``, including failed calls, and counts
    ``<name>_<verb>_errors``, also per class as ``<name>_<verb>_errors_StoreDenied``. ``verbs``
    defines the other counters.

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
        self._name = name
        self._seconds = seconds
        self._rows = {
            verb: _Row(
                how,
                f"{name}_{verb}",
                _NOTHING if slots is None else slots.of(verb, how.direction),
                seconds and seconds * (_WALK_FACTOR if how.walks else 1),
            )
            for verb, how in verbs.items()
        }

    def call(self, verb: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Make ``call`` in the module's order, or raise ``StoreError`` without making it."""
        row = self._rows[verb]
        how, count = row.how, self.recorder.count
        if not self.may_write and how.direction == "write":
            self.check_may_write(f"{verb} {args[0]}")
        with row.slot, self.breakers.attempt(how.direction, verb):
            begun_s = self.clock()
            if how.totals is not None:
                count(f"{self._name}_{how.totals[0]}")
            try:
                with _NOTHING if row.bound_s is None else EndsBy(monotonic() + row.bound_s):
                    result = call(*args, **kwargs)
            except StoreError as exc:
                if how.totals is not None:
                    count(f"{self._name}_{how.totals[1]}")
                count(f"{row.name}_errors")
                count(f"{row.name}_errors_{type(exc).__name__}")
                raise
            finally:
                self.recorder.observe(f"{row.name}_seconds", self.clock() - begun_s)
        if how.outcome is not None:
            for name, amount in how.outcome(result, args):
                count(f"{self._name}_{name}", amount)
        return result

    def check_may_write(self, call: str) -> None:
        """See ``CallPolicy``."""
        if not self.may_write:
            raise StoreDenied(f"{call}: {_READER}")

    def deadline(self) -> AbstractContextManager[None]:
        """See ``CallPolicy``."""
        return _NOTHING if self._seconds is None else EndsBy(monotonic() + self._seconds)


@dataclass(frozen=True, slots=True)
class _Row:
    """One verb of one guard."""

    how: Verb
    name: str
    slot: AbstractContextManager[None]
    bound_s: float | None
