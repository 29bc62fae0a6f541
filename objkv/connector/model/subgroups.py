"""The subgroups of vLLM's KV cache groups: layers of one group whose caches have one shape; and the
layers of all pipeline stages, derived from those of one rank. vLLM puts layers that need the same
blocks into one group, even if their caches differ: the latents and the indexer of sparse attention
(DeepSeek V3.2), compressed states of several ratios (V4), or a target and its draft. Workers get a
spec per layer (``UniformTypeKVCacheSpecs``), the scheduler only that of the first. Both get the
same tensors, one for all layers of one spec, so objkv takes subgroups and page sizes from those.
Source: vLLM 0.31-0.33, ``get_kv_cache_config_from_groups`` and
``generate_scheduler_kv_cache_config`` in ``v1/core/kv_cache_utils.py``."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import (
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    UniformTypeKVCacheSpecs,
)

from objkv.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec


@dataclass(frozen=True, slots=True)
class SubGroup:
    """Layers of one group whose caches have one shape."""

    table: int
    """Number of vLLM's group, whose block table the layers use."""
    layers: tuple[str, ...]
    """In forward order."""
    spec: KVCacheSpec
    """Spec of the group's first layer: equal to that of these layers only if ``page`` is None."""
    page: int | None = None
    """Bytes of a layer's block if ``spec`` is not its own, or pages are not divisible by token."""
    draft: bool = False
    """Whether the layers are a draft's."""


def shares_any(kv_cache_config: "KVCacheConfig") -> bool:
    """Whether any group can be shared. An engine that only encodes has none."""
    return any(map(_is_shared, kv_cache_config.kv_cache_groups))


def _is_shared(group: "KVCacheGroupSpec") -> bool:
    return getattr(group.kv_cache_spec, "prefix_cacheable", True)


def read_subgroups(
    kv_cache_config: "KVCacheConfig", is_draft: Callable[[str], bool]
) -> list[SubGroup]:
    """Return the subgroups of all groups that can be shared, the target's before the draft's. Rings
    and windows that vLLM does not cache by prefix are left out: it computes them again after each
    hit. Source: ``prefix_cacheable``, ``v1/kv_cache_interface.py``."""
    subgroups = [
        subgroup
        for table, group in enumerate(kv_cache_config.kv_cache_groups)
        if _is_shared(group)
        for subgroup in _subgroups_of(kv_cache_config, table, group, is_draft)
    ]
    return sorted(subgroups, key=lambda subgroup: subgroup.draft)


def _subgroups_of(
    kv_cache_config: "KVCacheConfig",
    table: int,
    group: "KVCacheGroupSpec",
    is_draft: Callable[[str], bool],
) -> Iterator[SubGroup]:
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):  # as the scheduler sees it
        spec = spec.first_spec
    shapes = _by_tensor(kv_cache_config, group.layer_names)
    of_target = sum(not all(map(is_draft, layers)) for layers, _ in shapes)
    for layers, page in shapes:
        divisible = group.layer_names[0] in layers and of_target <= 1 and not _is_paged(spec)
        for draft in (False, True):
            if own := tuple(layer for layer in layers if is_draft(layer) == draft):
                yield SubGroup(table, own, spec, None if divisible else page, draft)


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


PipelineStages = tuple[tuple[int, ...], ...]
"""Number of layers of each PP rank, per group."""
_ONE_STAGE = "run it without the objkv connector, or set pipeline_parallel_size to 1"
_STATES = frozenset({"linear_attention", "mamba", "mamba2", "conv"})
"""Kinds of layers that keep a state."""
_NOTHING = frozenset({"mlp", "moe"})
"""Kinds of layers without a cache."""
_BOTH = frozenset({"hybrid", "parallel"})
"""Kinds of layers with a state and attention."""
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""Kinds in ``hybrid_override_pattern`` of Nemotron-H."""


def whole_groups(
    vllm_config: "VllmConfig", groups: "Sequence[KVCacheGroupSpec]"
) -> "tuple[list[KVCacheGroupSpec], PipelineStages]":
    """Return the groups with the layers of all ranks in forward order, and the number per rank.
    ``groups``: of one rank. Raises ``ConfigError`` if the layers of others cannot be derived. vLLM
    gives each rank only its own layers, and the scheduler those of rank 0. But the groups determine
    the names of payloads, so they must be equal everywhere. Each rank checks its own layers, and a
    mismatch stops the engine. Source: vLLM 0.31-0.33, ``get_kv_cache_configs`` in ``v1/core``."""
    pp_size = vllm_config.parallel_config.pipeline_parallel_size
    total = vllm_config.model_config.get_total_num_hidden_layers()
    ranges = _stages(total, pp_size)
    parted = [list(range(total))]
    if len(groups) > 1:
        parted = _parted(_kinds(vllm_config, total), groups)
    namings, own = _own_layers(groups)
    stages = [
        [[layer for layer in layers if layer in stage] for layers in parted] for stage in ranges
    ]
    if own not in stages:
        raise ConfigError(
            f"objkv cannot derive the layers of other pipeline stages, because vLLM gave one stage "
            f"unexpected layers ({own} of {total}): {_ONE_STAGE}"
        )
    whole = [
        replace(group, layer_names=[naming.format(layer) for layer in layers])
        for group, naming, layers in zip(groups, namings, parted, strict=True)
    ]
    return whole, tuple(tuple(map(len, layers)) for layers in zip(*stages, strict=True))


def _stages(total: int, pp_size: int) -> list[range]:
    from vllm.distributed.utils import get_pp_indices

    ranges = [range(*get_pp_indices(total, rank, pp_size)) for rank in range(pp_size)]
    if not all(ranges):
        raise ConfigError(
            f"a pipeline stage has none of the model's {total} layers: set "
            "pipeline_parallel_size, or VLLM_PP_LAYER_PARTITION, so that each has some"
        )
    return ranges


def _listed(attention: Iterable[int], total: int) -> list[str]:
    return [("mamba", "attention")[layer in set(attention)] for layer in range(total)]


SOURCES: dict[str, Callable[[Any, int], list[str]]] = {
    "layer_types": lambda value, _: list(value),
    "layers_block_type": lambda value, _: list(value),
    "hybrid_override_pattern": lambda value, _: [_LETTERS.get(kind, kind) for kind in value],
    "attn_type_list": lambda value, _: [("linear_attention", "attention")[kind] for kind in value],
    "attn_layer_indices": _listed,
    "linear_attn_config": lambda value, total: _listed(
        [layer - 1 for layer in value["full_attn_layers"]], total
    ),
    "full_attention_interval": lambda value, total: _listed(range(value - 1, total, value), total),
}
"""Names in a model's configuration that determine the kind of each layer. The first one counts."""


