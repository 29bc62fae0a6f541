"""Whether objkv can share a model's KV in a given configuration, and what it stores.

The sentences are those of the connector, ``objkv/connector/model``, which decides at start from
what vLLM has made of the model.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from objkv.errors import ConfigError
from objkv.ops.models.layers import KV_DTYPES, CacheLayer, ModelLayers, read_config, read_layers

Use = Literal["connector", "tier"]

WITHOUT_KV: Final = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
"""Methods of speculative decoding that keep no KV of their own."""
WITH_KV: Final = ("draft_model", "eagle", "eagle3", "mtp", "dflash", "dspark")
"""Methods whose KV is shared as well."""
_INSTEAD = "run it without the objkv connector, or"
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
_DIVIDED = ("full", "mla")
"""Kinds whose tokens DCP ranks divide among them."""
_PAGED = {"indexed": "mla", "compressed": "sliding_window"}
"""How the connector names kinds whose pages are not divided by token."""


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """The settings of vLLM that matter to the cache."""

    tp: int = 1
    pp: int = 1
    dcp: int = 1
    kv_dtype: str = "auto"
    draft: str | None = None
    """A method, or the folder of a draft model."""
    chunk_tokens: int = 256


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
    """The connector's error at start if it refuses the configuration."""
    token_bytes: int | None
    """Per token of full attention, latents and windows. None if pages are not divided by token."""
    state_bytes: int
    """Per chunk, whatever its length."""
    chunk_tokens: int
    """At least: a chunk is a whole number of blocks, whose size vLLM sets."""
    chunk_bytes: int | None
    shared_with: str
    """Which replicas share the KV."""
    drafts: tuple[str, ...]
    """Methods of speculative decoding that can be used."""


def judge(folder: Path, options: VllmOptions) -> ModelVerdict:
    """Judge the model in ``folder``. Raises ``ConfigError`` for what is wrong with either."""
    model = read_layers(folder)
    dtype = model.dtype if options.kv_dtype == "auto" else options.kv_dtype
    if dtype not in KV_DTYPES:
        raise ConfigError(f"--kv-dtype {dtype}: choose auto, {', '.join(KV_DTYPES)}")
    item = KV_DTYPES[dtype][1]
    _check_ranks(model, options)
    method = read_method(model, options.draft)
    refused = _refusal(model, options, method)
    states = sum(layer.content for layer in model.layers if layer.kind == "mamba")
    divisible = all(layer.divisible or layer.kind == "mamba" for layer in model.layers)
    tokens = _chunk_tokens(model, options, item)
    token_bytes = sum(_token_bytes(layer, item) for layer in model.layers)
    kept = sum(_token_bytes(layer, item) * _kept_tokens(layer, tokens) for layer in model.layers)
    return ModelVerdict(
        model=model.name,
        model_type=model.model_type,
        kv_dtype=dtype,
        layers=dict(_counted(model)),
        use="connector" if refused is None else "tier",
        refused=refused,
        token_bytes=token_bytes if divisible else None,
        state_bytes=states,
        chunk_tokens=tokens,
        chunk_bytes=kept + states if divisible else None,
        shared_with=_shared_with(model),
        drafts=tuple(_drafts(model)),
    )


def read_method(model: ModelLayers, draft: str | None) -> str | None:
    """Return the method of speculative decoding. A folder's is read from its architecture."""
    if draft is None or draft in WITHOUT_KV:
        return draft
    if draft == "mtp" and not model.draft_layers:
        raise ConfigError(f"{model.name} has no layers for mtp: choose {', '.join(_drafts(model))}")
    if draft in WITH_KV:
        return draft
    if not Path(draft).exists():
        methods = ", ".join((*WITH_KV, *WITHOUT_KV))
        raise ConfigError(f"--draft {draft}: neither a folder nor one of {methods}")
    document, _ = read_config(Path(draft))
    architecture = str((document.get("architectures") or [""])[0]).lower()
    for name in ("eagle3", "eagle", "dflash", "dspark", "mtp", "medusa"):
        if name in architecture:
            return name
    return "draft_model"


