"""Restores the index from the bulk store alone: every payload's header names its key, protected by
the header's checksum or seal.

It adds missing records and corrects wrong ones; it removes nothing. Replicas and other rebuilds may
run at the same time.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from objkv.cache.chunks import publish_record, shard_record, stored_header
from objkv.cache.pins import read_pins
from objkv.codec.seal import Seal
from objkv.codec.values import Header
from objkv.errors import PayloadError
from objkv.index.base import Record
from objkv.index.guarded import for_operators
from objkv.ops.backends_view import (
    BackendsView,
    Lease,
    StoredNamespace,
    StoredPayload,
    recorded,
    with_records,
)
from objkv.ops.inventory.file import Inventory, Slice
from objkv.ops.runs import Check, Counters, Unit, count_exactly
from objkv.stores.base import Entry

_PAYLOADS: Final = "nbytes IS NOT NULL"
HOT_ASK_BYTES_MAX = 1 << 20
"""Larger payloads are not searched in the hot store."""


@dataclass(frozen=True, slots=True)
class Rebuild:
    """Units that restore records, then units that restore pins and totals."""

    view: BackendsView
    apply: bool
    """False only counts."""

    def parts(
        self, inventory: Inventory, namespaces: Mapping[str, StoredNamespace], *, lost: bool = False
    ) -> Iterator[Unit]:
        """Restore the records of payloads that replicas read. Counts ``restored``, ``corrected``
        (wrong records), ``present`` and ``written`` (by others meanwhile). Findings are
        ``corrupt``: unreadable, or claiming another key. ``lost``: afterwards, only records that
        the index may have lost during this run."""
        for part in inventory.slices(_PAYLOADS):
            namespace = namespaces[part.namespace]
            if namespace.is_known and not namespace.is_old_format:
                seal = self.view.seal_of(namespace)
                yield Unit(partial(self._part, inventory, part, seal, lost), items=part.number)

    def namespaces(self, namespaces: Iterable[str]) -> Iterator[Unit]:
        """Restore pins and totals. Counts ``pins``."""
        for name in namespaces if self.apply else ():
            yield count_exactly(self.view, name)
            yield Unit(partial(self._restore_pins, name))

    def _part(
        self,
        inventory: Inventory,
        part: Slice,
        seal: Seal | None,
        lost: bool,
        counters: Counters,
        check: Check,
    ) -> None:
        for items in inventory.items(part, _PAYLOADS):
            for stored in with_records(self.view, part.namespace, items):
                check()
                entry = stored.entry
                assert entry is not None
                if lost and stored.shard is not None:
                    continue
                kind, why = self._restore(stored, entry, seal)
                if lost and kind != "restored":
                    continue  # other counts and findings were reported already
                if why:
                    counters.find(kind, entry.key, entry.nbytes, why)
                elif kind:
                    counters.count(kind, entry.nbytes)

    def _restore(self, stored: StoredPayload, entry: Entry, seal: Seal | None) -> tuple[str, str]:
        """Return what was done, as a counter, and what is wrong; nothing if it is gone."""
        try:
            header = stored_header(self.view.bulk, entry, seal)
        except PayloadError as exc:
            return "corrupt", str(exc)
        if header is None:  # deleted meanwhile
            return "", ""
        if header.claim.key != stored.key:
            return "corrupt", f"claims to be {header.claim.key.path()}"
        if describes(stored.record, header):
            return "present", ""
        if self.apply and not self._publish(stored, header, seal):
            return "written", ""
        return "restored" if stored.shard is None else "corrected", ""

    def _publish(self, stored: StoredPayload, header: Header, seal: Seal | None) -> bool:
        """Publish the record; False if another process writes or has changed payload or record."""
        view, key = self.view, stored.key
        with Lease(view, key.path()) as lease:
            # The writer that has the lease publishes the record. Otherwise both may have changed
            # since they were read; under the lease they stay unchanged.
            if lease is None or recorded(view.index, key)[1] != stored.shard:
                return False
            assert stored.entry is not None
            now = stored_header(view.bulk, stored.entry, seal)
            if now is None or now.checksum != header.checksum:
                return False
            publish_record(view.index, header, hot=self._is_hot(header), ttl_s=view.ttl_s)
        return True

    def _is_hot(self, header: Header) -> bool:
        hot = self.view.hot
        if hot is None or header.nbytes > HOT_ASK_BYTES_MAX:
            return False
        copy = hot.head(header.claim.key.path())
        return copy is not None and copy.nbytes == header.nbytes

    def _restore_pins(self, namespace: str, counters: Counters, check: Check) -> None:
        now_s = time.time()
        for prefix_hash, until_s in read_pins(self.view.bulk, namespace).items():
            if until_s > now_s and for_operators(self.view.admin).pin(
                namespace, prefix_hash, until_s=until_s, ttl_s=self.view.ttl_s
            ):
                counters.count("pins")


def describes(record: Record | None, header: Header) -> bool:
    """Whether the record has this payload and its chunk, ignoring the flag ``hot``."""
    claim = header.claim
    shard = None if record is None else record.shards.get(claim.key.field)
    if record is None or shard is None or replace(shard, hot=False) != shard_record(header):
        return False
    chunk = record.parent_hash, record.token_start, record.token_end
    return chunk == (claim.parent_hash, claim.token_start, claim.token_end)
