"""The groups of a model and how objkv cuts them into chunks and shards. Knows nothing of vLLM."""

from dataclasses import dataclass, replace

from objkv.cache.match import keeps_all, stored_blocks
from objkv.keys.identity import GroupIdentity
from objkv.keys.ranks import Topology
from objkv.keys.topology import RankShard
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
    stages: tuple[tuple[int, ...], ...] = ()
    """Per group, how many of its layers each PP rank has; () without pipeline parallelism."""

    canonical: bool = False
    """Whether each token's content lies in its pages in one piece, so that tokens may be dealt into
    blocks of another size."""

    @property
    def stored_groups(self) -> tuple[GroupIdentity, ...]:
        """The groups as payloads know them: where tokens may be dealt into blocks of any size, that
        of this replica is nobody's business, and what cannot be taken apart is one token."""
        return tuple(
            replace(group, block_size=1) if self._is_divisible(group) else group
            for group in self.groups
        )

    @property
    def pp_size(self) -> int:
        """Stages of the pipeline."""
        return len(self.stages[0]) if self.stages else 1

    @property
    def ranks(self) -> int:
        """Workers in all."""
        return self.tp_size * self.pp_size

    @property
    def windowed(self) -> bool:
        """Whether any group forgets tokens, so that a match ends where a chunk does, with a token
        left to compute, and fails whole: what was kept for its end is of no use at another."""
        return not all(keeps_all(group) for group in self.groups)

    def topology(self, group: int) -> Topology:
        """How a group lies on the ranks."""
        identity = self.groups[group]
        layers = self.stages[group] if self.stages else (len(identity.layers),)
        return Topology(self.tp_size, identity.heads, layers, identity.block_size)

    def rank_shard(self, group: int, tp_rank: int, pp_rank: int = 0) -> RankShard | None:
        """What a rank holds of a group; None if its stage has no layer of it."""
        topology = self.topology(group)
        return topology.held(topology.rank(pp_rank, tp_rank))

    def fields(self, group: int) -> frozenset[str]:
        """The shard fields that all ranks of this replica together read and write."""
        if not stored_blocks(self.groups[group], self.chunk_tokens):
            return frozenset()
        held = map(self.topology(group).held, range(self.ranks))
        return frozenset(f"{group}.{share.shard}" for share in held if share is not None)

    def all_fields(self) -> frozenset[str]:
        """The shard fields of all groups: a chunk is complete for this replica with these."""
        return frozenset().union(*(self.fields(group) for group in range(len(self.groups))))

    def shape(self, group: int, tp_rank: int, pp_rank: int = 0) -> GroupShape | None:
        """What a rank expects of a group's tensors; None if its stage has no layer of it or it has
        no payloads, and the group is then left out of all that the rank does."""
        identity = self.groups[group]
        share = self.rank_shard(group, tp_rank, pp_rank)
        blocks = stored_blocks(identity, self.chunk_tokens)
        if share is None or not blocks:
            return None
        return GroupShape(
            layers=identity.layers[share.shard.layer_start : share.shard.layer_end],
            blocks=blocks,
            block_size=1 if identity.kind == "mamba" else identity.block_size,
            rank_shard=share,
            model_layers=identity.layers,
            heads=identity.heads,
            divisible=self._is_divisible(identity),
        )

    def _is_divisible(self, group: GroupIdentity) -> bool:
        return self.canonical and keeps_all(group)
