"""The dimensions of a model's KV cache: from its ``config.json``, or built in."""

import json
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Final, cast

from objkv.errors import ConfigError
from objkv.keys.identity import GroupIdentity, GroupKind
from objkv.ops.models.layers import KV_DTYPES, CacheLayer, read_layers

_NAME = "model.layers.{}.self_attn.attn"
_EVEN = 1.5
"""Kinds of layers become one group each if their layer counts differ by less than this factor."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The dimensions of a model's KV cache."""

    name: str
    layers: tuple[CacheLayer, ...]
    """In forward order; each ``divisible``."""
    kv_dtype: str
    """One of ``KV_DTYPES``."""
    source: str
    """The source of the numbers."""

    def groups(self, block_size: int) -> tuple[GroupIdentity, ...]:
        """Return the KV cache groups that vLLM makes of the layers.

        Identical layers are one group. Otherwise, each kind is split into groups of as many layers
        as the rarest kind has; if the layer counts of all kinds are within a factor of 1.5, each
        kind is one group. Source: vLLM 0.31-0.33, ``_get_kv_cache_groups_uniform_page_size`` in
        ``v1/core/kv_cache_utils.py``, since 0.33 ``kv_cache_planning.py``.
        """
        alike: dict[CacheLayer, list[int]] = {}
        for number, layer in enumerate(self.layers):
            alike.setdefault(layer, []).append(number)
        least, most = min(map(len, alike.values())), max(map(len, alike.values()))
        each = most if most < least * _EVEN else least
        groups = []
        for layer, numbers in alike.items():
            parts = -(-len(numbers) // each)
            for part in range(parts):
                names = tuple(_NAME.format(number) for number in numbers[part::parts])
                kind, shape = cast("GroupKind", layer.kind), (layer.heads, layer.content)
                groups.append(GroupIdentity(kind, layer.window, names, *shape, block_size))
        return tuple(groups)


def read_model(folder: Path, kv_dtype: str | None = None) -> ModelShape:
    """Read the model in ``folder``, a directory or a ``config.json``. Raises ``ConfigError`` if the
    file lacks a value, or the model has caches that are not divided by token."""
    file = folder if folder.is_file() else folder / "config.json"
    model = read_layers(folder)
    if other := next((layer.kind for layer in model.layers if not layer.divisible), None):
        raise ConfigError(
            f"{file}: has {other} layers, whose caches are not divided by token: let a replica "
            "save some and use objkv ls"
        )
    dtype = kv_dtype or model.dtype
    if dtype not in KV_DTYPES:
        raise ConfigError(f"{file}: no dtype that a KV cache can have; give it with --kv-dtype")
    return ModelShape(file.parent.name or str(file), model.layers, dtype, str(file))


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
        kinds = {
            "f": CacheLayer("full", self.kv_heads, 2 * self.size),
            "s": CacheLayer("sliding_window", self.kv_heads, 2 * self.size, self.window),
            "m": CacheLayer("mla", 1, self.size),
        }
        whole = (self.pattern * self.layers)[: self.layers]
        layers = tuple(kinds[kind] for kind in whole)
        return ModelShape(name, layers, kv_dtype, f"config.json of {self.source}")


PRESETS: Final = {
    name: Preset(**numbers)
    for name, numbers in json.loads(files(__package__).joinpath("models.json").read_text()).items()
}


def preset(name: str, kv_dtype: str | None) -> ModelShape:
    """Return the built-in model ``name``, ignoring case. Raises ``ConfigError`` if not listed."""
    of_source = (one for one in PRESETS.values() if one.source.lower() == name.lower())
    found = PRESETS.get(name.lower()) or next(of_source, None)
    if found is None:
        beginning = [known for known in PRESETS if known.startswith(name.lower())]
        near = (beginning or get_close_matches(name.lower(), PRESETS, cutoff=0.4))[:3]
        hint = f"did you mean {' or '.join(near)}?" if near else "objkv size --list shows all names"
        raise ConfigError(f"{name} is neither a directory nor a built-in model name; {hint}")
    return found.shape(name.lower(), kv_dtype or "bfloat16")
