"""Converts vLLM's KV cache groups to objkv's, and refuses unsupported ones.

Read against vLLM 0.31-0.33, ``v1/kv_cache_interface.py``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from objkv.cache.match import keeps_all, stored_blocks
from objkv.connector.model.states import read_split
from objkv.errors import ConfigError
from objkv.keys.chunk import effective_chunk_tokens
from objkv.keys.identity import GroupIdentity, GroupKind
from objkv.keys.states import SplitState
from objkv.keys.topology import RankShard, Topology
from objkv.transfer.paging import GroupShape

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec


@dataclass(frozen=True, slots=True)
class Geometry:
    """The groups of a model, and their division into chunks and shards."""

    groups: tuple[GroupIdentity, ...]
    """Groups in vLLM's order. The index of a group is its id."""
    chunk_tokens: int
    block_tokens: int
    """Least common multiple of all block sizes. Matches begin and end at its multiples."""
    tp_size: int
    stages: tuple[tuple[int, ...], ...] = ()
    """Number of layers of each PP rank, per group. () without pipeline parallelism."""

    canonical: bool = False
    """Whether each token's content is contiguous in its page, so that tokens can be moved into
    blocks of another size."""

    @property
    def stored_groups(self) -> tuple[GroupIdentity, ...]:
        """The groups as the identity document lists them. If tokens can be moved into blocks of any
        size, the block size is listed as 1, so that it does not affect the identity."""
        return tuple(
            replace(group, block_size=1) if self._is_divisible(group) else group
            for group in self.groups
        )

    @property
    def pp_size(self) -> int:
        """Number of pipeline stages."""
        return len(self.stages[0]) if self.stages else 1

    @property
    def ranks(self) -> int:
        """Number of workers."""
        return self.tp_size * self.pp_size

    @property
    def windowed(self) -> bool:
        """Whether any group drops tokens.

        Then a match ends at a chunk's end, leaves a token to compute, and fails as a whole: the
        tokens kept for its end cannot be used for another end.
        """
        return not all(keeps_all(group) for group in self.groups)

    def topology(self, group: int) -> Topology:
        """Return the distribution of a group over the ranks."""
        identity = self.groups[group]
        layers = self.stages[group] if self.stages else (len(identity.layers),)
        return Topology(self.tp_size, identity.heads, layers, identity.block_size)

    def rank_shard(self, group: int, tp_rank: int, pp_rank: int = 0) -> RankShard | None:
        """Return a rank's shard of a group, or None if its stage has no layer of the group."""
        topology = self.topology(group)
        return topology.held(topology.rank(pp_rank, tp_rank))

    def fields(self, group: int) -> frozenset[str]:
        """Return the shard fields that the ranks of this replica read and write."""
        if not stored_blocks(self.groups[group], self.chunk_tokens):
            return frozenset()
        held = map(self.topology(group).held, range(self.ranks))
        return frozenset(f"{group}.{share.shard}" for share in held if share is not None)

    def all_fields(self) -> frozenset[str]:
        """Return the shard fields of all groups. A chunk with all of them is complete for this
        replica."""
        return frozenset().union(*(self.fields(group) for group in range(len(self.groups))))

    def shape(self, group: int, tp_rank: int, pp_rank: int = 0) -> GroupShape | None:
        """Return the expected shape of a group's tensors on a rank.

        None if the rank's stage has no layer of the group, or if the group has no payloads. The
        rank then ignores the group.
        """
        identity = self.groups[group]
        share = self.rank_shard(group, tp_rank, pp_rank)
        blocks = stored_blocks(identity, self.chunk_tokens)
        if share is None or not blocks:
            return None
        split = SplitState.parse(identity.state)
        return GroupShape(
            parts=split.views(self.tp_size) if split else (),
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


_INSTEAD = "run it without the objkv connector, or"
_KINDS: dict[type[KVCacheSpec], GroupKind] = {
    FullAttentionSpec: "full",
    MLAAttentionSpec: "mla",
    SlidingWindowSpec: "sliding_window",
    ChunkedLocalAttentionSpec: "chunked_local",
    MambaSpec: "mamba",
}
"""Supported specs by exact type, because subclasses store other data in the blocks."""


def read_group(vllm_config: "VllmConfig", group: "KVCacheGroupSpec") -> GroupIdentity:
    """Convert a group. Raises ``ConfigError``, which names the fix, for an unsupported one."""
    layers, spec = list(group.layer_names), group.kv_cache_spec
    kind = _KINDS.get(type(spec))
    if kind is None or getattr(group, "host_resident", False):
        raise ConfigError(
            f"objkv does not support the KV cache of {layers[0]} ({type(spec).__name__}): "
            f"{_INSTEAD} use a model of full, sliding-window, chunked local, MLA and "
            "linear attention or Mamba layers only"
        )
    if isinstance(spec, MambaSpec):
        return _state(vllm_config, layers, spec)
    assert isinstance(spec, AttentionSpec)
    if getattr(spec, "non_causal", False) or spec.tokens_per_state != 1:
        raise ConfigError(
            f"objkv cannot share the KV of {layers[0]}, because it depends on later tokens or has "
            f"one state for several tokens: {_INSTEAD} use another model"
        )
    # Two planes of two heads have the same shape as two heads, so any value is refused.
    if getattr(spec, "num_head_slots", None) is not None:
        raise ConfigError(
            f"objkv cannot share the KV of {layers[0]}, because its attention backend keeps K and "
            f"V in separate planes, which no other backend can read: {_INSTEAD} choose another "
            "attention backend or KV cache dtype"
        )
    window = None
    if isinstance(spec, SlidingWindowSpec):
        window = spec.sliding_window
    elif isinstance(spec, ChunkedLocalAttentionSpec):
        window = spec.attention_chunk_size
        if window % spec.block_size:
            # vLLM 0.32 treats a block across such a boundary as one that is never read.
            raise ConfigError(
                f"the local attention of {layers[0]} restarts every {window} tokens, inside blocks "
                f"of {spec.block_size}: {_INSTEAD} set --block-size to a divisor of {window}"
            )
    item = torch.empty((), dtype=spec.dtype).element_size()
    return GroupIdentity(
        kind=kind,
        window=window,
        layers=tuple(layers),
        heads=_total_heads(vllm_config, layers[0], spec),
        content=spec.state_content_size_bytes // item,
        block_size=spec.block_size,
    )


def read_chunk_tokens(wish: int, groups: "Sequence[GroupIdentity]") -> int:
    """Return the effective chunk size of these groups, see ``docs/keyspace.md``.

    A model with Mamba groups gets the smallest size: a state can be saved only where a step of vLLM
    ends, at the end of a block, and larger chunks rarely end there. Raises ``ConfigError`` if no
    group would have a payload.
    """
    if any(group.kind == "mamba" for group in groups):
        wish = 1
    size = effective_chunk_tokens(wish, tuple(group.block_size for group in groups))
    if not any(stored_blocks(group, size) for group in groups):
        raise ConfigError(
            f"objkv cannot share this model in chunks of {size} tokens, because its local "
            f"attention restarts at the end of each chunk: {_INSTEAD} lower chunk_tokens"
        )
    return size


def _state(vllm_config: "VllmConfig", layers: list[str], spec: MambaSpec) -> GroupIdentity:
    if spec.mamba_cache_mode != "align":
        raise ConfigError(
            f"objkv can share the states of {layers[0]} only if vLLM keeps them at block ends, but "
            f"mamba_cache_mode is {spec.mamba_cache_mode!r}, not 'align': {_INSTEAD} start vLLM "
            "with --enable-prefix-caching"
        )
    cache = vllm_config.cache_config
    for name in ("use_replayssm", "use_kda_recoverssm"):
        if getattr(cache, name, False):
            raise ConfigError(
                f"objkv cannot share states that vLLM does not write at every step: {_INSTEAD} "
                f"turn {name} off"
            )
    tensors = " ".join(
        f"{str(dtype).removeprefix('torch.')}[{','.join(map(str, shape))}]"
        for dtype, shape in zip(spec.dtypes, spec.shapes, strict=True)
    )
    ranks = vllm_config.parallel_config.tensor_parallel_size
    opaque = GroupIdentity(
        kind="mamba",
        window=None,
        layers=tuple(layers),
        heads=1 if getattr(spec, "tp_replicated", False) else ranks,
        content=spec.state_content_size_bytes,
        block_size=spec.block_size,
        state=f"{spec.mamba_type.name.lower()} {tensors}",
    )
    split = read_split(vllm_config, spec)
    if split is None:
        return opaque
    return replace(opaque, heads=split.units, content=split.unit_bytes, state=str(split))


def _total_heads(vllm_config: "VllmConfig", layer: str, spec: Any) -> int:
    if isinstance(spec, MLAAttentionSpec):
        return 1
    total = int(vllm_config.model_config.get_total_num_kv_heads())
    tp_size = vllm_config.parallel_config.tensor_parallel_size
    heads = int(spec.num_kv_heads)
    if heads * tp_size == total or (heads == 1 and tp_size > total):
        return total
    raise ConfigError(
        f"objkv does not support the layout of {layer}, {heads} of {total} KV heads on each of "
        f"{tp_size} ranks: {_INSTEAD} set tensor_parallel_size to 1"
    )
