"""The parts of vLLM's KV cache groups: layers of one group whose caches have one shape.

vLLM puts layers that need the same blocks into one group, even if their caches differ: the latents
and the indexer of sparse attention (DeepSeek V3.2), compressed states of several ratios (V4), or a
target and its draft. Workers get a spec per layer (``UniformTypeKVCacheSpecs``), the scheduler only
that of the first layer. Both get the same tensors, one for all layers of one spec, so objkv takes
parts and page sizes from those. Source: vLLM 0.31-0.33, ``get_kv_cache_config_from_groups`` and
``generate_scheduler_kv_cache_config`` in ``v1/core/kv_cache_utils.py``.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import (
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    UniformTypeKVCacheSpecs,
)

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec


@dataclass(frozen=True, slots=True)
class LayerPart:
    """Layers of one group whose caches have one shape."""

    table: int
    """Number of vLLM's group, whose block table the layers use."""
    layers: tuple[str, ...]
    """In forward order."""
    spec: KVCacheSpec
    """Spec of the group's first layer: equal to that of these layers only if ``page`` is None."""
    page: int | None = None
    """Bytes of one layer's block, if the layers' spec is not that of the group's first layer, or
    if a page cannot be divided by token."""
    draft: bool = False
    """Whether the layers are a draft's."""


def shares_any(kv_cache_config: "KVCacheConfig") -> bool:
    """Whether any group can be shared. An engine that only encodes has none."""
    return any(map(_is_shared, kv_cache_config.kv_cache_groups))


def _is_shared(group: "KVCacheGroupSpec") -> bool:
    return getattr(group.kv_cache_spec, "prefix_cacheable", True)


def read_parts(
    kv_cache_config: "KVCacheConfig", is_draft: Callable[[str], bool]
) -> list[LayerPart]:
    """Return the parts of all groups that can be shared, the target's before the draft's.

    Rings and windows that vLLM itself does not cache by prefix are left out: vLLM computes them
    again after each hit. Source: ``prefix_cacheable``, ``v1/kv_cache_interface.py``.
    """
    parts = [
        part
        for table, group in enumerate(kv_cache_config.kv_cache_groups)
        if _is_shared(group)
        for part in _parts_of(kv_cache_config, table, group, is_draft)
    ]
    return sorted(parts, key=lambda part: part.draft)


def _parts_of(
    kv_cache_config: "KVCacheConfig",
    table: int,
    group: "KVCacheGroupSpec",
    is_draft: Callable[[str], bool],
) -> Iterator[LayerPart]:
    spec = first_spec(group)
    shapes = _by_tensor(kv_cache_config, group.layer_names)
    of_target = sum(not all(map(is_draft, layers)) for layers, _ in shapes)
    for layers, page in shapes:
        divisible = group.layer_names[0] in layers and of_target <= 1 and not _is_paged(spec)
        for draft in (False, True):
            if own := tuple(layer for layer in layers if is_draft(layer) == draft):
                yield LayerPart(table, own, spec, None if divisible else page, draft)


def first_spec(group: "KVCacheGroupSpec") -> KVCacheSpec:
    """Return the spec of the group's first layer, as the scheduler sees it."""
    spec = group.kv_cache_spec
    return spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _by_tensor(
    kv_cache_config: "KVCacheConfig", layers: Sequence[str]
) -> list[tuple[tuple[str, ...], int]]:
    """Return the layers of each tensor with the bytes of a page, in the order of first layers."""
    wanted, found = frozenset(layers), []
    for tensor in kv_cache_config.kv_cache_tensors:
        own = tuple(layer for layer in tensor.layers if layer in wanted)
        if own:
            # One of the two strides is a page: which one depends on the layout.
            found.append((own, min(tensor.layer_stride, tensor.block_stride)))
    if sum(len(own) for own, _ in found) != len(layers):  # not every caller has tensors
        return [(tuple(layers), 0)]
    return sorted(found, key=lambda one: layers.index(one[0][0]))


def _is_paged(spec: KVCacheSpec) -> bool:
    if isinstance(spec, SlidingWindowMLASpec):
        return True
    return isinstance(spec, MLAAttentionSpec) and spec.tokens_per_state != 1
