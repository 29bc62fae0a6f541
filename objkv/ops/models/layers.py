"""The kind of cache of each layer of a model, from its ``config.json``.

These are vLLM's rules in a few words. ``tests/models`` compares them with what vLLM itself makes of
the configurations of ``docs/models.md``. A configuration with missing values is refused, never
completed by guesses. Read against vLLM 0.31-0.33, ``model_executor/models``.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, Literal

from objkv.errors import ConfigError
from objkv.keys.identity import name_model

CacheKind = Literal[
    "full", "sliding_window", "chunked_local", "mla", "mamba", "indexed", "compressed", "cross"
]
"""Kinds of ``GroupIdentity``, and those whose pages cannot be divided by token."""
KV_DTYPES: Final = {
    "bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1,
}  # fmt: skip
"""Bytes of an element, by vLLM's names of KV cache dtypes."""
_CONFIG_BYTES_MAX = 16 << 20
_COUNT_MAX = 1 << 24
_BFLOAT16, _FLOAT32 = 2, 4


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


FULL: Final = _words(
    "arcee apertus cohere ernie4_5 ernie4_5_moe ernie4_5_moe_vl exaone4 exaone_moe gemma glm glm4 "
    "glm4_moe glm4v glm4v_moe granite granitemoe granitemoeshared hunyuan_v1_dense "
    "hunyuan_v1_moe idefics3 internlm2 internlm3 internvl llama llava minimax_m2 ministral "
    "ministral3 mistral mistral3 mixtral olmo olmo2 olmoe paligemma phi phi3 phimoe pixtral qwen2 "
    "qwen2_5_omni qwen2_5_vl qwen2_5_vl_text qwen2_audio qwen2_moe qwen2_vl qwen2_vl_text qwen3 "
    "qwen3_moe qwen3_omni_moe qwen3_vl qwen3_vl_text qwen3_vl_moe qwen3_vl_moe_text seed_oss "
    "smollm3 smolvlm solar_open stablelm starcoder2 voxtral"
)
"""Model types of softmax attention in all layers, with or without windows."""
LATENT: Final = _words("axk1 deepseek_v2 deepseek_v3 glm4_moe_lite kimi_k2 kimi_k25 minicpm3")
INDEXED: Final = frozenset(("deepseek_v32", "glm_moe_dsa"))
OTHERS: Final = _words(
    "cohere2 deepseek_v4 falcon_h1 gemma2 gemma3 gemma3_text gemma4 gemma4_text gpt_oss "
    "granitemoehybrid jamba lfm2 lfm2_moe llama4 llama4_text mamba2 mimo_v2_flash nemotron_h olmo3 "
    "olmo_hybrid qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text qwen3_next whisper"
)
"""Model types with rules of their own."""
KNOWN: Final = FULL | LATENT | INDEXED | OTHERS

_ATTENTION = ("full_attention", "attention", "*")
_STATES = ("linear_attention", "mamba", "conv", "M")
_NONE = ("mlp", "moe", "-", "E")
_EVERY: Final = {"gemma2": 2, "gemma3_text": 6, "gpt_oss": 2, "cohere2": 4, "olmo3": 4}
"""Every how many layers one has full attention, where older configurations do not list them."""


@dataclass(frozen=True, slots=True)
class CacheLayer:
    """The cache of one layer, over all ranks."""

    kind: CacheKind
    heads: int = 1
    content: int = 0
    """Elements per head and token, K and V fused. ``mamba``: bytes of the whole state."""
    window: int | None = None

    @property
    def divisible(self) -> bool:
        """Whether the cache consists of tokens, so that its bytes per token are known."""
        return self.kind in ("full", "sliding_window", "chunked_local", "mla")


@dataclass(frozen=True, slots=True)
class ModelLayers:
    """A model, as far as its cache is concerned."""

    name: str
    model_type: str
    dtype: str
    """That of its KV, unless --kv-cache-dtype names another."""
    layers: tuple[CacheLayer, ...]
    """In forward order. A layer of vLLM with two caches is listed as two."""
    is_float32: bool
    """Whether its weights are float32, with which vLLM does not compute by default."""


