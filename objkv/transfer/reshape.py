"""Pages of one shape made pages of another: other heads, other blocks. Views wherever one will do.

Pages are ``[blocks, heads, block_size, content]``, each token's content of each head in one piece,
so heads can be taken apart and tokens dealt into blocks of another size. Only where pages are
canonical: what an attention kernel packed its own way goes as it is. Source of the semantics: vLLM
0.14, ``kv_postprocess_*_on_receive`` in ``distributed/kv_transfer/kv_connector/utils.py``, which
does the same in place, for some ratios.
"""

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

PagesT = TypeVar("PagesT", np.ndarray[Any, np.dtype[Any]], torch.Tensor)
"""What is used here arrays and tensors have in common."""


@dataclass(frozen=True, slots=True)
class Recast:
    """How to read a frame of another rank's, or another replica's, shape."""

    heads: tuple[int, int]
    """Those to take, ``[start, end)`` of the frame's."""
    block_size: int
    """Tokens per block that the reader wants."""
    first_block: int
    """Of the reader's blocks in the frame, the first to take."""
    blocks: int
    """How many of them."""

    def __call__(self, pages: PagesT) -> PagesT:
        """``[blocks, heads, block_size, content]`` of ``pages``, in the reader's blocks.

        A view of ``pages`` if the block size stays, a copy otherwise.
        """
        start, end = self.heads
        assert 0 <= start < end <= pages.shape[1]
        dealt = deal_tokens(pages[:, start:end], self.block_size)
        until = self.first_block + self.blocks
        assert until <= dealt.shape[0]  # else one page would fill them all
        return dealt[self.first_block : until]


def deal_tokens(pages: PagesT, block_size: int) -> PagesT:
    """The same tokens in blocks of ``block_size``: ``[tokens // block_size, heads, block_size,
    content]``. The tokens have to fill whole blocks; larger and smaller ones, any ratio."""
    blocks, heads, size, content = pages.shape
    if size == block_size:
        return pages
    tokens = blocks * size
    assert tokens % block_size == 0
    rows = pages.swapaxes(0, 1).reshape(heads, tokens // block_size, block_size, content)
    return rows.swapaxes(0, 1)
