"""Settings of vLLM that change KV and that neither weights nor groups show."""

from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from objkv.connector.model.identity import further_settings
from objkv.errors import ConfigError

ROPE = {"rope_type": "longrope", "original_max_position_embeddings": 4096}


def settings(
    max_model_len: int = 2048,
    rope: dict[str, Any] | None = None,
    *,
    skip_layers: tuple[str, ...] = (),
    lora_config: Any = None,
    **more: Any,
) -> dict[str, str]:
    plain = {"dtype": "torch.bfloat16", "hf_overrides": {}, "multimodal_config": None}
    plain |= {"max_model_len": max_model_len, "hf_config_path": None, "quantization_config": None}
    text = SimpleNamespace(rope_parameters=rope or {})
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(**(plain | {"hf_text_config": text} | more)),
        cache_config=SimpleNamespace(kv_cache_dtype_skip_layers=list(skip_layers)),
        lora_config=lora_config,
    )
    return dict(further_settings(cast("Any", vllm_config)))


def config_elsewhere(theta: int, version: str = "5.0") -> dict[str, Any]:
    values = {"rope_theta": theta, "_name_or_path": f"/mnt/{theta}{version}"}
    config = SimpleNamespace(to_dict=lambda: values | {"transformers_version": version})
    return {"hf_config_path": f"/mnt/{theta}{version}", "hf_config": config}


def videos(method: str, rate: float | None) -> SimpleNamespace:
    return SimpleNamespace(
        mm_processor_kwargs=None, video_pruning_method=method, video_pruning_rate=rate
    )


def test_replicas_of_a_longrope_model_share_only_on_one_side_of_its_original_length() -> None:
    """vLLM takes the long factors for all positions where the engine's length exceeds it."""
    assert settings(4096, ROPE) == settings(2048, ROPE)
    assert settings(4097, ROPE) == settings(131_072, ROPE)
    assert settings(4096, ROPE) != settings(4097, ROPE)


@pytest.mark.parametrize("rope", [{}, {"rope_type": "default"}, {"rope_type": "yarn"}])
def test_the_engines_length_does_not_matter_to_other_models(rope: dict[str, Any]) -> None:
    assert settings(2048, rope) == settings(131_072, rope) == {"dtype": "bfloat16"}


def test_a_configuration_from_another_place_than_the_weights_counts_by_what_it_says() -> None:
    theirs = settings(**config_elsewhere(10_000))
    assert theirs == settings(**config_elsewhere(10_000, version="5.1"))
    assert theirs != settings(**config_elsewhere(500_000))
    assert theirs != settings()


def test_settings_that_change_what_layers_compute_or_keep_are_told() -> None:
    plain = settings()
    assert settings(quantization_config={"ignore": ["lm_head"]}) != plain
    assert settings(skip_layers=("0", "1")) != plain
    assert settings(skip_layers=("1", "0")) == settings(skip_layers=("0", "1"))


def test_replicas_that_prune_videos_differently_do_not_share() -> None:
    unpruned = settings(multimodal_config=videos("evs", None))
    assert unpruned == settings()
    pruned = [settings(multimodal_config=videos(method, 0.5)) for method in ("evs", "other")]
    assert pruned[0] != pruned[1]
    assert unpruned not in pruned


def fp8(scales: Path | None) -> SimpleNamespace:
    return SimpleNamespace(
        mm_processor_kwargs=None,
        mm_encoder_attn_dtype="fp8",
        mm_encoder_fp8_scale_path=None if scales is None else str(scales),
    )


def test_replicas_that_look_at_images_in_fp8_share_where_their_scales_are_the_same(
    tmp_path: Path,
) -> None:
    """By what the file says, not by where it is."""
    found = [settings(), settings(multimodal_config=fp8(None))]
    for name, content in (("a", "{}"), ("b", "{}"), ("a", '{"layers": {}}')):
        (tmp_path / name).write_text(content)
        found.append(settings(multimodal_config=fp8(tmp_path / name)))
    assert found[2] == found[3]
    assert all(a != b for a, b in combinations(found, 2) if a is not found[2])
    with pytest.raises(ConfigError, match="scales"):
        settings(multimodal_config=fp8(tmp_path / "gone"))


def lora(**more: Any) -> SimpleNamespace:
    plain = {"lora_dtype": "auto", "target_modules": None, "enable_tower_connector_lora": False}
    return SimpleNamespace(**(plain | {"max_lora_rank": 16, "max_loras": 1} | more))


def test_overrides_by_a_function_count_by_what_they_made_of_the_configuration() -> None:
    def made(theta: int) -> dict[str, str]:
        return settings(**(config_elsewhere(theta) | {"hf_config_path": None, "hf_overrides": len}))

    assert made(10_000) == made(10_000)
    assert made(10_000) != made(500_000)
    assert made(10_000) != settings()


@pytest.mark.parametrize("same", [lora(), lora(lora_dtype="bfloat16"), lora(max_lora_rank=64)])
def test_replicas_with_adapters_share_the_base_model_with_those_without(
    same: SimpleNamespace,
) -> None:
    assert settings(lora_config=same) == settings()


@pytest.mark.parametrize(
    "other",
    [
        lora(lora_dtype="float32"),
        lora(target_modules=["q_proj"]),
        lora(enable_tower_connector_lora=True),
    ],
)
def test_settings_that_change_what_adapters_compute_are_told(other: SimpleNamespace) -> None:
    assert settings(lora_config=other) != settings()
