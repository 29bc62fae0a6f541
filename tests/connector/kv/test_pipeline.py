"""Stages of a pipeline: which layers vLLM gives them, and that all ranks mean the same groups."""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from vllm.distributed.utils import get_pp_indices
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from objkv.connector.kv.metadata import StepPlan
from objkv.connector.kv.worker import Rank
from objkv.connector.model.groups import Geometry
from objkv.connector.model.subgroups import whole_groups
from objkv.errors import ConfigError
from objkv.keys.identity import GroupIdentity
from objkv.keys.prefix import token_digest
from objkv.ops.models.layers import CacheLayer
from objkv.ops.size.sizing import ModelShape
from objkv.transfer.plan import ChunkMove, LoadPlan, SaveMove, SavePlan
from tests.connector.kv.hybrid_layout import plain_config
from tests.support.paged_cache import CHUNK, HASHES, NAMESPACE, TOKENS, stores
from tests.support.plans import LoadMove, packed
from tests.support.sides import worker_side
from tests.support.waiting import wait_until

try:
    from vllm.v1.core import kv_cache_planning as planning  # since 0.33
except ImportError:
    from vllm.v1.core import kv_cache_utils as planning

FULL = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)
WINDOW = SlidingWindowSpec(
    block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16, sliding_window=64
)
SPECS = {"full_attention": FULL, "sliding_attention": WINDOW}
MIXES = {
    "one to one": ["sliding_attention", "full_attention"] * 12,
    "five to one": (["sliding_attention"] * 5 + ["full_attention"]) * 4 + ["sliding_attention"] * 2,
    "nearly as many": ["sliding_attention"] * 12 + ["full_attention"] * 13,
    "one kind": ["full_attention"] * 13,
}


@pytest.fixture(autouse=True)
def evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PP_LAYER_PARTITION", raising=False)


def engine(pp_size: int, kinds: Sequence[str], *, told: bool = True) -> Any:
    """vLLM's configuration, as far as it is asked."""
    text = SimpleNamespace(layer_types=list(kinds)) if told else SimpleNamespace()
    model = SimpleNamespace(hf_text_config=text, get_total_num_hidden_layers=lambda: len(kinds))
    return SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=pp_size), model_config=model
    )


def of_vllm(
    kinds: Sequence[str], pp_size: int, naming: str = "model.layers.{}.self_attn.attn"
) -> tuple[list[KVCacheGroupSpec], list[list[KVCacheGroupSpec]]]:
    """The groups of the whole model, and what each stage is told of them."""
    specs = {naming.format(layer): SPECS[kind] for layer, kind in enumerate(kinds)}
    whole = planning._get_kv_cache_groups_uniform_page_size(cast("Any", specs))
    names = list(specs)
    stages = [
        planning._project_kv_cache_groups_to_worker(
            whole,
            {name: specs[name] for name in names[slice(*get_pp_indices(len(kinds), r, pp_size))]},
        )
        for r in range(pp_size)
    ]
    return whole, stages


@pytest.mark.parametrize("pp_size", range(2, 9))
@pytest.mark.parametrize("mix", MIXES)
def test_every_stage_means_the_groups_of_the_whole_model(mix: str, pp_size: int) -> None:
    kinds = MIXES[mix]
    whole, stages = of_vllm(kinds, pp_size)
    for told in stages:
        found, counts = whole_groups(engine(pp_size, kinds), told)
        assert [group.layer_names for group in found] == [group.layer_names for group in whole]
        for g in range(len(whole)):
            assert counts[g] == tuple(len(stage[g].layer_names) for stage in stages)


@pytest.mark.parametrize("mix", MIXES)
def test_objkv_size_groups_layers_as_vllm_does(mix: str) -> None:
    shapes = {"full_attention": CacheLayer("full", 2, 16)}
    shapes["sliding_attention"] = CacheLayer("sliding_window", 2, 16, 64)
    model = ModelShape("x", tuple(shapes[kind] for kind in MIXES[mix]), "bfloat16", "a test")
    theirs = of_vllm(MIXES[mix], 1)[0]
    assert sorted(tuple(one.layer_names) for one in theirs) == sorted(
        one.layers for one in model.groups(16)
    )


def test_stages_are_as_long_as_the_operator_says_and_have_some_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "3,9,1")
    kinds = MIXES["one kind"]
    _, stages = of_vllm(kinds, 3)
    for told in stages:
        assert whole_groups(engine(3, kinds), told)[1] == ((3, 9, 1),)
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "13,0")
    with pytest.raises(ConfigError, match="so that each has some"):
        whole_groups(engine(2, kinds), of_vllm(kinds, 2)[1][0])


def test_several_groups_of_which_nothing_is_told_are_refused() -> None:
    kinds = MIXES["five to one"]
    _, stages = of_vllm(kinds, 2)
    for strange in (engine(2, kinds, told=False), engine(2, [])):
        strange.model_config.get_total_num_hidden_layers = lambda: len(kinds)
        with pytest.raises(ConfigError, match="its configuration has no layer_types"):
            whole_groups(strange, stages[0])


def test_a_stage_with_other_layers_than_expected_stops_the_engine() -> None:
    """Each stage checks its own, so what is wrong anywhere is found by the stage that has it."""
    kinds = MIXES["five to one"]
    _, stages = of_vllm(kinds, 2)
    for rank, layer in ((0, 3), (1, 20)):
        lied = list(kinds)
        lied[layer] = "full_attention"
        with pytest.raises(ConfigError, match="cannot derive the layers of other pipeline stages"):
            whole_groups(engine(2, lied), stages[rank])


