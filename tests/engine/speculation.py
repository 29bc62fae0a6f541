"""Tiny targets with drafts of every method that keeps KV.

``eagle`` predicts its target almost perfectly, but only if its own KV is right: the target's first
layer does all its work, and the draft is a copy of that layer which reads the next token's
embedding. ``draft_model`` is the target itself. So the number of accepted tokens is evidence of the
draft's KV, as equal tokens are of the target's. The other drafts are random.
"""

import json
from pathlib import Path
from typing import Any

from tests.engine import model
from tests.engine.model import SIZES, make_once, place

TOKENS = 3
"""Tokens that a draft proposes per step."""
_SIZES = SIZES | {"num_hidden_layers": 4, "tie_word_embeddings": False}


def make_pair(method: str) -> dict[str, Any]:
    """Make a target and its draft unless they are there. Returns arguments of ``vllm.LLM``."""
    made = make_once(place("drafts", __file__, model.__file__), _save_all)
    target = "glm4_moe" if method == "mtp" else "target"
    draft: dict[str, Any] = {"method": method, "num_speculative_tokens": TOKENS}
    if method != "mtp":
        draft["model"] = str(made / ("target" if method == "draft_model" else method))
    return {"model": str(made / target), "speculative_config": draft}


def _save_all(folder: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(21)
    target = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES)).float()
    with torch.no_grad():
        # Norms then leave embeddings as they are, so that the draft may do without.
        weight = target.model.embed_tokens.weight
        weight /= weight.pow(2).mean(-1, keepdim=True).sqrt()
        for layer in target.model.layers[1:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    target.save_pretrained(folder / "target")
    config = json.loads((folder / "target" / "config.json").read_text())
    weights = {name: tensor.contiguous() for name, tensor in target.state_dict().items()}
    _save_eagle(folder / "eagle", config, weights)
    _save_dflash(folder / "dflash")
    _save_mtp(folder / "glm4_moe")


def _write(place: Path, config: dict[str, Any], weights: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(config))
    save_file(weights, place / "model.safetensors", metadata={"format": "pt"})


def _save_eagle(place: Path, config: dict[str, Any], weights: dict[str, Any]) -> None:
    import torch

    first = "model.layers.0."
    layer = {
        f"layers.0.{name.removeprefix(first)}": tensor
        for name, tensor in weights.items()
        if name.startswith(first) and "input_layernorm" not in name
    }
    embedding = torch.cat((torch.eye(256), torch.zeros(256, 256)), dim=1)
    tables = {"embed_tokens.weight": weights["model.embed_tokens.weight"]}
    _write(place, config | {"num_hidden_layers": 1}, layer | tables | {"fc.weight": embedding})


def _random(*shape: int) -> Any:
    import torch

    return torch.randn(*shape) * 0.08


def _save_dflash(place: Path) -> None:
    import torch
    import transformers

    sizes = _SIZES | {"num_hidden_layers": 2}
    made = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes)).float()
    weights = {
        name.removeprefix("model."): tensor.contiguous()
        for name, tensor in made.state_dict().items()
        if name.startswith("model.") and "embed" not in name
    }
    weights |= {"fc.weight": _random(256, 512), "hidden_norm.weight": torch.ones(256)}
    config = made.config.to_dict() | {
        "architectures": ["DFlashDraftModel"],
        "dflash_config": {"mask_token_id": 5, "target_layer_ids": [0, 2]},
        "block_size": TOKENS + 1,
        "num_target_layers": 4,
    }
    _write(place, config, weights)


def _save_mtp(place: Path) -> None:
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    config = transformers.Glm4MoeConfig(
        **(_SIZES | {"num_hidden_layers": 3}),
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
    )
    transformers.Glm4MoeForCausalLM(config).float().save_pretrained(place)
    weights = load_file(place / "model.safetensors")
    last, draft = "model.layers.2.", "model.layers.3."
    weights |= {
        name.replace(last, draft): tensor.clone()
        for name, tensor in list(weights.items())
        if name.startswith(last)
    }
    weights |= {f"{draft}{name}.weight": torch.ones(256) for name in ("enorm", "hnorm")}
    weights |= {
        f"{draft}shared_head.norm.weight": torch.ones(256),
        f"{draft}shared_head.head.weight": weights["lm_head.weight"].clone(),
        f"{draft}embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
        f"{draft}eh_proj.weight": _random(256, 512),
    }
    save_file(weights, place / "model.safetensors", metadata={"format": "pt"})
    path = place / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_nextn_predict_layers": 1}))


def accepted(llm: Any) -> list[int]:
    """Tokens proposed and accepted so far. For ``Call`` steps."""
    names = ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")
    values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return [int(values.get(name, 0)) for name in names]
