"""Reads from vLLM's spec of a state how the state is split over TP ranks.

Read against vLLM 0.31-0.33, ``MambaStateShapeCalculator`` in
``model_executor/layers/mamba/mamba_utils.py`` and the layers that use it.
"""

from math import prod
from typing import TYPE_CHECKING

from vllm.model_executor.layers.mamba import mamba_utils

from objkv.keys.states import ITEM_BYTES, SplitState, StatePart, StateTensor

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import MambaSpec

_GROUPS_NAMES = ("n_groups", "mamba_n_groups", "mamba_ngroups")
"""How configurations of Mamba 2 name the number of groups that share B and C."""
_Parts = list[tuple[int, bool]]
"""Elements of each part on one rank, and whether each rank has all of it."""


def read_split(vllm_config: "VllmConfig", spec: "MambaSpec") -> SplitState | None:
    """Return the state over all ranks, or None if it is not known how ranks split it."""
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
    """Return the groups of a Mamba 2 layer over all ranks. ``groups``: those of one rank.

    A single group is on all ranks; more groups are split. Only the configuration can say which of
    both it is if each rank has one.
    """
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
