"""Shards: which layers and which KV heads one payload holds, whatever the TP and PP shape."""

import re
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class RankShard:
    """What one TP rank holds of a group, and its place among the ranks that hold the same."""

    shard: Shard
    replica: int
    replicas: int

    def writes(self, prefix_hash: bytes) -> bool:
        """Whether this rank saves the chunk: replicated KV is saved once, the writer rotating."""
        return prefix_hash[0] % self.replicas == self.replica


def rank_shard(*, layers: int, heads: int, tp_rank: int, tp_size: int) -> RankShard:
    """The shard of TP rank ``tp_rank``; KV heads are split evenly, or replicated when there are
    more ranks than heads. Raises ValueError where vLLM itself could not split them so."""
    assert 0 <= tp_rank < tp_size
    if heads >= tp_size:
        if heads % tp_size:
            raise ValueError(f"{heads} KV heads cannot be split over {tp_size} ranks")
        per_rank = heads // tp_size
        shard = Shard(0, layers, tp_rank * per_rank, (tp_rank + 1) * per_rank)
        return RankShard(shard, 0, 1)
    if tp_size % heads:
        raise ValueError(f"{tp_size} ranks cannot share {heads} KV heads evenly")
    replicas = tp_size // heads
    head = tp_rank // replicas
    return RankShard(Shard(0, layers, head, head + 1), tp_rank % replicas, replicas)
