"""A cache of records in this process, so that hot prefixes are found without a round trip.

Absence is not remembered: what another replica saves must be found at once, a prompt's lookup makes
its round trip for the chunks after the hot prefix anyway, and callers remember it per request.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock

from objkv.index.base import ChunkEntry, Record, ShardRecord, WriteIndex
from objkv.index.wrapped import WrappedIndex

SETTLE_S = 5
"""Records with a younger shard are not kept: other ranks may still be adding theirs. The
writers' clocks decide; one that is wrong costs round trips, or hits for ``ttl_s``."""

_Key = tuple[str, bytes]


class NearIndex(WrappedIndex):
    """Keeps up to ``records_max`` records of ``inner``, each for ``ttl_s``; the least used go.

    Hits and touches of a kept record may be old. A record that was removed elsewhere is still
    answered for up to ``ttl_s``: whoever finds that it lied calls ``forget`` or ``invalidate``.
    A record without all of the shard ``fields`` that the caller needs is asked for every time.
    ``clock`` tells seconds since the epoch. Thread-safe; no lock is held while ``inner`` is asked.
    """

    def __init__(
        self,
        inner: WriteIndex,
        *,
        records_max: int,
        ttl_s: float,
        clock: Callable[[], float] = time.time,
        fields: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(inner)
        self._fields = fields
        self._records_max = records_max
        self._ttl_s = ttl_s
        self._clock = clock
        self._lock = Lock()
        self._records: OrderedDict[_Key, tuple[Record, float]] = OrderedDict()
        self._asking: list[_Asking] = []

    def __repr__(self) -> str:
        kept = f"{len(self._records)}/{self._records_max} records for {self._ttl_s:g} s"
        return f"<NearIndex {kept}, of {self._inner!r}>"

    def lookup(self, namespace: str, prefix_hashes: Sequence[bytes]) -> list[Record | None]:
        """As the inner index, which is asked once, for what is not kept."""
        found = self._kept(namespace, prefix_hashes)
        wanted = [prefix_hash for prefix_hash in prefix_hashes if prefix_hash not in found]
        if wanted:
            with self._ask() as asking:
                fresh = super().lookup(namespace, wanted)
                self._keep(namespace, [record for record in fresh if record], asking)
            found |= {record.prefix_hash: record for record in fresh if record}
        return [found.get(prefix_hash) for prefix_hash in prefix_hashes]

    def publish(self, chunk: ChunkEntry, shards: Mapping[str, ShardRecord], *, ttl_s: int) -> None:
        """As the inner index."""
        try:
            super().publish(chunk, shards, ttl_s=ttl_s)
        finally:
            self.invalidate(chunk.namespace, chunk.prefix_hash)

    def forget(self, namespace: str, prefix_hash: bytes, field: str, expected: ShardRecord) -> bool:
        """As the inner index."""
        try:
            return super().forget(namespace, prefix_hash, field, expected)
        finally:
            self.invalidate(namespace, prefix_hash)

    def invalidate(self, namespace: str, prefix_hash: bytes) -> None:
        """Keep this record no longer, also if a lookup in flight is about to bring it."""
        key = (namespace, prefix_hash)
        with self._lock:
            self._records.pop(key, None)
            for asking in self._asking:
                asking.spoiled.add(key)

    def clear(self) -> None:
        """Keep nothing of what is kept now."""
        with self._lock:
            self._records.clear()

    def _kept(self, namespace: str, prefix_hashes: Sequence[bytes]) -> dict[bytes, Record]:
        now = self._clock()
        found: dict[bytes, Record] = {}
        with self._lock:
            for prefix_hash in prefix_hashes:
                key = (namespace, prefix_hash)
                record, ends_s = self._records.get(key, (None, 0.0))
                if record is None:
                    continue
                if ends_s > now:
                    self._records.move_to_end(key)
                    found[prefix_hash] = record
                else:
                    del self._records[key]
        return found

    def _keep(self, namespace: str, records: Sequence[Record], asking: "_Asking") -> None:
        now = self._clock()
        with self._lock:
            for record in records:
                if not self._fields <= record.shards.keys():
                    continue
                key = (namespace, record.prefix_hash)
                newest_s = max(shard.created_s for shard in record.shards.values())
                if key not in asking.spoiled and newest_s + SETTLE_S <= now:
                    self._records[key] = (record, now + self._ttl_s)
                    self._records.move_to_end(key)
            while len(self._records) > self._records_max:
                self._records.popitem(last=False)

    @contextmanager
    def _ask(self) -> Iterator["_Asking"]:
        asking = _Asking()
        with self._lock:
            self._asking.append(asking)
        try:
            yield asking
        finally:
            with self._lock:
                self._asking.remove(asking)


class _Asking:
    """One lookup in flight, and the records that were invalidated meanwhile."""

    def __init__(self) -> None:
        self.spoiled: set[_Key] = set()
