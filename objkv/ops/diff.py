"""Why two replicas do not share: what differs between their identity documents, and what to do.

Works on any JSON documents, so that it also explains those of other versions: a field that it has
never heard of is told with a plain sentence. Nothing here touches a store.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from objkv.errors import ConfigError
from objkv.keys.identity import NAMESPACE_HEX, canonical_json

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


Document = Mapping[str, Any]
_NAMES_SHOWN = 3
ABSENT = "(absent)"


@dataclass(frozen=True, slots=True)
class Difference:
    """One field that is not the same in both documents."""

    field: str
    """``kv_dtype``, ``groups[0].block_size``, ``extra.dtype``."""
    a: Any
    """As in the document; lists in few words; ``ABSENT`` where the document does not have it."""
    b: Any
    why: str
    """What the field is about, and why KV is not shared across it."""
    fix: str
    """What makes it the same, if that is wanted."""
    follows_from: str | None = None
    """The differing field that this one differs because of, if any."""


@dataclass(frozen=True, slots=True)
class DiffReport:
    """What came of comparing two documents."""

    share: bool
    reason: str
    """One sentence."""
    differences: tuple[Difference, ...]

    @property
    def causes(self) -> tuple[Difference, ...]:
        """Those that do not follow from others: what there is to change."""
        return tuple(d for d in self.differences if d.follows_from is None)


def namespace_of(document: Document) -> str:
    """The namespace that replicas with this document share."""
    return hashlib.sha256(canonical_json(document)).hexdigest()[:NAMESPACE_HEX]


def parse_document(text: str, name: str) -> Document:
    """An identity document: JSON, or a replica's log with a line that ends ``document={…}``; of
    several lines the last. Raises ``ConfigError``, which calls the text ``name``."""
    found = _loaded(text)
    if found is None:
        for line in text.splitlines():
            _, mark, rest = line.partition("document={")
            if mark and (one := _loaded("{" + rest)) is not None:
                found = one
    if found is None:
        raise ConfigError(
            f"{name}: no identity document: give identity.json, or a log with 'objkv identity'"
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
        return "they share: whatever one has saved, the other can load"
    # Of fields that follow from each other in a circle none would be left.
    causes = report.causes or report.differences
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
    """Where both are objects, also as text, what differs within them."""
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
    """No document has ``NaN`` or an infinity, nor has JSON."""
    raise ValueError(constant)


def _same(a: Any, b: Any) -> bool:
    """As the namespace sees it: 1 is not true, and not 1.0."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def _are_groups(*values: Any) -> bool:
    return all(isinstance(v, list) and all(isinstance(g, dict) for g in v) for v in values)


def _is_pairs(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    pairs = [p for p in value if isinstance(p, list) and len(p) == 2 and isinstance(p[0], str)]
    return len(pairs) == len({name for name, _ in pairs}) == len(value)


def _short(value: Any) -> Any:
    """``value``, lists in few words."""
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
