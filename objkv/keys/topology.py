"""Shards: the layers and KV heads that one payload holds, whatever the TP and PP shape."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from itertools import groupby
from operator import or_

_SHARD = re.compile(
    r"L(0|[1-9][0-9]*)-(0|[1-9][0-9]*)_H(0|[1-9][0-9]*)-(0|[1-9][0-9]*)"
    r"(?:_T(0|[1-9][0-9]*)of([1-9][0-9]*)(?:i([1-9][0-9]*))?)?"
)  # not \d, which also matches digits of other scripts


@dataclass(frozen=True, slots=True, order=True)
class TokenPart:
    """The tokens that one rank of decode context parallelism (DCP) holds: token ``t`` if
    ``t // interleave % size == rank``. Source: vLLM 0.31-0.33, ``config/parallel.py``."""

    rank: int = 0
    size: int = 1
    interleave: int = 1
    """``cp_kv_cache_interleave_size``; 1 if ``size`` is 1."""

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size
        assert self.interleave > 0
        assert self.size > 1 or self.interleave == 1

    def __str__(self) -> str:
        """Return the suffix of a shard's name, empty for all tokens."""
        if self.size == 1:
            return ""
        interleave = "" if self.interleave == 1 else f"i{self.interleave}"
        return f"_T{self.rank}of{self.size}{interleave}"

    def sources(self, size: int, interleave: int) -> "tuple[TokenPart, ...]":
        """Return the parts of another division that together have these tokens. Empty if they
        cannot be combined: both divisions must deal out single tokens, and one size must be a
        multiple of the other."""
        if (size, interleave) == (self.size, self.interleave):
            return (self,)
        if interleave != 1 or self.interleave != 1:
            return ()
        if self.size % size == 0:
            return (TokenPart(self.rank % size, size),)
        if size % self.size == 0:
            return tuple(TokenPart(rank, size) for rank in range(self.rank, size, self.size))
        return ()


ALL_TOKENS = TokenPart()


@dataclass(frozen=True, slots=True, order=True)
class Shard:
    """Layers ``[layer_start, layer_end)`` of a group × KV heads ``[head_start, head_end)``.

    Layers are counted within the group, heads over all TP ranks.
    """

    layer_start: int
    layer_end: int
    head_start: int
    head_end: int
    tokens: TokenPart = ALL_TOKENS
    """With DCP a payload holds only some tokens of its chunk."""

    def __post_init__(self) -> None:
        assert 0 <= self.layer_start < self.layer_end
        assert 0 <= self.head_start < self.head_end

    def __str__(self) -> str:
        layers, heads = (self.layer_start, self.layer_end), (self.head_start, self.head_end)
        return f"L{layers[0]}-{layers[1]}_H{heads[0]}-{heads[1]}{self.tokens}"

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """Return the shard that prints as ``text``. Raises ValueError."""
        match = _SHARD.fullmatch(text)
        if match is None:
            raise ValueError(f"invalid shard: {text!r}")
        layer_start, layer_end, head_start, head_end = map(int, match.groups()[:4])
        if layer_start >= layer_end or head_start >= head_end:
            raise ValueError(f"empty shard: {text!r}")
        rank, size, interleave = (int(n) for n in match.groups(1)[4:])
        if match[5] is None:
            return cls(layer_start, layer_end, head_start, head_end)
        if rank >= size or size == 1 or (match[7] is not None and interleave == 1):
            raise ValueError(f"invalid part of the tokens: {text!r}")
        part = TokenPart(rank, size, interleave)
        return cls(layer_start, layer_end, head_start, head_end, part)

    @property
    def cells(self) -> int:
        """Layers times heads: the payload's size, in units of one head of one layer."""
        return (self.layer_end - self.layer_start) * (self.head_end - self.head_start)

    def overlaps(self, other: "Shard") -> bool:
        """Whether the two have a cell in common."""
        layers = self.layer_start < other.layer_end and other.layer_start < self.layer_end
        return layers and self.head_start < other.head_end and other.head_start < self.head_end


def frame_name(layer: str, shard: Shard) -> str:
    """Return the name of a frame that has only the shard's heads and tokens of a layer.

    >>> frame_name("layers.3", Shard(0, 32, 4, 8, TokenPart(1, 2)))
    'layers.3@H4-8_T1of2'
    """
    return f"{layer}@{str(shard).partition('_')[2]}"


