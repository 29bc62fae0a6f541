"""Stages of a pipeline: the layers of all ranks, derived on each from its own, and checked there.

With pipeline parallelism vLLM tells a rank its own layers only, and the scheduler those of rank 0;
but the groups that name what is stored must be the same everywhere. Whatever is assumed here of
other ranks' layers these check of their own, so a wrong guess stops the engine and shares nothing.
Source: vLLM 0.31-0.33, ``get_kv_cache_configs`` in ``v1/core/kv_cache_utils.py``.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from objkv.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec

Stages = tuple[tuple[int, ...], ...]
"""Per group, how many of its layers each PP rank has; none without pipeline parallelism."""

_ONE_STAGE = "run it without the objkv connector, or set pipeline_parallel_size to 1"


def whole_groups(
    vllm_config: "VllmConfig", groups: "Sequence[KVCacheGroupSpec]"
) -> "tuple[list[KVCacheGroupSpec], Stages]":
    """The groups with the layers of all ranks, in forward order, and how many each rank has.

    Args:
        groups: those of one rank, as vLLM gives them to it, or to the scheduler.

    Raises ``ConfigError`` where the layers of other ranks cannot be told.
    """
    pp_size = vllm_config.parallel_config.pipeline_parallel_size
    if pp_size == 1:
        return list(groups), ()
    total = vllm_config.model_config.get_total_num_hidden_layers()
    ranges = _stages(total, pp_size)
    kinds = _kinds(vllm_config, total) if len(groups) > 1 else None
    parted = [list(range(total))] if kinds is None else _parted(kinds)
    naming, own = _own_layers(groups)
    if not any(_within(parted, stage) == own for stage in ranges):
        raise ConfigError(
            f"the layers that vLLM gave a stage of the pipeline, {own} of {total}, are not those "
            f"that objkv expects there, so it cannot tell those of other stages: {_ONE_STAGE}"
        )
    whole = [
        replace(group, layer_names=[naming.format(layer) for layer in layers])
        for group, layers in zip(groups, parted, strict=True)
    ]
    return whole, tuple(
        tuple(len([layer for layer in layers if layer in stage]) for stage in ranges)
        for layers in parted
    )


def _stages(total: int, pp_size: int) -> list[range]:
    from vllm.distributed.utils import get_pp_indices

    ranges = [range(*get_pp_indices(total, rank, pp_size)) for rank in range(pp_size)]
    if not all(ranges):
        raise ConfigError(
            f"a stage of the pipeline has none of the model's {total} layers: set "
            "pipeline_parallel_size, or VLLM_PP_LAYER_PARTITION, so that each has some"
        )
    return ranges


def _kinds(vllm_config: "VllmConfig", total: int) -> list[str]:
    """What each layer of a hybrid model is."""
    kinds = getattr(vllm_config.model_config.hf_text_config, "layer_types", None)
    if kinds is None or len(kinds) != total:
        raise ConfigError(
            "the model has several KV cache groups and its configuration no layer_types, so that "
            f"objkv cannot tell which layers the other stages of the pipeline have: {_ONE_STAGE}"
        )
    return list(kinds)


def _parted(kinds: Sequence[str]) -> list[list[int]]:
    """The layers of each group. Source: vLLM 0.31-0.33, ``_get_kv_cache_groups_uniform_page_size``:
    groups of one size, the least common kind's or nearly so; each kind is dealt out to its own."""
    alike: dict[str, list[int]] = {}
    for layer, kind in enumerate(kinds):
        alike.setdefault(kind, []).append(layer)
    counts = [len(layers) for layers in alike.values()]
    size = max(counts) if max(counts) < min(counts) * 1.5 else min(counts)
    return [
        layers[first :: -(-len(layers) // size)]
        for layers in alike.values()
        for first in range(-(-len(layers) // size))
    ]


def _own_layers(groups: "Sequence[KVCacheGroupSpec]") -> tuple[str, list[list[int]]]:
    """How layers are named, ``{}`` for the number, and the numbers of those in each group."""
    namings = set()
    numbers: list[list[int]] = []
    for group in groups:
        numbers.append([])
        for name in group.layer_names:
            parts = name.split(".")
            places = [place for place, part in enumerate(parts) if part.isdecimal()]
            if len(places) == 1:
                numbers[-1].append(int(parts[places[0]]))
                parts[places[0]] = "{}"
            namings.add(".".join(parts))
    naming = namings.pop() if len(namings) == 1 else ""
    if "{}" not in naming:
        raise ConfigError(
            f"the layers of this model are not named alike but for one number, {sorted(namings)}: "
            f"objkv cannot name those of other stages of the pipeline; {_ONE_STAGE}"
        )
    return naming, numbers


def _within(parted: list[list[int]], stage: range) -> list[list[int]]:
    return [[layer for layer in layers if layer in stage] for layers in parted]
