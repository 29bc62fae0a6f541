"""Shards: which layers and which KV heads one payload holds, whatever the TP and PP shape."""

import heapq
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

_SHARD = re.compile(
    r"L(0|[1-9][0-9]*)-(0|[1-9][0-9]*)_H(0|[1-9][0-9]*)-(0|[1-9][0-9]*)"
)  # not \d, which also matches the digits of other scripts


@dataclass(frozen=True, slots=True, order=True)
class Shard:
    """Layers ``[layer_start, layer_end)`` of a group × KV heads ``[head_start, head_end)``.

    Layers are counted within the group, heads over all TP ranks.
    """

    layer_start: int
    layer_end: int
    head_start: int
    head_end: int

    def __post_init__(self) -> None:
        assert 0 <= self.layer_start < self.layer_end
        assert 0 <= self.head_start < self.head_end

    def __str__(self) -> str:
        return f"L{self.layer_start}-{self.layer_end}_H{self.head_start}-{self.head_end}"

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """The shard that prints as ``text``. Raises ValueError."""
        match = _SHARD.fullmatch(text)
        if match is None:
            raise ValueError(f"not a shard: {text!r}")
        layer_start, layer_end, head_start, head_end = map(int, match.groups())
        if layer_start >= layer_end or head_start >= head_end:
            raise ValueError(f"an empty shard: {text!r}")
        return cls(layer_start, layer_end, head_start, head_end)

    @property
    def cells(self) -> int:
        """Layers times heads: what its payload weighs, in units of one head of one layer."""
        return (self.layer_end - self.layer_start) * (self.head_end - self.head_start)

    def overlaps(self, other: "Shard") -> bool:
        """Whether the two have a cell in common."""
        layers = self.layer_start < other.layer_end and other.layer_start < self.layer_end
        return layers and self.head_start < other.head_end and other.head_start < self.head_end


@dataclass(frozen=True, slots=True)
class Part:
    """What is read of one stored payload."""

    source: Shard
    take: Shard
    """Layers x heads, counted as in ``source``; inside both ``source`` and the reader's need."""


_PAYLOADS_PER_NEED = 16
"""One payload more is worth this part of the reader's need in bytes not fetched in vain: a 16th of
what is needed is still fetched by itself where the alternative is a payload twice as large."""


def cover(need: Shard, held: Iterable[Shard]) -> tuple[Part, ...] | None:
    """Which parts of ``held`` are together exactly ``need``; None if they do not reach.

    No two parts overlap; they are ordered by layer, then by head; a source whose share is not one
    rectangle has several. The order of ``held`` does not matter, and its shards may overlap.

    ``need`` itself is taken alone if it is there. Else greedily, by what a source adds for what it
    costs: all its bytes, needed or not, and a sixteenth of ``need`` for being one payload more. So
    sources inside ``need`` come first, the largest of them before others; in the end those that
    the rest makes superfluous are dropped again.

    A rank of a replica with two of them, of what one with four wrote, or with one:

    >>> four = [Shard(0, 32, head, head + 2) for head in (0, 2, 4, 6)]
    >>> [str(part.source) for part in cover(Shard(0, 32, 4, 8), four) or ()]
    ['L0-32_H4-6', 'L0-32_H6-8']
    >>> [str(part.take) for part in cover(Shard(0, 32, 4, 8), [Shard(0, 32, 0, 8)]) or ()]
    ['L0-32_H4-8']
    """
    near = {shard for shard in held if need.overlaps(shard)}
    if need in near:
        return (Part(need, need),)
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
    """Enough of the sources, the best first; None if all are not enough."""

    def worth(source: Shard) -> float:
        cost = _PAYLOADS_PER_NEED * source.cells + need.cells
        return -(masks[source] & left).bit_count() / cost

    left = _mask(need, need)
    chosen = []
    # What a source adds only shrinks, so that only the first in line has to be looked at again.
    line = [(worth(source), source) for source in masks]
    heapq.heapify(line)
    while left:
        if not line:
            return None
        before, source = heapq.heappop(line)
        if (now := worth(source)) != before:
            if now:
                heapq.heappush(line, (now, source))
            continue
        chosen.append(source)
        left &= ~masks[source]
    return _without_superfluous(chosen, masks)


def _without_superfluous(chosen: list[Shard], masks: dict[Shard, int]) -> list[Shard]:
    once = twice = 0
    for source in chosen:
        twice |= once & masks[source]
        once |= masks[source]
    if not any(masks[source] & ~twice == 0 for source in chosen):
        return chosen
    kept = list(chosen)
    for source in reversed(chosen):
        others = 0
        for other in kept:
            if other != source:
                others |= masks[other]
        if masks[source] & ~others == 0:
            kept.remove(source)
    return kept


