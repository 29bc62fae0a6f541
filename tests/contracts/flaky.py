"""A store that fails on request, for tests."""

from collections.abc import Callable
from threading import Event, Lock
from typing import ParamSpec, TypeVar

from objkv.net.guard import CallPolicy
from objkv.stores.base import PruneStore
from objkv.stores.guarded import GuardedStore

P = ParamSpec("P")
T = TypeVar("T")

GATE_WAIT_S = 60.0


class FlakyStore(GuardedStore, CallPolicy):
    """Delegates to ``inner``, except for the requested faults. Thread-safe.

    ``calls`` lists the verbs of all calls so far, in order, including failed ones. A scan adds one
    verb per entry.
    """

    def __init__(self, inner: PruneStore) -> None:
        super().__init__(inner, guard=self)
        self._lock = Lock()
        self._errors: list[BaseException] = []
        self._down: BaseException | None = None
        self._gate: Event | None = None
        self.calls: list[str] = []
        self.arrived = Event()
        """Set by every call before it waits at the gate. Clear it to wait for the next call."""

    def fail_next(self, error: BaseException, times: int = 1) -> None:
        with self._lock:
            self._errors += [error] * times

    def fail_until_mended(self, error: BaseException) -> None:
        self._down = error

    def hold(self, gate: Event) -> None:
        """Make every later call wait for ``gate`` first, for at most a minute."""
        self._gate = gate

    def drop(self, key: str) -> None:
        """Delete the value without an entry in ``calls``."""
        self.inner.delete(key)

    def mend(self) -> None:
        with self._lock:
            self._errors.clear()
        self._down = self._gate = None

    def check(self) -> None:
        if self._down is not None:
            raise self._down
        self.inner.check()

    def call(self, verb: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        with self._lock:
            self.calls.append(verb)
            error = self._errors.pop(0) if self._errors else self._down
            gate = self._gate  # a test that waits for ``arrived`` may call ``mend`` at once
        self.arrived.set()
        if gate is not None:
            gate.wait(GATE_WAIT_S)
        if error is not None:
            raise error
        return call(*args, **kwargs)
