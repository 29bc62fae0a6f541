"""Explains why two replicas do not share: the differences of their identities, and their fixes.

Works on any JSON documents, including those of other versions: an unknown field gets a generic
sentence. Nothing here touches a store.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from objkv.errors import ConfigError
from objkv.keys.identity import NAMESPACE_HEX, canonical_json

Document = Mapping[str, Any]
ABSENT: Final = "(absent)"
_NAMES_SHOWN: Final = 3
_GROUP: Final = re.compile(r"groups\[\d+\]")
_SAME_MODEL: Final = (
    "serve the same model with the same version of vLLM and --hf-overrides, and enable the hybrid "
    "KV cache manager on both or on neither"
)
_FLAGS: Final = {
    "dtype": "the models compute in different dtypes",
    "hf_overrides": "the overrides of the model configuration differ",
    "quantization_config": "the weights are quantised differently at start-up",
    "kv_cache_dtype_skip_layers": "different layers keep their KV unquantised",
    "mm_processor_kwargs": "images, audio and videos are preprocessed differently",
    "lora_dtype": "the adapters compute in different dtypes",
    "lora_target_modules": "the adapters apply to different modules",
}
"""Fields of ``extra`` that are flags of vLLM."""
REASONS: Final[dict[str, tuple[str, str]]] = {
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
    "groups": ("the layers are in different KV cache groups", _SAME_MODEL),
    "groups[]": ("the layers of the group have different caches", _SAME_MODEL),
    "groups[].block_size": (
        "the blocks have different numbers of tokens",
        "start both with the same --block-size; hybrid models choose it themselves",
    ),
    "groups[].state": (
        "the layers keep their state in different tensors",
        "serve the same model with the same mamba cache dtype and VLLM_SSM_CONV_STATE_LAYOUT; some "
        "states also need the same TP size, see docs/models.md",
    ),
    "extra.reset": (
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
    "extra.video_pruning": (
        "videos are pruned differently",
        "start both with the same --video-pruning-rate and method",
    ),
    "extra.payloads": (
        "their payloads are sealed differently, and each refuses payloads sealed unlike its own",
        "set the same signing_keys_… and encryption_keys_… on all replicas, or on none",
    ),
    "extra.lora_tower": (
        "adapters change the outputs of the image encoder on only one of them",
        "start both with or both without --enable-tower-connector-lora",
    ),
    **{
        f"extra.{name}": (why, f"start both with the same --{name.replace('_', '-')}")
        for name, why in _FLAGS.items()
    },
}
"""Why a field prevents sharing, and how to make it the same."""
_ROOTS: Final = {
    "kv_dtype": ("extra.dtype",),
    "page_layout": ("extra.dtype", "kv_dtype", "groups[0].block_size"),
    "chunk_tokens": ("groups[0].block_size",),
    "weights_epoch": ("extra.reset",),
}
"""Fields that usually differ because another one does."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One field that differs between the documents."""

    field: str
    """``kv_dtype``, ``groups[0].block_size``, ``extra.dtype``."""
    a: Any
    """The value in the document; ``(absent)`` if it is missing."""
    b: Any
    why: str
    """Why the difference prevents sharing."""
    fix: str
    follows_from: str | None = None
    """Another field that differs and usually causes this."""


@dataclass(frozen=True, slots=True)
class DiffReport:
    """The result of comparing two documents."""

    share: bool
    reason: str
    differences: tuple[Difference, ...]
    """Causes first."""


def namespace_of(document: Document) -> str:
    """Return the namespace of replicas with this document."""
    return hashlib.sha256(canonical_json(document)).hexdigest()[:NAMESPACE_HEX]


def parse_document(text: str, name: str) -> Document:
    """Parse an identity document from JSON or from a replica's log, of which the last line
    ``objkv identity … document={…}`` counts. Raises ``ConfigError``, which calls the text
    ``name``."""
    logged = [line.partition("document=")[2] for line in text.splitlines()]
    for one in (text, *reversed([part for part in logged if part.startswith("{")])):
        if (found := _loaded(one)) is not None:
            return found
    raise ConfigError(
        f"{name}: no identity document; give identity.json, or a log with 'objkv identity'"
    )


