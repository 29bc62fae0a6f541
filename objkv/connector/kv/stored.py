"""Which of a chunk's stored payloads this replica loads.

One payload has all of a group, unless the replica that wrote it runs on several nodes, which have
one each, or divides the tokens in a way of its own. The scheduler decides for all ranks together,
on its own thread, for every chunk of every prompt.
"""

from functools import lru_cache, partial

from objkv.cache.match import payloads_of
from objkv.connector.model.groups import Geometry
from objkv.index.base import ShardRecord, Shards
from objkv.keys.chunk import field_of
from objkv.keys.topology import ALL_TOKENS
from objkv.transfer.plan import Source

_CHOICES_KEPT = 4096
"""Bound of remembered choices. A fleet has few shapes, but an index may contain anything."""


class StoredPayloads:
    """Chooses payloads. Thread-safe for the scheduler's and lookup threads, which may compute the
    same choice twice."""

    def __init__(self, geometry: Geometry) -> None:
        groups = range(len(geometry.groups))
        self._geometry, self._target_count = geometry, geometry.target_count
        self._numbers = [geometry.number(group) for group in groups]
        self._has_payloads = [bool(geometry.fields(group)) for group in groups]
        # None: a replica that divides the tokens in a way of its own reads only that.
        self._wholes = [
            str(number) if geometry.reads(group, ALL_TOKENS) else None
            for group, number in enumerate(self._numbers)
        ]
        self._whole = [((Source(number), str(number)),) for number in self._numbers]
        self._chosen = lru_cache(_CHOICES_KEPT)(self._choose)

    def is_readable(self, shards: Shards, group: int) -> bool:
        """Whether every rank of this replica finds what it needs of a group."""
        return not self._has_payloads[group] or bool(self._payloads(shards, group))

    def is_loadable(self, shards: Shards) -> bool:
        """Whether every rank finds what it needs of every group of the target."""
        return all(self.is_readable(shards, group) for group in range(self._target_count))

    def is_complete(self, shards: Shards) -> bool:
        """Whether every rank finds what it needs of every group, so nothing remains to save."""
        return all(self.is_readable(shards, group) for group in range(len(self._numbers)))

    def of(self, shards: Shards | None, group: int) -> list[tuple[Source, ShardRecord]]:
        """Return the payloads that have a whole group, and their records. Raises ``LookupError`` if
        none have."""
        shards = shards or {}
        payloads = self._payloads(shards, group)
        if not payloads:
            raise LookupError(f"no payloads with all of group {self._numbers[group]}")
        return [(source, shards[field]) for source, field in payloads]

    def size(self, shards: Shards) -> tuple[int, bool]:
        """Return how many bytes a load of the chunk fetches, and whether all of them are hot."""
        groups = [group for group, has_payloads in enumerate(self._has_payloads) if has_payloads]
        fields = [field for group in groups for _, field in self._payloads(shards, group)]
        records = [shards[field] for field in fields]
        return sum(record.nbytes for record in records), all(record.hot for record in records)

    def _payloads(self, shards: Shards, group: int) -> tuple[tuple[Source, str], ...]:
        """Return the payloads that together have a whole group, and their fields; none if they do
        not suffice."""
        if self._wholes[group] in shards:
            return self._whole[group]
        return self._chosen(group, frozenset(shards))

    def _choose(self, group: int, fields: frozenset[str]) -> tuple[tuple[Source, str], ...]:
        number, geometry = self._numbers[group], self._geometry
        reads = partial(geometry.reads, group)
        shards = payloads_of(fields, number, geometry.groups[group], reads)
        return tuple((Source(number, shard), field_of(number, shard)) for shard in shards)
