"""Removes payloads and records while replicas go on: index first, bulk second, under the lease that
savers take, and only what is still as it was found.

A crash between two steps leaves an orphan, which the next sweep removes. A saver that could not ask
for the lease may announce a payload right before it goes: its record is forgotten after.
"""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from threading import Lock
from typing import Literal, get_args

from objkv.errors import StoreError
from objkv.index.base import ShardRecord
from objkv.keys.chunk import ChunkKey
from objkv.ops.backends_view import BackendsView, Lease, recorded
from objkv.ops.retrying import once, pauses
from objkv.ops.runs import Counters, Halted
from objkv.stores.base import Entry, Unfinished

Category = Literal[
    "orphan", "ghost", "expired", "over_quota", "old_epoch", "stranger", "temporary", "quarantined"
]
CATEGORIES: tuple[Category, ...] = get_args(Category)


@dataclass(frozen=True, slots=True)
class SweepLimits:
    """What a sweep may touch."""

    apply: bool
    """False: everything is counted, nothing is removed."""
    grace_s: float
    """What is younger is left alone: somebody may be about to announce it."""
    put_s: float = 600.0
    """No put lasts so long: what is temporary and younger may be one under way, whatever the
    grace."""
    only: Collection[Category] = CATEGORIES
    strangers: bool = False
    """Whether namespaces without an identity document are removed, too."""
    force: bool = False
    """Whether to go on where one end looks as if it were the wrong one, or wiped."""
    removals_max: int | None = None


class Remover:
    """Counts what it is given as found, and removes it if that is allowed. Safe from many threads,
    each with a ``Counters`` of its own."""

    def __init__(
        self,
        view: BackendsView,
        limits: SweepLimits,
        halt: Callable[[], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """``halt``: called once when no further removal is allowed."""
        self._view = view
        self._limits = limits
        self._halt = halt
        self._lock = Lock()
        self._left = limits.removals_max
        self._clock = clock
        self._sleep = sleep

    def payload(
        self,
        kind: Category,
        key: ChunkKey,
        entry: Entry,
        shard: ShardRecord | None,
        counters: Counters,
    ) -> None:
        """Remove a payload, and first its record, if ``shard`` is what it says. Neither is touched
        if one of them has changed since."""
        if not self._may(kind):
            counters.find(kind, entry.key, entry.nbytes)
            return
        lease = Lease(self._view, key.path(), clock=self._clock)
        if not lease.take():
            counters.count("busy")
            return
        try:
            is_removed = self._remove(key, entry, shard, lease)
        finally:
            lease.release()
        if is_removed:
            counters.find(kind, entry.key, entry.nbytes)
            counters.count("removed", entry.nbytes)
        else:
            counters.count("changed")

    def record(self, key: ChunkKey, shard: ShardRecord, counters: Counters) -> None:
        """Forget the record of a payload that is not there."""
        if not self._may("ghost"):
            counters.find("ghost", key.path(), shard.nbytes)
            return
        view, path = self._view, key.path()
        lease = Lease(view, path, clock=self._clock)
        if not lease.take():
            counters.count("busy")
            return
        try:
            is_forgotten = (
                view.bulk.head(path) is None
                and lease.renew()
                and view.index.forget(key.namespace, key.prefix_hash, key.field, shard)
            )
            if is_forgotten:
                self._remove_copy(path, shard)
        finally:
            lease.release()
        if is_forgotten:
            counters.find("ghost", path, shard.nbytes)
            counters.count("removed")
        else:
            counters.count("changed")

    def leftover(self, found: Unfinished, counters: Counters) -> None:
        """Discard what a killed writer left."""
        where = f"{found.key}/{found.name}" if found.name.startswith("~") else found.key
        if self._may("temporary"):
            if not self._view.bulk.discard(found):
                return
            counters.count("removed", found.nbytes)
        counters.find("temporary", where, found.nbytes)

    def entry(self, kind: Category, entry: Entry, counters: Counters) -> None:
        """Remove something that no index knows."""
        if self._may(kind):
            self._view.bulk.delete(entry.key)
            counters.count("removed", entry.nbytes)
        counters.find(kind, entry.key, entry.nbytes)

    def _may(self, kind: Category) -> bool:
        """Whether to remove one more. Raises ``Halted`` if there were enough."""
        if not self._limits.apply or (kind == "stranger" and not self._limits.strangers):
            return False
        with self._lock:
            if self._left is None:
                return True
            if self._left > 0:
                self._left -= 1
                return True
        self._halt()
        raise Halted

    def _remove(self, key: ChunkKey, entry: Entry, shard: ShardRecord | None, lease: Lease) -> bool:
        view, path = self._view, key.path()
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
        if not self._delete(entry, lease):
            return False
        self._remove_copy(path, shard)
        self._withdraw(key)
        return True

    def _delete(self, entry: Entry, lease: Lease) -> bool:
        """Delete ``entry``; False if it is, or may be, another's by now. A delete that failed may
        have been done all the same, and something saved since: it is looked at before the next."""
        store, path = once(self._view.bulk), entry.key
        for pause_s in pauses():
            if not lease.renew():
                return False
            try:
                store.delete(path)
            except StoreError as exc:
                if not exc.transient:
                    raise
            else:
                return True
            self._sleep(pause_s)
            now = self._view.bulk.head(path)
            if now is None or not _is_same(now, entry):
                return now is None
        if not lease.renew():
            return False
        store.delete(path)
        return True

    def _withdraw(self, key: ChunkKey) -> None:
        """Forget what was announced of a payload while it was deleted."""
        view = self._view
        if view.is_own_index:
            return
        _, known = recorded(view.index, key)
        if known is None or view.bulk.head(key.path()) is not None:
            return
        if view.index.forget(key.namespace, key.prefix_hash, key.field, known):
            self._remove_copy(key.path(), known)

    def _remove_copy(self, path: str, shard: ShardRecord | None) -> None:
        # Of what had no record nobody knows whether there is a copy; it ends by itself.
        if self._view.hot is not None and shard is not None and shard.hot:
            self._view.hot.delete(path)


def _is_same(now: Entry, then: Entry) -> bool:
    """Whether nobody has written it since: some S3 servers list fractions of a second that the
    answer to a HEAD has no room for."""
    return now.nbytes == then.nbytes and abs(now.modified_s - then.modified_s) < 1
