"""A store in this process's memory, for tests and trials. It is neither shared nor persistent."""

import time
from collections.abc import Callable, Iterator
from threading import Lock

from objkv.stores.base import Arrived, Buffer, Entry, Unfinished, check_key, check_prefix, copy_into


class MemoryStore:
    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = Lock()
        self._values: dict[str, tuple[bytes, float]] = {}

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes | None:
        found = self._find(key)
        return None if found is None else found[0][start:end]

    def get_into(
        self, key: str, buffer: memoryview, arrived: Arrived | None = None, start: int | None = None
    ) -> int | None:
        found = self._find(key)
        if found is None:
            return None
        value = found[0] if start is None else found[0][start : start + len(buffer)]
        return copy_into(key, value, buffer, arrived)

    def head(self, key: str) -> Entry | None:
        found = self._find(key)
        return None if found is None else Entry(key, len(found[0]), found[1])

    def scan(self, prefix: str) -> Iterator[Entry]:
        """Yield entries in key order, without those deleted during the scan."""
        check_prefix(prefix)
        with self._lock:
            keys = sorted(key for key in self._values if key.startswith(prefix))
        for key in keys:
            if (entry := self.head(key)) is not None:
                yield entry

    def folders(self, folder: str) -> list[str]:
        check_prefix(f"{folder}/" if folder else "")
        with self._lock:
            start = f"{folder}/" if folder else ""
            below = [key[len(start) :] for key in self._values if key.startswith(start)]
        return sorted({name for name, slash, _ in (key.partition("/") for key in below) if slash})

    def put_if_absent(self, key: str, value: Buffer) -> bool:
        check_key(key)
        kept = bytes(value), self._clock()
        with self._lock:
            return self._values.setdefault(key, kept) is kept

    def put(self, key: str, value: Buffer) -> None:
        check_key(key)
        kept = bytes(value), self._clock()
        with self._lock:
            self._values[key] = kept

    def delete(self, key: str) -> bool:
        check_key(key)
        with self._lock:
            return self._values.pop(key, None) is not None

    def unfinished(self) -> Iterator[Unfinished]:
        return iter(())

    def discard(self, unfinished: Unfinished) -> bool:
        return False

    def check(self) -> None:
        """Always succeeds."""

    def close(self) -> None:
        """Does nothing."""

    def _find(self, key: str) -> tuple[bytes, float] | None:
        check_key(key)
        with self._lock:
            return self._values.get(key)
