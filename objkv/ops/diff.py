"""Explains why two replicas do not share: the differences of their identities, and their fixes.

Works on any JSON documents, including those of other versions: an unknown field gets a generic
sentence. Nothing here touches a store.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from objkv.errors import ConfigError
from objkv.keys.identity import NAMESPACE_HEX, canonical_json

Pairs = Mapping[str, tuple[Any, Any]]
"""The fields that differ, with their two values."""
_DTYPE = "extra.dtype"
_RESET = "extra.reset"
_REASONS: dict[str, tuple[str, str]] = {
    "format": (
        "the replicas write payloads in different formats",
        "run versions of objkv that write the same format",
    ),
    "hash": (
        "prefixes are hashed by different schemes: one is not KV of prompts, or the versions of "
        "objkv differ",
        "compare replicas with the same connector and with versions that use the same scheme",
    ),
    "model": (
        "the names of the models differ",
        "serve the same model; if only names or mount paths differ, set the same model_id",
    ),
    "weights": (
        "the weights, or the configuration files next to them, differ",
        "serve the same checkpoint: compare config.json and the sizes of the weight files",
    ),
    "quantization": (
        "weights with different quantisation compute different KV",
        "start both with the same --quantization",
    ),
    "kv_dtype": (
        "the KV caches have different dtypes",
        "start both with the same --kv-cache-dtype (auto means the model's --dtype)",
    ),
    "page_layout": (
        "the CPU kernel has its own layout inside a block, which depends on the instruction set, "
        "dtype and block size",
        "run both on machines of one kind with the same --dtype and --block-size; on GPUs the "
        "layout is always canonical",
    ),
    "chunk_tokens": (
        "the chunks have different lengths, so no chunk has the same name",
        "set the same chunk_tokens; the effective length is a multiple of all block sizes",
    ),
    "weights_epoch": (
        "an operator or a cache reset marked the weights as different",
        "set the same weights_epoch on all replicas that serve the same weights",
    ),
    "tenant": (
        "tenants never share",
        "set the same tenant if these replicas may read each other's KV",
    ),
    "groups": (
        "the layers are in different KV cache groups",
        "serve the same model with the same version of vLLM, and enable the hybrid KV cache "
        "manager on both or on neither",
    ),
    "groups[].kind": (
        "the layers of the group have different kinds of attention",
        "serve the same model, and enable the hybrid KV cache manager on both or on neither",
    ),
    "groups[].window": (
        "the layers of the group have different attention windows",
        "give both the same sliding window: compare config.json and --hf-overrides",
    ),
    "groups[].layers": (
        "the group has different layers",
        "serve the same model: compare the number of layers in config.json",
    ),
    "groups[].heads": (
        "the layers have different numbers of KV heads over all ranks (TP does not change it)",
        "serve the same model: compare num_key_value_heads in config.json",
    ),
    "groups[].content": (
        "the heads keep different numbers of elements per token",
        "serve the same model: compare head_dim in config.json",
    ),
    "groups[].block_size": (
        "the blocks have different numbers of tokens",
        "start both with the same --block-size; hybrid models choose it themselves",
    ),
    "groups[].state": (
        "the layers keep their state in different tensors",
        "serve the same model with the same mamba cache dtype and VLLM_SSM_CONV_STATE_LAYOUT; some "
        "states also need the same TP size, see docs/models.md",
    ),
    _DTYPE: ("the models compute in different dtypes", "start both with the same --dtype"),
    _RESET: (
        "a replica stops sharing when its cache is reset or it sleeps, because its weights may "
        "have changed in place",
        "restart it with the weights it serves on disk, or set the same weights_epoch on all",
    ),
    "extra.longrope": (
        "the model rotates keys differently above its original length",
        "give both a --max-model-len on the same side of original_max_position_embeddings",
    ),
    "extra.hf_config": (
        "the model configurations, which are stored apart from the weights, differ",
        "start both with the same --hf-config-path and --hf-overrides",
    ),
    "extra.hf_overrides": (
        "the overrides of the model configuration differ",
        "start both with the same --hf-overrides",
    ),
    "extra.quantization_config": (
        "the weights are quantised differently at start-up",
        "start both with the same quantization settings",
    ),
    "extra.kv_cache_dtype_skip_layers": (
        "different layers keep their KV unquantised",
        "start both with the same --kv-cache-dtype-skip-layers",
    ),
    "extra.mm_processor_kwargs": (
        "images, audio and videos are preprocessed differently",
        "start both with the same --mm-processor-kwargs",
    ),
    "extra.video_pruning": (
        "videos are pruned differently",
        "start both with the same --video-pruning-rate and method",
    ),
    "extra.lora_dtype": (
        "the adapters compute in different dtypes",
        "start both with the same --lora-dtype",
    ),
    "extra.lora_target_modules": (
        "the adapters apply to different modules",
        "start both with the same --lora-target-modules",
    ),
    "extra.payloads": (
        "their payloads are sealed differently, and each refuses payloads sealed unlike its own",
        "set the same signing_keys_… and encryption_keys_… on all replicas, or on none",
    ),
    "extra.lora_tower": (
        "adapters change the outputs of the image encoder on only one of them",
        "start both with or both without --enable-tower-connector-lora",
    ),
}
_WEIGHTS_KINDS = {
    frozenset({"sampled", "full"}): (
        "the weights are hashed in two ways, so it is unknown whether they are the same",
        "set the same weights_digest on all replicas",
    ),
}
_NAMED = (
    "one identifies its weights by their bytes and the other only by a name",
    "let both read the weights from a local directory or the hub's cache",
)
_SEEDS = (
    "random weights (load_format dummy) are the same only with the same seed",
    "load real weights, or start both with the same --seed",
)


def explain(field: str, a: Any, b: Any, pairs: Pairs) -> tuple[str, str]:
    """Return why ``field`` prevents sharing, and the fix; a generic sentence for other fields."""
    if field == "weights":
        return _weights(str(a), str(b))
    if field == "model" and "weights" not in pairs:
        return "the weights are the same, but the names of the models differ", _REASONS[field][1]
    name = _general(field)
    while name not in _REASONS and "." in name:  # a value inside a known field
        name = name.rpartition(".")[0]
    if name in _REASONS:
        return _REASONS[name]
    return (
        f"{field} is part of the namespace, because it changes KV or its storage",
        "use the same value on both, by the vLLM or objkv setting of that name",
    )


def root_of(field: str, pairs: Pairs) -> str | None:
    """Return the differing field that causes ``field`` to differ; None if there is none."""
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
    """Whether rounding one chunk_tokens setting up to blocks can give both chunk lengths.

    The setting is greater than the length minus one block, and at most the length.
    """
    if not all(isinstance(value, int) for value in (*sizes, *chunks)):
        return False
    low: int = max(chunk - size for chunk, size in zip(chunks, sizes, strict=True))
    return low < int(min(chunks))


def _machine(layout: Any) -> str:
    """Return ``opaque:x86_64-avx512`` of ``opaque:x86_64-avx512-amx``.

    The last part is the kernel, which depends on dtype and block size.
    """
    return str(layout).rpartition("-")[0]


def _weights(a: str, b: str) -> tuple[str, str]:
    kinds = frozenset({a.partition(":")[0], b.partition(":")[0]})
    if kinds in _WEIGHTS_KINDS:
        return _WEIGHTS_KINDS[kinds]
    if kinds == {"dummy"}:
        return _SEEDS
    return _NAMED if len(kinds) > 1 else _REASONS["weights"]


def _general(field: str) -> str:
    """Return ``groups[].kind`` for the field of any group."""
    group, bracket, rest = field.partition("].")
    return f"groups[].{rest}" if bracket and group.startswith("groups[") else field


Document = Mapping[str, Any]
_NAMES_SHOWN = 3
ABSENT = "(absent)"


@dataclass(frozen=True, slots=True)
class Difference:
    """One field that differs between the documents."""

    field: str
    """``kv_dtype``, ``groups[0].block_size``, ``extra.dtype``."""
    a: Any
    """The value in the document, with lists shortened; ``(absent)`` if it is missing."""
    b: Any
    why: str
    """Why the difference prevents sharing."""
    fix: str
    """How to make the values the same."""
    follows_from: str | None = None
    """The differing field that causes this one to differ, if any."""


@dataclass(frozen=True, slots=True)
class DiffReport:
    """The result of comparing two documents."""

    share: bool
    reason: str
    """The result in one sentence."""
    differences: tuple[Difference, ...]

    @property
    def causes(self) -> tuple[Difference, ...]:
        """The differences that do not follow from others."""
        return tuple(d for d in self.differences if d.follows_from is None)


def namespace_of(document: Document) -> str:
    """Return the namespace of replicas with this document."""
    return hashlib.sha256(canonical_json(document)).hexdigest()[:NAMESPACE_HEX]


def parse_document(text: str, name: str) -> Document:
    """Parse an identity document from JSON or from a replica's log.

    In a log, the last line that ends with ``document={…}`` is used. Raises ``ConfigError``, which
    calls the text ``name``.
    """
    found = _loaded(text)
    if found is None:
        for line in text.splitlines():
            _, mark, rest = line.partition("document={")
            if mark and (one := _loaded("{" + rest)) is not None:
                found = one
    if found is None:
        raise ConfigError(
            f"{name}: no identity document; give identity.json, or a log with 'objkv identity'"
        )
    return found


def diff(a: Document, b: Document) -> DiffReport:
    """Compare two documents field by field.

    >>> diff({"kv_dtype": "bfloat16"}, {"kv_dtype": "fp8"}).reason
    'they do not share: kv_dtype differs'
    """
    pairs = {field: (x, y) for field, x, y in _differing(a, b)}
    roots = {field: root_of(field, pairs) for field in pairs}
    found = []
    for field, (x, y) in pairs.items():
        why, fix = explain(field, x, y, pairs)
        found.append(Difference(field, _short(x), _short(y), why, fix, roots[field]))
    found.sort(key=lambda one: one.follows_from is not None)
    report = DiffReport(not found, "", tuple(found))
    return replace(report, reason=_reason(report))


def _reason(report: DiffReport) -> str:
    if report.share:
        return "they share: each can load what the other has saved"
    causes = report.causes
    names = [_name(cause) for cause in causes[:_NAMES_SHOWN]]
    more = len(causes) - len(names)
    listed = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    if more:
        listed = f"{', '.join(names)} and {more} more"
    verb = "differs" if len(causes) == 1 else "differ"
    return f"they do not share: {listed} {verb}"


def _name(cause: Difference) -> str:
    group, dot, rest = cause.field.partition("].")
    name = f"{rest} of group {group.removeprefix('groups[')}" if dot else cause.field
    return name.removeprefix("extra.")


def _differing(a: Document, b: Document) -> Iterator[tuple[str, Any, Any]]:
    for field in [*a, *(name for name in b if name not in a)]:
        x, y = a.get(field, ABSENT), b.get(field, ABSENT)
        if _same(x, y):
            continue
        if field == "groups" and _are_groups(x, y):
            yield from _in_groups(x, y)
        elif _is_pairs(x) and _is_pairs(y):
            yield from _within(field, dict(x), dict(y))
        else:
            yield from _within_value(field, x, y)


def _in_groups(a: Sequence[Any], b: Sequence[Any]) -> Iterator[tuple[str, Any, Any]]:
    if len(a) != len(b):
        yield "groups", a, b
        return
    for number, (x, y) in enumerate(zip(a, b, strict=True)):
        yield from _within(f"groups[{number}]", x, y)


def _within(name: str, a: Document, b: Document) -> Iterator[tuple[str, Any, Any]]:
    for field in sorted({*a, *b}):
        x, y = a.get(field, ABSENT), b.get(field, ABSENT)
        if not _same(x, y):
            yield from _within_value(f"{name}.{field}", x, y)


def _within_value(name: str, a: Any, b: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the differences inside two objects, which may be JSON text; else the values."""
    x, y = _object(a), _object(b)
    if x is not None and y is not None and not _same(x, y):
        yield from _within(name, x, y)
    else:
        yield name, a, b


