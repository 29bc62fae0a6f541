"""Groups of several cache shapes, as vLLM itself makes and lays them out for a scheduler and its
workers: both read the same groups."""

from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from objkv.config import Config
from objkv.connector.model.groups import Geometry
from objkv.connector.model.identity import read_geometry
from objkv.errors import ConfigError
from objkv.keys.identity import GroupIdentity, Identity
from tests.connector.kv.hybrid_layout import plain_config

# vLLM 0.33 has some of its functions elsewhere.
planning = (
    import_module("vllm.v1.core.kv_cache_planning")
    if find_spec("vllm.v1.core.kv_cache_planning")
    else kv_cache_utils
)
LAYERS, HEADS = 4, 8
LATENT: dict[str, Any] = {"num_kv_heads": 1, "dtype": torch.bfloat16}
HEADED: dict[str, Any] = {"block_size": 16, "head_size": 64, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(num_kv_heads=HEADS, **HEADED)


def names(suffix: str = "self_attn.attn", *, first: int = 0, count: int = LAYERS) -> list[str]:
    return [f"model.layers.{layer}.{suffix}" for layer in range(first, first + count)]


def vllm_config(draft: Any = None, **parallel: int) -> Any:
    """Enough of vLLM's configuration for its grouping and for objkv's reading."""
    names = "tensor_parallel", "pipeline_parallel", "decode_context_parallel"
    sizes = dict.fromkeys((f"{name}_size" for name in (*names, "prefill_context_parallel")), 1)
    model = SimpleNamespace(
        dtype=torch.bfloat16,
        get_total_num_kv_heads=lambda: HEADS,
        get_total_num_hidden_layers=lambda: LAYERS,
        hf_config=SimpleNamespace(model_type="llama"),
    )
    cache = SimpleNamespace(
        cache_dtype="auto",
        prefix_cache_retention_interval=None,
        num_gpu_blocks_override=None,
        enable_prefix_caching=True,
        get_resolved_kv_cache_layout=lambda: KVCacheLayout.BLHNC,
    )
    ranks = sizes | {"world_size": 1, "distributed_executor_backend": "uni"} | parallel
    return SimpleNamespace(
        model_config=model,
        cache_config=cache,
        attention_config=SimpleNamespace(hisparse_config=None),
        parallel_config=SimpleNamespace(**ranks),
        scheduler_config=plain_config().scheduler_config,
        speculative_config=draft,
        load_config=SimpleNamespace(load_format="dummy"),
    )


def speculative(method: str = "mtp", *, tokens: int = 3, latent: bool = False, **more: Any) -> Any:
    model = SimpleNamespace(
        model="draft",
        revision=None,
        seed=0,
        dtype=torch.bfloat16,
        quantization=None,
        get_total_num_kv_heads=lambda: HEADS,
        use_mla=latent,
    )
    return SimpleNamespace(
        method=method,
        num_speculative_tokens=tokens,
        draft_model_config=model,
        use_eagle=lambda: method in ("mtp", "eagle"),
        use_eagle_block_drop=lambda: method in ("mtp", "eagle"),
        **({"draft_tensor_parallel_size": None} | more),
    )


def both(specs: dict[str, KVCacheSpec], draft: Any = None, **parallel: int) -> Geometry:
    """What the scheduler reads; the worker must read the same."""
    config = vllm_config(draft, **parallel)
    groups = planning.get_kv_cache_groups(config, specs)
    worker: KVCacheConfig = planning.get_kv_cache_config_from_groups(config, groups, 1 << 30)
    scheduler = kv_cache_utils.generate_scheduler_kv_cache_config([worker])
    read = [read_geometry(config, one, Config(chunk_tokens=16)) for one in (scheduler, worker)]
    assert read[0] == read[1]
    return read[0]


def sparse(layers: int = LAYERS) -> dict[str, KVCacheSpec]:
    """DeepSeek V3.2: latents, and the keys of an indexer in fp8."""
    attention = MLAAttentionSpec(block_size=64, head_size=576, **LATENT)
    indexer = MLAAttentionSpec(block_size=64, head_size=132, num_kv_heads=1, dtype=torch.uint8)
    specs: dict[str, KVCacheSpec] = {}
    for layer in range(layers):
        specs |= dict.fromkeys(names(first=layer, count=1), attention)
        specs |= dict.fromkeys(names("self_attn.indexer.k_cache", first=layer, count=1), indexer)
    return specs


def test_latents_and_indexer_are_two_groups_with_one_block_table() -> None:
    read = both(sparse())
    assert read.tables == (0, 0)
    assert [(g.kind, g.heads, g.page, g.block_size) for g in read.groups] == [
        ("mla", 1, 64 * 576 * 2, 64),
        ("mla", 1, 64 * 132, 64),
    ]
    assert read.groups[0].layers == tuple(names())
    assert (read.windowed, read.several_tables, read.block_tokens) == (False, False, 64)


def drafted(target: KVCacheSpec = FULL, own: KVCacheSpec = FULL) -> dict[str, KVCacheSpec]:
    return dict.fromkeys(names(), target) | dict.fromkeys(names(first=LAYERS, count=1), own)


def test_a_draft_is_the_last_group_and_not_in_the_identity() -> None:
    plain = both(dict.fromkeys(names(), FULL))
    read = both(drafted(), speculative())
    assert read.stored_groups == plain.stored_groups
    assert read.groups[:1] == plain.groups
    assert read.groups[1].layers == ("model.layers.4.self_attn.attn",)
    assert read.tables == (0, 0)
    assert (read.number(0), read.position(0)) == (0, 0)
    assert (read.draft_lag_tokens, read.several_tables) == (16, False)
    assert read.fields(0) == plain.fields(0)
    assert read.position(read.number(1)) == 1
    assert read.number(1) >= 1 << 16


def test_the_draft_of_a_sparse_model_has_both_caches() -> None:
    read = both(sparse(LAYERS + 1), speculative(latent=True))
    assert read.target_count == 2
    assert read.groups[:2] == both(sparse()).groups
    assert [group.layers[0] for group in read.groups[2:]] == [
        "model.layers.4.self_attn.attn",
        "model.layers.4.self_attn.indexer.k_cache",
    ]
    assert [read.number(g) - read.number(2) for g in (2, 3)] == [0, 1]


def test_the_number_of_a_draft_names_its_method_and_tokens() -> None:
    others = {"method": "eagle"}, {"tokens": 2}, {"method": "draft_model"}
    read = [both(drafted(), speculative(**more)) for more in ({}, *others)]
    assert len({one.number(1) for one in read}) == 4
    assert read[0].number(1) == both(drafted(), speculative()).number(1)
    assert read[-1].draft_lag_tokens == 0, "a draft model needs no further token"


@pytest.mark.parametrize("method", ["ngram", "suffix", "medusa"])
def test_methods_without_kv_change_nothing(method: str) -> None:
    plain = dict.fromkeys(names(), FULL)
    assert both(cast("Any", plain), speculative(method)) == both(cast("Any", plain))


WINDOW = SlidingWindowSpec(num_kv_heads=HEADS, sliding_window=64, **HEADED)
TWO = replace(WINDOW, num_kv_heads=2)
DCP = {"tensor_parallel_size": 4, "decode_context_parallel_size": 2}
PCP = "prefill_context_parallel_size"
FEWER = FullAttentionSpec(num_kv_heads=2, **HEADED)
MIXED = dict.fromkeys(names(count=2), FULL) | dict.fromkeys(names(first=2, count=2), FEWER)


@pytest.mark.parametrize(
    ("specs", "draft", "parallel", "what"),
    [
        (drafted(), speculative("extract_hidden_states"), {}, "extract_hidden_states"),
        (drafted(), speculative(), {"pipeline_parallel_size": 2}, "pipeline_parallel_size to 1"),
        (drafted(), speculative(draft_tensor_parallel_size=2), {}, "draft_tensor_parallel_size"),
        (drafted(), speculative(tokens=16), {}, "set fewer"),
        (dict.fromkeys(names(), FULL), speculative(), {}, "ObjKVTier"),
        (drafted(FULL, WINDOW), speculative(), {}, "full attention"),
        (sparse(), None, {"pipeline_parallel_size": 2}, "ObjKVTier"),
        (dict.fromkeys(names(), TWO), None, DCP, "decode_context_parallel_size=2"),
        (sparse(), None, DCP, "decode_context_parallel_size=2"),
        (dict.fromkeys(names(), FULL), None, {PCP: 2}, f"{PCP}=2"),
        (MIXED, None, {}, "other heads"),
    ],
)
def test_what_is_refused_says_what_to_do(
    specs: dict[str, KVCacheSpec], draft: Any, parallel: dict[str, int], what: str
) -> None:
    with pytest.raises(ConfigError, match=what):
        both(specs, draft, **parallel)


@pytest.mark.parametrize("page", [None, 8])
def test_a_page_is_named_in_the_identity(page: int | None) -> None:
    group = GroupIdentity("mla", None, ("a",), heads=1, content=8, block_size=4, page=page)
    identity = Identity("m", "w", 0, "t", None, "auto", (group,), "canonical", 4)
    [told] = identity.document()["groups"]
    assert told.get("page", "none") == (page or "none")
