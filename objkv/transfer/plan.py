"""Plans: the chunks of one request's load or save. They contain names and numbers only.

The scheduler makes the whole plan and sends it to the workers once. Each worker executes it
unchanged for its own shard.
"""

from dataclasses import dataclass

from objkv.index.base import ShardRecord
from objkv.keys.topology import Part


@dataclass(frozen=True, slots=True)
class ChunkMove:
    """One chunk of one group, and the physical blocks that it is copied to or from."""

    chunk: int
    """Number of the chunk in the prompt."""
    group: int
    prefix_hash: bytes
    parent_hash: bytes
    token_start: int
    token_end: int
    first_block: int
    """Index of the first of ``block_ids`` among the payload's blocks."""
    block_ids: tuple[int, ...]
    """Physical block ids, all different, none of them the null block."""

    def __post_init__(self) -> None:
        assert self.token_start < self.token_end
        assert self.first_block >= 0
        assert self.block_ids
        assert 0 not in self.block_ids


@dataclass(frozen=True, slots=True)
class LoadMove:
    """The load of one chunk."""

    move: ChunkMove
    records: tuple[tuple[str, ShardRecord], ...]
    """Index records by shard field. They give sizes, and identify the record if it is wrong."""
    part: Part | None = None
    """The payload to read and the part of it that is needed. None: all of the payload of the rank's
    own shard. Each worker sets it, see ``spread``."""


@dataclass(frozen=True, slots=True)
class SaveMove:
    """The save of one chunk."""

    move: ChunkMove
    token_digest: str
    tokens: tuple[int, ...] | None
    """None unless ``store_tokens`` is set."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The chunks to load for one request, in the order in which they are needed."""

    request_id: str
    namespace: str
    moves: tuple[LoadMove, ...]
    sync: bool
    """Whether this step's forward pass needs them, layer by layer. Otherwise a later step does."""
    traceparent: str | None = None
    """Trace context of the request."""


@dataclass(frozen=True, slots=True)
class SavePlan:
    """The chunks of one request that this step completes."""

    request_id: str
    namespace: str
    moves: tuple[SaveMove, ...]


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """The result of a load. Every submitted plan has exactly one."""

    request_id: str
    failed_blocks: frozenset[int]
    """Physical blocks that were not filled. Empty if the whole load succeeded."""
    rejected: frozenset[tuple[str, bytes]]
    """(namespace, prefix hash) of chunks whose record was wrong."""
    nbytes: int = 0
    """Payload bytes received, including those of payloads that were then refused."""
    seconds: float = 0.0
    """Time from the plan's start to the last byte, 0 if none was received."""
    first_s: float | None = None
    """Time from the plan's start to the first byte, None if none was received."""

    @property
    def failed(self) -> bool:
        """Whether any block has to be recomputed."""
        return bool(self.failed_blocks)
