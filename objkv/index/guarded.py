"""An index whose calls go through a guard: breakers, deadlines and counters.

Also the base of indexes that override a few verbs of another: without a guard, each passes through.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from objkv.errors import StoreDenied
from objkv.index.base import PruneIndex, WriteIndex
from objkv.keys.identity import NAMESPACE_HEX
from objkv.keys.prefix import PREFIX_HASH_BYTES
from objkv.net.guard import Guarded, Verb, guarded, guarded_scan

_CALLS: Final = ("calls", "errors")


def _found(result: Any, _args: object) -> tuple[tuple[str, float], ...]:
    missing = result.count(None)
    return (("records_found", len(result) - missing), ("records_missing", missing))


INDEX_VERBS: Final[Mapping[str, Verb]] = {
    "lookup": Verb("read", _CALLS, outcome=_found),
    "find": Verb("read", _CALLS, outcome=_found),
    "scan": Verb("read", walks=True),
    "namespaces": Verb("read", _CALLS, walks=True),
    "usage": Verb("read", _CALLS, walks=True),
    "savings": Verb("read", _CALLS, walks=True),
    **{
        verb: Verb("write", _CALLS)
        for verb in ("publish", "touch", "credit", "forget", "lease", "release", "sight")
    },
}
"""The counters of an index's guard: ``index_calls`` and ``index_errors`` of all but scans, whose
records count; ``index_records_found`` and ``index_records_missing`` of all lookups."""


def _written(verb: str, *, unwritten: object = None) -> Callable[..., Any]:
    """Return a method like ``guarded``, which in the read-only role returns ``unwritten``."""
    call = guarded(verb)

    def method(self: "GuardedIndex", *args: Any, **kwargs: Any) -> Any:
        return call(self, *args, **kwargs) if self.guard.may_write else unwritten

    return method


class GuardedIndex(Guarded[WriteIndex]):
    """An index behind a guard, which ``check``, ``flush`` and ``close`` skip.

    Operators change the inner index directly. In the read-only role, writes do nothing and no lease
    is granted, so savers do not save. This is no error, because replicas write only hints.
    """

    lookup = guarded("lookup")
    find = guarded("find")
    scan = guarded_scan
    namespaces = guarded("namespaces")
    usage = guarded("usage")
    savings = guarded("savings")
    publish = _written("publish")
    touch = _written("touch")
    credit = _written("credit")
    forget = _written("forget", unwritten=False)
    lease = _written("lease", unwritten=False)
    release = _written("release")

    def check(self) -> None:
        """The read-only role looks up one record instead, because an index's check may write."""
        if not self.guard.may_write:
            self.lookup("0" * NAMESPACE_HEX, [bytes(PREFIX_HASH_BYTES)])
            return
        with self.guard.deadline():
            self.inner.check()

    def flush(self) -> None:
        """Skips the breaker, for which sending nothing would be a success. Nothing waits for an
        index that fails."""
        if not self.guard.is_failing:
            with self.guard.deadline():
                self.inner.flush()

    def record_sightings(self, names: Sequence[str], *, ttl_s: int) -> list[bool]:
        if not self.guard.may_write:
            return [False] * len(names)
        return self.guard.call("sight", self.inner.record_sightings, names, ttl_s=ttl_s)


def for_operators(admin: PruneIndex | None) -> PruneIndex:
    """Return the index that operators change. Raises ``StoreDenied`` for a reader's, None."""
    if admin is None:
        raise StoreDenied("role reader does not allow writes: set role to writer or sweeper")
    return admin
