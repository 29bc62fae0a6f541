"""Chunks: a fixed number of tokens of one group of one shard, and their arithmetic."""

import re
from dataclasses import dataclass
from functools import lru_cache
from math import lcm

from objkv.keys.prefix import PREFIX_HASH_BYTES
from objkv.keys.topology import Shard

_PATH = re.compile(
    r"(?P<namespace>[0-9a-f]{32})/(?P<fan>[0-9a-f]{2})/(?P<hash>[0-9a-f]{40})/"
    r"(?P<group>0|[1-9][0-9]*)\.(?P<shard>[^/.]+)\.safetensors"
)


@lru_cache(maxsize=4096)
def _field(group: int, shard: Shard) -> str:
    return f"{group}.{shard}"


def payload_path(namespace: str, prefix_hash: bytes, field: str) -> str:
    """Return the path of a chunk's payload, whose field need not be valid. See ``ChunkKey``."""
    digest = prefix_hash.hex()
    return f"{namespace}/{digest[:2]}/{digest}/{field}.safetensors"


@dataclass(frozen=True, slots=True)
class ChunkKey:
    """Identifies one payload in the bulk store, the hot store and its own header."""

    namespace: str
    prefix_hash: bytes
    group: int
    shard: Shard

    def __post_init__(self) -> None:
        assert len(self.namespace) == 32
        assert len(self.prefix_hash) == PREFIX_HASH_BYTES
        assert self.group >= 0

    @property
    def field(self) -> str:
        """The shard's field in the chunk's index record, ``<group>.<shard>``."""
        return _field(self.group, self.shard)

    def path(self) -> str:
        """Return ``<namespace>/<aa>/<hash>/<group>.<shard>.safetensors``. The hash comes early so
        that S3 spreads the load."""
        return payload_path(self.namespace, self.prefix_hash, _field(self.group, self.shard))

    @classmethod
    def parse(cls, path: str) -> "ChunkKey":
        """Return the key whose path is ``path``. Raises ValueError for any other path.

        >>> key = ChunkKey("0" * 32, bytes(20), 0, Shard(0, 28, 0, 4))
        >>> ChunkKey.parse(key.path()) == key
        True
        >>> key.field
        '0.L0-28_H0-4'
        """
        match = _PATH.fullmatch(path)
        if match is None or match["fan"] != match["hash"][:2]:
            raise ValueError(f"invalid chunk path: {path!r}")
        shard = Shard.parse(match["shard"])
        return cls(match["namespace"], bytes.fromhex(match["hash"]), int(match["group"]), shard)


def effective_chunk_tokens(wish: int, block_sizes: tuple[int, ...]) -> int:
    """Return the smallest common multiple of all block sizes that is at least ``wish`` tokens.

    >>> effective_chunk_tokens(256, (16,)), effective_chunk_tokens(256, (16, 160))
    (256, 320)
    """
    step = lcm(*block_sizes)
    return -(-max(wish, 1) // step) * step
