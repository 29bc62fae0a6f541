"""Which replicas' encoder outputs are the same, as vLLM's configuration says it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from objkv.config import Config
from objkv.connector.encoder.identity import read_encoder_identity, read_form
from objkv.errors import ConfigError
from tests.connector.encoder.engine import engine, make_model

DEEP = SimpleNamespace(vision_config=SimpleNamespace(deepstack_visual_indexes=[5, 11, 17]))
CONFIG = Config(bulk_url="file:///dev/null/kv", index_url="sqlite:///dev/null/i")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_model(tmp_path)


def namespace(folder: Path, config: Config = CONFIG, **more: Any) -> str:
    return read_encoder_identity(engine(folder, **more), config).namespace()


@pytest.mark.parametrize("device", ["cuda", "xpu", "npu"])
def test_instances_that_only_encode_share_with_those_that_do_not(folder: Path, device: str) -> None:
    """vLLM has them process and decode on the accelerator, which it writes into their settings."""
    plain = namespace(folder, mm_processor_kwargs={"max_pixels": 9}, role="ec_consumer")
    there = namespace(
        folder,
        role="ec_producer",
        mm_processor_kwargs={"max_pixels": 9, "device": device},
        media_io_kwargs={"video": {"backend": "torchcodec", "device": device}},
    )
    assert there == plain


def test_what_only_the_kv_cache_depends_on_does_not_matter(folder: Path) -> None:
    long = {"rope_type": "longrope", "original_max_position_embeddings": 100}
    assert namespace(folder, rope=long) == namespace(folder)


@pytest.mark.parametrize(
    "more",
    [
        {"dtype": torch.float16},
        {"quantization": "fp8"},
        {"hf_overrides": {"x": 1}},
        {"mm_processor_kwargs": {"max_pixels": 9}},
        {"media_io_kwargs": {"video": {"num_frames": 9}}},
        {"video_pruning_rate": 0.5},
        {"config": CONFIG.model_copy(update={"tenant": "other"})},
        {"config": CONFIG.model_copy(update={"weights_epoch": 1})},
        {"config": CONFIG.model_copy(update={"model_id": "x"})},
    ],
    ids=lambda more: next(iter(more)),
)
def test_whatever_changes_outputs_changes_the_namespace(folder: Path, more: dict[str, Any]) -> None:
    assert namespace(folder, **more) != namespace(folder)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("preprocessor_config.json", b'{"size": 65}'),
        ("processor_config.json", b"{}"),
        ("video_preprocessor_config.json", b"{}"),
        ("processing_mine.py", b""),
        ("model.safetensors", b"weightz"),
        ("config.json", b'{"x": 1}'),
    ],
)
def test_the_files_of_model_and_processor_matter(folder: Path, name: str, content: bytes) -> None:
    before = namespace(folder)
    (folder / name).write_bytes(content)
    assert namespace(folder) != before


@pytest.mark.parametrize(
    ("more", "told"),
    [({"multimodal_config": None}, "has no image"), ({"is_encoder_decoder": True}, "decoder")],
)
def test_what_cannot_be_shared_is_refused_at_start(
    folder: Path, more: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        namespace(folder, **more)


def form_of(folder: Path, **more: Any) -> Any:
    return read_form(engine(folder, **more), item_bytes_max=1 << 20)


@pytest.mark.parametrize(
    ("modality", "more", "width"),
    [
        ("image", {"widths": {"image": 1024}}, 1024),
        ("video", {"widths": {"image": 1024}}, None),
        ("image", {"role": "ec_consumer", "widths": {}}, 256),
        ("image", {"role": "ec_consumer", "widths": {}, "hf_config": DEEP}, 4 * 256),
    ],
)
def test_who_encodes_counts_on_what_was_measured_and_others_on_the_configuration(
    folder: Path, modality: str, more: dict[str, Any], width: int | None
) -> None:
    assert form_of(folder, **more).width(modality) == width


def test_the_form_is_that_of_the_model_and_some_share_nothing(folder: Path) -> None:
    assert form_of(folder).dtype == "BF16"
    assert not form_of(folder).tower_lora
    lora = SimpleNamespace(enable_tower_connector_lora=True, lora_dtype="auto", target_modules=None)
    assert form_of(folder, lora=lora).tower_lora
    with pytest.raises(ConfigError, match="float64"):
        form_of(folder, dtype=torch.float64)
    with pytest.raises(ConfigError, match="--mm-encoder-attn-dtype"):  # scales follow images
        form_of(folder, mm_encoder_attn_dtype="fp8")
