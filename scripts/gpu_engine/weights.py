"""Random weights of a model whose answers depend on its KV, in place of vLLM's dummy weights.

With those, attention is an average, and all prompts have the same answer. With these, its scores
have a standard deviation of 4. Workers import this module for ``Extension``.
"""

import zlib
from typing import Any

import torch
from vllm.model_executor.model_loader import DummyModelLoader, register_model_loader


@register_model_loader("dummy")
class RandomWeights(DummyModelLoader):  # type: ignore[misc]
    """The same weights in every process, made where the model is."""

    @torch.no_grad()
    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Fill them."""
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.fill_(1.0)
                continue
            source = torch.Generator(device=weight.device)
            source.manual_seed(zlib.crc32(name.encode()))
            deviation = 1.0 if "embed" in name else weight.shape[-1] ** -0.5
            weight.normal_(0.0, 2 * deviation if "qkv" in name else deviation, generator=source)


class Extension:
    """Adds nothing to a worker."""
