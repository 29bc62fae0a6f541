"""What is simulated: the fleet, and objkv's settings in it under the names that they have there."""

from dataclasses import dataclass
from typing import Literal

from benchmarks.fleet.costs import Costs
from benchmarks.fleet.trace import BLOCK_TOKENS
from objkv.stores.s3.store import RANGES_MAX

Routing = Literal["random", "affine"]
Policy = Literal["all", "reused"]
"""What agents put into the bucket, see ``Agents``."""


@dataclass(frozen=True, slots=True)
class Settings:
    """objkv's settings with objkv's defaults, and its constants."""

    chunk_tokens: int = 256
    ttl_s: float = 14_400
    load_threads: int = 8
    save_threads: int = 16
    ranges_max: int = RANGES_MAX
    queue_max: int = 64
    """Chunks of a worker that may wait to be saved."""
    lookup_deadline_ms: int = 500
    load_deadline_ms: int = 30_000


@dataclass(frozen=True, slots=True)
class Agents:
    """One agent per node. ``memory_bytes`` and ``disk_bytes`` are a node's. It has eight processes,
    each with the connections, the threads and the speed that a worker would have."""

    memory_bytes: float
    disk_bytes: float = 0.0
    save_to_bucket: Policy = "all"
    """``reused``: what is committed twice, or read after a commit."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """How many replicas, of what, under which load, and how they are asked."""

    replicas: int = 8
    model: str = "llama-3.1-70b"
    bulk: str = "s3-standard"
    routing: Routing = "random"
    load: float = 0.5
    """Share of time that the GPUs would compute prompts if nothing were ever reused."""
    spill_s: float = 2.0
    """Affine routing goes elsewhere if a replica has more than this to compute."""
    redis_primaries: int = 1
    shared: bool = True
    """False: no objkv at all, the GPUs' own prefix caches only."""
    simulated_max: int = 8
    """At most so many replicas are simulated (whole hosts); the rest adds to what is shared."""
    seed: int = 1
    settings: Settings = Settings()
    agents: Agents | None = None

    def __post_init__(self) -> None:
        chunk = self.settings.chunk_tokens
        if chunk < 1 or (BLOCK_TOKENS % chunk and chunk % BLOCK_TOKENS):
            raise ValueError(f"chunk_tokens {chunk}: the trace knows blocks of {BLOCK_TOKENS}")
        if self.replicas < 1 or self.load <= 0 or self.redis_primaries < 1:
            raise ValueError("replicas, load and redis_primaries must be positive")

    def simulated(self, costs: Costs) -> int:
        """Replicas that are simulated: whole hosts, one at least."""
        host = costs.models[self.model].replicas_per_host
        return min(self.replicas, max(host, self.simulated_max // host * host))