def _object(value: Any) -> Document | None:
    if isinstance(value, dict):
        return value
    return _loaded(value) if isinstance(value, str) and value.startswith("{") else None


def _loaded(text: str) -> Document | None:
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _refuse(constant: str) -> Any:
    """Reject ``NaN`` and infinities, which are not valid JSON."""
    raise ValueError(constant)


def _same(a: Any, b: Any) -> bool:
    """Compare values as the namespace does: 1, true and 1.0 differ."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def _are_groups(*values: Any) -> bool:
    return all(isinstance(v, list) and all(isinstance(g, dict) for g in v) for v in values)


def _is_pairs(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    pairs = [p for p in value if isinstance(p, list) and len(p) == 2 and isinstance(p[0], str)]
    return len(pairs) == len({name for name, _ in pairs}) == len(value)


def _short(value: Any) -> Any:
    """Return ``value``, with a list shortened to a few words."""
    if not isinstance(value, list):
        return value
    if _are_groups(value) and value:
        return f"{len(value)}: " + ", ".join(
            f"{group.get('kind', '?')} of {_count(group.get('layers'))}" for group in value
        )
    if len(value) > _NAMES_SHOWN:
        return f"{len(value)}: {value[0]} … {value[-1]}"
    return ", ".join(map(str, value))


def _count(layers: Any) -> str:
    if not isinstance(layers, list):
        return "unknown layers"
    return "1 layer" if len(layers) == 1 else f"{len(layers)} layers"