def _mask(need: Shard, source: Shard) -> int:
    """The cells of ``need`` that ``source`` has, a bit each: heads of its first layer lowest."""
    width = need.head_end - need.head_start
    first, last = max(need.layer_start, source.layer_start), min(need.layer_end, source.layer_end)
    start, end = max(need.head_start, source.head_start), min(need.head_end, source.head_end)
    row = (1 << (end - start)) - 1 << (start - need.head_start)
    rows = ((1 << width * (last - first)) - 1) // ((1 << width) - 1)  # its first bit, in each row
    return row * rows << width * (first - need.layer_start)


def _rectangles(need: Shard, mask: int) -> Iterator[Shard]:
    """The cells of a mask: equal rows that follow one another together, each run of heads."""
    width = need.head_end - need.head_start
    layers = need.layer_end - need.layer_start
    rows = [(mask >> width * layer) & (1 << width) - 1 for layer in range(layers)]
    start = 0
    while start < layers:
        end = start + 1
        while end < layers and rows[end] == rows[start]:
            end += 1
        for first, last in _runs(rows[start]):
            yield Shard(
                need.layer_start + start,
                need.layer_start + end,
                need.head_start + first,
                need.head_start + last,
            )
        start = end


def _runs(row: int) -> Iterator[tuple[int, int]]:
    """``[start, end)`` of each run of ones."""
    place = 0
    while row:
        zeros = (row & -row).bit_length() - 1
        row >>= zeros
        ones = (~row & row + 1).bit_length() - 1
        row >>= ones
        yield place + zeros, place + zeros + ones
        place += zeros + ones


@dataclass(frozen=True, slots=True)
class RankShard:
    """What one rank holds of a group, and its place among the ranks that hold the same."""

    shard: Shard
    replica: int
    replicas: int

    def writes(self, prefix_hash: bytes) -> bool:
        """Whether this rank saves the chunk: replicated KV is saved once, the writer rotating."""
        return prefix_hash[0] % self.replicas == self.replica


def rank_shard(
    *,
    layers: int,
    heads: int,
    tp_rank: int,
    tp_size: int,
    layer_range: tuple[int, int] | None = None,
) -> RankShard:
    """The shard of TP rank ``tp_rank``; KV heads are split evenly, or replicated when there are
    more ranks than heads. Raises ValueError where vLLM itself could not split them so.

    Args:
        heads: KV heads over all TP ranks; 1 for MLA, whose latent every rank holds whole.
        layer_range: ``[start, end)`` of the ``layers`` that its PP rank has, at least one; by
            default all of them.
    """
    assert 0 <= tp_rank < tp_size
    start, end = layer_range or (0, layers)
    assert end <= layers
    if heads >= tp_size:
        if heads % tp_size:
            raise ValueError(
                f"{heads} KV heads cannot be split over {tp_size} ranks: set tensor_parallel_size "
                f"to a divisor of {heads}"
            )
        per_rank = heads // tp_size
        shard = Shard(start, end, tp_rank * per_rank, (tp_rank + 1) * per_rank)
        return RankShard(shard, 0, 1)
    if tp_size % heads:
        raise ValueError(
            f"{tp_size} ranks cannot share {heads} KV heads evenly: set tensor_parallel_size to a "
            f"divisor or a multiple of {heads}"
        )
    replicas = tp_size // heads
    head = tp_rank // replicas
    return RankShard(Shard(start, end, head, head + 1), tp_rank % replicas, replicas)


