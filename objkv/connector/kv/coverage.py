"""What of a chunk this replica can be served from, whatever the shapes of who saved it.

Decided on the scheduler alone, for all ranks together: each rank then picks the same shards. Called
for every chunk of every prompt, on the scheduler's thread: what shards there are is added up as
bits, one for each head of each layer, and nothing is searched.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import lru_cache

from objkv.config import Config
from objkv.connector.model.groups import Geometry
from objkv.index.base import ShardRecord, Shards
from objkv.index.near import NearIndex
from objkv.index.shapes import ShapesIndex
from objkv.keys.topology import Shard

_FIELDS_KEPT = 4096
"""Fields whose bits are known: a fleet's shapes are few, but an index may say anything."""
_CHOICES_KEPT = 4096
_CHOOSABLE_MAX = 64
"""Of more shards of one group all are counted as fetched."""


class Coverage:
    """The scheduler's thread, and threads that look up: what it keeps may be made twice."""

    def __init__(self, geometry: Geometry, is_mixed: Callable[[], bool] = lambda: False) -> None:
        """``is_mixed``: whether shards of other shapes can be among those given. Until then
        counting them says enough, and decodes none."""
        self._is_mixed = is_mixed
        groups = range(len(geometry.groups))
        self._fields = [geometry.fields(group) for group in groups]
        self._count = len(geometry.all_fields())
        # Ranks load side by side, so one rank's bytes are the total divided by the number of
        # distinct shards. If groups differ in that, the smallest number counts.
        self._shares = min((len(own) for own in self._fields if own), default=1)
        self._wholes = [
            Shard(0, len(identity.layers), 0, identity.heads) for identity in geometry.groups
        ]
        own = [[_shard(field) for field in sorted(fields)] for fields in self._fields]
        self._firsts = [shards[0] if shards else None for shards in own]
        self._needs = [
            _union(_bits(self._wholes[group], shard) for shard in own[group]) for group in groups
        ]
        self._held = lru_cache(_FIELDS_KEPT)(self._held_of)
        self._chosen = lru_cache(_CHOICES_KEPT)(self._choose)

    def is_readable(self, shards: Shards, group: int) -> bool:
        """Whether every rank of this replica finds what it needs of a group."""
        if not self._is_mixed():
            return len(shards) == self._count or self._fields[group].issubset(shards)
        return not self._needs[group] & ~self._bits_of(shards)[group]

    def is_complete(self, shards: Shards) -> bool:
        """The same of all groups: there is nothing left to save."""
        if not self._is_mixed():
            return len(shards) == self._count
        held = self._bits_of(shards)
        return not any(need & ~bits for need, bits in zip(self._needs, held, strict=True))

    def size(self, shards: Shards) -> tuple[int, bool]:
        """How many bytes a rank fetches, the first standing for all, and whether all are hot."""
        if not self._is_mixed():
            return _sum(shards.values(), self._shares)
        return _sum(self.fetched(shards), 1)

    def fetched(self, shards: Shards) -> Collection[ShardRecord]:
        """Roughly the records that the ranks will fetch. Where other shapes are stored, those that
        the first rank needs stand for all."""
        if not self._is_mixed():
            return shards.values()
        groups: dict[int, list[str]] = {}
        for field in shards:
            if (held := self._held(field)) is not None:
                groups.setdefault(held[0], []).append(field)
        chosen = [
            field
            for group, fields in groups.items()
            for field in self._chosen(group, frozenset(fields))
        ]
        return [shards[field] for field in chosen]

    def is_possible(self, field: str) -> bool:
        """Whether a shard field can be one of this model, written by whatever shape."""
        return self._held(field) is not None

    def _bits_of(self, shards: Shards) -> list[int]:
        """Per group what the shards hold, together."""
        bits = [0] * len(self._needs)
        for field in shards:
            if (held := self._held(field)) is not None:
                bits[held[0]] |= held[1]
        return bits

    def _held_of(self, field: str) -> tuple[int, int] | None:
        """The group of a field and what it holds of it; None for what cannot be of this model."""
        number, _, text = field.partition(".")
        try:
            group, shard = int(number), Shard.parse(text)
        except ValueError:
            return None
        if not 0 <= group < len(self._wholes) or str(group) != number:
            return None
        whole = self._wholes[group]
        if shard.layer_end > whole.layer_end or shard.head_end > whole.head_end:
            return None
        return group, _bits(whole, shard)

    def _choose(self, group: int, fields: frozenset[str]) -> tuple[str, ...]:
        """About what the first rank fetches: ``cover`` may find better, and takes longer."""
        need, whole = self._firsts[group], self._wholes[group]
        if need is None:
            return ()
        if len(fields) > _CHOOSABLE_MAX:
            return tuple(fields)
        wanted = left = _bits(whole, need)
        chosen = []
        for outside, _, field, bits in sorted(_ranked(whole, fields, wanted)):
            if bits & left and (outside or bits & left == bits):
                chosen.append(field)
                left &= ~bits
        return tuple(chosen)


def open_coverage(
    config: Config, geometry: Geometry, index: NearIndex, *, writes: bool
) -> tuple[ShapesIndex, Coverage]:
    """The index that lookups read, and the coverage that judges its answers."""
    reach = Coverage(geometry, is_mixed=lambda: shapes.mixed)
    shapes = ShapesIndex(
        index,
        geometry.all_fields(),
        readable=reach.is_possible,
        complete=reach.is_complete,
        writes=writes,
        ttl_s=config.ttl_s,
    )
    return shapes, reach


def _ranked(
    whole: Shard, fields: Iterable[str], wanted: int
) -> Iterator[tuple[int, int, str, int]]:
    """The best first: those that hold nothing but what is wanted, the larger before the smaller;
    then those with the least else."""
    for field in fields:
        bits = _bits(whole, _shard(field))
        yield (bits & ~wanted).bit_count(), -bits.bit_count(), field, bits


def _bits(whole: Shard, shard: Shard) -> int:
    """One bit for each head of each layer of the shard, those of its first layer lowest."""
    row = (1 << (shard.head_end - shard.head_start)) - 1 << shard.head_start
    return _union(row << whole.head_end * at for at in range(shard.layer_start, shard.layer_end))


def _union(bits: Iterable[int]) -> int:
    union = 0
    for some in bits:
        union |= some
    return union


def _sum(records: Iterable[ShardRecord], shares: int) -> tuple[int, bool]:
    nbytes, hot = 0, True
    for record in records:
        nbytes += record.nbytes
        hot = hot and record.hot
    return nbytes // shares, hot


def _shard(field: str) -> Shard:
    return Shard.parse(field.partition(".")[2])
