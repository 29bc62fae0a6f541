"""Converts vLLM's KV cache groups to objkv's. Source: vLLM 0.31-0.33, ``v1/kv_cache_interface``."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from objkv.cache.match import keeps_all, stored_blocks
from objkv.connector.model.drafts import INSTEAD, Draft
from objkv.connector.model.subgroups import SubGroup
from objkv.errors import ConfigError
from objkv.keys.chunk import effective_chunk_tokens, field_of
from objkv.keys.identity import GroupIdentity, GroupKind
from objkv.keys.states import ITEM_BYTES, SplitState, StatePart, StateTensor
from objkv.keys.topology import ALL_TOKENS, Shard, TokenPart, Topology
from objkv.transfer.paging import GroupShape

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, slots=True)
class DraftGroups:
    """The groups of a draft, the last of a geometry."""

    count: int
    number: int
    """Number of the first of them in keys, fields and plans."""
    lags: bool
    """Whether the KV of a draft depends on the next token. Its payloads then contain the blocks
    from one ``block_tokens`` before their chunk to one before its end."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """The groups of a model, and their division into chunks and shards."""

    groups: tuple[GroupIdentity, ...]
    """The target's groups in vLLM's order, then the draft's."""
    chunk_tokens: int
    block_tokens: int
    """Least common multiple of all block sizes. Matches begin and end at its multiples."""
    tp_size: int
    stages: tuple[tuple[int, ...], ...] = ()
    """Number of layers of each PP rank, per group. () without pipeline parallelism."""

    canonical: bool = False
    """Whether a token's content is contiguous, so that it can move into blocks of another size."""
    tables: tuple[int, ...] = ()
    """Number of vLLM's group, and so of the block table, of each group. (): they are the same."""
    table_count: int = 0
    """How many groups vLLM has. 0: as many as there are groups."""
    drafted: DraftGroups | None = None
    """The last groups, if they are a draft's."""
    dcp_size: int = 1
    """Size of decode context parallelism. A block's size counts the tokens of all these ranks."""
    dcp_interleave: int = 1
    """1 without it."""
    nodes: int = 1
    """How many nodes the ranks are on, as many ranks on each, in their order."""

    @property
    def target_count(self) -> int:
        """Number of the target's groups. They come first, and their index is their number."""
        return len(self.groups) - (self.drafted.count if self.drafted else 0)

    @property
    def several_tables(self) -> bool:
        """Whether vLLM has several groups, so that a block id alone does not identify a block."""
        return (self.table_count or len(self.groups)) > 1

    def table(self, group: int) -> int:
        """Return the number of the block table that a group's layers use."""
        return self.tables[group] if self.tables else group

    def number(self, group: int) -> int:
        """Return a group's number in keys, fields and plans. See ``Draft.number``."""
        if self.drafted is None or group < self.target_count:
            return group
        return self.drafted.number + group - self.target_count

    def position(self, number: int) -> int | None:
        """Return the index of the group with a number, or None if it is another draft's."""
        if 0 <= number < self.target_count:
            return number
        if self.drafted is None:
            return None
        at = number - self.drafted.number
        return self.target_count + at if 0 <= at < self.drafted.count else None

    def is_draft(self, group: int) -> bool:
        """Whether a group is a draft's: a chunk can be loaded without it."""
        return group >= self.target_count

    @property
    def draft_lag_tokens(self) -> int:
        """Tokens at the end of a match for which a draft has no KV, see ``DraftGroups``."""
        return self.block_tokens if self.drafted is not None and self.drafted.lags else 0

    def draft_lag_blocks(self, group: int) -> int:
        """Return how many blocks before its chunk's end a group's payload ends."""
        return self.draft_lag_tokens // self.groups[group].block_size if self.is_draft(group) else 0

    @property
    def stored_groups(self) -> tuple[GroupIdentity, ...]:
        """The groups as the identity document lists them. If tokens can be moved into blocks of any
        size, the block size is listed as 1, so that it does not affect the identity."""
        return tuple(
            replace(group, block_size=1) if self.is_divisible(g) else group
            for g, group in enumerate(self.groups[: self.target_count])
        )

    @property
    def ranks(self) -> int:
        """Number of workers."""
        return self.tp_size * (len(self.stages[0]) if self.stages else 1)

    @property
    def windowed(self) -> bool:
        """Whether any group drops tokens. Then a match ends at a chunk's end, leaves a token to
        compute, and fails as a whole: the tokens kept for its end are of no use for another. So
        also if vLLM has groups that are not stored, such as the ring of tokens that are still to
        be compressed: it is empty at the end of a block, but not one token earlier."""
        left_out = self.table_count > len(set(self.tables))
        return left_out or not all(keeps_all(group) for group in self.groups)

    def topology(self, group: int) -> Topology:
        """Return the distribution of a group over the ranks."""
        identity = self.groups[group]
        layers = self.stages[group] if self.stages else (len(identity.layers),)
        return Topology(
            self.tp_size, identity.heads, layers, self.dcp_size, self.dcp_interleave, self.nodes
        )

    def joined(self, group: int, rank: int) -> tuple[Shard | None, int]:
        """Return what the payload has that a rank, which must hold a shard, writes of a group, None
        for all, and how many different shards of ranks become that payload: those of a node, unless
        others could not take its tokens apart, or ``Topology.joined`` forbids it."""
        topology, identity = self.topology(group), self.groups[group]
        share = topology.held(rank)
        assert share is not None
        shard, count = topology.joined(rank) if self._is_dealt_for_all(group) else (share.shard, 1)
        whole = Shard(0, len(identity.layers), 0, identity.heads)
        return (None if shard == whole else shard), count

    def reads(self, group: int, tokens: TokenPart) -> bool:
        """Whether this replica can read payloads of a group that have these tokens."""
        is_own = (tokens.size, tokens.interleave) == (self.dcp_size, self.dcp_interleave)
        return is_own or (self._is_dealt_for_all(group) and self._is_combinable(group, tokens))

    def _is_dealt_for_all(self, group: int) -> bool:
        """Whether replicas that divide the tokens otherwise can read what this one writes."""
        return self._is_combinable(group, TokenPart(0, self.dcp_size, self.dcp_interleave))

    def _is_combinable(self, group: int, tokens: TokenPart) -> bool:
        """Whether ranks can combine these tokens with any others of which this is true."""
        is_dealt = tokens.interleave == 1 and not _BLOCK_TOKENS % tokens.size
        return tokens == ALL_TOKENS or (is_dealt and self.is_divisible(group))

    def fields(self, group: int) -> frozenset[str]:
        """Return the index fields of the payloads that this replica writes."""
        if not stored_blocks(self.groups[group], self.chunk_tokens):
            return frozenset()
        number, topology = self.number(group), self.topology(group)
        held = [rank for rank in range(self.ranks) if topology.held(rank) is not None]
        return frozenset(field_of(number, self.joined(group, rank)[0]) for rank in held)

    def all_fields(self) -> frozenset[str]:
        """Return the index fields of all payloads that this replica may read."""
        groups = range(len(self.groups))
        wholes = (
            str(self.number(g)) for g in groups if self.fields(g) and self.reads(g, ALL_TOKENS)
        )
        return frozenset().union(wholes, *(self.fields(group) for group in groups))

    def shape(self, group: int, tp_rank: int, pp_rank: int = 0) -> GroupShape | None:
        """Return the expected shape of a group's tensors on a rank, None if its stage has no layer
        of the group, or if the group has no payloads."""
        identity = self.groups[group]
        rank = pp_rank * self.tp_size + tp_rank
        share = self.topology(group).held(rank)
        blocks = stored_blocks(identity, self.chunk_tokens)
        if share is None or not blocks:
            return None
        split = SplitState.parse(identity.state)
        payload, joined = self.joined(group, rank)
        return GroupShape(
            payload=payload,
            joined=joined,
            parts=split.views(self.tp_size) if split else (),
            layers=identity.layers[share.shard.layer_start : share.shard.layer_end],
            blocks=blocks,
            block_size=1 if identity.kind == "mamba" else identity.block_size // self.dcp_size,
            rank_shard=share,
            model_layers=identity.layers,
            heads=identity.heads,
            divisible=self.is_divisible(group),
        )

    def is_divisible(self, group: int) -> bool:
        """Whether a group's pages can be divided by token."""
        identity = self.groups[group]
        return self.canonical and keeps_all(identity) and identity.page is None


