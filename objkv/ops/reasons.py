"""The sentences of ``objkv diff``: what each field of an identity is about, and what to do."""

from collections.abc import Mapping
from typing import Any

Pairs = Mapping[str, tuple[Any, Any]]
"""Every field that differs, with its two values."""

_DTYPE = "extra.dtype"
_RESET = "extra.reset"

_REASONS: dict[str, tuple[str, str]] = {
    "format": (
        "payloads are written in another format",
        "run versions of objkv that write the same format",
    ),
    "hash": (
        "prefixes are named by another scheme: these are not the KV of prompts in both, or not by "
        "the same version",
        "compare replicas that use the same connector, of versions with the same scheme",
    ),
    "model": (
        "the model has another name",
        "serve the same model; where only names or mount paths differ, set model_id to one name",
    ),
    "weights": (
        "the weights are others, or the configuration files beside them",
        "serve the same checkpoint: compare config.json and the sizes of the weight files",
    ),
    "quantization": (
        "weights that are quantised otherwise compute other KV",
        "start both with the same --quantization",
    ),
    "kv_dtype": (
        "KV is kept in another type",
        "start both with the same --kv-cache-dtype (with auto it is the model's --dtype)",
    ),
    "page_layout": (
        "bytes inside a block are the CPU kernel's own: they are shared only with the same "
        "instruction set, dtype and block size",
        "run both on machines of one kind, with the same --dtype and --block-size; on GPUs it is "
        "always canonical",
    ),
    "chunk_tokens": (
        "prompts are cut into chunks of another length, so no chunk has the same name",
        "set chunk_tokens alike; the effective length is a multiple of all block sizes",
    ),
    "weights_epoch": (
        "an operator, or a reset, said that the weights are others",
        "set weights_epoch alike on all replicas that serve the same weights",
    ),
    "tenant": ("tenants never share", "set tenant alike, if these may read each other's KV"),
    "groups": (
        "the layers are in other KV cache groups",
        "serve the same model with the same version of vLLM, and the hybrid KV cache manager on "
        "in both or in none",
    ),
    "groups[].kind": (
        "the layers of the group attend in another way",
        "serve the same model, and the hybrid KV cache manager on in both or in none",
    ),
    "groups[].window": (
        "the layers of the group see another number of tokens",
        "give both the same sliding window: compare config.json and --hf-overrides",
    ),
    "groups[].layers": (
        "the group has other layers",
        "serve the same model: compare the number of layers in config.json",
    ),
    "groups[].heads": (
        "the layers have another number of KV heads over all ranks (TP alone does not change it)",
        "serve the same model: compare num_key_value_heads in config.json",
    ),
    "groups[].content": (
        "a token takes another number of elements in each head",
        "serve the same model: compare head_dim in config.json",
    ),
    "groups[].block_size": (
        "blocks hold another number of tokens",
        "start both with the same --block-size; hybrid models choose it by themselves",
    ),
    "groups[].state": (
        "the state that a layer keeps is made of other tensors",
        "serve the same model with the same version of vLLM, mamba cache dtype and TP size",
    ),
    _DTYPE: ("the model computes in another type", "start both with the same --dtype"),
    _RESET: (
        "a replica whose cache was reset, because its weights may have changed in place or because "
        "it slept, shares with nobody",
        "restart it with the weights it serves on disk, or set weights_epoch alike on all",
    ),
    "extra.longrope": (
        "the model rotates keys otherwise above its original length",
        "give both a --max-model-len on the same side of original_max_position_embeddings",
    ),
    "extra.hf_config": (
        "the model's configuration, which does not lie beside its weights, says something else",
        "start both with the same --hf-config-path and --hf-overrides",
    ),
    "extra.hf_overrides": (
        "the model's configuration is overridden otherwise",
        "start both with the same --hf-overrides",
    ),
    "extra.quantization_config": (
        "weights are quantised at start in another way",
        "start both with the same quantization settings",
    ),
    "extra.kv_cache_dtype_skip_layers": (
        "other layers keep their KV unquantised",
        "start both with the same --kv-cache-dtype-skip-layers",
    ),
    "extra.mm_processor_kwargs": (
        "images, sounds and videos are prepared otherwise",
        "start both with the same --mm-processor-kwargs",
    ),
    "extra.mm_encoder_attn_dtype": (
        "the encoder of images looks at them in another type",
        "start both with the same --mm-encoder-attn-dtype",
    ),
    "extra.mm_encoder_fp8_scales": (
        "the fp8 scales of the encoder of images are others",
        "start both with copies of one file as --mm-encoder-fp8-scale-path",
    ),
    "extra.video_pruning": (
        "videos are pruned otherwise",
        "start both with the same --video-pruning-rate and method",
    ),
    "extra.lora_dtype": (
        "adapters compute in another type",
        "start both with the same --lora-dtype",
    ),
    "extra.lora_target_modules": (
        "adapters are applied to other modules",
        "start both with the same --lora-target-modules",
    ),
    "extra.payloads": (
        "their payloads are not sealed alike, and each refuses what is not sealed as its own are",
        "set signing_keys_… and encryption_keys_… alike on all replicas, or on none",
    ),
    "extra.lora_tower": (
        "adapters change what is made of images in one of them",
        "start both with or without --enable-tower-connector-lora",
    ),
}
_WEIGHTS_KINDS = {
    frozenset({"sampled", "full"}): (
        "the weights are told in two ways, so that nobody can say whether they are the same",
        "set weights_digest alike on all replicas",
    ),
}
_NAMED = (
    "one knows its weights by their bytes and the other only by a name",
    "let both read the weights from a local folder or the hub's cache",
)
_SEEDS = (
    "random weights (load_format dummy) are the same only for one seed",
    "load real weights, or start both with the same --seed",
)


