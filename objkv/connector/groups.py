"""vLLM's KV cache groups in objkv's words, and which of them are refused and why.

Read against vLLM 0.31-0.33, ``v1/kv_cache_interface.py``.
"""

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

from objkv.cache.match import stored_blocks
from objkv.errors import ConfigError
from objkv.keys.chunk import effective_chunk_tokens
from objkv.keys.identity import GroupIdentity, GroupKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec

_INSTEAD = "run it without the objkv connector, or"
_KINDS: dict[type[KVCacheSpec], GroupKind] = {
    FullAttentionSpec: "full",
    MLAAttentionSpec: "mla",
    SlidingWindowSpec: "sliding_window",
    ChunkedLocalAttentionSpec: "chunked_local",
    MambaSpec: "mamba",
}
"""Exact types: their subclasses keep other things in the same blocks."""


def read_group(vllm_config: "VllmConfig", group: "KVCacheGroupSpec") -> GroupIdentity:
    """Raises ``ConfigError`` with what to do for a group that objkv does not know."""
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
            f"objkv cannot share the KV of {layers[0]}: it depends on later tokens, or holds one "
            f"state for several of them; {_INSTEAD} use another model"
        )
    # Two planes of two heads look just like two heads: what is said at all is refused.
    if getattr(spec, "num_head_slots", None) is not None:
        raise ConfigError(
            f"objkv cannot share the KV of {layers[0]}: its attention backend keeps K and V of all "
            f"heads in planes of their own, which no other backend could read; {_INSTEAD} choose "
            "another attention backend or KV cache dtype"
        )
    window = None
    if isinstance(spec, SlidingWindowSpec):
        window = spec.sliding_window
    elif isinstance(spec, ChunkedLocalAttentionSpec):
        window = spec.attention_chunk_size
        if window % spec.block_size:
            # vLLM 0.32 takes a block that lies across such a boundary for one that nobody reads.
            raise ConfigError(
                f"the local attention of {layers[0]} begins anew every {window} tokens, within "
                f"blocks of {spec.block_size}: {_INSTEAD} set --block-size to a divisor of {window}"
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
    """The effective chunk of these groups, see ``docs/keyspace.md``. Raises ``ConfigError`` if none
    of them would have any payload.

    A state is there to be saved only where a step of vLLM ends, which is the end of some block:
    with chunks of several blocks most of these ends would be within a chunk.
    """
    if any(group.kind == "mamba" for group in groups):
        wish = 1
    size = effective_chunk_tokens(wish, tuple(group.block_size for group in groups))
    if not any(stored_blocks(group, size) for group in groups):
        raise ConfigError(
            f"nothing of this model can be shared in chunks of {size} tokens, at whose ends its "
            f"local attention begins anew: {_INSTEAD} lower chunk_tokens"
        )
    return size


def _state(vllm_config: "VllmConfig", layers: list[str], spec: MambaSpec) -> GroupIdentity:
    if spec.mamba_cache_mode != "align":
        raise ConfigError(
            f"objkv can share the states of {layers[0]} only where vLLM keeps them at the ends of "
            f"blocks (mamba_cache_mode is {spec.mamba_cache_mode!r}, not 'align'): {_INSTEAD} "
            "start vLLM with --enable-prefix-caching"
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
    return GroupIdentity(
        kind="mamba",
        window=None,
        layers=tuple(layers),
        heads=1 if getattr(spec, "tp_replicated", False) else ranks,
        content=spec.state_content_size_bytes,
        block_size=spec.block_size,
        state=f"{spec.mamba_type.name.lower()} {tensors}",
    )


def _total_heads(vllm_config: "VllmConfig", layer: str, spec: Any) -> int:
    if isinstance(spec, MLAAttentionSpec):
        return 1
    total = int(vllm_config.model_config.get_total_num_kv_heads())
    tp_size = vllm_config.parallel_config.tensor_parallel_size
    heads = int(spec.num_kv_heads)
    if heads * tp_size == total or (heads == 1 and tp_size > total):
        return total
    raise ConfigError(
        f"{layer} keeps {heads} KV heads on each of {tp_size} ranks, of {total} in all: "
        f"objkv does not know that layout; {_INSTEAD} set tensor_parallel_size to 1"
    )
