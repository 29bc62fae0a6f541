"""``objkv size`` groups layers as vLLM itself does, in whatever version is installed."""

from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from objkv.ops.size.model import LayerShape, ModelShape

try:
    from vllm.v1.core import kv_cache_planning as planning  # since 0.33
except ImportError:
    from vllm.v1.core import kv_cache_utils as planning


@pytest.mark.parametrize(
    "pattern",
    ["sf" * 12, "sf" * 12 + "f", "sssssf" * 8, ("sssssf" * 11)[:62], "fs" * 3 + "fff", "fss"],
)
def test_the_groups_are_those_of_vllm(pattern: str) -> None:
    form: dict[str, Any] = {
        "block_size": 16, "num_kv_heads": 8, "head_size": 64, "dtype": torch.bfloat16,
    }  # fmt: skip
    specs = {
        f"model.layers.{number}.self_attn.attn": FullAttentionSpec(**form)
        if kind == "f"
        else SlidingWindowSpec(**form, sliding_window=128)
        for number, kind in enumerate(pattern)
    }
    theirs = planning._get_kv_cache_groups_uniform_page_size(specs)
    kinds = {"f": LayerShape("full", 8, 128), "s": LayerShape("sliding_window", 8, 128, 128)}
    shape = ModelShape("x", tuple(kinds[kind] for kind in pattern), "bfloat16", "a test")
    ours = shape.groups(16)
    assert sorted(tuple(group.layer_names) for group in theirs) == sorted(
        group.layers for group in ours
    )
