"""An index in this process's memory, for ``memory:`` and for tests. No other process sees it."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from threading import Lock

from objkv.index.base import ChunkEntry, Lease, Record, Savings, ShardRecord, ShardRecords, Usage
from objkv.index.fields import read_savings, savings_fields, shards_of

_NEVER: tuple[Record | None, float] = (None, 0.0)


class MemoryIndex:
    """Implements ``PruneIndex``, which describes its methods; ``clock`` returns seconds since the
    epoch."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = Lock()
        self._records: dict[tuple[str, bytes], tuple[Record, float]] = {}
        self.leases: dict[str, tuple[str, float]] = {}
        self._savings: Counter[str] = Counter()
        self._sightings: dict[str, float] = {}
        """Until when each is remembered."""

    def lookup(self, namespace: str, prefix_hashes: Sequence[bytes]) -> list[Record | None]:
        with self._lock:
            return [self._live((namespace, prefix_hash)) for prefix_hash in prefix_hashes]

    def find(
        self, namespace: str, prefix_hashes: Sequence[bytes], fields: Sequence[str]
    ) -> list[ShardRecords | None]:
        now = self._clock()
        with self._lock:
            kept = [self._records.get((namespace, one), _NEVER) for one in prefix_hashes]
        return [shards_of(record, fields) if ends_s > now else None for record, ends_s in kept]

    def scan(self, namespace: str) -> Iterator[Record]:
        """See ``ReadIndex``. Yields the records that exist at the first step."""
        with self._lock:
            found = [self._live(key) for key in list(self._records) if key[0] == namespace]
        yield from (record for record in found if record is not None)

    def namespaces(self) -> list[str]:
        with self._lock:
            return sorted({key[0] for key in list(self._records) if self._live(key)})

    def usage(self) -> list[Usage]:
        now_s, found = int(self._clock()), []
        for name in MemoryIndex.namespaces(self):
            shards = [
                shard for record in MemoryIndex.scan(self, name) for shard in record.shards.values()
            ]
            found.append(Usage(name, sum(one.nbytes for one in shards), len(shards), now_s))
        return found

    def savings(self) -> list[Savings]:
        with self._lock:
            return read_savings(self._savings)

    def check(self) -> None:
        """Always succeeds."""

    def close(self) -> None:
        """Does nothing."""

    def publish(
        self, chunk: ChunkEntry, shards: ShardRecords, *, ttl_s: int, lease: Lease | None = None
    ) -> None:
        assert shards
        key = (chunk.namespace, chunk.prefix_hash)
        with self._lock:
            new = Record(
                chunk.prefix_hash, chunk.parent_hash, chunk.token_start, chunk.token_end, {}
            )
            old = self._live(key) or new
            self._keep(key, replace(old, shards={**old.shards, **shards}), ttl_s)
        if lease is not None:
            MemoryIndex.release(self, *lease)

    def touch(self, namespace: str, prefix_hashes: Sequence[bytes], *, ttl_s: int) -> None:
        with self._lock:
            for prefix_hash in dict.fromkeys(prefix_hashes):
                key = (namespace, prefix_hash)
                if old := self._live(key):
                    touched = replace(old, hits=old.hits + 1, touched_s=int(self._clock()))
                    self._keep(key, touched, ttl_s)

    def credit(self, savings: Savings) -> None:
        with self._lock:
            self._savings.update(savings_fields(savings))

    def forget(self, namespace: str, prefix_hash: bytes, field: str, expected: ShardRecord) -> bool:
        key = (namespace, prefix_hash)
        with self._lock:
            old = self._live(key)
            if old is None or old.shards.get(field) != expected:
                return False
            left = {name: shard for name, shard in old.shards.items() if name != field}
            if left:
                self._records[key] = (replace(old, shards=left), self._records[key][1])
            else:
                del self._records[key]
            return True

    def lease(self, name: str, owner: str, *, ttl_ms: int) -> bool:
        now = self._clock()
        with self._lock:
            holder, ends_s = self.leases.get(name, (owner, now))
            if holder != owner and ends_s > now:
                return False
            self.leases[name] = (owner, now + ttl_ms / 1000)
            return True

    def release(self, name: str, owner: str) -> None:
        with self._lock:
            if self.leases.get(name, (None, 0.0))[0] == owner:
                del self.leases[name]

    def flush(self) -> None:
        """Does nothing: ``usage`` counts."""

    def record_sightings(self, names: Sequence[str], *, ttl_s: int) -> list[bool]:
        now, seen = self._clock(), []
        with self._lock:
            for name in names:
                seen.append(self._sightings.get(name, 0.0) > now)
                self._sightings[name] = now + ttl_s
        return seen

    def pin(self, namespace: str, prefix_hash: bytes, *, until_s: int, ttl_s: int) -> bool:
        key = (namespace, prefix_hash)
        with self._lock:
            old = self._live(key)
            if old is None:
                return False
            self._keep(key, replace(old, pinned_until_s=until_s), ttl_s)
            return True

    def drop(self, namespace: str, prefix_hash: bytes) -> bool:
        key = (namespace, prefix_hash)
        with self._lock:
            there = self._live(key) is not None
            self._records.pop(key, None)
            return there

    def set_usage(self, usage: Usage) -> None:
        """Does nothing: ``usage`` counts exactly."""

    def _live(self, key: tuple[str, bytes]) -> Record | None:
        record, ends_s = self._records.get(key, _NEVER)
        now = self._clock()
        if record is None or ends_s <= now:
            return None
        if 0 < record.pinned_until_s <= now:
            return replace(record, pinned_until_s=0)
        return record

    def _keep(self, key: tuple[str, bytes], record: Record, ttl_s: int) -> None:
        self._records[key] = (record, max(self._clock() + ttl_s, record.pinned_until_s))
