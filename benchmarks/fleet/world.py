"""What the simulated replicas share, what each has for itself, and what is counted.

Of a large fleet only some hosts are simulated, with their share of the load. What the other
replicas do to shared things is added in proportion (``World.scale``), and a request finds in its
replica's own caches only what that very replica of the whole fleet would hold: see ``World.place``.
"""

import random
from collections import deque
from dataclasses import dataclass, field

from benchmarks.fleet.costs import Costs, Model
from benchmarks.fleet.fleet import Agents, Fleet
from benchmarks.fleet.tiers import BlockCache, Gauge, Lane, NodeCache, SharedStore
from benchmarks.fleet.trace import BLOCK_TOKENS, Arrival
from objkv.config.prices import RANGE_BYTES
from objkv.net.breaker import BreakerLimits

_PATIENCE = BreakerLimits()
REDIS_FULL = 0.95
"""A server that is asked for more than this of its time answers the rest too late."""
AGENT_PROCESSES = 8
_TAG = 1 << 40
"""Larger than any id of a block."""
_SPREAD = 0x9E3779B97F4A7C15


@dataclass(slots=True)
class Counts:
    """What happened on the simulated replicas: tokens, chunks, bytes, calls, seconds."""

    requests: int = 0
    prompt: int = 0
    gpu: int = 0
    bulk: int = 0
    arena: int = 0
    disk: int = 0
    computed: int = 0
    lookup_commands: int = 0
    touch_commands: int = 0
    save_commands: int = 0
    gets: int = 0
    puts: int = 0
    bytes_bulk: int = 0
    bytes_saved: int = 0
    saved: int = 0
    dropped: int = 0
    compute_s: float = 0.0
    ttft_s: list[float] = field(default_factory=list)


class Host:
    """What some replicas share: a network card, each way, and an agent if there are any."""

    def __init__(self, agents: Agents | None = None) -> None:
        self.receive = Lane()
        self.send = Lane()
        self.cache = NodeCache(agents)
        self.loads = Lane()
        """The agent's, from the bucket; likewise the next."""
        self.saves = Lane()
        self.reads = Lane()
        """From the disk."""


class Replica:
    """One simulated replica's own things."""

    def __init__(self, fleet: Fleet, costs: Costs, host: Host) -> None:
        model = costs.models[fleet.model]
        self.host = host
        self.cache = BlockCache(int(model.gpu_cache_bytes / model.token_bytes))
        self.waiting = deque[Job]()
        """Nothing is computed of these, and nothing decided."""
        self.loaded = deque[Job]()
        """Ready to be computed, before those that wait."""
        self.running: Job | None = None
        """Begun, but too long for one step."""
        self.is_stepping = False
        self.loads = Lane()
        self.saves = Lane()
        self.failures = 0
        """Late answers of Redis in a row."""
        self.closed_until_s = 0.0
        """Until when the breaker leaves Redis alone."""
        self.pauses = 0
        """Of the breaker in a row."""

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

    arrival: Arrival
    replica: Replica
    private: list[int]
    """Keys of its blocks in the replica's own caches."""
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

    def __init__(self, fleet: Fleet, costs: Costs) -> None:
        self.fleet, self.settings, self.costs = fleet, fleet.settings, costs
        self.model, self.bulk = costs.models[fleet.model], costs.bulk[fleet.bulk]
        simulated = fleet.simulated(costs)
        self.scale = fleet.replicas / simulated
        self.chunk_bytes = fleet.settings.chunk_tokens * self.model.token_bytes
        self.store = SharedStore(fleet.settings.ttl_s)
        self.redis = Gauge()
        host_size = self.model.replicas_per_host
        hosts = [Host(fleet.agents) for _ in range(-(-simulated // host_size))]
        self.replicas = [Replica(fleet, costs, hosts[i // host_size]) for i in range(simulated)]
        self.hosts = hosts
        self.sighted: dict[int, float] = {}
        """Until when the index remembers that a unit was committed, but not put."""
        self.counts = Counts()
        self.rng = random.Random(fleet.seed + 1)

    def place(self, arrival: Arrival) -> Job:
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

    def empty(self) -> None:
        """Forget what is cached, which is most of the memory; what was counted stays."""
        self.store.empty()
        for replica in self.replicas:
            replica.cache = BlockCache(0)
        for host in self.hosts:
            host.cache.empty()
        self.sighted.clear()

    def ask_redis(self, replica: Replica, now: float, work_s: float) -> float | None:
        """Let the server do ``work_s`` of work; seconds that it takes, or None: too late."""
        busy = self.redis.add(now, work_s * self.scale / self.fleet.redis_primaries)
        if busy > REDIS_FULL and self.rng.random() > REDIS_FULL / busy:
            replica.failures += 1
            if replica.failures >= _PATIENCE.failures:
                longest_s = _PATIENCE.reset_s * 2**replica.pauses
                replica.closed_until_s = now + min(longest_s, _PATIENCE.reset_max_s)
                replica.pauses = min(replica.pauses + 1, 30)
                replica.failures = _PATIENCE.failures - 1  # one call tries again
            return None
        replica.failures = replica.pauses = 0
        return work_s / (1 - min(busy, REDIS_FULL))

    def width(self) -> int:
        """Processes that move the payloads of one request: its workers, or its agent's."""
        return AGENT_PROCESSES if self.fleet.agents else self.model.ranks

    def connections(self, *, save: bool) -> int:
        """Requests to the bulk store that one worker has under way at most."""
        settings = self.settings
        if save:
            return settings.save_threads
        return settings.load_threads + (
            settings.ranges_max if self.chunk_bytes > RANGE_BYTES else 0
        )

    def _units(self, arrival: Arrival) -> list[Unit]:
        chunk, blocks = self.settings.chunk_tokens, arrival.blocks
        whole, rest = divmod(arrival.tokens, BLOCK_TOKENS)
        if chunk > BLOCK_TOKENS:
            step = chunk // BLOCK_TOKENS
            return [Unit(blocks[i], i, 1) for i in range(step - 1, whole, step)]
        units = [Unit(blocks[i], i, BLOCK_TOKENS // chunk) for i in range(whole)]
        if rest >= chunk:
            units.append(Unit(blocks[whole], whole, rest // chunk))
        return units
