"""An index whose records are found by listing the bulk store where the server refuses to scan keys.

Only the role sweeper may scan a Redis, because that shows the keys of other tenants. Every role may
list its own prefix of the bulk store and look chunks up, so every command that reads works with a
reader's rights. Such a command does not see records whose payloads are gone, and logs that once.
"""

import logging
import re
from collections.abc import Iterator
from itertools import groupby, islice
from typing import Final

from objkv.cache.chunks import stored_payloads
from objkv.errors import SCAN_DENIED, StoreDenied
from objkv.index.base import Record, WriteIndex
from objkv.index.guarded import GuardedIndex
from objkv.keys.identity import NAMESPACE_HEX
from objkv.net.guard import CallPolicy
from objkv.stores.base import ReadStore

logger = logging.getLogger(__name__)
_NAMESPACE = re.compile(rf"[0-9a-f]{{{NAMESPACE_HEX}}}")
_CHUNKS_AT_ONCE = 500


MISSING_UNSEEN: Final = (
    "records whose payloads are missing are not seen, because this user may not list the "
    "keys of the index: to see them, use the role sweeper"
)


def is_listed(index: object) -> bool:
    """Whether ``index`` lists the bulk store, because its server has refused a scan."""
    return isinstance(index, ListedIndex) and index.is_denied


class ListedIndex(GuardedIndex):
    """A guarded index that lists ``bulk`` once the server has refused a scan. Does not close
    ``bulk``."""

    def __init__(self, inner: WriteIndex, guard: CallPolicy, bulk: ReadStore) -> None:
        super().__init__(inner, guard)
        self._bulk = bulk
        self.is_denied = False

    def scan(self, namespace: str) -> Iterator[Record]:
        """See ``ReadIndex``. From a listing, yields each chunk that has a payload and a record."""
        if not self.is_denied:
            try:
                yield from super().scan(namespace)
                return
            except StoreDenied as exc:  # at the first record: rights rarely end within a scan
                self._note(exc)
        payloads = stored_payloads(self._bulk, f"{namespace}/")
        hashes = (found for found, _ in groupby(payloads, lambda found: found[0].prefix_hash))
        while batch := list(islice(hashes, _CHUNKS_AT_ONCE)):
            yield from filter(None, self.lookup(namespace, batch))

    def namespaces(self) -> list[str]:
        """See ``ReadIndex``. From a listing, returns the namespaces of the bulk store."""
        if not self.is_denied:
            try:
                return list(super().namespaces())
            except StoreDenied as exc:
                self._note(exc)
        return sorted(name for name in self._bulk.folders("") if _NAMESPACE.fullmatch(name))

    def _note(self, denied: StoreDenied) -> None:
        """Remember a refused scan. Raises ``denied`` if something else was refused."""
        if SCAN_DENIED not in str(denied):
            raise denied
        self.is_denied = True
        logger.warning("index keys not scanned, bulk store listed instead: %s", MISSING_UNSEEN)