_BLOCK_TOKENS = 16
"""Blocks of vLLM are multiples of this many tokens. Sizes of context parallelism that divide it can
be combined with each other in any of them."""
_KINDS: dict[type[KVCacheSpec], GroupKind] = {
    FullAttentionSpec: "full",
    MLAAttentionSpec: "mla",
    SlidingWindowSpec: "sliding_window",
    SlidingWindowMLASpec: "sliding_window",
    ChunkedLocalAttentionSpec: "chunked_local",
    MambaSpec: "mamba",
}
"""Supported specs by exact type, because subclasses store other data in the blocks."""


def read_group(
    vllm_config: "VllmConfig", subgroup: SubGroup, draft: Draft | None = None
) -> GroupIdentity:
    """Convert a part of a group. ``draft``: of the engine. Raises ``ConfigError``."""
    layers, spec = list(subgroup.layers), subgroup.spec
    kind = _KINDS.get(type(spec))
    if kind is None:
        raise ConfigError(
            f"objkv does not support the KV cache of {layers[0]} ({type(spec).__name__}): "
            f"{INSTEAD} use ObjKVTier, which takes every cache that vLLM can offload, or a model "
            "of full, sliding-window, chunked local, MLA and linear attention or Mamba layers only"
        )
    is_paged_draft = subgroup.draft and subgroup.page is not None
    if is_paged_draft and draft is not None and kind in ("full", "mla"):
        kind = "mla" if draft.latent else "full"  # the spec is that of the target's first layer
    if isinstance(spec, MambaSpec):
        return _state(vllm_config, layers, spec)
    assert isinstance(spec, AttentionSpec)
    if getattr(spec, "non_causal", False):
        raise ConfigError(
            f"objkv cannot share the KV of {layers[0]}, because it depends on later tokens: "
            f"{INSTEAD} use another model"
        )
    # Two planes of two heads have the same shape as two heads, so any value is refused.
    if getattr(spec, "num_head_slots", None) is not None:
        raise ConfigError(
            f"objkv cannot share the KV of {layers[0]}, because its attention backend keeps K and "
            f"V in separate planes, which no other backend can read: {INSTEAD} choose another "
            "attention backend or KV cache dtype"
        )
    if subgroup.draft and kind not in ("full", "mla"):
        raise ConfigError(
            f"objkv does not support a draft with {kind} layers ({layers[0]}): {INSTEAD} use "
            "ObjKVTier, or a draft with full attention"
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
                f"of {spec.block_size}: {INSTEAD} set --block-size to a divisor of {window}"
            )
    heads, content, page = _page_shape(vllm_config, subgroup, draft)
    return GroupIdentity(
        kind=kind,
        window=window,
        layers=tuple(layers),
        heads=heads,
        content=content,
        block_size=spec.block_size,
        page=page,
    )


