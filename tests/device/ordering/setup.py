"""The paged cache, the pools and the prompt of an ordering scenario."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch

from objkv.keys.prefix import prefix_hashes

NAMESPACE: Final = "0123456789abcdef" * 2
LAYERS: Final = ("layers.0", "layers.1", "layers.2")
CHUNK_TOKENS: Final = 64
CHUNKS: Final = 8
"""Stored chunks of the prompt."""
Pages = list[torch.Tensor]
"""One tensor per layer, ``[blocks, heads, block_size, content]``."""


REGISTERED, REGISTERING, REFUSED = WAYS = ("registered", "registering", "refused")
"""How a device reads the memory of a node agent: in place, in place once the driver has registered
it, or by way of slabs, because the device registers no read-only memory."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The form of the paged cache."""

    heads: int = 2
    block_size: int = 16
    content: int = 64
    contiguous: bool = False
    """Whether the bytes of a block are contiguous (HND). If not, all heads of a token are (NHD)."""

    @property
    def chunk_blocks(self) -> int:
        """Blocks per chunk."""
        return CHUNK_TOKENS // self.block_size

    def caches(self, device: torch.device, blocks: int) -> Pages:
        """Return zeroed bf16 tensors, one per layer."""
        sizes = (blocks, self.heads, self.block_size, self.content)
        if self.contiguous:
            return [torch.zeros(sizes, dtype=torch.bfloat16, device=device) for _ in LAYERS]
        sizes = (blocks, self.block_size, self.heads, self.content)
        plain = [torch.zeros(sizes, dtype=torch.bfloat16, device=device) for _ in LAYERS]
        return [cache.transpose(1, 2) for cache in plain]


STRIDED: Final = CacheLayout()
"""Heads of a block are apart, and blocks are small: kernels distribute them."""
WHOLE: Final = CacheLayout(heads=8, block_size=32, contiguous=True)
"""Blocks are contiguous and of 32 KiB: each is copied directly where the device can."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The worker's pools and bounds."""

    layout: CacheLayout = STRIDED
    blocks: int = 96
    load_threads: int = 2
    way: str = REGISTERED
    """How the device reads the memory of the node agent, one of ``WAYS``."""
    load_slabs: int = 4
    save_slabs: int = 16
    deadline_s: float = 60.0
    """Of loads."""
    save_deadline_s: float = 600.0
    drain_deadline_ms: int = 60_000
    windowed: bool = False
    """Whether layers attend to a window, so that blocks leave running requests."""
    writes_early: bool = False
    """See ``Rank.writes_early``."""
    watched: bool = False
    """Whether ``OrderRig.on_call`` is called."""
    attempts_s: tuple[float, ...] = (0.2, 0.8, 3.2)
    """How long the device is busy in each attempt to show that something does not wait for it. The
    machine may be too busy for the first ones."""
    slowness: float = 1.0
    """Factor of the other delays of the device. A busy machine needs longer ones to show an edge
    that is missing."""
    patience_s: float = 20.0
    """Bound of every wait for another thread or for the device."""


@lru_cache
def content_of(chunk: int, shapes: tuple[tuple[int, ...], ...]) -> Pages:
    """Return random pages, different for each chunk and layer."""
    pages = []
    for number, shape in enumerate(shapes):
        generator = torch.Generator().manual_seed(1000 * chunk + number)
        pages.append(torch.randn(shape, generator=generator).to(torch.bfloat16))
    return pages


@lru_cache
def hashes_of(namespace: str) -> Sequence[bytes]:
    """Return the prefix hash of each chunk of the prompt."""
    return prefix_hashes(namespace, range(CHUNKS * CHUNK_TOKENS), CHUNK_TOKENS)


def equal(found: Pages, expected: Pages) -> bool:
    """Whether two sets of pages have the same bytes."""
    return all(
        torch.equal(a.cpu().contiguous().view(torch.uint8), b.cpu().contiguous().view(torch.uint8))
        for a, b in zip(found, expected, strict=True)
    )


def difference(found: Pages, expected: Pages) -> str:
    """Return where two sets of pages first differ: layer, block and bytes. Empty if nowhere."""
    for layer, (a, b) in enumerate(zip(found, expected, strict=True)):
        ours, theirs = (pages.cpu().contiguous().view(torch.uint8) for pages in (a, b))
        differs = (ours != theirs).flatten(1).any(1)
        if bool(differs.any()):
            blocks = differs.nonzero().flatten().tolist()
            block = blocks[0]
            at = int((ours[block] != theirs[block]).flatten().nonzero()[0])
            heads = [pages[block].flatten()[at : at + 8].tolist() for pages in (ours, theirs)]
            return (
                f"layer {layer}, blocks {blocks} of {len(ours)}, from byte {at} on: "
                f"{bytes(heads[0]).hex()} instead of {bytes(heads[1]).hex()}"
            )
    return ""
