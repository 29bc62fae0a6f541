"""What the wrappers of an index share: every verb passes one method that a wrapper overrides."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, TypeVar

from objkv.index.base import ChunkEntry, Record, ShardRecord, Shards, Usage, WriteIndex

T = TypeVar("T")

Verb = Literal[
    "lookup",
    "find",
    "scan",
    "namespaces",
    "usage",
    "publish",
    "touch",
    "forget",
    "lease",
    "release",
]


class WrappedIndex:
    """Delegates everything to ``inner``, whose owner it becomes: closing it closes ``inner``.

    A ``WriteIndex``: what operators do by hand goes to the index itself. ``check`` and ``close``
    pass by ``_around``; a scan passes through it once per record.
    """

    def __init__(self, inner: WriteIndex) -> None:
        self._inner = inner

    def _around(self, verb: Verb, call: Callable[[], T]) -> T:
        """Make ``call``, which is ``verb`` of the inner index (for ``scan``: its next record)."""
        return call()

    def lookup(self, namespace: str, prefix_hashes: Sequence[bytes]) -> list[Record | None]:
        """As the inner index."""
        return self._around("lookup", lambda: self._inner.lookup(namespace, prefix_hashes))

    def find(
        self, namespace: str, prefix_hashes: Sequence[bytes], fields: Sequence[str]
    ) -> list[Shards | None]:
        """As the inner index."""
        return self._around("find", lambda: self._inner.find(namespace, prefix_hashes, fields))

    def scan(self, namespace: str) -> Iterator[Record]:
        """As the inner index."""
        records = self._inner.scan(namespace)
        while (record := self._around("scan", lambda: next(records, None))) is not None:
            yield record

    def namespaces(self) -> list[str]:
        """As the inner index."""
        return self._around("namespaces", self._inner.namespaces)

    def usage(self) -> list[Usage]:
        """As the inner index."""
        return self._around("usage", self._inner.usage)

    def check(self) -> None:
        """As the inner index."""
        self._inner.check()

    def close(self) -> None:
        """Close the inner index."""
        self._inner.close()

    def publish(self, chunk: ChunkEntry, shards: Mapping[str, ShardRecord], *, ttl_s: int) -> None:
        """As the inner index."""
        self._around("publish", lambda: self._inner.publish(chunk, shards, ttl_s=ttl_s))

    def touch(self, namespace: str, prefix_hashes: Sequence[bytes], *, ttl_s: int) -> None:
        """As the inner index."""
        self._around("touch", lambda: self._inner.touch(namespace, prefix_hashes, ttl_s=ttl_s))

    def forget(self, namespace: str, prefix_hash: bytes, field: str, expected: ShardRecord) -> bool:
        """As the inner index."""
        return self._around(
            "forget", lambda: self._inner.forget(namespace, prefix_hash, field, expected)
        )

    def lease(self, name: str, owner: str, *, ttl_ms: int) -> bool:
        """As the inner index."""
        return self._around("lease", lambda: self._inner.lease(name, owner, ttl_ms=ttl_ms))

    def release(self, name: str, owner: str) -> None:
        """As the inner index."""
        self._around("release", lambda: self._inner.release(name, owner))
