"""A store whose calls go through a guard: breakers, limits, deadlines and counters.

Also the base of stores that override a few verbs of another: without a guard, each passes through.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeVar

from objkv.net.guard import Guarded, Verb, guarded, guarded_scan
from objkv.stores.base import Entry, HotStore, PruneStore, Unfinished

_READS: Final = ("reads", "read_errors")
_WRITES: Final = ("writes", "write_errors")


def _read(verb: str) -> Verb:
    misses = ((f"{verb}_misses", 1.0),)

    def outcome(result: Any, _args: object) -> tuple[tuple[str, float], ...]:
        if result is None:
            return misses
        if isinstance(result, Entry):
            return ()
        return (("read_bytes", result if isinstance(result, int) else len(result)),)

    return Verb("read", _READS, outcome=outcome)


def _put(result: Any, args: tuple[Any, ...]) -> tuple[tuple[str, float], ...]:
    if result is False:  # ``put_if_absent`` found an existing key
        return (("duplicates", 1),)
    return (("written_bytes", len(args[1])),)


STORE_VERBS: Final[Mapping[str, Verb]] = {
    **{verb: _read(verb) for verb in ("get", "get_into", "head")},
    "scan": Verb("read", walks=True),
    "folders": Verb("read", walks=True),
    "put_if_absent": Verb("write", _WRITES, outcome=_put),
    "put": Verb("write", _WRITES, outcome=_put),
    "delete": Verb("write"),
}
"""The counters of a store's guard. Per verb: ``<name>_<verb>_misses`` counts reads of missing keys.
Per store: ``<name>_reads``, ``_read_errors``, ``_writes``, ``_write_errors``, ``_read_bytes``,
``_written_bytes`` (only puts that wrote) and ``_duplicates`` (``put_if_absent`` calls that found an
existing key). A scan is guarded and counted per entry."""
S = TypeVar("S", bound=HotStore)


class GuardedValues(Guarded[S]):
    """Values by key behind a guard. ``check``, ``close`` and the verbs for leftovers skip it: an
    operator needs the backend's own answer."""

    get = guarded("get")
    get_into = guarded("get_into")
    head = guarded("head")
    put_if_absent = guarded("put_if_absent")
    put = guarded("put")
    delete = guarded("delete")

    def check(self) -> None:
        """See ``ReadStore``. Ends within the guard's deadline."""
        with self.guard.deadline():
            self.inner.check()


class GuardedStore(GuardedValues[PruneStore]):
    """A store behind a guard."""

    scan = guarded_scan
    folders = guarded("folders")

    def unfinished(self) -> Iterator[Unfinished]:
        return self.inner.unfinished()

    def discard(self, unfinished: Unfinished) -> bool:
        self.guard.check_may_write(f"discard {unfinished.key}")
        return self.inner.discard(unfinished)
