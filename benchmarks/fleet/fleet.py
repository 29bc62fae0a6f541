"""What is simulated: the fleet, objkv's settings in it under the names that they have there, and
the fleets that are compared: one thing is changed at a time, from one base."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from benchmarks.fleet.costs import Costs
from objkv.cache.worth import SWEEP_WAIT_S, ChunkCost, PutRule, Puts
from objkv.config.prices import Prices

Routing = Literal["random", "affine"]
DISK_BYTES = 4e12
"""Of each node, where the agents have a disk."""
_STEP_TOKENS = 2048
"""Of a prompt's beginning, by which the GPU time of a token is taken."""


@dataclass(frozen=True, slots=True)
class Settings:
    """objkv's settings with objkv's defaults."""

    chunk_tokens: int = 256
    """A divisor or a multiple of the trace's blocks."""
    ttl_s: float = 14_400
    load_threads: int = 8
    lookup_deadline_ms: int = 500
    load_deadline_ms: int = 30_000
    save_to_bucket: Literal["auto", "all", "reused"] = "auto"


@dataclass(frozen=True, slots=True)
class Fleet:
    """How many replicas, of what, under which load, and how they are asked. Each node has an
    agent."""

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
    disk_bytes: float = 0.0
    """Of each agent."""
    simulated_max: int = 4
    """At most so many replicas are simulated (whole nodes); the rest adds to what is shared."""
    settings: Settings = Settings()

    def simulated(self, costs: Costs) -> int:
        """Replicas that are simulated: whole nodes, one at least."""
        node = costs.models[self.model].replicas_per_host
        return min(self.replicas, max(node, self.simulated_max // node * node))

    def puts(self, costs: Costs) -> Puts:
        """What ``save_to_bucket`` decides, once the GPU time of a chunk is known."""
        model, bulk, settings = costs.models[self.model], costs.bulk[self.bulk], self.settings
        prices = Prices(
            bulk.gb_month_usd,
            1000 * bulk.put_usd,
            1000 * bulk.get_usd,
            gpu_hour=costs.node.gpu_hour_usd,
            put_gb=bulk.put_gb_usd,
            source=self.bulk,
        )
        life_s, has_disk = settings.ttl_s + SWEEP_WAIT_S, self.disk_bytes > 0
        rule = PutRule(settings.save_to_bucket, prices, life_s, has_disk)
        tokens = settings.chunk_tokens
        gpu_s = model.gpus * model.prefill_s(0, _STEP_TOKENS) * tokens / _STEP_TOKENS
        return rule.decide(ChunkCost(1, model.token_bytes * tokens, gpu_s)).puts


def changed(fleet: Fleet, **settings: Any) -> Fleet:
    """The fleet with these settings changed."""
    return replace(fleet, settings=replace(fleet.settings, **settings))


def cases(fleet: Fleet, costs: Costs) -> Iterator[tuple[str, Fleet]]:
    """The fleets that are compared, by what is special about them."""
    for routing in ("random", "affine"):
        routed = replace(fleet, routing=routing)
        yield f"{routing} routing, no objkv", replace(routed, shared=False)
        yield f"{routing} routing, default settings", routed
        yield f"{routing} routing, reused", changed(routed, save_to_bucket="reused")
        yield f"{routing} routing, disk of 4 TB", replace(routed, disk_bytes=DISK_BYTES)
    for threads in (2, 32):
        yield f"load_threads {threads}", changed(fleet, load_threads=threads)
    for store in costs.bulk:
        if store != fleet.bulk:
            yield f"bulk {store}", replace(fleet, bulk=store)
    yield "chunk_tokens 512", changed(fleet, chunk_tokens=512)
    for ttl_s in (900, 3600, 86_400):
        yield f"ttl_s {ttl_s}", changed(fleet, ttl_s=ttl_s)
    for factor in (10, 100, 512):
        larger = replace(fleet, replicas=fleet.replicas * factor)
        enough = replace(larger, redis_primaries=10 * factor)
        yield f"{larger.replicas} replicas, enough primaries", enough
    yield f"{larger.replicas} replicas, one primary", larger