def diff(a: Document, b: Document) -> DiffReport:
    """Compare two documents field by field.

    >>> diff({"kv_dtype": "bfloat16"}, {"kv_dtype": "fp8"}).reason
    'they do not share: kv_dtype differs'
    """
    x, y = dict(_fields("", a)), dict(_fields("", b))
    pairs = {
        name: (x.get(name, ABSENT), y.get(name, ABSENT))
        for name in [*x, *(name for name in y if name not in x)]
        if not _same(x.get(name, ABSENT), y.get(name, ABSENT))
    }
    if not pairs and not _same(a, b):  # such as an empty list in place of none
        pairs = {"document": (dict(a), dict(b))}
    found = [
        Difference(
            name,
            *pair,
            *_explain(name, pair, pairs),
            next((root for root in _ROOTS.get(name, ()) if root in pairs), None),
        )
        for name, pair in pairs.items()
    ]
    found.sort(key=lambda one: one.follows_from is not None)
    return DiffReport(not found, _reason(found), tuple(found))


def _explain(
    field: str, pair: tuple[Any, Any], pairs: Mapping[str, tuple[Any, Any]]
) -> tuple[str, str]:
    """Return why ``field`` prevents sharing, and the fix; a generic sentence for other fields."""
    kinds = {str(value).partition(":")[0] for value in pair}
    if field == "weights" and kinds == {"sampled", "full"}:
        return (
            "the weights are hashed in two ways, so it is unknown whether they are the same",
            "set the same weights_digest on all replicas",
        )
    if field == "weights" and kinds == {"dummy"}:
        return (
            "random weights (load_format dummy) are the same only with the same seed",
            "load real weights, or start both with the same --seed",
        )
    if field == "weights" and len(kinds) > 1:
        return (
            "one identifies its weights by their bytes and the other only by a name",
            "let both read the weights from a local directory or the hub's cache",
        )
    if field == "model" and "weights" not in pairs:
        return "the weights are the same, but the names of the models differ", REASONS[field][1]
    name = _GROUP.sub("groups[]", field)
    while name not in REASONS and "." in name:  # a value inside a known field
        name = name.rpartition(".")[0]
    return REASONS.get(name) or (
        f"{field} is part of the namespace, because it changes KV or its storage",
        "use the same value on both, by the vLLM or objkv setting of that name",
    )


def _reason(found: list[Difference]) -> str:
    if not found:
        return "they share: each can load what the other has saved"
    names = [one.field.removeprefix("extra.") for one in found if one.follows_from is None]
    shown, more = names[:_NAMES_SHOWN], len(names) - _NAMES_SHOWN
    listed = (
        f"{', '.join(shown)} and {more} more"
        if more > 0
        else " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))
    )
    return f"they do not share: {listed} {'differs' if len(names) == 1 else 'differ'}"


def _fields(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values in a document by path. Lists of pairs and objects in JSON text are read as
    objects, as ``extra`` has them; other lists than groups are values."""
    if isinstance(value, str) and value.startswith("{"):
        value = _loaded(value) or value
    if name and isinstance(value, list):
        pairs = [p for p in value if isinstance(p, list) and len(p) == 2 and isinstance(p[0], str)]
        if value and len({p[0] for p in pairs}) == len(value):
            value = {p[0]: p[1] for p in pairs}
        elif name == "groups" and value and all(isinstance(one, dict) for one in value):
            for number, one in enumerate(value):
                yield from _fields(f"{name}[{number}]", one)
            return
    if isinstance(value, Mapping) and (value or not name):
        for key in value:
            yield from _fields(f"{name}.{key}" if name else key, value[key])
        return
    yield name, value


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
