"""Chunks: a fixed number of tokens of one group, and the names of their payloads."""

import re
from dataclasses import dataclass
from functools import lru_cache
from math import lcm
from typing import Final

from objkv.keys.prefix import PREFIX_HASH_BYTES
from objkv.keys.topology import Shard

_PATH = re.compile(
    r"(?P<namespace>[0-9a-f]{32})/(?P<fan>[0-9a-f]{2})/(?P<hash>[0-9a-f]{40})/"
    r"(?P<field>[^/]+)\.safetensors"
)
_FIELD = re.compile(r"(0|[1-9][0-9]{0,9})(?:\.([^/.]+))?")
_CHUNK = re.compile(r"([0-9a-f]{32})([0-9a-f]{40})([0-9]{10})")
GROUPS_MAX: Final = 10**10
CHUNK_CHARS: Final = 82
"""Length of ``ChunkKey.chunk_text``."""


@lru_cache(maxsize=4096)
def field_of(group: int, shard: Shard | None) -> str:
    """Return the field of a payload in its chunk's record: ``<group>`` or ``<group>.<shard>``."""
    return str(group) if shard is None else f"{group}.{shard}"


@lru_cache(maxsize=4096)
def parse_field(text: str) -> tuple[int, Shard | None]:
    """Return the group and the shard of a field. Raises ValueError for any other text."""
    match = _FIELD.fullmatch(text)
    if match is None:
        raise ValueError(f"invalid field: {text!r}")
    return int(match[1]), None if match[2] is None else Shard.parse(match[2])


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
    shard: Shard | None = None
    """What a payload with only some layers, heads or tokens of the group has."""

    def __post_init__(self) -> None:
        assert len(self.namespace) == 32
        assert len(self.prefix_hash) == PREFIX_HASH_BYTES
        assert 0 <= self.group < GROUPS_MAX

    @property
    def field(self) -> str:
        """See ``field_of``."""
        return field_of(self.group, self.shard)

    def path(self) -> str:
        """Return ``<namespace>/<aa>/<hash>/<field>.safetensors``; ``aa`` spreads S3's load."""
        return payload_path(self.namespace, self.prefix_hash, field_of(self.group, self.shard))

    @property
    def chunk_text(self) -> str:
        """Namespace, prefix hash and group in ``CHUNK_CHARS`` characters."""
        return f"{self.namespace}{self.prefix_hash.hex()}{self.group:010}"

    @classmethod
    def of(cls, namespace: str, prefix_hash: bytes, field: str) -> "ChunkKey":
        """Return the key of a field of a chunk's record. Raises ValueError for an invalid one."""
        return cls(namespace, prefix_hash, *parse_field(field))

    @classmethod
    def read(cls, chunk_text: str, shard: str) -> "ChunkKey":
        """Return the key of a ``chunk_text`` and a shard, empty if all. Raises ValueError."""
        match = _CHUNK.fullmatch(chunk_text)
        if match is None:
            raise ValueError(f"invalid chunk: {chunk_text!r}")
        namespace, digest, group = match.groups()
        return cls(
            namespace, bytes.fromhex(digest), int(group), Shard.parse(shard) if shard else None
        )

    @classmethod
    def parse(cls, path: str) -> "ChunkKey":
        """Return the key whose path is ``path``. Raises ValueError for any other path.

        >>> key = ChunkKey("0" * 32, bytes(20), 0, Shard(0, 28, 0, 4))
        >>> ChunkKey.parse(key.path()) == key
        True
        >>> key.field, ChunkKey("0" * 32, bytes(20), 0).field
        ('0.L0-28_H0-4', '0')
        """
        match = _PATH.fullmatch(path)
        if match is None or match["fan"] != match["hash"][:2]:
            raise ValueError(f"invalid chunk path: {path!r}")
        return cls.of(match["namespace"], bytes.fromhex(match["hash"]), match["field"])


def effective_chunk_tokens(wish: int, block_sizes: tuple[int, ...]) -> int:
    """Return the smallest common multiple of all block sizes that is at least ``wish`` tokens.

    >>> effective_chunk_tokens(256, (16,)), effective_chunk_tokens(256, (16, 160))
    (256, 320)
    """
    step = lcm(*block_sizes)
    return -(-max(wish, 1) // step) * step
