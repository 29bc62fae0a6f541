"""Tiny random models, made on the spot and kept in ``.cache/models``.

Weights are drawn with a standard deviation of 0.08 instead of the usual 0.02: with such a model
wrong KV changes the greedy tokens, so equal tokens are evidence of equal KV. There are four KV
heads, for tensor parallelism, and no tokenizer: prompts are token ids below ``VOCABULARY``.
"""

import functools
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

ModelName = Literal["llama", "llama_draft", "gpt_oss", "qwen3_next", "deepseek"]

VOCABULARY = 1024
SLIDING_WINDOW = 64
"""Of every other layer of ``gpt_oss``, in tokens."""
_MODELS = Path(__file__).resolve().parents[2] / ".cache" / "models"
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "initializer_range": 0.08,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
"""Sizes of the models, as transformers names them."""


def place(name: str, *recipes: str) -> Path:
    """Where a model is or will be; changes with the files that make it and with transformers."""
    parts = (*(Path(file).read_bytes() for file in recipes), version("transformers").encode())
    return _MODELS / f"{name}-{hashlib.sha256(b''.join(parts)).hexdigest()[:12]}"


def folder(name: ModelName) -> Path:
    return place(name, __file__)


def make(name: ModelName) -> Path:
    return make_once(folder(name), lambda target: _save(name, target))


def make_once(target: Path, save: Callable[[Path], None]) -> Path:
    """Make a model unless it is there; of many makers at once, each sees a whole one."""
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.{os.getpid()}")
    save(partial)
    try:
        partial.rename(target)
    except OSError:  # Another process was first; models are made from a seed and equal.
        shutil.rmtree(partial)
    return target


def _save(name: ModelName, target: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(20)
    model: Any
    match name:
        case "llama" | "llama_draft":
            layers = 3 if name == "llama" else 1
            llama = transformers.LlamaConfig(num_hidden_layers=layers, **SIZES)
            model = transformers.LlamaForCausalLM(llama)
        case "gpt_oss":
            gpt_oss = transformers.GptOssConfig(
                num_hidden_layers=4,
                layer_types=["sliding_attention", "full_attention"] * 2,
                sliding_window=SLIDING_WINDOW,
                num_local_experts=4,
                num_experts_per_tok=2,
                **SIZES,
            )
            model = transformers.GptOssForCausalLM(gpt_oss)
        case "qwen3_next":
            model = transformers.Qwen3NextForCausalLM(_qwen3_next())
        case "deepseek":
            model = transformers.DeepseekV2ForCausalLM(_deepseek())
    target.mkdir(parents=True)
    model.to(torch.float32).save_pretrained(target)


def _qwen3_next() -> Any:
    import transformers

    return transformers.Qwen3NextConfig(
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        linear_num_key_heads=4,
        linear_num_value_heads=16,  # so large a state that blocks have 160 tokens or more
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        mlp_only_layers=[0, 1, 2],
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
        **SIZES,
    )


def _deepseek() -> Any:
    import transformers

    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"}
    return transformers.DeepseekV2Config(
        num_hidden_layers=3,
        first_k_dense_replace=3,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=64,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        moe_intermediate_size=128,
        **sizes,
    )


ADAPTERS: dict[Path, int] = {}
"""The folder of each adapter that was asked for, and the seed of its weights."""


def adapter(name: str, seed: int) -> Path:
    """Where an adapter of the tiny Llama will be, once ``make_adapters`` was called."""
    found = place(f"llama-adapter-{seed}", __file__) / name
    ADAPTERS[found] = seed
    return found


def make_adapters() -> None:
    for target, seed in ADAPTERS.items():
        make_once(target, functools.partial(make_adapter, seed=seed))


def make_adapter(folder: Path, *, seed: int) -> None:
    """An adapter that changes the queries and values of every layer, and so the tokens."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    weights = {}
    for layer in range(3):
        for name in ("q_proj", "v_proj"):
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{stem}.lora_A.weight"] = torch.randn(8, 256) * 0.2
            weights[f"{stem}.lora_B.weight"] = torch.randn(256, 8) * 0.2
    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
