"""Fleets that tests simulate: small, quick, and one in which nothing takes any time."""

from dataclasses import replace
from typing import Any

from benchmarks.fleet.costs import Costs, read_costs
from benchmarks.fleet.fleet import Fleet
from benchmarks.fleet.simulate import Run, simulate
from benchmarks.fleet.trace import Request, read_trace

COSTS = read_costs()
SAMPLE = read_trace()
SMALL = Fleet(replicas=2, simulated_max=2, load=0.15)


def with_settings(fleet: Fleet, **settings: Any) -> Fleet:
    """The fleet with some of objkv's settings changed."""
    return replace(fleet, settings=replace(fleet.settings, **settings))


def run(fleet: Fleet, costs: Costs = COSTS, requests: list[Request] = SAMPLE) -> Run:
    """One simulation."""
    return simulate(requests, fleet, costs)


def timeless(model: str) -> Costs:
    """Costs without any: a store that answers at once, GPUs that compute at once and keep
    nothing."""
    at_once = replace(COSTS.models[model], peak_flops=1e30, gpu_cache_bytes=0.0)
    bulk = replace(COSTS.bulk["lan"], first_byte_s=0.0, connection_bytes_s=1e30)
    redis = replace(
        COSTS.redis,
        round_trip_s=0.0,
        lookup_s=0.0,
        touch_s=0.0,
        save_command_s=0.0,
        client_s_per_chunk=0.0,
    )
    client = replace(COSTS.client, load_bytes_s=1e30, save_bytes_s=1e30, nic_bytes_s=1e30)
    return Costs({model: at_once}, {"lan": bulk}, redis, client, COSTS.node)
