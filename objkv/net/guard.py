"""A guard around each store and index: all calls pass it in one order.

    read-only role → circuit breaker → recorder → deadline → the store or index itself

Metrics do not count calls that role or breaker refuse. See decision 26 in ``docs/decisions.md``.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass
from time import monotonic, perf_counter
from typing import Any, Final, Generic, ParamSpec, Protocol, TypeVar

from objkv.errors import StoreDenied, StoreError
from objkv.net.breaker import Breakers, Direction
from objkv.net.deadline import EndsBy
from objkv.telemetry import Recorder

P = ParamSpec("P")
T = TypeVar("T")

Outcome = Callable[[Any, tuple[Any, ...]], Iterable[tuple[str, float]]]
"""Returns the counters to increase after a call, by its result and its arguments."""

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
    def is_failing(self) -> bool:
        """Whether writes are known to fail now."""
        return False

    def call(self, verb: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Make ``call``, which is ``verb`` of a store or an index (for ``scan``: its next item)."""
        return call(*args, **kwargs)

    def check_may_write(self, call: str) -> None:
        """Raise ``StoreDenied`` if the role forbids ``call``."""

    def deadline(self) -> AbstractContextManager[None]:
        """Return what bounds one call, for calls that skip the guard."""
        return _NOTHING


class Closeable(Protocol):
    """A store or an index."""

    def close(self) -> None:
        """Release connections. Idempotent."""


B = TypeVar("B", bound=Closeable)


class Guarded(Generic[B]):
    """``inner`` behind ``guard``, by methods that ``guarded`` makes."""

    def __init__(self, inner: B, guard: CallPolicy | None = None) -> None:
        self.inner = inner
        self.guard = guard or CallPolicy()

    def close(self) -> None:
        self.inner.close()


def guarded(verb: str) -> Callable[..., Any]:
    """Return a method that calls ``verb`` of ``self.inner`` through ``self.guard``."""

    def method(self: Guarded[Any], *args: Any, **kwargs: Any) -> Any:
        return self.guard.call(verb, getattr(self.inner, verb), *args, **kwargs)

    return method


def guarded_scan(self: Guarded[Any], start: str) -> Iterator[Any]:
    """Scan ``self.inner``. Each item passes ``self.guard``."""
    items = self.inner.scan(start)
    while (item := self.guard.call("scan", next, items, None)) is not None:
        yield item


@dataclass(eq=False)
class Guard(CallPolicy):
    """Guards the calls of one store or index, and counts them under ``name``. Thread-safe.

    Per verb it observes ``<name>_<verb>_seconds``, including failed calls, and counts
    ``<name>_<verb>_errors``, also per class as ``<name>_<verb>_errors_StoreDenied``.

    ``verbs``: all of them, with their other counters. ``seconds``: the deadline of a call (twelve
    times as long for one that walks); None if the backend has its own. ``may_write``: False for the
    read-only role.
    """

    name: str
    verbs: Mapping[str, Verb]
    recorder: Recorder
    breakers: Breakers
    _: KW_ONLY
    seconds: float | None = None
    may_write: bool = True
    clock: Callable[[], float] = perf_counter

    @property
    def is_failing(self) -> bool:
        return self.breakers.write.is_open

    def call(self, verb: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Make ``call`` in the module's order, or raise ``StoreError`` without making it."""
        how, name, count = self.verbs[verb], f"{self.name}_{verb}", self.recorder.count
        if not self.may_write and how.direction == "write":
            self.check_may_write(f"{verb} {args[0]}")
        with self.breakers.attempt(how.direction, verb):
            begun_s = self.clock()
            if how.totals is not None:
                count(f"{self.name}_{how.totals[0]}")
            try:
                with self.deadline(walks=how.walks):
                    result = call(*args, **kwargs)
            except StoreError as exc:
                if how.totals is not None:
                    count(f"{self.name}_{how.totals[1]}")
                count(f"{name}_errors")
                count(f"{name}_errors_{type(exc).__name__}")
                raise
            finally:
                self.recorder.observe(f"{name}_seconds", self.clock() - begun_s)
        if how.outcome is not None:
            for counter, amount in how.outcome(result, args):
                count(f"{self.name}_{counter}", amount)
        return result

    def check_may_write(self, call: str) -> None:
        if not self.may_write:
            raise StoreDenied(f"{call}: {_READER}")

    def deadline(self, *, walks: bool = False) -> AbstractContextManager[None]:
        if self.seconds is None:
            return _NOTHING
        return EndsBy(monotonic() + self.seconds * (_WALK_FACTOR if walks else 1))
