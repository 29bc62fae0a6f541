"""What objkv stores of a model, and whether its connector takes it, before a server starts.

What else the connector refuses depends on parallelism and drafts (``docs/models.md``): it decides
at start, from what vLLM has made of the model.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from objkv.errors import ConfigError
from objkv.ops.models.layers import KV_DTYPES, CacheLayer, ModelLayers, read_layers

Use = Literal["connector", "tier"]

_NAMES = {
    "full": "full attention",
    "mla": "latents (MLA)",
    "sliding_window": "windows of {}",
    "chunked_local": "local attention of {}",
    "mamba": "states",
    "indexed": "latents with an indexer",
    "compressed": "compressed states",
    "cross": "cross attention",
}
_BLOCK_STEP = 16
_CROSS: Final = (
    "objkv does not support the KV cache of .decoder.layers.0.layers.encoder_attn.attn "
    "(CrossAttentionSpec): run it without the objkv connector, or use ObjKVTier, which takes every "
    "cache that vLLM can offload, or a model of full, sliding-window, chunked local, MLA and "
    "linear attention or Mamba layers only"
)
"""The connector's error."""
_FLOAT32: Final = (
    "the weights are float32; vLLM's --dtype auto computes with them in bfloat16, or in float16 "
    "where the device has no bfloat16, and replicas of different dtypes share nothing: give all of "
    "them one --dtype"
)


@dataclass(frozen=True, slots=True)
class ModelVerdict:
    """The use that objkv has for a model. Bytes are over all ranks."""

    model: str
    model_type: str
    kv_dtype: str
    layers: dict[str, int]
    """How many layers have which cache."""
    use: Use
    refused: str | None
    """The connector's error at start if it refuses the model."""
    token_bytes: int | None
    """Per token of full attention, latents and windows. None if pages are not divided by token."""
    state_bytes: int
    """Per chunk, whatever its length."""
    chunk_tokens: int
    """At least: a chunk is a whole number of blocks, whose size vLLM sets."""
    chunk_bytes: int | None
    shared_with: str
    note: str | None


def judge(
    folder: Path, *, tp: int = 1, kv_dtype: str = "auto", chunk_tokens: int = 256
) -> ModelVerdict:
    """Judge the model in ``folder``. ``kv_dtype``: vLLM's ``--kv-cache-dtype``. ``chunk_tokens``:
    the setting. Raises ``ConfigError`` for what is wrong with either."""
    model = read_layers(folder)
    dtype = model.dtype if kv_dtype == "auto" else kv_dtype
    if dtype not in KV_DTYPES:
        raise ConfigError(f"--kv-dtype {dtype}: choose auto, {', '.join(KV_DTYPES)}")
    item = KV_DTYPES[dtype]
    _check_ranks(model, tp)
    is_refused = any(layer.kind == "cross" for layer in model.layers)
    states = sum(layer.content for layer in model.layers if layer.kind == "mamba")
    divisible = all(layer.divisible or layer.kind == "mamba" for layer in model.layers)
    tokens = _chunk_tokens(model, tp, item) if states else chunk_tokens
    token_bytes = sum(_token_bytes(layer, item) for layer in model.layers)
    kept = sum(_token_bytes(layer, item) * _kept_tokens(layer, tokens) for layer in model.layers)
    shared_with = "replicas of any tensor parallel size"
    if states:
        shared_with += " with the same block size, if states allow it"
    return ModelVerdict(
        model=model.name,
        model_type=model.model_type,
        kv_dtype=dtype,
        layers=_counted(model),
        use="tier" if is_refused else "connector",
        refused=_CROSS if is_refused else None,
        token_bytes=token_bytes if divisible else None,
        state_bytes=states,
        chunk_tokens=tokens,
        chunk_bytes=kept + states if divisible else None,
        shared_with=shared_with,
        note=_FLOAT32 if model.is_float32 else None,
    )


def _check_ranks(model: ModelLayers, tp: int) -> None:
    for layer in model.layers:
        heads = layer.heads
        if layer.kind in ("full", "sliding_window", "chunked_local") and heads % tp and tp % heads:
            raise ConfigError(
                f"--tp {tp}: vLLM cannot divide {heads} KV heads among {tp} ranks; choose a "
                "divisor or a multiple"
            )


def _token_bytes(layer: CacheLayer, item: int) -> int:
    return layer.heads * layer.content * item if layer.divisible else 0


def _kept_tokens(layer: CacheLayer, chunk: int) -> int:
    """Return how many tokens of a chunk are stored: of windows only the last ones."""
    if layer.kind != "sliding_window" or layer.window is None:
        return chunk
    return min(chunk, -(-layer.window // _BLOCK_STEP) * _BLOCK_STEP)


def _chunk_tokens(model: ModelLayers, tp: int, item: int) -> int:
    """Return a chunk's least tokens: vLLM makes a block of attention as large as a state."""
    state = max(layer.content for layer in model.layers if layer.kind == "mamba")
    pages = [
        max(1, layer.heads // tp) * layer.content * item
        for layer in model.layers
        if layer.divisible
    ]
    tokens = -(-(state // tp) // max(pages)) if pages else 1
    return -(-tokens // _BLOCK_STEP) * _BLOCK_STEP


def _counted(model: ModelLayers) -> dict[str, int]:
    return dict(Counter(_NAMES[layer.kind].format(layer.window) for layer in model.layers))