def _refusal(model: ModelLayers, options: VllmOptions, method: str | None) -> str | None:
    """Return the connector's error. Its checks have this order."""
    kinds = {layer.kind for layer in model.layers}
    if options.pp > 1 and method in WITH_KV:
        return (
            f"objkv does not support {method!r} together with pipeline parallelism, because only "
            f"the last stage has the draft: {_INSTEAD} set pipeline_parallel_size to 1"
        )
    if options.pp > 1 and (reason := _stages_refused(model)):
        return reason
    if "cross" in kinds:
        return (
            "objkv does not support the KV cache of .decoder.layers.0.layers.encoder_attn.attn "
            f"(CrossAttentionSpec): {_INSTEAD} use ObjKVTier, which takes every cache that vLLM "
            "can offload, or a model of full, sliding-window, chunked local, MLA and linear "
            "attention or Mamba layers only"
        )
    drafted = "full" if method in WITH_KV else None
    undivided = next((layer.kind for layer in model.layers if layer.kind not in _DIVIDED), drafted)
    if options.dcp > 1 and undivided is not None:
        return (
            f"objkv does not support decode_context_parallel_size={options.dcp} for the KV cache "
            f"of some layers ({_PAGED.get(undivided, undivided)}): {_INSTEAD} set it to 1, or use "
            "ObjKVTier"
        )
    return None


KINDS_FROM = (
    "layer_types",
    "layers_block_type",
    "hybrid_override_pattern",
    "attn_type_list",
    "attn_layer_indices",
    "linear_attn_config",
    "full_attention_interval",
)
"""Names in a configuration from which the connector reads the kind of each layer."""
_PARALLEL = ("falcon_h1",)
"""Models whose layers have attention and a state side by side."""


def _stages_refused(model: ModelLayers) -> str | None:
    kinds = {layer.kind for layer in model.layers}
    one_stage = f"{_INSTEAD} set pipeline_parallel_size to 1"
    if kinds & {"indexed", "compressed"}:
        return (
            "objkv does not support pipeline parallelism for caches of several shapes in one "
            f"group: {one_stage}, or use ObjKVTier"
        )
    underivable = "objkv cannot derive the layers of other pipeline stages, because"
    if model.model_type in _PARALLEL:
        return f"{underivable} vLLM gave one stage unexpected layers: {one_stage}"
    if "cross" in kinds:
        return (
            f"{underivable} the model has several KV cache groups, and its configuration has no "
            f"{', '.join(KINDS_FROM)} of as many layers: {one_stage}"
        )
    if len({(layer.heads, layer.content) for layer in model.layers if layer.kind != "mamba"}) > 1:
        return f"{underivable} vLLM has other KV cache groups than expected: {one_stage}"
    return None


def _check_ranks(model: ModelLayers, options: VllmOptions) -> None:
    for layer in model.layers:
        heads = layer.heads
        if layer.kind in ("full", "sliding_window", "chunked_local") and (
            heads % options.tp and options.tp % heads
        ):
            raise ConfigError(
                f"--tp {options.tp}: vLLM cannot divide {heads} KV heads among {options.tp} ranks; "
                "choose a divisor or a multiple"
            )
    if options.pp > len(model.layers):
        raise ConfigError(f"--pp {options.pp}: the model has only {len(model.layers)} layers")
    if options.tp % options.dcp:
        raise ConfigError(f"--dcp {options.dcp}: vLLM needs a divisor of --tp {options.tp}")


def _token_bytes(layer: CacheLayer, item: int) -> int:
    return layer.heads * layer.content * item if layer.divisible else 0


def _kept_tokens(layer: CacheLayer, chunk: int) -> int:
    """Return how many tokens of a chunk are stored: of windows only the last ones."""
    if layer.kind != "sliding_window" or layer.window is None:
        return chunk
    return min(chunk, -(-layer.window // _BLOCK_STEP) * _BLOCK_STEP)


def _chunk_tokens(model: ModelLayers, options: VllmOptions, item: int) -> int:
    """Return the least tokens of a chunk. vLLM makes a block of attention as large as a state."""
    state = max((layer.content for layer in model.layers if layer.kind == "mamba"), default=0)
    if not state:
        return options.chunk_tokens
    pages = [
        max(1, layer.heads // options.tp) * layer.content * item
        for layer in model.layers
        if layer.divisible
    ]
    tokens = -(-(state // options.tp) // max(pages)) if pages else 1
    return -(-tokens // _BLOCK_STEP) * _BLOCK_STEP


def _counted(model: ModelLayers) -> Iterator[tuple[str, int]]:
    counts = Counter((layer.kind, layer.window) for layer in model.layers)
    for (kind, window), count in counts.items():
        yield _NAMES[kind].format(window), count


def _shared_with(model: ModelLayers) -> str:
    if any(layer.kind == "mamba" for layer in model.layers):
        return "replicas of any tensor parallel size with the same block size, if states allow it"
    if _stages_refused(model) is not None:
        return "replicas of any tensor parallel size"
    return "replicas of any tensor and pipeline parallel size"


def _drafts(model: ModelLayers) -> Iterator[str]:
    yield from (name for name in WITH_KV if name != "mtp" or model.draft_layers)
    yield from WITHOUT_KV
