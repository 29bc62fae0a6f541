"""What a model makes of images, sounds and videos, where its encoder computes in fp8.

The scales then come from a file, or, without one, from the largest values of the last 16 calls:
what comes of an image depends on the images before it, in that process alone. Source: vLLM 0.32,
``MMEncoderAttention`` in ``model_executor/layers/attention/mm_encoder_attention.py``.
"""

import hashlib
from pathlib import Path
from typing import Any

from objkv.errors import ConfigError


def encoder_settings(multimodal: Any) -> dict[str, str]:
    """Of vLLM's ``MultiModalConfig``, or None: what changes what encoders compute. The file of the
    scales counts by what it says. Raises ``ConfigError`` if it cannot be read."""
    dtype = getattr(multimodal, "mm_encoder_attn_dtype", None)  # not every version has it
    if dtype is None:
        return {}
    found = {"mm_encoder_attn_dtype": str(dtype)}
    if path := _scale_file(multimodal):
        try:
            content = Path(path).read_bytes()
        except OSError as exc:
            raise ConfigError(f"the encoder's fp8 scales cannot be read: {exc}") from exc
        found["mm_encoder_fp8_scales"] = f"sha256:{hashlib.sha256(content).hexdigest()[:40]}"
    return found


def scales_follow_media(multimodal: Any) -> bool:
    """Whether what an encoder makes of an image depends on those it saw before."""
    dtype = getattr(multimodal, "mm_encoder_attn_dtype", None)
    return dtype is not None and not _scale_file(multimodal)


def _scale_file(multimodal: Any) -> str | None:
    path: str | None = getattr(multimodal, "mm_encoder_fp8_scale_path", None)
    return path
