"""Well-known models as plain numbers, so that sizes can be told before anything is downloaded.

Each is typed from the ``config.json`` that its authors publish; ``objkv size --model FOLDER`` reads
the file itself, which wins where the two differ.
"""

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final

from objkv.errors import ConfigError
from objkv.ops.model_shape import LayerShape, ModelShape, attention

_DTYPE = "bfloat16"
_NEAREST = 3


@dataclass(frozen=True, slots=True)
class Preset:
    """One published model."""

    layers: int
    kv_heads: int
    """1 for MLA."""
    size: int
    """Of a head; of MLA's latent, its rotary part included."""
    source: str
    """The repository whose ``config.json`` says so."""
    window: int | None = None
    """Of the layers that have one."""
    pattern: str = "f"
    """Kinds of layers, again and again: (f)ull, (s)liding window, (m)la."""

    def shape(self, name: str, kv_dtype: str) -> ModelShape:
        """As if its file had been read."""
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
    "deepseek-v2-lite": Preset(27, 1, 576, "deepseek-ai/DeepSeek-V2-Lite", pattern="m"),
    "deepseek-v3": Preset(61, 1, 576, "deepseek-ai/DeepSeek-V3", pattern="m"),
    "gemma-3-12b": Preset(48, 8, 256, "google/gemma-3-12b-it", 1024, "sssssf"),
    "gemma-3-27b": Preset(62, 16, 128, "google/gemma-3-27b-it", 1024, "sssssf"),
    "gpt-oss-120b": Preset(36, 8, 64, "openai/gpt-oss-120b", 128, "sf"),
    "gpt-oss-20b": Preset(24, 8, 64, "openai/gpt-oss-20b", 128, "sf"),
    "kimi-k2": Preset(61, 1, 576, "moonshotai/Kimi-K2-Instruct", pattern="m"),
    "llama-3.1-405b": Preset(126, 8, 128, "meta-llama/Llama-3.1-405B"),
    "llama-3.1-70b": Preset(80, 8, 128, "meta-llama/Llama-3.1-70B"),
    "llama-3.1-8b": Preset(32, 8, 128, "meta-llama/Llama-3.1-8B"),
    "llama-3.2-1b": Preset(16, 8, 64, "meta-llama/Llama-3.2-1B"),
    "mistral-7b-v0.3": Preset(32, 8, 128, "mistralai/Mistral-7B-v0.3"),
    "mixtral-8x7b": Preset(32, 8, 128, "mistralai/Mixtral-8x7B-v0.1"),
    "qwen2.5-7b": Preset(28, 4, 128, "Qwen/Qwen2.5-7B"),
    "qwen2.5-72b": Preset(80, 8, 128, "Qwen/Qwen2.5-72B"),
    "qwen3-0.6b": Preset(28, 8, 128, "Qwen/Qwen3-0.6B"),
    "qwen3-8b": Preset(36, 8, 128, "Qwen/Qwen3-8B"),
    "qwen3-32b": Preset(64, 8, 128, "Qwen/Qwen3-32B"),
    "qwen3-30b-a3b": Preset(48, 4, 128, "Qwen/Qwen3-30B-A3B"),
    "qwen3-235b-a22b": Preset(94, 4, 128, "Qwen/Qwen3-235B-A22B"),
}


def preset(name: str, kv_dtype: str | None) -> ModelShape:
    """The model of that name, whatever its case. Raises ``ConfigError`` for one not listed."""
    found = PRESETS.get(name.lower())
    if found is None:
        near = _nearest(name.lower())
        hint = f"did you mean {' or '.join(near)}?" if near else "objkv size --list tells all"
        raise ConfigError(f"no folder and no model known here: {name}; {hint}")
    return found.shape(name.lower(), kv_dtype or _DTYPE)


def _nearest(name: str) -> list[str]:
    """Known names that begin so, else those that are written most alike; the first few."""
    beginning = [known for known in PRESETS if known.startswith(name)]
    return beginning[:_NEAREST] or get_close_matches(name, PRESETS, _NEAREST, cutoff=0.4)