def read_layers(folder: Path) -> ModelLayers:
    """Read the model in ``folder``. Raises ``ConfigError``, which names the fix."""
    document, config = _read_config(folder)
    model_type = str(config.get("model_type") or document.get("model_type"))
    if model_type not in KNOWN:
        near = get_close_matches(model_type, KNOWN, 1)
        raise ConfigError(
            f"{folder}: model_type {model_type!r} is unknown to objkv"
            + (f" (similar: {near[0]})" if near else "")
            + ": start vLLM with the connector, which reads the cache groups that vLLM makes and "
            "refuses those that it cannot share; docs/models.md lists the kinds that it can"
        )
    layers = tuple(_Shapes(folder, model_type, config).layers())
    named = (where.get(key) for where in (config, document) for key in ("dtype", "torch_dtype"))
    dtype = str(next(filter(None, named), "bfloat16")).removeprefix("torch.")
    # vLLM 0.31-0.33, ``_resolve_auto_dtype`` in ``config/model.py``: the first dtype of the
    # platform, which is bfloat16, or float16 on GPUs and CPUs without it.
    is_float32 = dtype == "float32"
    name = name_model(str(folder if folder.is_dir() else folder.parent), None)
    return ModelLayers(name, model_type, "bfloat16" if is_float32 else dtype, layers, is_float32)


