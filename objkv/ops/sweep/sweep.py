"""Removes unreachable and evictable data that an inventory found, by the categories of ``remove``.

Each item is looked up in the index again before it is judged, and again under its lease.
"""

import math
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Final

from objkv.cache.pins import read_pins
from objkv.cache.quota import FULL_PERCENT
from objkv.keys.identity import identity_path
from objkv.ops.backends_view import BackendsView, StoredPayload, record_keys, with_records
from objkv.ops.inventory.file import Inventory, Slice
from objkv.ops.inventory.findings import Doubt, doubted
from objkv.ops.inventory.walk import Walk, WalkScope
from objkv.ops.pin import remove_ended_pins
from objkv.ops.runs import Check, Counters, Unit, count_exactly
from objkv.ops.sweep.eviction import Candidate, choose
from objkv.ops.sweep.remove import Category, Remover, SweepLimits
from objkv.stores.base import Entry, Unfinished

SWEPT_PERCENT: Final = 85
"""What a sweep leaves of a quota: room for a tenth of it until saves stop (``FULL_PERCENT``)."""
_PAYLOADS: Final = "kind IN ('orphan', 'expired', 'old_epoch', 'unidentified')"
_MISSING: Final = "kind = 'missing'"
_OTHERS = "SELECT key, name, nbytes, modified_s FROM main.others WHERE kind = ?"
_CANDIDATES = """
SELECT c.hash, c.parent, ifnull(c.start, 0), ifnull(c.ends, 0), sum(p.recorded), c.hits,
  c.touched_s, max(p.created_s), c.pinned
FROM main.chunks c JOIN main.payloads p USING (ns, hash)
WHERE c.ns = ? AND p.recorded IS NOT NULL AND p.nbytes IS NOT NULL GROUP BY c.hash
"""


