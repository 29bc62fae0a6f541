"""Finds and removes unreachable and evictable data, by the categories of ``remove``."""

import math
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Final

from objkv.index.base import Record, Usage
from objkv.index.guarded import for_operators
from objkv.keys.identity import identity_path
from objkv.ops.backends_view import (
    QUARANTINE,
    BackendsView,
    NamespacePart,
    StoredPayload,
    looks,
    record_keys,
    stored_payloads,
)
from objkv.ops.pin import remove_ended_pins
from objkv.ops.runs import Check, Counters, Unit
from objkv.ops.sweep.eviction import Candidate, choose
from objkv.ops.sweep.remove import Category, Remover, SweepLimits
from objkv.ops.sweep.survey import Doubt, Survey, doubted
from objkv.stores.base import Entry

_RECORDS_AT_ONCE = 250
SWEPT_PERCENT: Final = 85
"""What a sweep leaves of a quota: room for a tenth of it until saves stop (``FULL_PERCENT``)."""


class Sweep:
    """Units of work over the bulk store (``leftovers``, ``parts``, ``documents``) and over the
    index (``ghosts``, ``quotas``)."""

    def __init__(
        self,
        view: BackendsView,
        found: Survey,
        limits: SweepLimits,
        remover: Remover,
        *,
        doubts: Collection[Doubt] = (),
        workers: int = 16,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            doubts: what to keep because it looks like a mistake.
            workers: concurrent HEAD requests of a unit that starts from records.
        """
        # With a doubt about the whole store nothing at all is deleted.
        assert not (limits.apply and any(one.namespace is None for one in doubts))
        self._view = view
        self._found = found
        self._limits = limits
        self._doubted = doubted(found, doubts)
        self._remover = remover
        self._workers = workers
        self._clock = clock

    def leftovers(self) -> Iterator[Unit]:
        """Sweep leftovers of killed writers, and the quarantine."""
        if "temporary" in self._limits.only:
            yield Unit(self._temporary)
        if "quarantined" in self._limits.only:
            yield Unit(self._quarantined)

    def parts(self) -> Iterator[Unit]:
        """Sweep payloads, by their namespace and their records."""
        if {"orphan", "expired", "old_epoch", "stranger"}.isdisjoint(self._limits.only):
            return
        for part in self._found.parts:
            yield Unit(self._part_work(part), items=part.payloads)

    def documents(self) -> Iterator[Unit]:
        """Remove documents of old epochs without payloads, and of ended pins. Counted as
        ``documents``, not as findings."""
        if not self._limits.apply:
            return
        for name in sorted(self._found.namespaces):
            yield Unit(self._document_work(name))

    def _temporary(self, counters: Counters, check: Check) -> None:
        for found in self._view.bulk.unfinished():
            check()
            if self._is_looked_at(found.key) and self._is_old(found.modified_s, self._limits.put_s):
                self._remover.leftover(found, counters)

    def _quarantined(self, counters: Counters, check: Check) -> None:
        only = self._found.only
        for entry in self._view.bulk.scan(f"{QUARANTINE}/{only}/" if only else f"{QUARANTINE}/"):
            check()
            if self._is_old(entry.modified_s):
                self._remover.entry("quarantined", entry, counters)

    def _is_looked_at(self, key: str) -> bool:
        """Whether a leftover belongs to a namespace that is swept, or to its quarantine."""
        folder = key.removeprefix(f"{QUARANTINE}/").partition("/")[0]
        return self._found.only in (None, folder)

    def _part_work(self, part: NamespacePart) -> Callable[[Counters, Check], None]:
        def work(counters: Counters, check: Check) -> None:
            def other(entry: Entry) -> None:
                counters.count("other", entry.nbytes)

            for batch in stored_payloads(self._view, part, other=other):
                for stored in batch:
                    check()
                    self._judge(part.namespace, stored, counters)

        return work

    def _judge(self, namespace: str, stored: StoredPayload, counters: Counters) -> None:
        key, entry, record = stored.key, stored.entry, stored.record
        kind = self._kind(namespace, stored)
        if kind is None or kind not in self._limits.only:
            counters.count("kept", entry.nbytes)
            return
        is_pinned = key.prefix_hash in self._found.pins[namespace]
        if is_pinned or (record is not None and record.pinned):
            counters.count("pinned", entry.nbytes)
        elif namespace in self._doubted:
            counters.count("doubted", entry.nbytes)
        elif not self._is_old(max(entry.modified_s, record.touched_s if record else 0)):
            counters.count("young", entry.nbytes)
        else:
            self._remover.payload(kind, key, entry, stored.shard, counters)

    def _kind(self, namespace: str, stored: StoredPayload) -> Category | None:
        if not self._found.namespaces[namespace].is_known:
            return "stranger"
        if namespace in self._found.old:
            return "old_epoch"
        if stored.shard is not None or self._view.is_own_index:
            return None
        age_s = self._clock() - stored.entry.modified_s
        return "expired" if age_s >= self._view.ttl_s else "orphan"

    def _document_work(self, name: str) -> Callable[[Counters, Check], None]:
        def work(counters: Counters, check: Check) -> None:
            bulk = self._view.bulk
            grace_s = max(0, self._limits.grace_s)
            counters.counts["documents"] += remove_ended_pins(
                bulk, name, now_s=self._clock(), grace_s=grace_s
            )
            if (
                name in self._doubted
                or name not in self._found.old
                or "old_epoch" not in self._limits.only
            ):
                return
            beside = []
            for entry in bulk.scan(f"{name}/"):
                check()
                beside.append(entry.key)
                is_beside = entry.key.startswith(f"{name}/shapes/")  # empty files of format 1
                if not (is_beside or entry.key == identity_path(name)):
                    return  # a payload is left
                if not self._is_old(entry.modified_s):
                    return
            for key in beside:
                counters.counts["documents"] += bulk.delete(key)

        return work

    def _is_old(self, modified_s: float, least_s: float = -math.inf) -> bool:
        return self._clock() - modified_s >= max(self._limits.grace_s, least_s)

    def ghosts(self) -> Iterator[Unit]:
        """Sweep records without payloads, and set the totals to the exact counts."""
        if "ghost" in self._limits.only:
            for name in self._found.counted:
                items = self._found.totals.get(name, 0)
                yield Unit(self._ghost_work(name), items=items)

    def quotas(self, quota_bytes: int) -> Iterator[Unit]:
        """Evict the ends of the least used prefixes of tenants, down to ``SWEPT_PERCENT`` of their
        quota. Holds all records of a tenant in memory, about 1 KiB each."""
        if not quota_bytes or "over_quota" not in self._limits.only:
            return
        room = quota_bytes * SWEPT_PERCENT // 100
        for tenant in sorted({t for t in map(self._tenant, self._found.namespaces) if t}):
            yield Unit(self._quota_work(tenant, room))

    def _ghost_work(self, name: str) -> Callable[[Counters, Check], None]:
        def work(counters: Counters, check: Check) -> None:
            nbytes = payloads = 0
            records = self._view.index.scan(name)
            with ThreadPoolExecutor(self._workers, thread_name_prefix="objkv-heads") as pool:
                while batch := list(islice(records, _RECORDS_AT_ONCE)):
                    keys = [(key, one) for one in batch for key in record_keys(name, one)]
                    check(len(keys))
                    entries = looks(
                        self._view.bulk, pool, [key for key, _ in keys], at_once=self._workers
                    )
                    for (key, record), entry in zip(keys, entries, strict=True):
                        shard = record.shards[key.field]
                        if entry is None:
                            self._remover.record(key, shard, counters)
                        else:
                            nbytes, payloads = nbytes + shard.nbytes, payloads + 1
            if self._limits.apply:
                for_operators(self._view.admin).set_usage(
                    Usage(name, nbytes, payloads, int(self._clock()))
                )

        return work

    def _quota_work(self, tenant: str, room: int) -> Callable[[Counters, Check], None]:
        def work(counters: Counters, check: Check) -> None:
            records: dict[bytes, tuple[str, Record]] = {}
            for name in self._found.namespaces:
                if self._tenant(name) == tenant:
                    for record in self._view.index.scan(name):
                        check()
                        records[record.prefix_hash] = name, record
            used = sum(record.nbytes for _, record in records.values())
            if used <= room:
                return
            for candidate in choose(
                [self._candidate(*one) for one in records.values()],
                free_bytes=used - room,
                now_s=self._clock(),
            ):
                check()
                self._give_up(*records[candidate.prefix_hash], counters)

        return work

    def _give_up(self, name: str, record: Record, counters: Counters) -> None:
        for key in record_keys(name, record):
            entry = self._view.bulk.head(key.path())
            if entry is not None:
                shard = record.shards[key.field]
                self._remover.payload("over_quota", key, entry, shard, counters)

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
        """Return the namespace's tenant; None if no quota applies: strangers, swept epochs, and
        namespaces that look wrong."""
        if name in self._doubted:
            return None
        if name in self._found.old and "old_epoch" in self._limits.only:
            return None
        return self._found.namespaces[name].tenant