STATE = MambaSpec(
    16,
    ((3, 64), (2, 8, 8)),
    (torch.bfloat16, torch.float32),
    page_size_padded=FULL.page_size_bytes * 4,
    mamba_cache_mode="align",
)
NAMES = {"M": "backbone.layers.{}.mixer", "*": "backbone.layers.{}.mixer.attn"}
QWEN = "MMM*" * 6
NEMOTRON = "M-M-M-MM-M-M*-M-M*-M-M-M*-M-MM-"
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "layer_types": (QWEN, {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6}),
    "layers_block_type": (
        "MMMMM*MMMM" * 4,
        {"layers_block_type": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4},
    ),
    "hybrid layers": ("MMMMMB" * 6, {"layers_block_type": (["mamba"] * 5 + ["hybrid"]) * 6}),
    "all layers have both": ("B" * 8, {"layers_block_type": ["parallel"] * 8}),
    "hybrid_override_pattern": (NEMOTRON, {"hybrid_override_pattern": NEMOTRON}),
    "attn_type_list": (QWEN, {"attn_type_list": [0, 0, 0, 1] * 6}),
    "attn_layer_indices": (QWEN, {"attn_layer_indices": list(range(3, 24, 4))}),
    "linear_attn_config": (
        QWEN,
        {"linear_attn_config": {"full_attn_layers": list(range(4, 25, 4))}},
    ),
    "full_attention_interval": (QWEN, {"full_attention_interval": 4}),
}


def of_vllm_with_states(kinds: str, pp_size: int) -> list[Any]:
    """What vLLM gives each stage. ``B``: a layer with both, its attention made first."""
    full = replace(FULL, block_size=16, page_size_padded=STATE.page_size_bytes)
    stages: list[dict[str, Any]] = []
    for rank in range(pp_size):
        stages.append({})
        for layer in range(*get_pp_indices(len(kinds), rank, pp_size)):
            for kind in "*M" if kinds[layer] == "B" else kinds[layer].strip("-E"):
                stages[-1][NAMES[kind].format(layer)] = STATE if kind == "M" else full
    config = copy(plain_config())
    config.cache_config = copy(config.cache_config)
    config.cache_config.kv_cache_layout = "LBHNC"
    more = ()
    if hasattr(planning, "get_global_kv_cache_groups"):  # since 0.33
        more = (planning.get_global_kv_cache_groups(config, stages),)
    found = planning.get_kv_cache_configs(config, stages, [1 << 30] * pp_size, *more)
    return [one.kv_cache_groups for one in found]


@pytest.mark.parametrize("pp_size", [2, 3, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_layers_with_states_are_found_however_a_configuration_names_them(
    name: str, pp_size: int
) -> None:
    kinds, text = CONFIGS[name]
    stages = of_vllm_with_states(kinds, pp_size)
    config = engine(pp_size, kinds)
    config.model_config.hf_text_config = SimpleNamespace(**text)
    lacking = [any(not group.layer_names for group in told) for told in stages]
    wholes = []
    for told, lacks in zip(stages, lacking, strict=True):
        if lacks and not _has_both(told):
            with pytest.raises(ConfigError, match="lacks layers of a kind"):
                whole_groups(config, told)
            continue
        found, counts = whole_groups(config, told)
        wholes.append([group.layer_names for group in found])
        assert list(zip(*counts, strict=True)) == [
            tuple(len(group.layer_names) for group in stage) for stage in stages
        ]
    every = [[n for s in stages for n in s[g].layer_names] for g in range(len(stages[0]))]
    assert wholes == [every] * len(wholes)
    assert wholes


def _has_both(told: list[KVCacheGroupSpec]) -> bool:
    held = {isinstance(group.kv_cache_spec, MambaSpec) for group in told if group.layer_names}
    return len(held) == 2


@pytest.mark.parametrize("naming", ["model.layers.{}.attn.{}", "model.attn"])
def test_layers_named_another_way_are_refused_in_a_pipeline(naming: str) -> None:
    names = [naming.format(layer, 0) for layer in range(2)]
    with pytest.raises(ConfigError, match="one pattern with one number"):
        whole_groups(engine(2, ["full_attention"] * 4), [KVCacheGroupSpec(names, FULL)])


def test_a_stage_without_anything_to_share_starts_and_reports_loads_as_ended() -> None:
    """Such as one of local attention alone, which starts anew at the end of every chunk. vLLM waits
    for all ranks."""
    groups = tuple(
        GroupIdentity(kind, window, (name,), heads=2, content=16, block_size=32)
        for kind, window, name in (("full", None, "m0"), ("chunked_local", CHUNK, "c0"))
    )
    geometry = Geometry(groups, CHUNK, 32, tp_size=1, stages=((1, 0), (0, 1)))
    cache = {"c0": torch.zeros((32, 2, 32, 16), dtype=torch.bfloat16)}
    rank = Rank(0, "w", batches_in_flight=2, pp_rank=1)
    worker = worker_side(*stores(), geometry=geometry, rank=rank, caches=cache)
    move = ChunkMove(0, 0, HASHES[0], bytes(20), 0, CHUNK, first_block=0, block_ids=(9, 10))
    save = SaveMove(move, token_digest(tuple(TOKENS[:CHUNK])), None)
    worker.end_forward(StepPlan(saves=(SavePlan("r", NAMESPACE, (save,)),)))
    load = LoadPlan("q", NAMESPACE, packed([LoadMove(move, None)]), sync=False)
    worker.start_loads(StepPlan(loads=(load,)))
    wait_until(lambda: bool(worker.results(StepPlan(), set()).finished_recving), "the load to end")
    assert worker.take_failed_blocks() == set()
    report = worker.take_report()
    assert report is None or not report.failed
