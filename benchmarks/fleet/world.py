"""What the simulated replicas share, what each has for itself, and what is counted.

Of a large fleet only some hosts are simulated, with their share of the load. What the other
replicas do to shared things is added in proportion (``World.scale``), and a request finds in its
replica's and node's own caches only what those of the whole fleet would hold: see ``World.place``.
"""

import math
import random
from collections import deque
from dataclasses import dataclass, field

from benchmarks.fleet.costs import Costs, Model
from benchmarks.fleet.fleet import Fleet
from benchmarks.fleet.tiers import BlockCache, Gauge, Lane, NodeCache, SharedStore
from benchmarks.fleet.trace import BLOCK_TOKENS, Request
from objkv.config.prices import RANGE_BYTES
from objkv.errors import LeftAlone, StoreUnavailable
from objkv.net.breaker import Breaker, BreakerLimits
from objkv.stores.s3.store import RANGES_MAX
from objkv.telemetry import NullRecorder

REDIS_FULL = 0.95
"""A server that is asked for more than this of its time answers the rest too late."""
ARENA_SHARE = 1 / 8
"""objkv's default: of the node's memory."""
SAVERS_EACH = 8
"""Threads of an agent that save to a bucket, for each that loads."""
_TAG = 1 << 40
"""Larger than any id of a block."""
_SPREAD = 0x9E3779B97F4A7C15


@dataclass(slots=True)
class Counts:
    """What happened on the simulated replicas: tokens, chunks, calls, seconds."""

    prompt: int = 0
    gpu: int = 0
    node: int = 0
    bulk: int = 0
    computed: int = 0
    lookup_commands: int = 0
    touch_commands: int = 0
    save_commands: int = 0
    gets: int = 0
    puts: int = 0
    """Chunks, one object each."""
    fetched: int = 0
    """Chunks."""
    dropped: int = 0
    compute_s: float = 0.0
    ttft_s: list[float] = field(default_factory=list)


class Host:
    """What the replicas of a node share: a network card, each way, and the agent."""

    def __init__(self, world: "World") -> None:
        self.receive, self.send = Lane(), Lane()
        self.cache = NodeCache(world.arena_bytes, world.fleet.disk_bytes)
        self.loads, self.saves = Lane(), Lane()
        """Of the agent, from the bucket and to it."""
        self.reads = Lane()
        """From the disk."""
        recorder, clock = NullRecorder(), lambda: world.now_s
        self.breaker = Breaker("index", "read", BreakerLimits(), recorder, logs=False, clock=clock)
        self.breaker.draw = world.rng.random


class Replica:
    """One simulated replica's own things."""

    def __init__(self, world: "World", host: Host) -> None:
        self.host = host
        self.cache = BlockCache(int(world.model.gpu_cache_bytes / world.model.token_bytes))
        self.waiting = deque[Job]()
        """Nothing is computed of these, and nothing decided."""
        self.loaded = deque[Job]()
        """Ready to be computed, before those that wait."""
        self.running: Job | None = None
        """Begun, but too long for one step."""
        self.is_stepping = False

    def backlog_s(self, model: Model) -> float:
        """Time to compute everything that is here, as far as can be told."""
        begun = [self.running] if self.running else []
        jobs = (*begun, *self.loaded, *self.waiting)
        return sum(model.prefill_s(job.computed, job.arrival.tokens) for job in jobs)


@dataclass(frozen=True, slots=True)
class Unit:
    """Chunks that the trace cannot tell apart."""

    key: int
    place: int
    """The block in which they end."""
    chunks: int


@dataclass(slots=True)
class Job:
    """One request on its way through its replica."""

    arrival: Request
    replica: Replica
    private: list[int]
    """Keys of its blocks in the caches of the replica and its node."""
    units: list[Unit]
    stored: int = 0
    """Leading units that the index had."""
    reused: int = 0
    """Tokens that it need not compute."""
    computed: int = 0
    """Tokens whose KV is there."""
    start_s: float = 0.0
    """When its prompt began to be computed."""


class World:
    """Everything that the parts of the simulation work on."""

    def __init__(self, fleet: Fleet, costs: Costs, span_s: float) -> None:
        """``span_s``: length of the trace as it is laid over the fleet."""
        self.fleet, self.settings, self.costs, self.span_s = fleet, fleet.settings, costs, span_s
        self.model, self.bulk = costs.models[fleet.model], costs.bulk[fleet.bulk]
        simulated = fleet.simulated(costs)
        self.scale = fleet.replicas / simulated
        self.chunk_bytes = fleet.settings.chunk_tokens * self.model.token_bytes
        self.arena_bytes = costs.node.memory_bytes * ARENA_SHARE
        self.loaders = self.savers = fleet.settings.load_threads
        """An agent's connections that load, and those that save."""
        self.loaders += RANGES_MAX if self.chunk_bytes > RANGE_BYTES else 0
        self.savers *= SAVERS_EACH
        self.puts_all = fleet.puts(costs) == "all"
        self.store = SharedStore(fleet.settings.ttl_s)
        self.redis = Gauge()
        self.now_s = 0.0
        """Of the last question to Redis."""
        self.rng = random.Random(2)
        size = self.model.replicas_per_host
        self.hosts = [Host(self) for _ in range(-(-simulated // size))]
        self.replicas = [Replica(self, self.hosts[i // size]) for i in range(simulated)]
        self.sighted: dict[int, float] = {}
        """Until when the index remembers that a unit was committed, but not put."""
        self.counts = Counts()

    def place(self, arrival: Request) -> Job:
        """Choose the replica of a request, among all of the fleet.

        Those whose numbers are equal modulo the simulated ones are one simulated replica. Its
        private keys carry which of them is meant, so that none finds what another computed.
        """
        simulated = len(self.replicas)
        chosen = self.rng.randrange(self.fleet.replicas)
        if self.fleet.routing == "affine":
            home = (arrival.conversation * _SPREAD % 2**64 >> 20) % self.fleet.replicas
            waiting = self.replicas[home % simulated].backlog_s(self.model)
            chosen = home if waiting <= self.fleet.spill_s else chosen
        tag = chosen // simulated * _TAG
        blocks, common = arrival.blocks, arrival.common
        private = [block if i < common else block + tag for i, block in enumerate(blocks)]
        return Job(arrival, self.replicas[chosen % simulated], private, self._units(arrival))

    def ask_redis(self, host: Host, now: float, work_s: float) -> float | None:
        """Let the server do ``work_s`` of work for an agent. Returns seconds that it takes,
        infinite if it is too late, and None if the breaker leaves it alone."""
        self.now_s = now
        try:
            is_probe = host.breaker.begin_call("ask")
        except LeftAlone:
            return None
        busy = self.redis.add(now, work_s * self.scale / self.fleet.redis_primaries)
        is_late = busy > REDIS_FULL and self.rng.random() > REDIS_FULL / busy
        host.breaker.end_call(StoreUnavailable("late") if is_late else None, is_probe=is_probe)
        return math.inf if is_late else work_s / (1 - min(busy, REDIS_FULL))

    def _units(self, arrival: Request) -> list[Unit]:
        chunk, blocks = self.settings.chunk_tokens, arrival.blocks
        whole, rest = divmod(arrival.tokens, BLOCK_TOKENS)
        if chunk > BLOCK_TOKENS:
            step = chunk // BLOCK_TOKENS
            return [Unit(blocks[i], i, 1) for i in range(step - 1, whole, step)]
        units = [Unit(blocks[i], i, BLOCK_TOKENS // chunk) for i in range(whole)]
        if rest >= chunk:
            units.append(Unit(blocks[whole], whole, rest // chunk))
        return units
