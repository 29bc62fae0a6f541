"""vLLM's configuration for an engine that sees, as far as the encoder cache reads it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.engine.core import EngineCore


def core() -> Any:
    """An EngineCore without a model, which every connector of this process hears."""
    made: Any = object.__new__(EngineCore)
    made.model_executor = SimpleNamespace(
        collective_rpc=lambda *_: ["done"],
        add_lora=lambda *_: True,
        remove_lora=lambda *_: True,
        reset_encoder_cache=lambda: None,
    )
    made.scheduler = SimpleNamespace(
        has_unfinished_requests=lambda: False, reset_encoder_cache=lambda: None
    )
    return made


def make_model(folder: Path) -> Path:
    """The files of a model with its processor."""
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "preprocessor_config.json").write_text('{"size": 64}')
    return folder


def engine(folder: Path, role: str = "ec_both", **more: Any) -> Any:
    """vLLM's configuration; ``more``: of the model's or its media's, by name."""
    multimodal = SimpleNamespace(
        mm_processor_kwargs=more.pop("mm_processor_kwargs", None),
        media_io_kwargs=more.pop("media_io_kwargs", {}),
        mm_encoder_attn_dtype=more.pop("mm_encoder_attn_dtype", None),
        video_pruning_rate=more.pop("video_pruning_rate", None),
        mm_processor_cache_gb=4,
    )
    model: dict[str, Any] = {
        "model": str(folder),
        "revision": None,
        "dtype": torch.bfloat16,
        "quantization": None,
        "seed": 0,
        "max_model_len": 512,
        "hf_overrides": {},
        "hf_config_path": None,
        "hf_config": SimpleNamespace(vision_config=SimpleNamespace()),
        "hf_text_config": SimpleNamespace(rope_parameters=more.pop("rope", None)),
        "quantization_config": None,
        "multimodal_config": multimodal,
        "is_encoder_decoder": False,
        "get_inputs_embeds_size": lambda: 256,
    }
    lora = more.pop("lora", None)
    transfer = SimpleNamespace(
        engine_id="engine",
        ec_connector_extra_config=more.pop("settings", {}),
        is_ec_producer=role != "ec_consumer",
        is_ec_consumer=role != "ec_producer",
        mm_encoder_output_widths=more.pop("widths", {"image": 256}),
    )
    return SimpleNamespace(
        model_config=SimpleNamespace(**(model | more)),
        load_config=SimpleNamespace(load_format="auto"),
        cache_config=SimpleNamespace(
            cache_dtype="auto", enable_prefix_caching=True, kv_cache_dtype_skip_layers=()
        ),
        lora_config=lora,
        kv_transfer_config=None,
        ec_transfer_config=transfer,
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            world_size=1,
            distributed_executor_backend="uni",
        ),
        max_concurrent_batches=1,
        shutdown_timeout=15,
    )
