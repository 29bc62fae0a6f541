"""A simulation's counts as the figures that an operator plans with, for the whole fleet."""

from collections.abc import Callable

from benchmarks.fleet.world import World
from objkv.cache.worth import SWEEP_WAIT_S

_HOURS_OF_MONTH = 730.0


class Summary:
    """One fleet. Rates are per second of the whole fleet, means over the trace unless named so.
    Dollars are those of an hour of the whole fleet, at list prices."""

    def __init__(self, name: str, world: World, bare: "Summary | None") -> None:
        """``bare`` is the same fleet without objkv, to say what is saved; None: this is it."""
        counts = world.counts
        per_s = world.scale / world.span_s
        prompt, new = max(1, counts.prompt), max(1, counts.puts + counts.dropped)
        self.name = name
        self.replicas, self.simulated = world.fleet.replicas, len(world.replicas)
        self.gpu = counts.gpu / prompt
        """Share of prompt tokens found in the replica's own GPUs; likewise the next three."""
        self.node = counts.node / prompt
        """In the agent's memory or on its disk."""
        self.bulk = counts.bulk / prompt
        self.computed = counts.computed / prompt
        self.dropped = counts.dropped / new
        """Share of new chunks that could not be saved."""
        ttft_s = sorted(counts.ttft_s)
        self.ttft_mean_s = sum(ttft_s) / max(1, len(ttft_s))
        self.ttft_ratio = self.ttft_mean_s / bare.ttft_mean_s if bare else 1.0
        """The mean, of that without objkv."""
        self.ttft_p50_s, self.ttft_p90_s, self.ttft_p99_s = (
            ttft_s[min(len(ttft_s) - 1, int(share * len(ttft_s)))] if ttft_s else 0.0
            for share in (0.5, 0.9, 0.99)
        )
        commands = counts.lookup_commands + counts.touch_commands + counts.save_commands
        self.redis_s = commands * per_s
        self.redis_busy = world.redis.peak * world.fleet.redis_primaries
        """Primaries that the commands would keep busy, in the busiest ten seconds."""
        records = _records(world) * world.scale
        self.redis_bytes = records * world.costs.redis.record_bytes
        """Memory of the index once ``ttl_s`` has passed."""
        bulk = world.bulk
        self.gets_s, self.puts_s = counts.gets * per_s, counts.puts * per_s
        self.partitions = max(self.gets_s / bulk.prefix_gets_s, self.puts_s / bulk.prefix_puts_s)
        """Of the bucket that these rates need, at the published rate for one."""
        sent_s = sum(host.send.busy_s for host in world.hosts)
        received_s = sum(host.receive.busy_s for host in world.hosts)
        self.nic = max(sent_s, received_s) / len(world.hosts) / world.span_s
        """Share of the time that a node's card is busy, in its busier direction."""
        self.put_bytes_s = self.puts_s * world.chunk_bytes
        self.stored_bytes = records * world.chunk_bytes + self.put_bytes_s * SWEEP_WAIT_S
        """Once ``ttl_s`` has passed, if new chunks keep coming as in the trace, and a sweep runs
        each hour."""
        self._pay(world, bare)

    def _pay(self, world: World, bare: "Summary | None") -> None:
        """Set what is spent and saved."""
        counts, bulk = world.counts, world.bulk
        per_s = world.scale / world.span_s
        fetched_bytes_s = counts.fetched * per_s * world.chunk_bytes
        requests_usd_s = self.gets_s * bulk.get_usd + self.puts_s * bulk.put_usd
        bytes_usd_s = fetched_bytes_s * bulk.get_gb_usd + self.put_bytes_s * bulk.put_gb_usd
        self.request_usd = 3600 * (requests_usd_s + bytes_usd_s / 1e9)
        hour_usd = bulk.gb_month_usd / _HOURS_OF_MONTH / 1e9
        self.storage_usd = self.stored_bytes * hour_usd
        written = sum(host.cache.disk_written for host in world.hosts) * per_s
        self.disk_usd = 3600 * written / 1e12 * world.costs.node.disk_usd_tb
        """Wear."""
        self.compute_s = counts.compute_s * per_s * world.model.gpus
        """GPU time of prefill."""
        spared_s = bare.compute_s - self.compute_s if bare else 0.0
        self.saved_usd = spared_s * world.costs.node.gpu_hour_usd
        """What the prefill that is not done would have cost, if its GPUs could be given back."""
        left_usd = self.saved_usd - self.request_usd - self.disk_usd
        self.left_usd = left_usd - self.storage_usd
        life_h = left_usd / (3600 * self.put_bytes_s * hour_usd) if self.storage_usd else 0.0
        self.pays_up_to_h = max(0.0, life_h)
        """The longest life of payloads at which no more is spent than saved; 0: none."""


COLUMNS: dict[str, Callable[[Summary], str]] = {
    "GPU %": lambda of: f"{100 * of.gpu:.1f}",
    "node %": lambda of: f"{100 * of.node:.1f}",
    "bucket %": lambda of: f"{100 * of.bulk:.1f}",
    "computed %": lambda of: f"{100 * of.computed:.1f}",
    "TTFT p50 s": lambda of: f"{of.ttft_p50_s:.2f}",
    "p90": lambda of: f"{of.ttft_p90_s:.1f}",
    "p99": lambda of: f"{of.ttft_p99_s:.1f}",
    "mean, of no objkv": lambda of: f"{of.ttft_ratio:.2f}",
    "drops %": lambda of: f"{100 * of.dropped:.0f}",
    "Redis/s": lambda of: f"{of.redis_s:,.0f}",
    "busy": lambda of: f"{of.redis_busy:.3f}",
    "GB": lambda of: f"{of.redis_bytes / 1e9:,.1f}",
    "PUT/s": lambda of: f"{of.puts_s:,.0f}",
    "GET/s": lambda of: f"{of.gets_s:,.0f}",
    "partitions": lambda of: f"{of.partitions:.2f}",
    "NIC %": lambda of: f"{100 * of.nic:.0f}",
    "requests $": lambda of: f"{of.request_usd / of.replicas:.2f}",
    "storage": lambda of: f"{of.storage_usd / of.replicas:.2f}",
    "disk": lambda of: f"{of.disk_usd / of.replicas:.2f}",
    "saved": lambda of: f"{of.saved_usd / of.replicas:.2f}",
    "left": lambda of: f"{of.left_usd / of.replicas:+.2f}",
    "pays up to h": lambda of: f"{of.pays_up_to_h:.0f}",
}
"""Dollars are those of a replica."""


def _records(world: World) -> float:
    """Chunks that the simulated part has in the index once ``ttl_s`` has passed.

    The trace is an hour long. A longer life is extrapolated: as many new chunks every hour. That is
    too much if prompts come back after an hour, which the trace cannot show.
    """
    ttl_s = world.settings.ttl_s
    if ttl_s <= world.span_s:
        return float(world.store.chunks_peak)
    return world.counts.puts / world.span_s * ttl_s