@dataclass(frozen=True, slots=True)
class Topology:
    """How one replica's KV of one group lies on its ranks: which rank holds, saves and reads what.
    Raises ValueError for sizes that vLLM could not run. Ranks are numbered as vLLM does:
    ``pp_rank * tp_size + tp_rank``.

    It answers the questions of vLLM's ``TpKVTopology``, but for stored shards instead of live
    peers; so a reader needs no ratio to find its sources, and sizes without one can still share.
    """

    tp_size: int
    heads: int
    """KV heads over all TP ranks; 1 for MLA, whatever the model's configuration says: its latent
    cannot be split."""
    layers: tuple[int, ...]
    """How many of the group's layers each PP rank has, in forward order; see ``pp_layers``."""
    block_size: int = 16
    """Tokens per block."""

    def __post_init__(self) -> None:
        assert self.tp_size > 0
        assert self.heads > 0
        assert self.block_size > 0
        if min(self.layers, default=-1) < 0 or not any(self.layers):
            raise ValueError(
                f"layers {self.layers} on the ranks of a pipeline: give each its number of layers, "
                "at least one in all"
            )
        self._share(0, (0, 1))

    @property
    def pp_size(self) -> int:
        """Stages of the pipeline."""
        return len(self.layers)

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.tp_size * self.pp_size

    @property
    def replicas(self) -> int:
        """How many TP ranks hold the same; 1 where each has heads of its own."""
        return max(1, self.tp_size // self.heads)

    @property
    def replicated(self) -> bool:
        """Whether several TP ranks hold the same. With as many ranks as heads none do, though some
        versions of vLLM's ``is_kv_replicated`` say so."""
        return self.replicas > 1

    def tp_ratio(self, other: "Topology") -> int:
        """TP ranks here for each one there; negative, ranks there for each one here, where the
        other has more. Raises ValueError if neither size is a multiple of the other.

        The sign is the one that vLLM documents, and gives since 0.32; before, 2 meant both ways.
        Source: ``distributed/kv_transfer/kv_connector/utils.py``.
        """
        return _ratio(self.tp_size, other.tp_size, "tensor_parallel_size")

    def pp_ratio(self, other: "Topology") -> int:
        """As ``tp_ratio``, of the stages of the pipelines."""
        return _ratio(self.pp_size, other.pp_size, "pipeline_parallel_size")

    def block_ratio(self, other: "Topology") -> int:
        """As ``tp_ratio``, of tokens per block. Replicas of different block sizes have different
        namespaces, so this says only whether the one's KV could be cut into the other's blocks."""
        return _ratio(self.block_size, other.block_size, "block_size")

    def rank(self, pp_rank: int, tp_rank: int) -> int:
        """The number of a rank."""
        assert 0 <= pp_rank < self.pp_size
        assert 0 <= tp_rank < self.tp_size
        return pp_rank * self.tp_size + tp_rank

    def layer_range(self, pp_rank: int) -> tuple[int, int]:
        """The layers ``[start, end)`` of a stage; equal where it has none."""
        end = list(accumulate(self.layers))[pp_rank]
        return end - self.layers[pp_rank], end

    def held(self, rank: int) -> RankShard | None:
        """What a rank holds of the group; None if its stage has no layer of it."""
        pp_rank, tp_rank = divmod(rank, self.tp_size)
        start, end = self.layer_range(pp_rank)
        return self._share(tp_rank, (start, end)) if start < end else None

    def writers(self, prefix_hash: bytes) -> tuple[int, ...]:
        """The ranks that save a chunk; together every layer and head of it exactly once."""
        shares = ((rank, self.held(rank)) for rank in range(self.size))
        return tuple(rank for rank, share in shares if share and share.writes(prefix_hash))

    def target_ranks(self, rank: int, writer: "Topology", prefix_hash: bytes) -> tuple[int, ...]:
        """The ranks of ``writer`` that saved what ``rank`` here needs of a chunk.

        Of ranks that hold the same it is the one that saved it. vLLM's ``get_target_remote_ranks``
        names all of them, and takes stages to be of one length.
        """
        assert sum(writer.layers) == sum(self.layers)
        assert writer.heads == self.heads
        need = self.held(rank)
        if need is None:
            return ()
        shares = ((target, writer.held(target)) for target in writer.writers(prefix_hash))
        return tuple(t for t, share in shares if share and share.shard.overlaps(need.shard))

    def _share(self, tp_rank: int, layer_range: tuple[int, int]) -> RankShard:
        return rank_shard(
            layers=sum(self.layers),
            heads=self.heads,
            tp_rank=tp_rank,
            tp_size=self.tp_size,
            layer_range=layer_range,
        )


def pp_layers(layers: int, pp_size: int) -> tuple[int, ...]:
    """How many of a model's layers each PP rank has, unless VLLM_PP_LAYER_PARTITION says otherwise.

    What does not divide evenly goes to the ranks before the last, one layer each. Source: vLLM
    0.31-0.33, ``get_pp_indices`` in ``distributed/utils.py``.
    """
    assert layers >= 0
    assert pp_size > 0
    each, more = divmod(layers, pp_size)
    return tuple(each + (pp_size - 1 - more <= rank < pp_size - 1) for rank in range(pp_size))


def _ratio(here: int, there: int, what: str) -> int:
    if here % there == 0:
        return here // there
    if there % here == 0:
        return -(there // here)
    raise ValueError(
        f"{what} {here} here and {there} there: neither divides the other, set one to a multiple "
        "of the other"
    )
