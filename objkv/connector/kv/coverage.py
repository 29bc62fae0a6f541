"""Decides which stored shards of a chunk this replica can load, whatever shape wrote them.

The scheduler alone decides, for all ranks together, so every rank picks the same shards. It does so
for every chunk of every prompt on its own thread. Shards are therefore combined as bits, one per
head and layer, without a search.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache

from objkv.config import Config
from objkv.connector.model.groups import Geometry
from objkv.index.base import ShardRecord, Shards, WriteIndex
from objkv.index.shapes import ShapesIndex
from objkv.keys.topology import Shard, TokenPart, cover

_FIELDS_KEPT = 4096
"""Bound of cached fields. A fleet has few shapes, but an index may contain anything."""
_CHOICES_KEPT = 4096
_CHOOSABLE_MAX = 64
"""If a group has more shards than this, all of them are counted as fetched."""


class Coverage:
    """Coverage of chunks by stored shards. Thread-safe for the scheduler's and lookup threads,
    which may compute the same cached value twice."""

    def __init__(self, geometry: Geometry, is_mixed: Callable[[], bool] = lambda: False) -> None:
        """``is_mixed``: whether shards of other shapes are possible. If not, shards are only
        counted, and none is decoded."""
        self._is_mixed = is_mixed
        self._geometry = geometry
        groups = range(len(geometry.groups))
        self._fields = [geometry.fields(group) for group in groups]
        self._count = len(geometry.all_fields())
        # Ranks load in parallel, so one rank's bytes are the total divided by the number of
        # distinct shards. If groups differ in that number, the smallest is used.
        self._shares = min((len(own) for own in self._fields if own), default=1)
        self._wholes = [
            Shard(0, len(identity.layers), 0, identity.heads) for identity in geometry.groups
        ]
        own = [[_shard(field) for field in sorted(fields)] for fields in self._fields]
        self._firsts = [shards[0] if shards else None for shards in own]
        self._needs = [
            _union(_bits(self._wholes[group], shard) for shard in own[group]) for group in groups
        ]
        self._divisions = [_divisions(geometry, group) for group in groups]
        self._held = lru_cache(_FIELDS_KEPT)(self._held_of)
        self._chosen = lru_cache(_CHOICES_KEPT)(self._choose)

    def is_readable(self, shards: Shards, group: int) -> bool:
        """Whether every rank of this replica finds what it needs of a group."""
        if not self._is_mixed():
            return len(shards) == self._count or self._fields[group].issubset(shards)
        return self._covers(group, self._bits_of(shards)[group])

    def is_complete(self, shards: Shards) -> bool:
        """Whether every rank finds what it needs of every group, so nothing remains to save."""
        if not self._is_mixed():
            return len(shards) == self._count
        held = self._bits_of(shards)
        return all(self._covers(group, bits) for group, bits in enumerate(held))

    def size(self, shards: Shards) -> tuple[int, bool]:
        """Return how many bytes the first rank fetches, as an estimate for every rank, and whether
        all of them are hot."""
        if not self._is_mixed():
            return _sum(shards.values(), self._shares)
        return _sum((shards[field] for field in self.fetched_fields(shards)), 1)

    def fetched_fields(self, fields: Iterable[str]) -> Collection[str]:
        """Return roughly those of a chunk's fields whose payloads the ranks will fetch. If other
        shapes are stored, these are the ones that the first rank needs."""
        if not self._is_mixed():
            return tuple(fields)
        groups: dict[int, list[str]] = {}
        for field in fields:
            if (held := self._held(field)) is not None:
                groups.setdefault(held[0], []).append(field)
        return [
            field
            for group, some in groups.items()
            for field in self._chosen(group, frozenset(some))
        ]

    def is_possible(self, field: str) -> bool:
        """Whether a shard field is valid for this model, in any shape."""
        return self._held(field) is not None

    def _bits_of(self, shards: Shards) -> list[dict[str, int]]:
        """Return the union of the shards' bits per group and part of the tokens."""
        bits = [dict[str, int]() for _ in self._needs]
        for field in shards:
            if (held := self._held(field)) is not None:
                group, tokens, own = held
                bits[group][tokens] = bits[group].get(tokens, 0) | own
        return bits

    def _covers(self, group: int, bits: dict[str, int]) -> bool:
        """Whether some division of the tokens that this replica can read is stored as a whole. With
        DCP its ranks together need all tokens of a chunk."""
        need = self._needs[group]
        if not need & ~bits.get("", 0):
            return True
        divisions = self._divisions[group]
        return any(
            not any(need & ~bits.get(part, 0) for part in divisions[first])
            for first in bits
            if first in divisions
        )

    def _held_of(self, field: str) -> tuple[int, str, int] | None:
        """Return a field's group, tokens and bits, or None if it is not valid for this model."""
        number, _, text = field.partition(".")
        try:
            group, shard = int(number), Shard.parse(text)
        except ValueError:
            return None
        at = self._geometry.position(group)
        if at is None or str(group) != number:
            return None
        whole = self._wholes[at]
        if shard.layer_end > whole.layer_end or shard.head_end > whole.head_end:
            return None
        if str(replace(shard.tokens, rank=0)) not in self._divisions[at]:
            return None
        return at, str(shard.tokens), _bits(whole, shard)

    def _choose(self, group: int, fields: frozenset[str]) -> tuple[str, ...]:
        """Return about the fields that the first rank fetches. ``cover`` may find fewer, but takes
        longer."""
        need, whole = self._firsts[group], self._wholes[group]
        if need is None:
            return ()
        if len(fields) > _CHOOSABLE_MAX:
            return tuple(fields)
        shards = {_shard(field): field for field in fields}
        if any(shard.tokens.size > 1 for shard in (need, *shards)):
            return tuple(dict.fromkeys(shards[part.source] for part in cover(need, shards) or ()))
        wanted = left = _bits(whole, need)
        chosen = []
        for outside, _, field, bits in sorted(_ranked(whole, fields, wanted)):
            if bits & left and (outside or bits & left == bits):
                chosen.append(field)
                left &= ~bits
        return tuple(chosen)


