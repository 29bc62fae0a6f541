"""Reads the identity and the form of encoder outputs from vLLM's configuration, equal on all
replicas that encode alike. Read against vLLM 0.32-0.33."""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from objkv.config import Config
from objkv.connector.encoder.items import OutputForm
from objkv.connector.model.identity import (
    further_settings,
    has_fp8_encoder,
    names_media,
    refuse_external_launcher,
)
from objkv.connector.model.weights import local_folder, read_weights
from objkv.errors import ConfigError
from objkv.keys.encoder import EncoderIdentity
from objkv.keys.identity import name_model, sealed_extra
from objkv.transfer.paging import DTYPE_NAMES

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_OF_THE_KV_CACHE = ("kv_cache_dtype_skip_layers", "longrope")
_PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "*.py",  # a processor that comes with its model
)
_OF_THE_PLACE = ("device", "backend")
"""Settings for the place where media are processed. vLLM sets them on instances that only encode.
Source: vLLM 0.32, ``_resolve_mm_processor_device`` in ``config/vllm.py``."""


def read_encoder_identity(vllm_config: "VllmConfig", config: Config) -> EncoderIdentity:
    """Return the identity of this replica's encoder outputs. Reads the model's files, which may
    take seconds. Raises ``ConfigError`` for models whose outputs cannot be shared."""
    model = vllm_config.model_config
    if model.multimodal_config is None:
        raise ConfigError(
            f"{model.model!r} has no image, sound or video input: run it without ec_transfer_config"
        )
    if model.is_encoder_decoder:
        raise ConfigError(
            "objkv does not support the encoder cache of encoder-decoder models, because vLLM does "
            f"not use it: run {model.model!r} without ec_transfer_config"
        )
    return EncoderIdentity(
        model=name_model(model.model, config.model_id),
        weights=read_weights(vllm_config, config),
        processor=_processor(local_folder(model.model, model.revision), model.revision),
        quantization=model.quantization,
        dtype=str(model.dtype).removeprefix("torch."),
        weights_epoch=config.weights_epoch,
        tenant=config.tenant,
        extra=sealed_extra(_extra(vllm_config), config.seal_kinds),
    )


def read_form(vllm_config: "VllmConfig", *, item_bytes_max: int) -> OutputForm:
    """Return the form of outputs. Raises ``ConfigError`` if outputs or ranks may disagree on it."""
    refuse_external_launcher(vllm_config)
    model, lora = vllm_config.model_config, vllm_config.lora_config
    if has_fp8_encoder(model.multimodal_config):
        raise ConfigError(
            "objkv cannot share the outputs of an fp8 encoder, whose scales may depend on earlier "
            "images: unset --mm-encoder-attn-dtype, or run it without ec_transfer_config"
        )
    dtype = DTYPE_NAMES.get(model.dtype)
    if dtype is None:
        raise ConfigError(f"objkv cannot store encoder outputs of {model.dtype}: use bfloat16")
    return OutputForm(
        dtype=dtype,
        width=lambda modality: _width(vllm_config, modality),
        item_bytes_max=item_bytes_max,
        media_named=names_media(vllm_config),
        tower_lora=getattr(lora, "enable_tower_connector_lora", False),
    )


def _width(vllm_config: "VllmConfig", modality: str) -> int | None:
    """Return the row width of a modality's outputs: measured by vLLM if this replica encodes, else
    that of token embeddings, times the vision layers passed on (DeepStack)."""
    transfer, model = vllm_config.ec_transfer_config, vllm_config.model_config
    assert transfer is not None
    if transfer.is_ec_producer:
        measured: int | None = transfer.mm_encoder_output_widths.get(modality)
        return measured
    vision = getattr(model.hf_config, "vision_config", None)
    deep = getattr(vision, "deepstack_visual_indexes", None) or ()
    return int(model.get_inputs_embeds_size()) * (1 + len(deep))


def _processor(folder: Path | None, revision: str | None) -> str:
    if folder is None:
        return f"revision:{revision}"
    digest = hashlib.sha256(b"objkv-processor-1")
    for path in sorted({path for name in _PROCESSOR_FILES for path in folder.glob(name)}):
        for value in (path.name.encode(), path.read_bytes()):
            digest.update(len(value).to_bytes(8, "little") + value)
    return f"sha256:{digest.hexdigest()[:40]}"


def _extra(vllm_config: "VllmConfig") -> tuple[tuple[str, str], ...]:
    extra = dict(further_settings(vllm_config))
    for name in (*_OF_THE_KV_CACHE, "mm_processor_kwargs", "dtype"):
        extra.pop(name, None)
    multimodal = vllm_config.model_config.multimodal_config
    media = {kind: _elsewhere(io) for kind, io in multimodal.media_io_kwargs.items()}
    settings = {
        "mm_processor_kwargs": _elsewhere(multimodal.mm_processor_kwargs or {}),
        # A name given by a client does not depend on how the image was read.
        "media_io_kwargs": {kind: kept for kind, kept in media.items() if kept},
    }
    for name, value in settings.items():
        if value:
            extra[name] = json.dumps(value, sort_keys=True, default=str)
    return tuple(sorted(extra.items()))


def _elsewhere(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in _OF_THE_PLACE}