def explain(field: str, a: Any, b: Any, pairs: Pairs) -> tuple[str, str]:
    """Why ``field`` keeps KV apart, and what to do; a plain sentence for what is not known here."""
    if field == "weights":
        return _weights(str(a), str(b))
    if field == "model" and "weights" not in pairs:
        return "the weights are the same, only the model's name differs", _REASONS[field][1]
    name = _general(field)
    while name not in _REASONS and "." in name:  # a value within a value that is known
        name = name.rpartition(".")[0]
    if name in _REASONS:
        return _REASONS[name]
    return (
        f"{field} is part of the name of what is stored, because it changes KV or how it is kept",
        "make it the same on both, by vLLM's or objkv's setting of that name",
    )


def root_of(field: str, pairs: Pairs) -> str | None:
    """The differing field that explains why ``field`` differs as well, if there is one."""
    a, b = pairs[field]
    block_size = next((name for name in pairs if name.endswith("].block_size")), None)
    if field == "kv_dtype" and pairs.get(_DTYPE) == (a, b):
        return _DTYPE  # auto in both
    if field == "page_layout" and _machine(a) == _machine(b):
        kv_dtype = "kv_dtype" if "kv_dtype" in pairs else None
        return _DTYPE if _DTYPE in pairs else kv_dtype or block_size
    if field == "chunk_tokens" and block_size is not None:
        return block_size if _follow(pairs[block_size], (a, b)) else None
    if field == "weights_epoch" and _RESET in pairs:
        return _RESET
    return None


def _follow(sizes: tuple[Any, Any], chunks: tuple[Any, Any]) -> bool:
    """Whether one wish for a chunk's length can have become both, by rounding up to blocks.

    The wish lies above the length less one block, and not above the length.
    """
    if not all(isinstance(value, int) for value in (*sizes, *chunks)):
        return False
    low: int = max(chunk - size for chunk, size in zip(chunks, sizes, strict=True))
    return low < int(min(chunks))


def _machine(layout: Any) -> str:
    """Of ``opaque:x86_64-avx512-amx`` all but the kernel, which dtype and block size choose."""
    return str(layout).rpartition("-")[0]


def _weights(a: str, b: str) -> tuple[str, str]:
    kinds = frozenset({a.partition(":")[0], b.partition(":")[0]})
    if kinds in _WEIGHTS_KINDS:
        return _WEIGHTS_KINDS[kinds]
    if kinds == {"dummy"}:
        return _SEEDS
    return _NAMED if len(kinds) > 1 else _REASONS["weights"]


def _general(field: str) -> str:
    """``groups[].kind`` for any group's."""
    group, bracket, rest = field.partition("].")
    return f"groups[].{rest}" if bracket and group.startswith("groups[") else field