def _kinds(vllm_config: "VllmConfig", total: int) -> list[str]:
    """Return the kind of each layer of a hybrid model."""
    text = vllm_config.model_config.hf_text_config
    for name, read in SOURCES.items():
        if (value := getattr(text, name, None)) is not None:
            kinds = read(value, total)
            if len(kinds) == total:
                return kinds
    raise ConfigError(
        "objkv cannot derive the layers of other pipeline stages, because the model has several KV "
        f"cache groups, and its configuration has no {', '.join(SOURCES)} of as many layers: "
        f"{_ONE_STAGE}"
    )


def _parted(kinds: Sequence[str], groups: "Sequence[KVCacheGroupSpec]") -> list[list[int]]:
    """Return the layers of each group. All groups have one size, about the number of layers of the
    rarest kind. Attention or states come first as in ``groups``, which is the same for all stages.
    Source: vLLM 0.31-0.33, ``_get_kv_cache_groups_uniform_page_size``."""
    alike: dict[str, list[int]] = {}
    for layer, kind in enumerate(kinds):
        for each in ("mamba", "attention") if kind in _BOTH else (kind,):
            if each not in _NOTHING:
                alike.setdefault(each, []).append(layer)
    states_first = isinstance(groups[0].kv_cache_spec, MambaSpec)
    buckets = [alike[kind] for kind in sorted(alike, key=lambda k: (k in _STATES) != states_first)]
    counts = [len(layers) for layers in buckets]
    size = max(counts) if max(counts) < min(counts) * 1.5 else min(counts)
    parted = [
        layers[first :: -(-len(layers) // size)]
        for layers in buckets
        for first in range(-(-len(layers) // size))
    ]
    if len(parted) != len(groups):
        raise ConfigError(
            f"objkv cannot derive the layers of other pipeline stages, because vLLM has other KV "
            f"cache groups than expected ({len(groups)} instead of {len(parted)}): {_ONE_STAGE}"
        )
    return parted


def _own_layers(groups: "Sequence[KVCacheGroupSpec]") -> tuple[list[str], list[list[int]]]:
    """Return each group's pattern of layer names, with ``{}`` for the number, and its numbers."""
    found: list[set[str]] = []
    numbers: list[list[int]] = []
    for group in groups:
        numbers.append([])
        found.append(set())
        for name in group.layer_names:
            parts = name.split(".")
            places = [place for place, part in enumerate(parts) if part.isdecimal()]
            if len(places) == 1:
                numbers[-1].append(int(parts[places[0]]))
                parts[places[0]] = "{}"
            found[-1].add(".".join(parts))
    # All attention is named alike, and all states are. So groups without layers here have names.
    is_state = [isinstance(group.kv_cache_spec, MambaSpec) for group in groups]
    for one, other in product(range(len(groups)), repeat=2):
        if not groups[one].layer_names and is_state[one] == is_state[other]:
            found[one] |= found[other]
    if any(len(names) != 1 or "{}" not in min(names) for names in found):
        raise ConfigError(
            "objkv cannot name the layers of other pipeline stages, because this stage lacks "
            "layers of a kind, or this model's layer names do not follow one pattern with one "
            f"number, {sorted(set().union(*found))}: {_ONE_STAGE}"
        )
    return [min(names) for names in found], numbers
