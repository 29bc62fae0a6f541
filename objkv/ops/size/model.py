"""The dimensions of a model's KV cache, from its ``config.json`` or from options.

Nothing here imports vllm. A configuration with missing values is refused, never completed by
guesses, because a wrong size is worse than none.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from objkv.errors import ConfigError
from objkv.keys.identity import GroupIdentity, GroupKind
from objkv.ops.models.layers import read_config

DTYPES: Final = {
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "fp8": "F8_E4M3",
    "fp8_e4m3": "F8_E4M3",
    "fp8_e5m2": "F8_E5M2",
}
"""KV cache dtypes by vLLM's names, with their names in payloads."""
_INSTEAD = "use --layers, --kv-heads and --head-size instead"
_NAME = "model.layers.{}.self_attn.attn"
_KINDS: Final[dict[str, GroupKind]] = {
    "full_attention": "full",
    "sliding_attention": "sliding_window",
    "chunked_attention": "chunked_local",
}
_EVEN = 1.5
"""Kinds of layers become one group each if their layer counts differ by less than this factor."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The KV of one layer, per token."""

    kind: GroupKind
    heads: int
    content: int
    """Elements per head and token, K and V fused."""
    window: int | None = None


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The dimensions of a model's KV cache."""

    name: str
    layers: tuple[LayerShape, ...]
    """In forward order."""
    kv_dtype: str
    """One of ``DTYPES``."""
    source: str
    """The source of the numbers."""

    def groups(self, block_size: int) -> tuple[GroupIdentity, ...]:
        """Return the KV cache groups that vLLM makes of the layers.

        Identical layers are one group. Otherwise, each kind is split into groups of as many layers
        as the rarest kind has; if the layer counts of all kinds are within a factor of 1.5, each
        kind is one group. Source: vLLM 0.31-0.33, ``_get_kv_cache_groups_uniform_page_size`` in
        ``v1/core/kv_cache_utils.py``, since 0.33 ``kv_cache_planning.py``.
        """
        alike: dict[LayerShape, list[int]] = {}
        for number, layer in enumerate(self.layers):
            alike.setdefault(layer, []).append(number)
        least, most = min(map(len, alike.values())), max(map(len, alike.values()))
        each = most if most < least * _EVEN else least
        groups = []
        for layer, numbers in alike.items():
            parts = -(-len(numbers) // each)
            for part in range(parts):
                names = tuple(_NAME.format(number) for number in numbers[part::parts])
                groups.append(_group(layer, names, block_size))
        return tuple(groups)


def attention(
    name: str, layers: int, kv_heads: int, head_size: int, *, kv_dtype: str, source: str
) -> ModelShape:
    """Return a model of identical full attention layers."""
    layer = LayerShape("full", kv_heads, 2 * head_size)
    return ModelShape(name, (layer,) * layers, kv_dtype, source)


def read_model(folder: Path, kv_dtype: str | None = None) -> ModelShape:
    """Read the model in ``folder``, a directory or a ``config.json``.

    The KV dtype is ``kv_dtype``, or the model's own. Raises ``ConfigError`` if the file lacks a
    value.
    """
    file = folder if folder.is_file() else folder / "config.json"
    document, text = read_config(folder)
    own = text.get("dtype") or text.get("torch_dtype") or document.get("torch_dtype")
    dtype = kv_dtype or str(own or document.get("dtype") or "").removeprefix("torch.")
    if dtype not in DTYPES:
        raise ConfigError(f"{file}: no dtype that a KV cache can have; give it with --kv-dtype")
    return ModelShape(file.parent.name or str(file), _layers(text, file), dtype, str(file))


def _layers(config: Mapping[str, Any], file: Path) -> tuple[LayerShape, ...]:
    number = _count(config, "num_hidden_layers", file)
    for other in ("index_topk", "index_head_dim", "compress_ratios", "cross_attention_layers"):
        if config.get(other):
            raise ConfigError(f"{file}: {other}: objkv cannot size this kind of cache")
    if config.get("kv_lora_rank"):
        latent = _count(config, "kv_lora_rank", file) + _count(config, "qk_rope_head_dim", file)
        return (LayerShape("mla", 1, latent),) * number
    heads = _count(config, "num_attention_heads", file)
    kv_heads = _count(config, "num_key_value_heads", file, default=heads)
    head = _count(
        config, "head_dim", file, default=_count(config, "hidden_size", file, default=0) // heads
    )
    if head <= 0:
        raise ConfigError(f"{file}: has neither head_dim nor hidden_size; {_INSTEAD}")
    if config.get("v_head_dim", head) != head:
        raise ConfigError(f"{file}: heads of K and V differ in size; {_INSTEAD}")
    return tuple(
        LayerShape(kind, kv_heads, 2 * head, window)
        for kind, window in _kinds(config, number, file)
    )


def _kinds(
    config: Mapping[str, Any], number: int, file: Path
) -> list[tuple[GroupKind, int | None]]:
    """Return the kind and window of each layer."""
    types, window = config.get("layer_types"), config.get("sliding_window")
    slides = bool(window) and config.get("use_sliding_window", True) is not False
    if types is None:
        states = ("linear_num_key_heads", "mamba_d_state", "state_size", "ssm_cfg")
        if any(config.get(name) for name in states) or config.get("attention_chunk_size"):
            raise ConfigError(f"{file}: layer_types is missing, so attention layers are unknown")
        if not slides:
            return [("full", None)] * number
        if config.get("model_type") == "mistral":
            return [("sliding_window", _count(config, "sliding_window", file))] * number
        raise ConfigError(
            f"{file}: layer_types is missing, so the layers with a sliding window are unknown"
        )
    if not isinstance(types, list) or len(types) != number:
        raise ConfigError(f"{file}: layer_types does not list {number} layers")
    found: list[tuple[GroupKind, int | None]] = []
    for name in types:
        kind = _KINDS.get(name) if isinstance(name, str) else None
        if kind is None:
            raise ConfigError(
                f"{file}: the size of layers of type {name!r} is unknown; let a replica save some "
                "and use objkv ls"
            )
        span = {"sliding_window": "sliding_window", "chunked_local": "attention_chunk_size"}
        tokens = _count(config, span[kind], file) if kind in span else None
        found.append((kind, tokens))
    return found


def _count(config: Mapping[str, Any], name: str, file: Path, *, default: int | None = None) -> int:
    value = config.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 24:
        raise ConfigError(f"{file}: {name} is {value!r}, not a positive integer; {_INSTEAD}")
    return value


def _group(layer: LayerShape, names: tuple[str, ...], block_size: int) -> GroupIdentity:
    return GroupIdentity(
        kind=layer.kind,
        window=layer.window,
        layers=names,
        heads=layer.heads,
        content=layer.content,
        block_size=block_size,
    )


_DTYPE = "bfloat16"
_NEAREST = 3


@dataclass(frozen=True, slots=True)
class Preset:
    """One published model."""

    layers: int
    kv_heads: int
    """1 for MLA."""
    size: int
    """Elements of a head; for MLA, of the latent including its rotary part."""
    source: str
    """The repository of the ``config.json``."""
    window: int | None = None
    """Window of the sliding window layers."""
    pattern: str = "f"
    """Repeating kinds of layers: (f)ull, (s)liding window, (m)la."""

    def shape(self, name: str, kv_dtype: str) -> ModelShape:
        """Return the same shape as ``read_model`` would."""
        source = f"config.json of {self.source}"
        if self.pattern == "f":
            return attention(
                name, self.layers, self.kv_heads, self.size, kv_dtype=kv_dtype, source=source
            )
        kinds = {
            "f": LayerShape("full", self.kv_heads, 2 * self.size),
            "s": LayerShape("sliding_window", self.kv_heads, 2 * self.size, self.window),
            "m": LayerShape("mla", 1, self.size),
        }
        whole = (self.pattern * self.layers)[: self.layers]
        return ModelShape(name, tuple(kinds[kind] for kind in whole), kv_dtype, source)


PRESETS: Final = {
    name: Preset(**numbers)
    for name, numbers in json.loads(files(__package__).joinpath("models.json").read_text()).items()
}


def preset(name: str, kv_dtype: str | None) -> ModelShape:
    """Return the built-in model ``name``, ignoring case. Raises ``ConfigError`` if not listed."""
    found = PRESETS.get(name.lower())
    if found is None:
        near = _nearest(name.lower())
        hint = f"did you mean {' or '.join(near)}?" if near else "objkv size --list shows all names"
        raise ConfigError(f"{name} is neither a directory nor a built-in model name; {hint}")
    return found.shape(name.lower(), kv_dtype or _DTYPE)


def _nearest(name: str) -> list[str]:
    """Return a few built-in names that start with ``name``, or else the most similar ones."""
    beginning = [known for known in PRESETS if known.startswith(name)]
    return beginning[:_NEAREST] or get_close_matches(name, PRESETS, _NEAREST, cutoff=0.4)