class Sweep:
    """Units: ``leftovers``, ``parts``, ``missing``, ``quotas``; then ``documents``, ``totals``."""

    def __init__(
        self,
        view: BackendsView,
        walk: Walk,
        limits: SweepLimits,
        *,
        doubts: Collection[Doubt] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``walk``: done, and judged. ``doubts``: what to keep as it looks like a mistake."""
        # With a doubt about the whole store nothing at all is deleted.
        assert not (limits.apply and any(one.namespace is None for one in doubts))
        self._view = view
        self._inventory: Inventory = walk.inventory
        self._scope: WalkScope = walk.scope
        self._limits = limits
        self._doubted = doubted(doubts, walk.scope)
        self._remover = Remover(view, limits)
        self._clock = clock
        now_s = clock()
        self._pins = {
            name: frozenset(
                h for h, until_s in read_pins(view.bulk, name).items() if until_s > now_s
            )
            for name in walk.scope.namespaces
        }
        """Chunks pinned now, by namespace."""

    def leftovers(self) -> Iterator[Unit]:
        """Sweep leftovers of killed writers, and the quarantine."""
        yield Unit(self._leftovers)

    def parts(self) -> Iterator[Unit]:
        """Sweep payloads, by their namespace and their records."""
        return self._units(_PAYLOADS, self._judge)

    def missing(self) -> Iterator[Unit]:
        """Forget records without payloads."""
        return self._units(_MISSING, self._forget)

    def documents(self) -> Iterator[Unit]:
        """Remove documents of old epochs without payloads, and of ended pins."""
        if not self._limits.apply:
            return
        for name in sorted(self._scope.namespaces):
            yield Unit(partial(self._documents, name))

    def _leftovers(self, counters: Counters, check: Check) -> None:
        """One after the other: only one thread at a time may use ``rows``."""
        for key, name, nbytes, modified_s in self._inventory.rows(_OTHERS, ("temporary",)):
            check()
            if self._is_old(modified_s, self._limits.put_s):
                self._remover.leftover(Unfinished(key, name, nbytes, modified_s), counters)
            else:
                counters.count("young", nbytes)
        for key, _, nbytes, modified_s in self._inventory.rows(_OTHERS, ("quarantined",)):
            check()
            if self._is_old(modified_s):
                self._remover.entry("quarantined", Entry(key, nbytes, modified_s), counters)
            else:
                counters.count("young", nbytes)

    def _units(
        self, where: str, judge: Callable[[StoredPayload, Counters], None]
    ) -> Iterator[Unit]:
        """Let ``judge`` see what the inventory found, with its records of now."""

        def work(part: Slice, counters: Counters, check: Check) -> None:
            for items in self._inventory.items(part, where):
                for stored in with_records(self._view, part.namespace, items):
                    check()
                    judge(stored, counters)

        for part in self._inventory.slices(where):
            yield Unit(partial(work, part), items=part.number)

    def _forget(self, stored: StoredPayload, counters: Counters) -> None:
        if stored.shard is not None and stored.key.namespace in self._doubted:
            counters.count("doubted")
        elif stored.shard is not None:
            self._remover.record(stored.key, stored.shard, counters)

    def _judge(self, stored: StoredPayload, counters: Counters) -> None:
        key, entry, record = stored.key, stored.entry, stored.record
        namespace = key.namespace
        assert entry is not None
        kind = self._kind(namespace, entry, is_recorded=stored.shard is not None)
        if kind is None:
            return
        is_pinned = key.prefix_hash in self._pins[namespace]
        if is_pinned or (record is not None and record.pinned):
            counters.count("pinned", entry.nbytes)
        elif namespace in self._doubted:
            counters.count("doubted", entry.nbytes)
        elif not self._is_old(max(entry.modified_s, record.touched_s if record else 0)):
            counters.count("young", entry.nbytes)
        else:
            self._remover.payload(kind, key, entry, stored.shard, counters)

    def _kind(self, namespace: str, entry: Entry, *, is_recorded: bool) -> Category | None:
        if not self._scope.namespaces[namespace].is_known:
            return "unidentified"
        if namespace in self._scope.old:
            return "old_epoch"
        if is_recorded or self._view.is_own_index:
            return None
        age_s = self._clock() - entry.modified_s
        return "expired" if age_s >= self._view.ttl_s else "orphan"

    def _documents(self, name: str, counters: Counters, check: Check) -> None:
        bulk, grace_s = self._view.bulk, max(0, self._limits.grace_s)
        counters.counts["documents"] += remove_ended_pins(
            bulk, name, now_s=self._clock(), grace_s=grace_s
        )
        if name in self._doubted or name not in self._scope.old:
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

    def _is_old(self, modified_s: float, least_s: float = -math.inf) -> bool:
        return self._clock() - modified_s >= max(self._limits.grace_s, least_s)

    def totals(self) -> Iterator[Unit]:
        """Set the totals to exact counts, also of namespaces whose records have all expired."""
        if not self._limits.apply or self._view.is_own_index:
            return
        names = {*self._scope.every, *self._scope.totals}
        for name in sorted(names if self._scope.only is None else {self._scope.only}):
            yield count_exactly(self._view, name, self._clock)

    def quotas(self, quota_bytes: int) -> Iterator[Unit]:
        """Evict the ends of the least used prefixes of tenants, down to ``SWEPT_PERCENT`` of their
        quota. Holds all chunks of a tenant in memory, about 400 bytes each. Finds tenants for
        whom pins alone stop saves as ``full``."""
        if not quota_bytes:
            return
        for tenant in sorted({t for t in map(self._tenant, self._scope.namespaces) if t}):
            yield Unit(partial(self._quota, tenant, quota_bytes))

    def _quota(self, tenant: str, quota_bytes: int, counters: Counters, check: Check) -> None:
        homes: dict[bytes, str] = {}
        candidates: list[Candidate] = []
        for name in self._scope.namespaces:
            if self._tenant(name) == tenant:
                ns = self._inventory.namespace(name)
                for *values, pinned in self._inventory.run(_CANDIDATES, (ns,)):
                    is_pinned = bool(pinned) or values[0] in self._pins[name]
                    candidates.append(Candidate(*(*values, is_pinned)))
                    homes[values[0]] = name
        left = sum(one.nbytes for one in candidates)
        room = quota_bytes * SWEPT_PERCENT // 100
        for one in choose(candidates, free_bytes=left - room, now_s=self._clock()):
            check()
            self._evict(homes[one.prefix_hash], one, counters)
            left -= one.nbytes
        if 100 * left >= FULL_PERCENT * quota_bytes:  # pinned chunks, and those before them
            counters.find("full", tenant, left)

    def _evict(self, name: str, chosen: Candidate, counters: Counters) -> None:
        [record] = self._view.index.lookup(name, [chosen.prefix_hash])
        if record is None or record.touched_s > chosen.touched_s:  # it was used meanwhile
            counters.count("changed")
            return
        for key in record_keys(name, record):
            entry = self._view.bulk.head(key.path())
            if entry is not None:
                shard = record.shards[key.field]
                self._remover.payload("over_quota", key, entry, shard, counters)

    def _tenant(self, name: str) -> str | None:
        """Return the namespace's tenant; None if no quota applies."""
        if name in self._doubted or name in self._scope.old:
            return None
        return self._scope.namespaces[name].tenant
