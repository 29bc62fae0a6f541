"""Removes payloads and records while replicas are running: first the record, then the payload,
under the lease that writers take, and only if both are unchanged.

A crash between two steps leaves an orphan, which the next sweep removes. A writer that could not
take the lease may publish a payload just before its deletion; that record is forgotten afterwards.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from objkv.index.base import ShardRecord
from objkv.keys.chunk import ChunkKey
from objkv.ops.backends_view import BackendsView, Lease, delete_unchanged, recorded
from objkv.ops.runs import Counters
from objkv.stores.base import Entry, Unfinished

Category = Literal[
    "orphan", "missing", "expired", "over_quota", "old_epoch", "unidentified", "temporary",
    "quarantined",
]  # fmt: skip
CATEGORIES: tuple[Category, ...] = get_args(Category)


@dataclass(frozen=True, slots=True)
class SweepLimits:
    """The limits of a sweep."""

    apply: bool
    """False: count everything, remove nothing."""
    grace_s: float
    """Younger data is kept: its writer may be about to publish it."""
    put_s: float = 600.0
    """Longer than any put takes: younger temporary data is kept even if ``grace_s`` is shorter."""
    unidentified: bool = False
    """Whether payloads in namespaces without an identity document are removed too."""


@dataclass(frozen=True, slots=True)
class Remover:
    """Counts each item and removes it if it may. For many threads, each with its ``Counters``."""

    view: BackendsView
    limits: SweepLimits
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def payload(
        self,
        kind: Category,
        key: ChunkKey,
        entry: Entry,
        shard: ShardRecord | None,
        counters: Counters,
    ) -> None:
        """Remove a payload after its record ``shard``, unless one of them has changed since."""
        self._under_lease(
            kind, key, entry.nbytes, lambda lease: self._remove(key, entry, shard, lease), counters
        )

    def record(self, key: ChunkKey, shard: ShardRecord, counters: Counters) -> None:
        """Forget the record of a missing payload."""
        self._under_lease(
            "missing", key, shard.nbytes, lambda lease: self._forget(key, shard, lease), counters
        )

    def _under_lease(
        self,
        kind: Category,
        key: ChunkKey,
        nbytes: int,
        remove: Callable[[Lease], bool],
        counters: Counters,
    ) -> None:
        """Count what is found. If the limits allow it, do ``remove``, which returns False for what
        has changed, unless another process has the lease."""
        path = key.path()
        if not self._may(kind):
            counters.find(kind, path, nbytes)
            return
        with Lease(self.view, path, clock=self.clock) as lease:
            if lease is None:
                counters.count("busy")
            elif remove(lease):
                counters.find(kind, path, nbytes)
                # A record alone takes no bytes of the bulk store.
                counters.count("removed", 0 if kind == "missing" else nbytes)
            else:
                counters.count("changed")

    def _forget(self, key: ChunkKey, shard: ShardRecord, lease: Lease) -> bool:
        view, path = self.view, key.path()
        if view.bulk.head(path) is not None or not lease.renew():
            return False
        if not view.index.forget(key.namespace, key.prefix_hash, key.field, shard):
            return False
        self._remove_copy(path, shard)
        return True

    def leftover(self, found: Unfinished, counters: Counters) -> None:
        """Discard the leftover of a killed writer."""
        where = f"{found.key}/{found.name}" if found.name.startswith("~") else found.key
        if self._may("temporary"):
            if not self.view.bulk.discard(found):
                return
            counters.count("removed", found.nbytes)
        counters.find("temporary", where, found.nbytes)

    def entry(self, kind: Category, entry: Entry, counters: Counters) -> None:
        """Remove an entry that has no index record."""
        if self._may(kind):
            self.view.bulk.delete(entry.key)
            counters.count("removed", entry.nbytes)
        counters.find(kind, entry.key, entry.nbytes)

    def _may(self, kind: Category) -> bool:
        return self.limits.apply and (kind != "unidentified" or self.limits.unidentified)

    def _remove(self, key: ChunkKey, entry: Entry, shard: ShardRecord | None, lease: Lease) -> bool:
        view, path = self.view, key.path()
        now = view.bulk.head(path)
        if now is None or not _is_same(now, entry):
            return False
        if not view.is_own_index:
            record, known = recorded(view.index, key)
            if known != shard or (record is not None and record.pinned):
                return False
            if shard is not None and not (
                lease.renew()
                and view.index.forget(key.namespace, key.prefix_hash, key.field, shard)
            ):
                return False
        if not delete_unchanged(view, now, lease, sleep=self.sleep):
            return False
        self._remove_copy(path, shard)
        self._withdraw(key)
        return True

    def _withdraw(self, key: ChunkKey) -> None:
        """Forget a record that was published while its payload was deleted."""
        view = self.view
        if view.is_own_index:
            return
        _, known = recorded(view.index, key)
        if known is None or view.bulk.head(key.path()) is not None:
            return
        if view.index.forget(key.namespace, key.prefix_hash, key.field, known):
            self._remove_copy(key.path(), known)

    def _remove_copy(self, path: str, shard: ShardRecord | None) -> None:
        # Without a record it is unknown whether a hot copy exists; such a copy expires on its own.
        if self.view.hot is not None and shard is not None and shard.hot:
            self.view.hot.delete(path)


def _is_same(now: Entry, then: Entry) -> bool:
    """Whether the entry is unchanged. Times may differ by less than 1 s: some S3 servers list
    fractions of a second, which a HEAD answer cannot carry."""
    return now.nbytes == then.nbytes and abs(now.modified_s - then.modified_s) < 1
