"""Ranks: which of them holds, saves and reads what, in replicas of any two TP and PP shapes.

The questions are those of vLLM's ``TpKVTopology``, asked of stored shards instead of live peers; so
a reader needs no ratio to find its sources, and sizes without one can still share.
"""

from dataclasses import dataclass
from itertools import accumulate

from objkv.keys.topology import RankShard, rank_shard


@dataclass(frozen=True, slots=True)
class Topology:
    """How one replica's KV of one group lies on its ranks. Raises ValueError for sizes that vLLM
    could not run. Ranks are numbered as vLLM does: ``pp_rank * tp_size + tp_rank``."""

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
