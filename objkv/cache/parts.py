"""Finds payloads that have only a part of a group, which a reader cannot ask for by name.

Lookups ask for payloads with all of a group. A replica on several nodes writes one per node, whose
names depend on its shape. So the whole record of the first chunk that lacks something is read too,
and the chunks from there on are looked up by the names in it. Where nothing is stored in parts,
that is one more small call per ``again_s``.
"""

from collections.abc import Callable, Sequence
from math import inf
from time import monotonic
from typing import Final, Protocol

from objkv.background import Steps, in_steps
from objkv.cache.lookup import FindIndex
from objkv.cache.match import ENTRIES_MAX
from objkv.errors import StoreError
from objkv.index.base import Record, Shards

_AGAIN_S: Final = 30.0
_KEPT_S: Final = 600.0
"""How long the names of parts are asked for after they were last found."""


class RecordIndex(FindIndex, Protocol):
    """The part of an index that this needs."""

    def lookup(
        self, namespace: str, prefix_hashes: Sequence[bytes]
    ) -> Steps[list[Record | None]] | list[Record | None]:
        """See ``ReadIndex.lookup``. In steps, if it is in another process."""


class PartsIndex:
    """Implements ``FindIndex``. For one thread, which may have begun several lookups."""

    def __init__(
        self,
        inner: RecordIndex,
        is_stored: Callable[[Shards], bool],
        *,
        again_s: float = _AGAIN_S,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Args:
        is_stored: whether shards have everything that a reader needs of a chunk.
        again_s: for how long no record is read after one without parts that help.
        """
        self._inner, self._is_stored = inner, is_stored
        self._again_s, self._clock = again_s, clock
        self._namespace = ""
        self._parts: tuple[str, ...] = ()
        self._parts_end = self._due = -inf

    def __repr__(self) -> str:
        return f"<PartsIndex {len(self._parts)} parts, of {self._inner!r}>"

    def find(
        self, namespace: str, prefix_hashes: Sequence[bytes], fields: Sequence[str]
    ) -> Steps[list[Shards | None]]:
        """Find ``fields``, and the parts of leading chunks that lack something. If those are of
        several shapes that were not met before, only up to the second of them."""
        found = list((yield from in_steps(self._inner.find(namespace, prefix_hashes, fields))))
        if namespace != self._namespace:
            self._namespace, self._parts, self._due = namespace, (), -inf
        if self._parts and self._clock() < self._parts_end:
            yield from self._add(found, namespace, prefix_hashes, fields)
        at = self._count_stored(found)
        if at == len(found) or self._clock() < self._due:
            return found
        record = yield from self._read(namespace, prefix_hashes[at])
        found[at] = {**(found[at] or {}), **record} or None
        if self._is_stored(found[at] or {}):
            names = sorted(record.keys() - set(fields))
            if names:
                self._parts = tuple(dict.fromkeys((*names, *self._parts)))[:ENTRIES_MAX]
                self._parts_end = self._clock() + _KEPT_S
            self._due = -inf
            yield from self._add(found, namespace, prefix_hashes, fields)
        return found

    def _add(
        self,
        found: list[Shards | None],
        namespace: str,
        prefix_hashes: Sequence[bytes],
        fields: Sequence[str],
    ) -> Steps[None]:
        """Find the chunks from the first on that lacks something again, by the names of parts, too.
        The index may not have looked beyond it before."""
        at, names = self._count_stored(found), (*fields, *self._parts)
        if at < len(found):
            found[at:] = yield from in_steps(self._inner.find(namespace, prefix_hashes[at:], names))
            if any(one and one.keys() - set(fields) for one in found[at:]):
                self._parts_end = self._clock() + _KEPT_S

    def _count_stored(self, found: Sequence[Shards | None]) -> int:
        """Return how many leading chunks lack nothing."""
        for number, shards in enumerate(found):
            if shards is None or not self._is_stored(shards):
                return number
        return len(found)

    def _read(self, namespace: str, prefix_hash: bytes) -> Steps[Shards]:
        """Return all shards of a chunk; none if it has too many, or the index does not answer: what
        was found by name is right all the same."""
        self._due = self._clock() + self._again_s  # for lookups that begin meanwhile, too
        try:
            (record,) = yield from in_steps(self._inner.lookup(namespace, [prefix_hash]))
        except StoreError:
            return {}
        return {} if record is None or len(record.shards) > ENTRIES_MAX else record.shards
