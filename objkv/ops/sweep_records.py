"""The part of a sweep that begins at records: those of payloads that are gone, those that are too
many, and how much there is."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from objkv.cache.eviction import Candidate, choose
from objkv.index.base import Record, Usage
from objkv.index.shapes import is_shapes
from objkv.ops.crew import Check, Unit
from objkv.ops.ends import Ends, looks, record_keys
from objkv.ops.sweep_remove import Remover, SweepLimits
from objkv.ops.sweep_survey import Survey
from objkv.ops.tally import Tally

_RECORDS_AT_ONCE = 250


class RecordSweep:
    """Units of work on what the index has."""

    def __init__(
        self,
        ends: Ends,
        found: Survey,
        limits: SweepLimits,
        remover: Remover,
        *,
        workers: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``workers``: looks at payloads at once, of each unit."""
        self._ends = ends
        self._found = found
        self._limits = limits
        self._remover = remover
        self._workers = workers
        self._clock = clock

    def ghosts(self) -> Iterator[Unit]:
        """Records without payloads. With all categories, totals are set to what was counted."""
        if "ghost" in self._limits.only:
            for name in self._found.counted:
                yield Unit(f"records {name}", self._ghost_work(name))

    def quotas(self, quota_bytes: int, *, high_percent: int, low_percent: int) -> Iterator[Unit]:
        """What tenants have beyond ``high_percent`` of their quota, down to ``low_percent``: ends
        of chains that are used least. Holds all records of a tenant in memory, about 1 KiB each."""
        if not quota_bytes or "over_quota" not in self._limits.only:
            return
        high, low = (quota_bytes * percent // 100 for percent in (high_percent, low_percent))
        for tenant in sorted({t for t in map(self._tenant, self._found.namespaces) if t}):
            yield Unit(f"quota {tenant}", self._quota_work(tenant, high, low), again=True)

    def _ghost_work(self, name: str) -> Callable[[Tally, Check], None]:
        def work(tally: Tally, check: Check) -> None:
            nbytes = payloads = 0
            records = (one for one in self._ends.index.scan(name) if not is_shapes(one))
            with ThreadPoolExecutor(self._workers, thread_name_prefix="objkv-heads") as pool:
                while batch := list(islice(records, _RECORDS_AT_ONCE)):
                    check()
                    keys = [(key, one) for one in batch for key in record_keys(name, one)]
                    entries = looks(
                        self._ends.bulk, pool, [key for key, _ in keys], at_once=self._workers
                    )
                    for (key, record), entry in zip(keys, entries, strict=True):
                        shard = record.shards[key.field]
                        if entry is None:
                            self._remover.record(key, shard, tally)
                        else:
                            nbytes, payloads = nbytes + shard.nbytes, payloads + 1
            if self._limits.apply:
                self._ends.index.set_usage(Usage(name, nbytes, payloads, int(self._clock())))

        return work

    def _quota_work(self, tenant: str, high: int, low: int) -> Callable[[Tally, Check], None]:
        def work(tally: Tally, check: Check) -> None:
            records: dict[bytes, tuple[str, Record]] = {}
            for name in self._found.namespaces:
                if self._tenant(name) == tenant:
                    for record in self._ends.index.scan(name):
                        check()
                        if not is_shapes(record):
                            records[record.prefix_hash] = name, record
            used = sum(record.nbytes for _, record in records.values())
            if used <= high:
                return
            for candidate in choose(
                [self._candidate(*one) for one in records.values()],
                free_bytes=used - low,
                now_s=self._clock(),
            ):
                check()
                self._give_up(*records[candidate.prefix_hash], tally)

        return work

    def _give_up(self, name: str, record: Record, tally: Tally) -> None:
        for key in record_keys(name, record):
            entry = self._ends.bulk.head(key.path())
            if entry is not None:
                shard = record.shards[key.field]
                self._remover.payload("over_quota", key, entry, shard, tally)

    def _candidate(self, name: str, record: Record) -> Candidate:
        return Candidate(
            prefix_hash=record.prefix_hash,
            parent_hash=record.parent_hash,
            token_start=record.token_start,
            token_end=record.token_end,
            nbytes=record.nbytes,
            hits=record.hits,
            touched_s=record.touched_s,
            created_s=max(shard.created_s for shard in record.shards.values()),
            pinned=record.pinned or record.prefix_hash in self._found.pins[name],
        )

    def _tenant(self, name: str) -> str | None:
        """None for namespaces that do not count: strangers, and epochs that are swept anyway."""
        if name in self._found.old and "old_epoch" in self._limits.only:
            return None
        return self._found.namespaces[name].tenant