def _read_config(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a model's configuration, and the part of it that describes the text model."""
    file = folder if folder.is_file() else folder / "config.json"
    try:
        if file.stat().st_size > _CONFIG_BYTES_MAX:
            raise ConfigError(f"{file}: too large for a model's configuration")
        document = json.loads(file.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(
            f"{file}: {exc.strerror}; give the folder of a model, with its config.json"
        ) from exc
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"{file}: not JSON ({exc}); download the model's config.json") from exc
    if not isinstance(document, dict):
        raise ConfigError(f"{file}: not a model's configuration; download its config.json")
    inner: Any = document.get("thinker_config") or document
    text = inner.get("text_config") if isinstance(inner, dict) else None
    return document, text if isinstance(text, dict) and text else document


@dataclass(frozen=True, slots=True)
class _Shapes:
    """Reads numbers of one configuration."""

    folder: Path
    type: str
    config: Mapping[str, Any]

    def layers(self) -> Iterator[CacheLayer]:
        if self.type == "whisper":
            yield from self._whisper()
        elif self.type == "deepseek_v4":
            count = self._count("num_hidden_layers")
            yield from (CacheLayer("compressed") for _ in self._list("compress_ratios")[:count])
        elif self.type in LATENT | INDEXED:
            yield from self._latents()
        elif self.type == "falcon_h1":
            for _ in range(self._count("num_hidden_layers")):
                yield from (self._attention(), self._state())
        else:
            for kind in self._kinds():
                if kind in _STATES:
                    yield self._state()
                elif kind not in _NONE:
                    yield self._attention(kind)

    def _kinds(self) -> list[str]:
        """Return the words for each layer."""
        listed = self.config.get("layer_types") or self.config.get("layers_block_type")
        if isinstance(pattern := self.config.get("hybrid_override_pattern"), str):
            return list(pattern)
        if isinstance(mixed := self.config.get("hybrid_layer_pattern"), list):
            return ["sliding_attention" if one else "full_attention" for one in mixed]
        if isinstance(listed, list):
            return [str(one) for one in listed]
        count = self._count("num_hidden_layers")
        if self.type == "mamba2":
            return ["mamba"] * count
        if self.type in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5"):
            return self._every(count, self._count("full_attention_interval", 4), "linear_attention")
        if self.type == "jamba":
            period, offset = self._count("attn_layer_period"), self._count("attn_layer_offset")
            return ["attention" if n % period == offset else "mamba" for n in range(count)]
        if self.type.startswith("llama4"):
            return self._every(count, 4, "chunked_attention")
        window = self.config.get("sliding_window")
        if not window or self.config.get("use_sliding_window") is False:
            return ["full_attention"] * count
        if self.type in ("mistral", "mixtral", "ministral"):
            return ["sliding_attention"] * count
        pattern = self.config.get("sliding_window_pattern") or _EVERY.get(self.type)
        if not isinstance(pattern, int):
            raise self._missing("layer_types", "so the layers with a window are unknown")
        return self._every(count, pattern, "sliding_attention")

    @staticmethod
    def _every(count: int, interval: int, other: str) -> list[str]:
        return ["full_attention" if n % interval == interval - 1 else other for n in range(count)]

    def _attention(self, kind: str = "full_attention") -> CacheLayer:
        queries = self._count("num_attention_heads")
        heads = self._count("num_key_value_heads", queries)
        head = self._count("head_dim", self._count("hidden_size", queries) // queries)
        content = head + self._count("v_head_dim", head)
        if kind in _ATTENTION:
            head = self._wide_head(head)
            return CacheLayer("full", heads, content if self.type[:6] != "gemma4" else 2 * head)
        if kind == "chunked_attention":
            window = self._count("attention_chunk_size")
            return CacheLayer("chunked_local", heads, content, window)
        if kind != "sliding_attention":
            raise self._missing("a known kind of layer", f"but {kind!r}")
        window = self._count("sliding_window", self.config.get("sliding_window_size"))
        if self.type == "mimo_v2_flash":
            heads = self._count("swa_num_key_value_heads")
            content = self._count("swa_head_dim") + self._count("swa_v_head_dim")
        return CacheLayer("sliding_window", heads, content, window + (self.type == "cohere2"))

    def _wide_head(self, head: int) -> int:
        """Return the size of heads of full attention, which Gemma 4 has larger than others."""
        own = self.config.get("per_layer_config")
        sizes = [one.get("head_dim") for one in own.values()] if isinstance(own, dict) else []
        return self._count("global_head_dim", next((one for one in sizes if one), head))

    def _latents(self) -> Iterator[CacheLayer]:
        latent = self._count("kv_lora_rank") + self._count("qk_rope_head_dim")
        layer = CacheLayer("indexed") if self.type in INDEXED else CacheLayer("mla", 1, latent)
        yield from [layer] * self._count("num_hidden_layers")

    def _whisper(self) -> Iterator[CacheLayer]:
        heads = self._count("decoder_attention_heads")
        content = 2 * (self._count("d_model") // heads)
        for _ in range(self._count("decoder_layers")):
            yield CacheLayer("full", heads, content)
            yield CacheLayer("cross", heads, content)

    def _state(self) -> CacheLayer:
        """Return a state over all ranks: its convolution in bfloat16, the rest in float32."""
        conv, rest = self._state_shape()
        return CacheLayer("mamba", 1, conv * _BFLOAT16 + rest * _FLOAT32)

    def _state_shape(self) -> tuple[int, int]:
        if self.type.startswith("lfm2"):
            return (self._count("conv_L_cache") - 1) * self._count("hidden_size"), 0
        if self.type.startswith(("qwen3", "olmo")):
            keys, values = (self._count(f"linear_num_{of}_heads") for of in ("key", "value"))
            key, value = (self._count(f"linear_{of}_head_dim") for of in ("key", "value"))
            width = self._count("linear_conv_kernel_dim") - 1
            return width * (2 * keys * key + values * value), values * key * value
        if self.type == "jamba":
            inner = self._count("mamba_expand") * self._count("hidden_size")
            return (self._count("mamba_d_conv") - 1) * inner, inner * self._count("mamba_d_state")
        names = _MAMBA2[self.type]
        heads, head, groups, size, width = (self._count(name) for name in names)
        inner = heads * head
        return (width - 1) * (inner + 2 * groups * size), inner * size

    def _count(self, name: str, default: int | None = None) -> int:
        value = self.config.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _COUNT_MAX:
            raise self._missing(name, f"but {value!r}")
        return value

    def _list(self, name: str) -> list[Any]:
        value = self.config.get(name)
        if not isinstance(value, list):
            raise self._missing(name, "a list with an entry per layer")
        return value

    def _missing(self, name: str, why: str) -> ConfigError:
        return ConfigError(
            f"{self.folder}: config.json has no {name}, {why}: download the config.json that "
            "belongs to this model"
        )


_MAMBA2: Final = {
    "mamba2": ("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel"),
    "nemotron_h": (
        "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel",
    ),
    "granitemoehybrid": (
        "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv",
    ),
    "falcon_h1": (
        "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv",
    ),
}  # fmt: skip
"""Names of heads, their size, groups, state size and convolution, by model type."""
