"""Shards: the layers and KV heads that one payload holds, whatever the TP and PP shape."""

import re
from dataclasses import dataclass

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

    def sources(self, other: "TokenPart") -> "tuple[TokenPart, ...]":
        """Return the parts of the division of ``other`` that together have these tokens. Empty if
        they cannot be combined: both divisions must deal out single tokens, and one size must be a
        multiple of the other."""
        size = other.size
        if (size, other.interleave) == (self.size, self.interleave):
            return (self,)
        if other.interleave != 1 or self.interleave != 1:
            return ()
        if self.size % size == 0:
            return (TokenPart(self.rank % size, size),)
        if size % self.size == 0:
            return tuple(TokenPart(rank, size) for rank in range(self.rank, size, self.size))
        return ()


ALL_TOKENS = TokenPart()


@dataclass(frozen=True, slots=True, order=True)
class Shard:
    """Layers ``[layer_start, layer_end)``, counted within a group, × KV heads ``[head_start,
    head_end)``, counted over all TP ranks."""

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
        heads = f"H{self.head_start}-{self.head_end}"
        return f"L{self.layer_start}-{self.layer_end}_{heads}{self.tokens}"

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """Return the shard that prints as ``text``. Raises ValueError."""
        match = _SHARD.fullmatch(text)
        if match is None:
            raise ValueError(f"invalid shard: {text!r}")
        layer_start, layer_end, head_start, head_end = map(int, match.groups()[:4])
        if layer_start >= layer_end or head_start >= head_end:
            raise ValueError(f"empty shard: {text!r}")
        tokens = ALL_TOKENS
        if match[5] is not None:
            rank, size, interleave = (int(n) for n in match.groups(1)[4:])
            if rank >= size or size == 1 or match[7] == "1":
                raise ValueError(f"invalid part of the tokens: {text!r}")
            tokens = TokenPart(rank, size, interleave)
        return cls(layer_start, layer_end, head_start, head_end, tokens)

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


@dataclass(frozen=True, slots=True)
class RankShard:
    """What one rank holds of a group, and its number among the ranks that hold the same."""

    shard: Shard
    replica: int
    replicas: int

    def writes(self, prefix_hash: bytes) -> bool:
        """Whether this rank saves the chunk. Replicated KV is saved once; the writer rotates."""
        return prefix_hash[0] % self.replicas == self.replica


@dataclass(frozen=True, slots=True)
class Topology:
    """How one replica's KV of one group is distributed over its ranks, which are numbered as in
    vLLM: ``pp_rank * tp_size + tp_rank``. Raises ValueError for sizes that vLLM could not run."""

    tp_size: int
    heads: int
    """KV heads over all TP ranks; 1 for MLA, whatever the model's configuration states, because its
    latent cannot be split."""
    layers: tuple[int, ...]
    """How many of the group's layers each PP rank has, in forward order."""
    dcp_size: int = 1
    """Decode context parallelism: so many TP ranks with the same heads divide the tokens."""
    interleave: int = 1
    """``cp_kv_cache_interleave_size``."""
    nodes: int = 1
    """How many nodes the ranks are on, as many ranks on each, in their order."""

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
                f"{self.tp_size} ranks cannot share {self.heads} KV heads evenly: the "
                f"tensor-parallel size must be a divisor or a multiple of {self.heads}"
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

    def joined(self, rank: int) -> tuple[Shard, int]:
        """Return what the ranks of a node have together, and in how many different shards, for a
        ``rank`` that holds one. It is the rank's own shard if together they have no rectangle, or
        if another node has some of it, but not all: then a node does not write all of it alone."""
        own, each = self.held(rank), self.size // self.nodes
        assert own is not None
        is_even = not self.size % self.nodes and not each % self.dcp_size
        if not is_even or not _divides(each, self.tp_size) or not _divides(each, self._copies):
            return own.shard, 1
        first = rank // each * each
        ranks = map(self.held, range(first, first + each))
        held = {share.shard for share in ranks if share is not None}
        whole = Shard(
            min(shard.layer_start for shard in held),
            max(shard.layer_end for shard in held),
            min(shard.head_start for shard in held),
            max(shard.head_end for shard in held),
        )
        return whole, len(held)


def _divides(one: int, other: int) -> bool:
    return not one % other or not other % one
