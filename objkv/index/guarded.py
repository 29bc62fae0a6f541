"""An index whose calls go through a guard: breakers, deadlines and counters.

Also the base of indexes that override a few verbs of another index. Without a guard every verb
passes straight through.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from objkv.errors import StoreDenied
from objkv.index.base import (
    ChunkEntry,
    PruneIndex,
    Record,
    Savings,
    ShardRecord,
    Shards,
    Usage,
    WriteIndex,
)
from objkv.keys.identity import NAMESPACE_HEX
from objkv.keys.prefix import PREFIX_HASH_BYTES
from objkv.net.guard import CallPolicy, Verb

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
"""The counters of an index's guard: ``index_calls`` and ``index_errors`` over all verbs except
scans, ``index_records_found`` and ``index_records_missing`` over all lookups. A scan is guarded and
counted per record."""


class GuardedIndex:
    """``inner`` behind ``guard``. Closing this index closes ``inner``.

    A ``WriteIndex``: operators change the inner index directly. ``check`` and ``close``
    skip the guard too. In the read-only role, writes do nothing and no lease is granted,
    so savers do not save. This is not an error, because a replica writes only hints to an index.
    """

    def __init__(self, inner: WriteIndex, guard: CallPolicy | None = None) -> None:
        self._inner = inner
        self._guard = guard or CallPolicy()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._guard.state}, of {self._inner!r}>"

    def lookup(self, namespace: str, prefix_hashes: Sequence[bytes]) -> list[Record | None]:
        """See ``ReadIndex``."""
        return self._guard.call("lookup", self._inner.lookup, namespace, prefix_hashes)

    def find(
        self, namespace: str, prefix_hashes: Sequence[bytes], fields: Sequence[str]
    ) -> list[Shards | None]:
        """See ``ReadIndex``."""
        return self._guard.call("find", self._inner.find, namespace, prefix_hashes, fields)

    def scan(self, namespace: str) -> Iterator[Record]:
        """See ``ReadIndex``."""
        records = self._inner.scan(namespace)
        while (record := self._guard.call("scan", next, records, None)) is not None:
            yield record

    def namespaces(self) -> list[str]:
        """See ``ReadIndex``."""
        return self._guard.call("namespaces", self._inner.namespaces)

    def usage(self) -> list[Usage]:
        """See ``ReadIndex``."""
        return self._guard.call("usage", self._inner.usage)

    def savings(self) -> list[Savings]:
        """See ``ReadIndex``."""
        return self._guard.call("savings", self._inner.savings)

    def check(self) -> None:
        """See ``ReadIndex``. The read-only role looks up one record instead, because an index's
        check may write."""
        if not self._guard.may_write:
            self.lookup("0" * NAMESPACE_HEX, [bytes(PREFIX_HASH_BYTES)])
            return
        with self._guard.deadline():
            self._inner.check()

    def close(self) -> None:
        """Close the inner index."""
        self._inner.close()

    def publish(self, chunk: ChunkEntry, shards: Mapping[str, ShardRecord], *, ttl_s: int) -> None:
        """See ``WriteIndex``."""
        if self._guard.may_write:
            self._guard.call("publish", self._inner.publish, chunk, shards, ttl_s=ttl_s)

    def touch(self, namespace: str, prefix_hashes: Sequence[bytes], *, ttl_s: int) -> None:
        """See ``WriteIndex``."""
        if self._guard.may_write:
            self._guard.call("touch", self._inner.touch, namespace, prefix_hashes, ttl_s=ttl_s)

    def credit(self, savings: Savings) -> None:
        """See ``WriteIndex``."""
        if self._guard.may_write:
            self._guard.call("credit", self._inner.credit, savings)

    def forget(self, namespace: str, prefix_hash: bytes, field: str, expected: ShardRecord) -> bool:
        """See ``WriteIndex``."""
        return self._guard.may_write and self._guard.call(
            "forget", self._inner.forget, namespace, prefix_hash, field, expected
        )

    def lease(self, name: str, owner: str, *, ttl_ms: int) -> bool:
        """See ``WriteIndex``."""
        return self._guard.may_write and self._guard.call(
            "lease", self._inner.lease, name, owner, ttl_ms=ttl_ms
        )

    def release(self, name: str, owner: str) -> None:
        """See ``WriteIndex``."""
        if self._guard.may_write:
            self._guard.call("release", self._inner.release, name, owner)

    def sight(self, names: Sequence[str], *, ttl_s: int) -> list[bool]:
        """See ``WriteIndex``. The read-only role records nothing."""
        if not self._guard.may_write:
            return [False] * len(names)
        return self._guard.call("sight", self._inner.sight, names, ttl_s=ttl_s)


def for_operators(admin: PruneIndex | None) -> PruneIndex:
    """Return the index on which operators pin, drop and count. Raises ``StoreDenied`` for None, the
    read-only role's index."""
    if admin is None:
        raise StoreDenied("role reader does not allow writes: set role to sweeper")
    return admin
