"""vLLM's configuration as an identity, and which engines are refused."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

from objkv.config import Config, LoadMode
from objkv.connector.encoder.identity import read_form
from objkv.connector.model.groups import Geometry
from objkv.connector.model.identity import (
    further_settings,
    kv_dtype_name,
    names_media,
    read_geometry,
    read_quantised,
    refuse_external_launcher,
    safe_load_mode,
)
from objkv.connector.model.weights import read_weights
from objkv.errors import ConfigError
from objkv.transfer.paging import Quantised
from tests.connector.encoder.engine import engine, make_model
from tests.support.sides import ONE_LAYER

ROPE = {"rope_type": "longrope", "original_max_position_embeddings": 4096}


def settings(
    max_model_len: int = 2048,
    rope: dict[str, Any] | None = None,
    *,
    skip_layers: tuple[str, ...] = (),
    lora_config: Any = None,
    **more: Any,
) -> dict[str, str]:
    more = {"multimodal_config": None} | more
    vllm_config = engine(
        Path(), max_model_len=max_model_len, rope=rope or {}, lora=lora_config, **more
    )
    vllm_config.cache_config.kv_cache_dtype_skip_layers = list(skip_layers)
    return dict(further_settings(vllm_config))


def config_elsewhere(theta: int, version: str = "5.0") -> dict[str, Any]:
    values = {"rope_theta": theta, "_name_or_path": f"/mnt/{theta}{version}"}
    config = SimpleNamespace(to_dict=lambda: values | {"transformers_version": version})
    return {"hf_config_path": f"/mnt/{theta}{version}", "hf_config": config}


def test_replicas_of_a_longrope_model_share_only_on_one_side_of_its_original_length() -> None:
    """vLLM takes the long factors for all positions where the engine's length exceeds it."""
    assert settings(4096, ROPE) == settings(2048, ROPE)
    assert settings(4097, ROPE) == settings(131_072, ROPE)
    assert settings(4096, ROPE) != settings(4097, ROPE)
    for rope in ({}, {"rope_type": "default"}, {"rope_type": "yarn"}):
        assert settings(2048, rope) == settings(131_072, rope) == {"dtype": "bfloat16"}


@pytest.mark.parametrize("by_function", [False, True])
def test_a_configuration_from_elsewhere_counts_by_what_it_says(*, by_function: bool) -> None:
    """From another place than the weights, or made by a function."""
    more: dict[str, Any] = {"hf_config_path": None, "hf_overrides": len} if by_function else {}
    theirs = settings(**(config_elsewhere(10_000) | more))
    assert theirs == settings(**(config_elsewhere(10_000, version="5.1") | more))
    assert theirs != settings(**(config_elsewhere(500_000) | more))
    assert theirs != settings()


def test_settings_that_change_what_layers_compute_or_keep_are_told() -> None:
    plain = settings()
    assert settings(quantization_config={"ignore": ["lm_head"]}) != plain
    assert settings(skip_layers=("0", "1")) != plain
    assert settings(skip_layers=("1", "0")) == settings(skip_layers=("0", "1"))
    form = {"mm_processor_kwargs": None, "video_pruning_method": "evs"}
    rates = {"video_pruning_rate": None}, {"video_pruning_rate": 0.5}
    media = (form | one for one in (*rates, rates[1] | {"video_pruning_method": "other"}))
    pruned = [settings(multimodal_config=SimpleNamespace(**one)) for one in media]
    assert pruned[0] == plain
    assert len({str(one) for one in pruned}) == 3


def lora(**more: Any) -> SimpleNamespace:
    plain = {"lora_dtype": "auto", "target_modules": None, "enable_tower_connector_lora": False}
    return SimpleNamespace(**(plain | {"max_lora_rank": 16, "max_loras": 1} | more))