_DCP_SIZE_MAX = 64
"""Bound of sizes of context parallelism that are read."""


def _divisions(geometry: Geometry, group: int) -> dict[str, tuple[str, ...]]:
    """Return the divisions of the tokens that all ranks can read: the names of their parts, by the
    name of the first one."""
    own = TokenPart(0, geometry.dcp_size, geometry.dcp_interleave)
    sizes = range(1, _DCP_SIZE_MAX + 1) if geometry.is_divisible(group) else ()
    slots = geometry.groups[group].block_size // geometry.dcp_size
    found = [(own.size, own.interleave)]
    found += [
        (size, 1)
        for size in sizes
        if own.sources(size, 1) and slots % max(1, size // own.size) == 0
    ]
    parts = [[str(TokenPart(rank, *one)) for rank in range(one[0])] for one in found]
    return {names[0]: tuple(names) for names in parts}


def open_coverage(
    config: Config, geometry: Geometry, index: WriteIndex, *, writes: bool
) -> tuple[ShapesIndex, Coverage]:
    """Return the index that lookups read, and the coverage that evaluates its answers."""
    reach = Coverage(geometry, is_mixed=lambda: shapes.mixed)
    shapes = ShapesIndex(
        index,
        geometry.all_fields(),
        readable=reach.is_possible,
        writes=writes,
        ttl_s=config.ttl_s,
    )
    return shapes, reach


def _ranked(
    whole: Shard, fields: Iterable[str], wanted: int
) -> Iterator[tuple[int, int, str, int]]:
    """Yield sort keys that put the best fields first: the fewest unwanted bits, then the
    largest."""
    for field in fields:
        bits = _bits(whole, _shard(field))
        yield (bits & ~wanted).bit_count(), -bits.bit_count(), field, bits


def _bits(whole: Shard, shard: Shard) -> int:
    """Return one bit per head and layer of the shard. The first layer has the lowest bits."""
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
