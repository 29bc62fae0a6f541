"""A simulation's counts as the figures that an operator plans with, for the whole fleet."""

from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.fleet.simulate import Run

_HOURS_OF_MONTH = 730.0


@dataclass(frozen=True, slots=True)
class Summary:
    """One fleet. Rates are per second of the whole fleet, means over the trace unless named so."""

    name: str
    replicas: int
    simulated: int
    requests_s: float
    gpu: float
    """Share of prompt tokens found in the replica's own GPUs; likewise the next four."""
    bulk: float
    arena: float
    disk: float
    computed: float
    saved_bytes_s: float
    dropped: float
    """Share of new chunks that could not be saved."""
    redis_lookups_s: float
    redis_touches_s: float
    redis_saves_s: float
    redis_busy: float
    """Primaries that the commands would keep busy, in the busiest ten seconds."""
    redis_bytes: float
    """Memory of the index once ``ttl_s`` has passed: see ``stored_bytes``."""
    stored_bytes: float
    """In the bulk store once ``ttl_s`` has passed, if new chunks keep coming as in the trace."""
    gets_s: float
    puts_s: float
    prefixes: float
    """Partitions of the bucket that these rates need, at the published rate for one."""
    nic_receive: float
    """Share of the time that a host's card is busy; likewise the next."""
    nic_send: float
    request_usd: float
    """Dollars for one hour of the whole fleet at list prices; likewise the next three."""
    storage_usd: float
    egress_usd: float
    gpu_usd_saved: float
    """What the prefill that is not done would have cost, if its GPUs could be given back."""
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float

    @property
    def redis_ops_s(self) -> float:
        """Commands per second."""
        return self.redis_lookups_s + self.redis_touches_s + self.redis_saves_s

    @property
    def usd(self) -> float:
        """Dollars an hour to the store, for the whole fleet."""
        return self.request_usd + self.storage_usd + self.egress_usd

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"redis_ops_s": self.redis_ops_s, "usd": self.usd}


def summarise(name: str, run: Run, without: Run | None = None) -> Summary:
    """``without`` is the same fleet without objkv, to say what is saved."""
    world, counts = run.world, run.world.counts
    per_s = world.scale / run.span_s
    prompt, hour = max(1, counts.prompt), 3600 * per_s
    new = counts.saved + counts.dropped
    stored = stored_chunks(run) * world.scale
    record = world.costs.redis.record_bytes
    bulk, gets_s, puts_s = world.bulk, counts.gets * per_s, counts.puts * per_s
    loaded_gb, saved_gb = counts.bytes_bulk / 1e9, counts.bytes_saved / 1e9
    gpu_hour = world.costs.client.gpu_hour_usd * world.model.gpus
    spared_s = without.world.counts.compute_s - counts.compute_s if without else 0.0
    hosts = len(world.hosts)
    return Summary(
        name=name,
        replicas=world.fleet.replicas,
        simulated=len(world.replicas),
        requests_s=counts.requests * per_s,
        gpu=counts.gpu / prompt,
        bulk=counts.bulk / prompt,
        arena=counts.arena / prompt,
        disk=counts.disk / prompt,
        computed=counts.computed / prompt,
        saved_bytes_s=counts.bytes_saved * per_s,
        dropped=counts.dropped / new if new else 0.0,
        redis_lookups_s=counts.lookup_commands * per_s,
        redis_touches_s=counts.touch_commands * per_s,
        redis_saves_s=counts.save_commands * per_s,
        redis_busy=world.redis.peak * world.fleet.redis_primaries,
        redis_bytes=stored * record,
        stored_bytes=stored * world.chunk_bytes,
        gets_s=gets_s,
        puts_s=puts_s,
        prefixes=max(gets_s / bulk.prefix_gets_s, puts_s / bulk.prefix_puts_s),
        nic_receive=sum(host.receive.busy_s for host in world.hosts) / hosts / run.span_s,
        nic_send=sum(host.send.busy_s for host in world.hosts) / hosts / run.span_s,
        request_usd=3600 * (gets_s * bulk.get_usd + puts_s * bulk.put_usd)
        + hour * (loaded_gb * bulk.get_gb_usd + saved_gb * bulk.put_gb_usd),
        storage_usd=stored * world.chunk_bytes / 1e9 * bulk.gb_month_usd / _HOURS_OF_MONTH,
        egress_usd=hour * loaded_gb * bulk.egress_gb_usd,
        gpu_usd_saved=spared_s * hour / 3600 * gpu_hour,
        ttft_mean_s=sum(counts.ttft_s) / max(1, len(counts.ttft_s)),
        ttft_p50_s=quantile(counts.ttft_s, 0.5),
        ttft_p90_s=quantile(counts.ttft_s, 0.9),
        ttft_p99_s=quantile(counts.ttft_s, 0.99),
    )


def stored_chunks(run: Run) -> float:
    """Chunks of the simulated part once ``ttl_s`` has passed.

    The trace is an hour long. A longer life is extrapolated: as many new chunks every hour. That is
    too much if prompts come back after an hour, which the trace cannot show.
    """
    world, ttl_s = run.world, run.world.settings.ttl_s
    if ttl_s <= run.span_s:
        return float(world.store.chunks_peak)
    return world.counts.saved / run.span_s * ttl_s


def quantile(values: list[float], share: float) -> float:
    """The smallest value that ``share`` of them do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
