"""What all wrappers share: every verb goes through one method that a wrapper overrides."""

from collections.abc import Callable, Iterator
from typing import Literal, TypeVar

from objkv.stores.base import Arrived, Buffer, Entry, PruneStore, Unfinished

T = TypeVar("T")

Verb = Literal[
    "get",
    "get_range",
    "get_into",
    "get_range_into",
    "head",
    "scan",
    "folders",
    "put_if_absent",
    "put",
    "delete",
]


class WrappedStore:
    """Delegates everything to ``inner``, whose owner it becomes: closing it closes ``inner``.

    ``check``, ``close`` and what concerns leftovers pass by ``_around``: they ask the place itself.
    A scan passes through it once per entry, so whoever holds something there does not hold it while
    the consumer works.
    """

    def __init__(self, inner: PruneStore) -> None:
        self._inner = inner

    def _around(self, verb: Verb, call: Callable[[], T]) -> T:
        """Make ``call``, which is ``verb`` of the inner store (for ``scan``: its next entry)."""
        return call()

    def get(self, key: str) -> bytes | None:
        """As the inner store."""
        return self._around("get", lambda: self._inner.get(key))

    def get_range(self, key: str, start: int, end: int) -> bytes | None:
        """As the inner store."""
        return self._around("get_range", lambda: self._inner.get_range(key, start, end))

    def get_into(
        self, key: str, buffer: memoryview, arrived: Arrived | None = None, start: int | None = None
    ) -> int | None:
        """As the inner store."""
        verb: Verb = "get_into" if start is None else "get_range_into"
        return self._around(verb, lambda: self._inner.get_into(key, buffer, arrived, start))

    def head(self, key: str) -> Entry | None:
        """As the inner store."""
        return self._around("head", lambda: self._inner.head(key))

    def scan(self, prefix: str) -> Iterator[Entry]:
        """As the inner store."""
        entries = self._inner.scan(prefix)
        while (entry := self._around("scan", lambda: next(entries, None))) is not None:
            yield entry

    def folders(self, folder: str) -> list[str]:
        """As the inner store."""
        return self._around("folders", lambda: self._inner.folders(folder))

    def put_if_absent(self, key: str, value: Buffer) -> bool:
        """As the inner store."""
        return self._around("put_if_absent", lambda: self._inner.put_if_absent(key, value))

    def put(self, key: str, value: Buffer) -> None:
        """As the inner store."""
        self._around("put", lambda: self._inner.put(key, value))

    def delete(self, key: str) -> bool:
        """As the inner store."""
        return self._around("delete", lambda: self._inner.delete(key))

    def unfinished(self) -> Iterator[Unfinished]:
        """As the inner store."""
        return self._inner.unfinished()

    def discard(self, unfinished: Unfinished) -> bool:
        """As the inner store."""
        return self._inner.discard(unfinished)

    def check(self) -> None:
        """As the inner store."""
        self._inner.check()

    def close(self) -> None:
        """Close the inner store."""
        self._inner.close()