@pytest.mark.parametrize(
    ("adapters", "alike"),
    [
        (lora(), True),
        (lora(lora_dtype="bfloat16"), True),
        (lora(max_lora_rank=64), True),
        (lora(lora_dtype="float32"), False),
        (lora(target_modules=["q_proj"]), False),
        (lora(enable_tower_connector_lora=True), False),
    ],
)
def test_replicas_with_adapters_share_the_base_model_unless_layers_keep_other_kv(
    adapters: SimpleNamespace, alike: bool
) -> None:
    assert (settings(lora_config=adapters) == settings()) is alike


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def name_of(folder: Path | None, *, load_format: str = "auto", **more: Any) -> str:
    name, revision = str(folder or "org/model"), more.pop("revision", None)
    model = SimpleNamespace(model=name, seed=3, revision=revision)
    load = SimpleNamespace(load_format=load_format)
    vllm_config = SimpleNamespace(model_config=model, load_config=load)
    return read_weights(cast("Any", vllm_config), Config(**more))


def test_weights_are_named_by_their_bytes_their_revision_or_their_seed(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(b"w" * 100)
    assert name_of(tmp_path).startswith("sampled:")
    assert name_of(tmp_path, weights_digest="full").startswith("full:")
    assert name_of(None, revision="abc") == "revision:abc"
    assert name_of(None, load_format="dummy") == "dummy:seed=3"
    with pytest.raises(ConfigError, match="--revision"):
        name_of(None)


class Mine(ExecutorWithExternalLauncher):
    """Somebody's own."""


def ranks(backend: Any, world_size: int) -> Any:
    return SimpleNamespace(
        world_size=world_size, tensor_parallel_size=1, distributed_executor_backend=backend
    )


@pytest.mark.parametrize(
    ("backend", "world_size", "refused"),
    [
        *((backend, 2, True) for backend in ("external_launcher", Mine, f"{__name__}.Mine")),
        *((backend, 1, False) for backend in ("external_launcher", Mine, "uni", None)),
        *((backend, 2, False) for backend in ("mp", "ray")),
    ],
)
def test_nothing_is_shared_by_ranks_that_schedule_for_themselves(
    backend: Any, world_size: int, refused: bool, tmp_path: Path
) -> None:
    vllm_config = engine(make_model(tmp_path))
    vllm_config.parallel_config = ranks(backend, world_size)
    if not refused:
        refuse_external_launcher(vllm_config)
        return
    for read in (
        lambda: read_geometry(vllm_config, cast("Any", None), Config()),
        lambda: read_form(vllm_config, item_bytes_max=1 << 20),
    ):
        with pytest.raises(ConfigError, match="--distributed-executor-backend mp"):
            read()


def mode(wish: LoadMode, *, batches: int, groups: int = 1, stages: int = 1) -> str:
    parallel = SimpleNamespace(pipeline_parallel_size=stages)
    engine = cast("Any", SimpleNamespace(max_concurrent_batches=batches, parallel_config=parallel))
    geometry = Geometry((ONE_LAYER,) * groups, 32, 32, tp_size=1)
    return safe_load_mode(engine, geometry, Config(load_mode=wish)).load_mode


@pytest.mark.parametrize(
    ("wish", "more", "used", "is_advised"),
    [
        ("layerwise", {"batches": 2}, "async", True),
        ("auto", {"batches": 2}, "async", True),
        ("layerwise", {"batches": 2, "stages": 2}, "async", False),
        ("layerwise", {"batches": 1, "groups": 2}, "async", None),
        ("layerwise", {"batches": 1}, "layerwise", False),
        ("async", {"batches": 2}, "async", False),
    ],
)
def test_loads_are_within_a_step_only_if_vllm_can_be_told_of_failures_in_time(
    wish: LoadMode,
    more: dict[str, int],
    used: str,
    is_advised: bool | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """vLLM believes the token of a step that was scheduled before the failure was known, and
    cannot be told which blocks of which group failed."""
    assert mode(wish, **more) == used
    assert is_advised in (None, "--no-async-scheduling" in caplog.text)


CACHE, ATTENTION = "--mm-processor-cache-gb", "--mm-encoder-attn-dtype"


@pytest.mark.parametrize(
    ("prefix_caching", "multimodal", "advice"),
    [
        # vLLM numbers images where both of its caches are off.
        (True, {"mm_processor_cache_gb": 0}, ""),
        (False, {"mm_processor_cache_gb": 4}, ""),
        (False, {"mm_processor_cache_gb": 0}, CACHE),
        (False, None, ""),
        # What fp8 encoders make of an image may depend on earlier ones.
        (True, {"mm_encoder_attn_dtype": None}, ""),
        (True, {"mm_encoder_attn_dtype": "fp8"}, ATTENTION),
    ],
)
def test_images_are_named_unless_they_are_numbered_or_depend_on_earlier_ones(
    prefix_caching: bool,
    multimodal: dict[str, Any] | None,
    advice: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    media = None if multimodal is None else SimpleNamespace(**multimodal)
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=media),
        cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
    )
    assert names_media(config) is (not advice)
    assert [one for one in (CACHE, ATTENTION) if one in caplog.text] == [advice][: bool(advice)]


# What a worker reads of quantised layers, and what is refused: one scale for K and one for V.


PAGES = (4, 1, 32, 8)
BYTES = torch.zeros(PAGES, dtype=torch.uint8)


def layer(k: float = 0.5, v: float = 2.0, name: str = "fp8", **more: Any) -> Any:
    """What is read of vLLM's attention layer."""
    plain = {"_k_scale_float": k, "_v_scale_float": v, "kv_cache_dtype": name}
    plain |= {"_k_scale": torch.tensor(k), "_v_scale": torch.tensor(v)}
    return SimpleNamespace(**(plain | more))


def read(one: Any, cache: torch.Tensor = BYTES) -> dict[str, Quantised]:
    layers = SimpleNamespace(static_forward_context={"l0": one})
    engine: Any = SimpleNamespace(compilation_config=layers)
    return read_quantised(engine, {"l0": cache})


@pytest.mark.parametrize(
    ("one", "dtype", "read_as"),
    [
        (layer(name="fp8"), torch.uint8, "F8_E4M3"),
        (layer(name="fp8_e4m3"), torch.uint8, "F8_E4M3"),
        (layer(name="fp8_e5m2"), torch.uint8, "F8_E5M2"),
        (layer(name="int8_per_token_head"), torch.uint8, None),
        (layer(name="nvfp4"), torch.uint8, None),
        (layer(name="fp8"), torch.float8_e5m2, None),  # the tensor says it itself
        # Wide elements and states are not quantised.
        (layer(), torch.bfloat16, ""),
        (SimpleNamespace(), torch.int8, ""),
        (None, torch.uint8, ""),
    ],
)
def test_plain_bytes_get_their_format_from_the_layer(
    one: Any, dtype: torch.dtype, read_as: str | None
) -> None:
    expected = {} if read_as == "" else {"l0": Quantised(read_as, "0.5 2.0")}
    assert read(one, torch.zeros(PAGES, dtype=dtype)) == expected


@pytest.mark.parametrize(
    ("one", "told"),
    [
        (layer(_k_scale=torch.ones(2)), "--kv-cache-dtype auto"),
        *((layer(scale), "not a finite positive scale") for scale in (0.0, -1.0, float("nan"))),
    ],
)
def test_what_is_no_scale_or_one_for_each_head_is_refused(one: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read(one)


@pytest.mark.parametrize("fnuz", [False, True])
def test_the_other_kind_of_fp8_has_another_name(
    fnuz: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half the value for the same bits, and 0x80 is no number but NaN."""
    monkeypatch.setattr(type(current_platform), "is_fp8_fnuz", classmethod(lambda cls: fnuz))
    suffix = "_fnuz" if fnuz else ""
    assert kv_dtype_name("fp8") == f"fp8{suffix}"
    assert kv_dtype_name("bfloat16") == "bfloat16"
    [found] = read(layer()).values()
    assert found.dtype == f"F8_E4M3{suffix[1:].upper()}"
