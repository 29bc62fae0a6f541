"""A tiny target with drafts that keep KV.

``eagle`` predicts its target almost perfectly, but only if its own KV is right: the target's first
layer does all its work, and the draft is a copy of that layer which reads the next token's
embedding. ``draft_model`` is the target itself. So the number of accepted tokens is evidence of the
draft's KV, as equal tokens are of the target's.
"""

import json
from pathlib import Path
from typing import Any

from tests.engine.model import SIZES, folder, make_once

TOKENS = 3
"""Tokens that a draft proposes per step."""
_SIZES = SIZES | {"num_hidden_layers": 4, "tie_word_embeddings": False}


def make_pair(method: str) -> dict[str, Any]:
    """Make a target and its draft unless they are there. Returns arguments of ``vllm.LLM``."""
    place = folder("llama").parent / f"drafts-{folder('llama').name[-6:]}-{_recipe()}"
    make_once(place, _save_all)
    draft: dict[str, Any] = {"method": method, "num_speculative_tokens": TOKENS}
    draft["model"] = str(place / ("target" if method == "draft_model" else method))
    return {"model": str(place / "target"), "speculative_config": draft}


def _recipe() -> str:
    import hashlib

    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]


def _save_all(place: Path) -> None:
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
    target.save_pretrained(place / "target")
    config = json.loads((place / "target" / "config.json").read_text())
    weights = {name: tensor.contiguous() for name, tensor in target.state_dict().items()}
    _save_eagle(place / "eagle", config, weights)


def _save_eagle(place: Path, config: dict[str, Any], weights: dict[str, Any]) -> None:
    import torch
    from safetensors.torch import save_file

    first = "model.layers.0."
    layer = {
        f"layers.0.{name.removeprefix(first)}": tensor
        for name, tensor in weights.items()
        if name.startswith(first) and "input_layernorm" not in name
    }
    embedding = torch.cat((torch.eye(256), torch.zeros(256, 256)), dim=1)
    layer |= {"embed_tokens.weight": weights["model.embed_tokens.weight"], "fc.weight": embedding}
    place.mkdir()
    (place / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    save_file(layer, place / "model.safetensors", metadata={"format": "pt"})


def accepted(llm: Any) -> list[int]:
    """Tokens proposed and accepted so far. For ``Call`` steps."""
    names = ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")
    values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return [int(values.get(name, 0)) for name in names]
