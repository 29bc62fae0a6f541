"""Plans: what one request's load or save consists of. Names and numbers only.

A plan is decided whole on the scheduler, crosses the process boundary once, and every worker
executes it unchanged for the shard that it holds.
"""

from dataclasses import dataclass

from objkv.index.base import ShardRecord
from objkv.keys.topology import Part


@dataclass(frozen=True, slots=True)
class ChunkMove:
    """One chunk of one group, between its payload and physical blocks."""

    chunk: int
    """Which chunk of the prompt."""
    group: int
    prefix_hash: bytes
    parent_hash: bytes
    token_start: int
    token_end: int
    first_block: int
    """Where ``block_ids`` begin among the blocks that the payload holds."""
    block_ids: tuple[int, ...]
    """Physical block ids, all different, none of them the null block."""

    def __post_init__(self) -> None:
        assert self.token_start < self.token_end
        assert self.first_block >= 0
        assert self.block_ids
        assert 0 not in self.block_ids


@dataclass(frozen=True, slots=True)
class LoadMove:
    """Bring one chunk in."""

    move: ChunkMove
    records: tuple[tuple[str, ShardRecord], ...]
    """What the index promised, by shard field: sizes, and what to compare when it was wrong."""
    part: Part | None = None
    """Which payload, and what of it; None: the one of the rank's own shard, all of it. Decided by
    each worker, see ``spread``."""


@dataclass(frozen=True, slots=True)
class SaveMove:
    """Take one chunk out."""

    move: ChunkMove
    token_digest: str
    tokens: tuple[int, ...] | None
    """Only where the operator wants payloads to carry their tokens."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Chunks to bring in for one request, in the order they are needed."""

    request_id: str
    namespace: str
    moves: tuple[LoadMove, ...]
    sync: bool
    """Whether this step's forward pass needs them (layer by layer), or a later step."""
    traceparent: str | None = None
    """The trace that the request belongs to, for spans."""


@dataclass(frozen=True, slots=True)
class SavePlan:
    """Chunks of one request that this step completes."""

    request_id: str
    namespace: str
    moves: tuple[SaveMove, ...]


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """How a load ended. Every plan that was submitted has exactly one."""

    request_id: str
    failed_blocks: frozenset[int]
    """Physical blocks that do not hold what the plan promised; empty when all went well."""
    rejected: frozenset[tuple[str, bytes]]
    """(namespace, prefix hash) of chunks whose record was wrong."""
    nbytes: int = 0
    """Bytes of payloads that came, whatever became of them."""
    seconds: float = 0.0
    """From the plan's start to the last of them; 0 if none came."""
    first_s: float | None = None
    """From the plan's start to the first bytes of whichever chunk came first; None if none did."""

    @property
    def failed(self) -> bool:
        """Whether anything has to be recomputed."""
        return bool(self.failed_blocks)
