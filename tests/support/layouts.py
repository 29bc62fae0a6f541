"""Paged KV in any physical order."""

from collections.abc import Sequence

import numpy as np
import torch


def placed(memory: torch.Tensor, layout: str, sizes: Sequence[int]) -> torch.Tensor:
    """``memory`` as ``[layers, blocks, heads, tokens, content]`` of these sizes. ``layout``: the
    order in which they are in memory, as vLLM's ``KVCacheLayout`` names it: ``LBHNC``."""
    order = ["LBHNC".index(axis) for axis in layout]
    return memory.view([sizes[axis] for axis in order]).permute(np.argsort(order).tolist())