def _page_shape(
    vllm_config: "VllmConfig", subgroup: SubGroup, draft: Draft | None
) -> tuple[int, int, int | None]:
    """Return heads of all ranks, elements per head and token, and bytes of an indivisible page."""
    spec = subgroup.spec
    assert isinstance(spec, AttentionSpec)
    item = torch.empty((), dtype=spec.dtype).element_size()
    own = draft if subgroup.draft else None
    model_heads = own.heads if own else int(vllm_config.model_config.get_total_num_kv_heads())
    if subgroup.page is None:
        heads = _total_heads(vllm_config, subgroup.layers[0], spec, model_heads)
        return heads, spec.state_content_size_bytes // item, None
    latent = own.latent if own else isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec)
    if latent:
        return 1, subgroup.page, subgroup.page
    if own:
        here = max(1, model_heads // vllm_config.parallel_config.tensor_parallel_size)
        return model_heads, subgroup.page // (here * spec.block_size * item), None
    raise ConfigError(
        f"objkv does not support the KV cache of {subgroup.layers[0]}, because layers of its group "
        f"have other heads: {INSTEAD} use ObjKVTier"
    )


def read_chunk_tokens(wish: int, groups: "Sequence[GroupIdentity]") -> int:
    """Return the effective chunk size of these groups, see ``docs/keyspace.md``. With Mamba groups
    it is the smallest: a state can be saved only where a step of vLLM ends, at the end of a block,
    and larger chunks rarely end there. Raises ``ConfigError`` if no group would have a payload."""
    if any(group.kind == "mamba" for group in groups):
        wish = 1
    size = effective_chunk_tokens(wish, tuple(group.block_size for group in groups))
    if not any(stored_blocks(group, size) for group in groups):
        raise ConfigError(
            f"objkv cannot share this model in chunks of {size} tokens, because its local "
            f"attention restarts at the end of each chunk: {INSTEAD} lower chunk_tokens"
        )
    return size


def _state(vllm_config: "VllmConfig", layers: list[str], spec: MambaSpec) -> GroupIdentity:
    if spec.mamba_cache_mode != "align":
        raise ConfigError(
            f"objkv can share the states of {layers[0]} only if vLLM keeps them at block ends, but "
            f"mamba_cache_mode is {spec.mamba_cache_mode!r}, not 'align': {INSTEAD} start vLLM "
            "with --enable-prefix-caching"
        )
    cache = vllm_config.cache_config
    for name in ("use_replayssm", "use_kda_recoverssm"):
        if getattr(cache, name, False):
            raise ConfigError(
                f"objkv cannot share states that vLLM does not write at every step: {INSTEAD} "
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
    split = _read_split(vllm_config, spec)
    if split is None:
        return opaque
    return replace(opaque, heads=split.units, content=split.unit_bytes, state=str(split))


_GROUPS_NAMES = ("n_groups", "mamba_n_groups", "mamba_ngroups")
"""How configurations of Mamba 2 name the number of groups that share B and C."""
_Parts = list[tuple[int, bool]]
"""Elements of each part on one rank, and whether each rank has all of it."""


def _read_split(vllm_config: "VllmConfig", spec: "MambaSpec") -> SplitState | None:
    """Return the state over all ranks, None if it is not known how they split it. Source: vLLM
    0.31-0.33, ``MambaStateShapeCalculator`` in ``layers/mamba/mamba_utils.py`` and its users."""
    dtypes = [str(dtype).removeprefix("torch.") for dtype in spec.dtypes]
    parts = _parts_of(vllm_config, spec)
    if parts is None or getattr(spec, "tp_replicated", False) or not set(dtypes) <= {*ITEM_BYTES}:
        return None
    ranks = vllm_config.parallel_config.tensor_parallel_size
    tensors = []
    for dtype, shape, (rows, row) in zip(dtypes, spec.shapes, parts, strict=True):
        if rows * sum(width for width, _ in row) != prod(shape) or min(row)[0] < 1:
            return None
        whole = (StatePart(w if everywhere else w * ranks, everywhere) for w, everywhere in row)
        tensors.append(StateTensor(dtype, rows, tuple(whole)))
    split = SplitState(spec.mamba_type.name.lower(), tuple(tensors))
    return split if split.units % ranks == 0 else None


def _parts_of(vllm_config: "VllmConfig", spec: "MambaSpec") -> list[tuple[int, _Parts]] | None:
    """Return the rows of each tensor on one rank, and the parts of a row. None if not known."""
    match spec.mamba_type.name, *(len(shape) for shape in spec.shapes):
        case "LINEAR", 3:
            return [(1, [(prod(spec.shapes[0]), False)])]
        case "SHORT_CONV", 2:
            return [_conv(spec.shapes[0], [(_width(spec), False)])]
        case "MAMBA1", 2, 2:
            row = [(_width(spec), False)]
        case "MAMBA2", 2, 3:
            heads, head, size = spec.shapes[1]
            groups, rest = divmod(_width(spec) - heads * head, 2 * size)
            total = _total_groups(vllm_config, groups)
            if rest or total is None:
                return None
            row = [(heads * head, False)] + [(groups * size, total == 1)] * 2 * (groups > 0)
        case "GDN_ATTN", 2, 3:
            heads, head, _ = spec.shapes[1]  # of v; q and k may have fewer heads
            keys, rest = divmod(_width(spec) - heads * head, 2)
            if rest:
                return None
            row = [(keys, False), (keys, False), (heads * head, False)]
        case _:
            return None
    return [_conv(spec.shapes[0], row), (1, [(prod(spec.shapes[1]), False)])]


def _total_groups(vllm_config: "VllmConfig", groups: int) -> int | None:
    """Return the groups of a Mamba 2 layer over all ranks. ``groups``: those of one rank. If each
    rank has one, only the configuration says whether all have the same."""
    ranks: int = vllm_config.parallel_config.tensor_parallel_size
    if ranks == 1 or groups != 1:
        return groups * ranks
    text = vllm_config.model_config.hf_text_config
    found = {getattr(text, name) for name in _GROUPS_NAMES if hasattr(text, name)}
    return int(found.pop()) if found in ({1}, {ranks}) else None


def _width(spec: "MambaSpec") -> int:
    """Return the channels of the convolution."""
    return int(spec.shapes[0][0 if mamba_utils.is_conv_state_dim_first() else 1])


def _conv(shape: tuple[int, ...], row: _Parts) -> tuple[int, _Parts]:
    """Return rows and parts of a convolution: a row for each token, or all tokens of a channel
    together (``VLLM_SSM_CONV_STATE_LAYOUT=DS``)."""
    if mamba_utils.is_conv_state_dim_first():
        return 1, [(width * shape[1], everywhere) for width, everywhere in row]
    return shape[0], row


def _total_heads(vllm_config: "VllmConfig", layer: str, spec: Any, model_heads: int) -> int:
    """Return a layer's KV heads over all ranks. ``model_heads``: those of most layers."""
    if isinstance(spec, MLAAttentionSpec):
        return 1
    tp_size = vllm_config.parallel_config.tensor_parallel_size
    heads = int(spec.num_kv_heads)
    if heads > 1 or tp_size == 1:  # only single heads are on several ranks
        return int(heads * tp_size)
    if model_heads <= tp_size:
        return int(model_heads)
    raise ConfigError(
        f"objkv does not support the layout of {layer}, {heads} of {model_heads} KV heads on each "
        f"of {tp_size} ranks: {INSTEAD} set tensor_parallel_size to 1"
    )
