"""The groups of a model and how objkv cuts them into chunks and shards. Knows nothing of vLLM."""

from dataclasses import dataclass

from objkv.cache.match import keeps_all, stored_blocks
from objkv.keys.identity import GroupIdentity
from objkv.keys.topology import RankShard, rank_shard
from objkv.transfer.paging import GroupShape


@dataclass(frozen=True, slots=True)
class Geometry:
    """The groups of a model and how objkv cuts them."""

    groups: tuple[GroupIdentity, ...]
    """In vLLM's order: a group's place is its id."""
    chunk_tokens: int
    block_tokens: int
    """Least common multiple of all block sizes: where matches may begin and end."""
    tp_size: int

    @property
    def windowed(self) -> bool:
        """Whether any group forgets tokens, so that a match ends where a chunk does, with a token
        left to compute, and fails whole: what was kept for its end is of no use at another."""
        return not all(keeps_all(group) for group in self.groups)

    def rank_shard(self, group: int, tp_rank: int) -> RankShard:
        """What a rank holds of a group."""
        identity = self.groups[group]
        return rank_shard(
            layers=len(identity.layers),
            heads=identity.heads,
            tp_rank=tp_rank,
            tp_size=self.tp_size,
        )

    def fields(self, group: int) -> frozenset[str]:
        """The shard fields that all ranks of this replica together read and write."""
        if not stored_blocks(self.groups[group], self.chunk_tokens):
            return frozenset()
        return frozenset(
            f"{group}.{self.rank_shard(group, rank).shard}" for rank in range(self.tp_size)
        )

    def all_fields(self) -> frozenset[str]:
        """The shard fields of all groups: a chunk is complete for this replica with these."""
        return frozenset().union(*(self.fields(group) for group in range(len(self.groups))))

    def shape(self, group: int, tp_rank: int) -> GroupShape:
        """What a rank expects of a group's tensors."""
        identity = self.groups[group]
        return GroupShape(
            layers=identity.layers,
            blocks=stored_blocks(identity, self.chunk_tokens),
            block_size=1 if identity.kind == "mamba" else identity.block_size,
            rank_shard=self.rank_shard(group, tp_rank),
        )