def parse_share(name: str, layer: str, whole: Shard) -> Shard:
    """Return what a frame has of ``whole``: all of its heads and tokens if its name is the layer's,
    or else what the name says. Raises ValueError for any other name."""
    if name == layer:
        return whole
    before, _, share = name.rpartition("@")
    shard = Shard.parse(f"L{whole.layer_start}-{whole.layer_end}_{share}")
    if before != layer:
        raise ValueError(f"{name!r} is no frame of {layer!r}")
    return shard


@dataclass(frozen=True, slots=True)
class Part:
    """The part of one stored payload that is read."""

    source: Shard
    take: Shard
    """Layers x heads, counted as in ``source``; inside both ``source`` and the reader's need."""


_PAYLOADS_PER_NEED = 16
"""Cost of one more payload as a fraction of the reader's need: a separate payload with a 16th of
the need is still read if the alternative is one payload of twice the size."""


def cover(need: Shard, held: Iterable[Shard]) -> tuple[Part, ...] | None:
    """Return the parts of ``held`` that together are exactly ``need``, or None if they do not
    suffice.

    No two parts overlap. They are ordered by layer, then by head. A source whose share is not one
    rectangle has several parts. The order of ``held`` does not matter, and its shards may overlap.
    Shards of different divisions of the tokens are not combined.

    ``need`` itself is used alone if it is held. Otherwise sources are chosen greedily by the cells
    they add relative to their cost: all their bytes, needed or not, plus a sixteenth of ``need``
    per payload. So sources inside ``need`` come first, the largest of them before others. In the
    end, sources that the others make redundant are dropped.

    For example, a rank of a replica with two ranks reads from one with four, then from one with
    one:

    >>> four = [Shard(0, 32, head, head + 2) for head in (0, 2, 4, 6)]
    >>> [str(part.source) for part in cover(Shard(0, 32, 4, 8), four) or ()]
    ['L0-32_H4-6', 'L0-32_H6-8']
    >>> [str(part.take) for part in cover(Shard(0, 32, 4, 8), [Shard(0, 32, 0, 8)]) or ()]
    ['L0-32_H4-8']
    """
    near = {shard for shard in held if need.overlaps(shard)}
    if need in near:
        return (Part(need, need),)
    for size, interleave in sorted({(s.tokens.size, s.tokens.interleave) for s in near}):
        parts: list[Part] | None = []
        for tokens in need.tokens.sources(size, interleave):
            some = _cover_tokens(replace(need, tokens=tokens), near)
            parts = None if some is None or parts is None else [*parts, *some]
        if parts:
            return tuple(parts)
    return None


def _cover_tokens(need: Shard, held: Iterable[Shard]) -> tuple[Part, ...] | None:
    """Return a cover by shards with the same tokens as ``need``."""
    near = {shard for shard in held if shard.tokens == need.tokens}
    masks = {source: _mask(need, source) for source in near}
    chosen = _chosen(need, masks)
    if chosen is None:
        return None
    left = _mask(need, need)
    parts = []
    for source in chosen:
        parts += [Part(source, take) for take in _rectangles(need, masks[source] & left)]
        left &= ~masks[source]
    return tuple(sorted(parts, key=lambda part: part.take))


def _chosen(need: Shard, masks: dict[Shard, int]) -> list[Shard] | None:
    """Return enough of the sources, the best first, or None if all do not suffice."""
    left, chosen = _mask(need, need), list[Shard]()
    while left:
        worths = (
            (-(mask & left).bit_count() / (_PAYLOADS_PER_NEED * source.cells + need.cells), source)
            for source, mask in masks.items()
        )
        worth, source = min(worths, default=(0, need))
        if not worth:
            return None
        chosen.append(source)
        left &= ~masks[source]
    kept = list(chosen)
    for source in reversed(chosen):  # drop those that the others make redundant
        others = reduce(or_, (masks[other] for other in kept if other != source), 0)
        if masks[source] & ~others == 0:
            kept.remove(source)
    return kept


