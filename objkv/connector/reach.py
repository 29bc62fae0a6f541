"""What of a chunk this replica can be served from, whatever the shapes of who saved it.

Decided on the scheduler alone, for all ranks together: each rank then picks the same shards.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from objkv.connector.geometry import Geometry
from objkv.index.base import ShardRecord, Shards
from objkv.keys.topology import Shard, cover

_KEPT_MAX = 256
"""Combinations of fields: a fleet's shapes are few, but an index may say anything."""


@dataclass(frozen=True, slots=True)
class _Served:
    """What one combination of stored shards comes to."""

    groups: frozenset[int]
    """Those that every rank can be served."""
    fetched: tuple[tuple[str, ...], ...]
    """The payloads of these, for each rank that reads something else than the others."""


class Reach:
    """The scheduler's thread, and threads that look up: what it keeps may be made twice."""

    def __init__(self, geometry: Geometry, is_mixed: Callable[[], bool] = lambda: False) -> None:
        """``is_mixed``: whether shards of other shapes can be among those asked about. Until then
        counting them says enough, and decodes none."""
        self._geometry = geometry
        self._is_mixed = is_mixed
        count = len(geometry.groups)
        self._fields = [geometry.fields(group) for group in range(count)]
        self._count = len(geometry.all_fields())
        self._shares = min((len(own) for own in self._fields if own), default=1)
        self._needs = [[_shard(field) for field in sorted(own)] for own in self._fields]
        self._wholes = [
            Shard(0, len(identity.layers), 0, identity.heads) for identity in geometry.groups
        ]
        self._kept: dict[frozenset[str], _Served] = {}

    def is_readable(self, shards: Shards, group: int) -> bool:
        """Whether every rank of this replica finds what it needs of a group."""
        if not self._is_mixed():
            return len(shards) == self._count or self._fields[group].issubset(shards)
        return group in self._served(shards).groups

    def is_complete(self, shards: Shards) -> bool:
        """The same of all groups: there is nothing left to save."""
        if not self._is_mixed():
            return len(shards) == self._count
        return len(self._served(shards).groups) == len(self._needs)

    def size(self, shards: Shards) -> tuple[int, bool]:
        """How many bytes the rank fetches that fetches most, and whether all of them are hot. Ranks
        fetch at once, each its own shards, of which there may be fewer than ranks."""
        if not self._is_mixed():
            # Where groups differ, as if all were divided like the one that is least.
            return _sum(shards.values(), self._shares)
        served = self._served(shards)
        ranks = [_sum([shards[field] for field in fields], 1) for fields in served.fetched]
        return max(ranks, default=(0, True))

    def is_possible(self, field: str) -> bool:
        """Whether a shard field can be one of this model, written by whatever shape."""
        number, _, text = field.partition(".")
        try:
            group, shard = int(number), Shard.parse(text)
        except ValueError:
            return False
        if not 0 <= group < len(self._wholes) or str(group) != number:
            return False
        whole = self._wholes[group]
        return shard.layer_end <= whole.layer_end and shard.head_end <= whole.head_end

    def _served(self, shards: Shards) -> _Served:
        held = frozenset(shards)
        served = self._kept.get(held)
        if served is None:
            served = self._serve(held)
            if len(self._kept) >= _KEPT_MAX:
                self._kept.clear()
            self._kept[held] = served
        return served

    def _serve(self, held: frozenset[str]) -> _Served:
        groups, fetched = [], []
        for group, needs in enumerate(self._needs):
            prefix = f"{group}."
            stored = [_shard(f) for f in held if f.startswith(prefix) and self.is_possible(f)]
            covers = [cover(need, stored) for need in needs]
            if None not in covers:
                groups.append(group)
            fetched.append(
                [{f"{group}.{part.source}" for part in parts} for parts in covers if parts]
            )
        return _Served(frozenset(groups), tuple(_by_rank(fetched)))


def _by_rank(fetched: list[list[set[str]]]) -> Iterable[tuple[str, ...]]:
    """Groups are cut into different numbers of shards: a rank has its share of each."""
    ranks = max((len(shares) for shares in fetched), default=0)
    for rank in range(ranks):
        mine = [shares[rank * len(shares) // ranks] for shares in fetched if shares]
        yield tuple(sorted(set().union(*mine)))


def _sum(records: Iterable[ShardRecord], shares: int) -> tuple[int, bool]:
    nbytes, hot = 0, True
    for record in records:
        nbytes += record.nbytes
        hot = hot and record.hot
    return nbytes // shares, hot


def _shard(field: str) -> Shard:
    return Shard.parse(field.partition(".")[2])
