"""Tells a recorder how often the index was asked, how long it took, and how it ended."""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from objkv.errors import StoreError
from objkv.index.base import Record, Shards, WriteIndex
from objkv.index.guarded import Verb, WrappedIndex
from objkv.telemetry import Recorder

T = TypeVar("T")


class ObserveIndex(WrappedIndex):
    """Counts every verb of ``inner``.

    Per verb: ``index_<verb>_seconds`` observed, failed calls included, and ``index_<verb>_errors``,
    by class too: ``index_<verb>_errors_StoreDenied``. Over all verbs but scans: ``index_calls`` and
    ``index_errors``; over all lookups: ``index_records_found`` and ``index_records_missing``. A
    scan is observed per record.
    """

    def __init__(
        self,
        inner: WriteIndex,
        recorder: Recorder,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(inner)
        self._recorder = recorder
        self._clock = clock

    def __repr__(self) -> str:
        return f"<ObserveIndex {self._inner!r}>"

    def lookup(self, namespace: str, prefix_hashes: Sequence[bytes]) -> list[Record | None]:
        """As the inner index."""
        records = super().lookup(namespace, prefix_hashes)
        self._count(len(records), records.count(None))
        return records

    def find(
        self, namespace: str, prefix_hashes: Sequence[bytes], fields: Sequence[str]
    ) -> list[Shards | None]:
        """As the inner index."""
        found = super().find(namespace, prefix_hashes, fields)
        self._count(len(found), found.count(None))
        return found

    def _count(self, asked: int, missing: int) -> None:
        self._recorder.count("index_records_found", asked - missing)
        self._recorder.count("index_records_missing", missing)

    def _around(self, verb: Verb, call: Callable[[], T]) -> T:
        begun_s = self._clock()
        if verb != "scan":
            self._recorder.count("index_calls")
        try:
            return call()
        except StoreError as exc:
            if verb != "scan":
                self._recorder.count("index_errors")
            self._recorder.count(f"index_{verb}_errors")
            self._recorder.count(f"index_{verb}_errors_{type(exc).__name__}")
            raise
        finally:
            self._recorder.observe(f"index_{verb}_seconds", self._clock() - begun_s)
