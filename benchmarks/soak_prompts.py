"""The prompts of a soak, and the KV that its model computes for them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from objkv.keys.chunk import ChunkKey
from objkv.keys.identity import GroupIdentity
from objkv.keys.prefix import prefix_hashes
from objkv.keys.topology import RankShard, rank_shard

NAMESPACE = "50a2" * 8
CHUNK, BLOCK = 64, 16
BLOCKS = CHUNK // BLOCK
GROUPS = (
    GroupIdentity("full", None, tuple(f"a{i}" for i in range(6)), 4, 64, BLOCK),
    GroupIdentity("full", None, ("b0", "b1"), 2, 16, BLOCK),
)
"""Payloads of the second are kept in Redis at once with ``HOT_SAVE_BYTES_MAX``, those of the first
when they are loaded often."""
HOT_SAVE_BYTES_MAX = 32 << 10
CONTENTS = 8
"""Bytes of a truth are below this: codecs find something to compress."""
CHUNKS_MAX = 8
DOCUMENTS = 24


@dataclass(frozen=True)
class Prompt:
    """Whole chunks of tokens, and their hashes."""

    tokens: tuple[int, ...]
    hashes: tuple[bytes, ...]

    def __len__(self) -> int:
        return len(self.hashes)


def prompt(tokens: Sequence[int]) -> Prompt:
    """The prompt of these tokens, without those after the last whole chunk."""
    return Prompt(tuple(tokens), tuple(prefix_hashes(NAMESPACE, list(tokens), CHUNK)))


@lru_cache(maxsize=256)
def truth(prefix_hash: bytes, group: int) -> tuple[torch.Tensor, ...]:
    """What the model computes for a chunk: per layer ``[BLOCKS, heads, BLOCK, content]``."""
    identity = GROUPS[group]
    generator = torch.Generator().manual_seed(int.from_bytes(prefix_hash[:6], "big") * 2 + group)
    shape = (len(identity.layers), BLOCKS, identity.heads, BLOCK, identity.content)
    return tuple(torch.randint(0, CONTENTS, shape, generator=generator, dtype=torch.uint8))


def payload_paths(prompt_: Prompt) -> list[str]:
    """Where the payloads of a prompt's chunks are."""
    return [
        ChunkKey(NAMESPACE, prefix_hash, g, shard_of(group).shard).path()
        for prefix_hash in prompt_.hashes
        for g, group in enumerate(GROUPS)
    ]


class Documents:
    """Prompts that all replicas ask for; old ones are given up for new ones. Thread-safe enough: a
    prompt that was just given up is asked for once more."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.prompts = [self._fresh(None) for _ in range(DOCUMENTS)]

    def replace_one(self) -> list[str]:
        """A new prompt for an old one; where the payloads of the old one are."""
        place = self._random.randrange(DOCUMENTS)
        old = self.prompts[place]
        self.prompts[place] = self._fresh(self._random.choice(self.prompts))
        return payload_paths(old)

    def _fresh(self, stem: Prompt | None) -> Prompt:
        keep = 0 if stem is None else self._random.randrange(CHUNKS_MAX) * CHUNK
        head = () if stem is None else stem.tokens[:keep]
        tail = [self._random.randrange(50_000) for _ in range(CHUNKS_MAX * CHUNK - keep)]
        return prompt((*head, *tail))


def shard_of(group: GroupIdentity) -> RankShard:
    """The one rank holds all of a group."""
    return rank_shard(layers=len(group.layers), heads=group.heads, tp_rank=0, tp_size=1)
