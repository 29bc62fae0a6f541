"""Scales of quantised KV caches and of fp8 encoders.

Unless an fp8 encoder takes its scales from a file, it uses the largest values of its last 16 calls,
so the output for an image depends on the earlier images of the same process. Source: vLLM 0.32,
``MMEncoderAttention`` in ``model_executor/layers/attention/mm_encoder_attention.py``.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms import current_platform

from objkv.codec.values import scales_text
from objkv.errors import ConfigError
from objkv.transfer.paging import Quantised

if TYPE_CHECKING:
    from vllm.config import VllmConfig


_E4M3 = ("fp8", "fp8_e4m3")


def read_quantised(
    vllm_config: "VllmConfig", kv_caches: Mapping[str, torch.Tensor]
) -> dict[str, Quantised]:
    """Return the element format and the scales of K and V of quantised KV caches, by layer.

    vLLM registers such caches as plain bytes. It keeps the scales in each layer, where only a
    worker can read them, once the weights are loaded: the checkpoint's scales, or 1.0. Source: vLLM
    0.31-0.33, ``process_weights_after_loading`` in
    ``model_executor/layers/quantization/kv_cache.py``.

    Raises ``ConfigError`` unless there is one scale for K and one for V.
    """
    layers = vllm_config.compilation_config.static_forward_context
    found = {}
    for name, cache in kv_caches.items():
        layer = layers.get(name)
        # States are skipped: their bytes belong to several tensors.
        if cache.element_size() == 1 and hasattr(layer, "_k_scale_float"):
            found[name] = Quantised(_dtype(layer, cache), _layer_scales(name, layer))
    return found


def kv_dtype_name(cache_dtype: str) -> str:
    """Return vLLM's name of a KV dtype, with a suffix for AMD's fp8.

    Under the same name, AMD MI300 and MI325 use another number format. Source: vLLM 0.32,
    ``is_fp8_fnuz``.
    """
    fnuz = cache_dtype.startswith("fp8") and current_platform.is_fp8_fnuz()
    return f"{cache_dtype}_fnuz" if fnuz else cache_dtype


def _dtype(layer: Any, cache: torch.Tensor) -> str | None:
    if cache.dtype != torch.uint8:
        return None
    suffix = "FNUZ" if current_platform.is_fp8_fnuz() else ""
    name = getattr(layer, "kv_cache_dtype", "")
    if name in _E4M3:
        return f"F8_E4M3{suffix}"
    return f"F8_E5M2{suffix}" if name == "fp8_e5m2" else None


def _layer_scales(name: str, layer: Any) -> str:
    for tensor in (getattr(layer, "_k_scale", None), getattr(layer, "_v_scale", None)):
        if isinstance(tensor, torch.Tensor) and tensor.numel() != 1:
            raise ConfigError(
                f"the KV cache of {name} has one scale per head, which objkv does not support: "
                "run the model without the objkv connector, or with --kv-cache-dtype auto"
            )
    try:
        return scales_text(layer._k_scale_float, layer._v_scale_float)
    except ValueError as exc:
        raise ConfigError(f"the KV cache of {name} cannot be shared: {exc}") from exc


def has_fp8_encoder(multimodal: Any) -> bool:
    """Whether an encoder's output for an image may depend on earlier images. ``multimodal``: vLLM's
    ``MultiModalConfig`` or None."""
    return getattr(multimodal, "mm_encoder_attn_dtype", None) is not None  # not every version