def _mask(need: Shard, source: Shard) -> int:
    """Return the cells of ``need`` that ``source`` has, one bit each, with the heads of its first
    layer lowest."""
    width = need.head_end - need.head_start
    first, last = max(need.layer_start, source.layer_start), min(need.layer_end, source.layer_end)
    start, end = max(need.head_start, source.head_start), min(need.head_end, source.head_end)
    row = (1 << (end - start)) - 1 << (start - need.head_start)
    rows = ((1 << width * (last - first)) - 1) // ((1 << width) - 1)  # the lowest bit of each row
    return row * rows << width * (first - need.layer_start)


def _rectangles(need: Shard, mask: int) -> Iterator[Shard]:
    """Yield the cells of a mask as rectangles: consecutive equal rows together, and each run of
    heads."""
    width, layers = need.head_end - need.head_start, range(need.layer_start, need.layer_end)
    rows = [mask >> width * place & (1 << width) - 1 for place in range(len(layers))]
    for row, group in groupby(layers, lambda layer: rows[layer - need.layer_start]):
        same = list(group)
        for heads in re.finditer("1+", f"{row:b}"[::-1]):
            yield Shard(
                same[0],
                same[-1] + 1,
                need.head_start + heads.start(),
                need.head_start + heads.end(),
                need.tokens,
            )


@dataclass(frozen=True, slots=True)
class RankShard:
    """The shard that one rank holds of a group, and its number among the ranks that hold the
    same."""

    shard: Shard
    replica: int
    replicas: int

    def writes(self, prefix_hash: bytes) -> bool:
        """Whether this rank saves the chunk. Replicated KV is saved once; the writer rotates."""
        return prefix_hash[0] % self.replicas == self.replica


@dataclass(frozen=True, slots=True)
class Topology:
    """How one replica's KV of one group is distributed over its ranks: which rank holds, saves and
    reads which part.

    Raises ValueError for sizes that vLLM could not run. Ranks are numbered as in vLLM: ``pp_rank *
    tp_size + tp_rank``.
    """

    tp_size: int
    heads: int
    """KV heads over all TP ranks; 1 for MLA, whatever the model's configuration states, because its
    latent cannot be split."""
    layers: tuple[int, ...]
    """How many of the group's layers each PP rank has, in forward order."""
    dcp_size: int = 1
    """Size of decode context parallelism: so many TP ranks with the same heads divide the
    tokens."""
    interleave: int = 1
    """``cp_kv_cache_interleave_size``."""

    def __post_init__(self) -> None:
        assert self.tp_size > 0
        assert self.dcp_size > 0
        assert self.heads > 0
        if min(self.layers, default=-1) < 0 or not any(self.layers):
            raise ValueError(
                f"pipeline ranks have {self.layers} layers: pass one number per rank, with at "
                "least one layer in total"
            )
        if self.heads % self.tp_size and self.tp_size % self.heads:
            raise ValueError(
                f"{self.tp_size} ranks cannot share {self.heads} KV heads evenly: set "
                f"tensor_parallel_size to a divisor or a multiple of {self.heads}"
            )
        if self._copies % self.dcp_size:
            raise ValueError(
                f"{self.tp_size} ranks with {self.heads} KV heads cannot divide the tokens by "
                f"{self.dcp_size}: set decode_context_parallel_size to a divisor of {self._copies}"
            )

    @property
    def size(self) -> int:
        """Total number of ranks."""
        return self.tp_size * len(self.layers)

    @property
    def columns(self) -> int:
        """How many ranks have different parts of one layer."""
        return min(self.tp_size, self.heads) * self.dcp_size

    @property
    def _copies(self) -> int:
        """How many ranks of a stage have the same heads."""
        return max(1, self.tp_size // self.heads)

    def held(self, rank: int) -> RankShard | None:
        """Return the shard that a rank holds of the group, or None if its stage has no layer of
        it. KV heads are split evenly, or replicated if there are more ranks than heads."""
        pp_rank, tp_rank = divmod(rank, self.tp_size)
        start = sum(self.layers[:pp_rank])
        end = start + self.layers[pp_rank]
        if start == end:
            return None
        heads = max(1, self.heads // self.tp_size)
        head = tp_rank // self._copies * heads
        tokens = TokenPart(tp_rank % self.dcp_size, self.dcp_size, self.interleave)
        return RankShard(
            Shard(start, end, head, head + heads, tokens),
            tp_rank % self._copies // self.dcp_size,
            self._copies // self.dcp_size,
        )
