"""Tells a recorder how often, how long, how many bytes, and how it ended."""

import time
from collections.abc import Callable
from typing import TypeVar

from objkv.errors import StoreError
from objkv.stores.base import Arrived, Buffer, PruneStore
from objkv.stores.guarded import Verb, WrappedStore
from objkv.telemetry import Recorder

T = TypeVar("T")

_READS: frozenset[Verb] = frozenset(("get", "get_range", "get_into", "get_range_into", "head"))
_WRITES: frozenset[Verb] = frozenset(("put", "put_if_absent"))


class ObserveStore(WrappedStore):
    """Counts every verb of ``inner`` under ``name`` (``bulk``, ``hot``).

    Per verb: ``<name>_<verb>_seconds`` observed, failed calls included; ``<name>_<verb>_errors``
    by class too, ``<name>_<verb>_errors_StoreDenied``; ``<name>_<verb>_misses`` for reads that
    found nothing. Over all verbs: ``<name>_reads`` and ``<name>_read_errors``, ``<name>_writes``
    and ``<name>_write_errors``; ``<name>_read_bytes``, ``<name>_written_bytes`` (of puts that
    wrote), ``<name>_duplicates`` (``put_if_absent`` that found the key).
    Scans are observed per entry.
    """

    def __init__(
        self,
        inner: PruneStore,
        recorder: Recorder,
        name: str,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(inner)
        self._recorder = recorder
        self._name = name
        self._clock = clock

    def __repr__(self) -> str:
        return f"<ObserveStore {self._name} {self._inner!r}>"

    def _around(self, verb: Verb, call: Callable[[], T]) -> T:
        begun_s = self._clock()
        kind = "read" if verb in _READS else "write" if verb in _WRITES else None
        if kind is not None:
            self._recorder.count(f"{self._name}_{kind}s")
        try:
            value = call()
        except StoreError as exc:
            if kind is not None:
                self._recorder.count(f"{self._name}_{kind}_errors")
            self._recorder.count(f"{self._name}_{verb}_errors")
            self._recorder.count(f"{self._name}_{verb}_errors_{type(exc).__name__}")
            raise
        finally:
            self._recorder.observe(f"{self._name}_{verb}_seconds", self._clock() - begun_s)
        if value is None and verb in _READS:
            self._recorder.count(f"{self._name}_{verb}_misses")
        return value

    def get(self, key: str) -> bytes | None:
        """As the inner store."""
        return self._read(super().get(key))

    def get_range(self, key: str, start: int, end: int) -> bytes | None:
        """As the inner store."""
        return self._read(super().get_range(key, start, end))

    def get_into(
        self, key: str, buffer: memoryview, arrived: Arrived | None = None, start: int | None = None
    ) -> int | None:
        """As the inner store."""
        return self._read_into(super().get_into(key, buffer, arrived, start))

    def put_if_absent(self, key: str, value: Buffer) -> bool:
        """As the inner store."""
        written = super().put_if_absent(key, value)
        if written:
            self._recorder.count(f"{self._name}_written_bytes", len(value))
        else:
            self._recorder.count(f"{self._name}_duplicates")
        return written

    def put(self, key: str, value: Buffer) -> None:
        """As the inner store."""
        super().put(key, value)
        self._recorder.count(f"{self._name}_written_bytes", len(value))

    def _read_into(self, nbytes: int | None) -> int | None:
        if nbytes is not None:
            self._recorder.count(f"{self._name}_read_bytes", nbytes)
        return nbytes

    def _read(self, value: bytes | None) -> bytes | None:
        if value is not None:
            self._recorder.count(f"{self._name}_read_bytes", len(value))
        return value
