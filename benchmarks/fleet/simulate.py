"""The simulation: requests arrive, are looked up, loaded, computed and saved, event by event.

A replica computes one prompt after the other, in the order in which their loads end; loads and
saves go on beside. Decoding, steps and failures are left out: see ``docs/scaling.md``.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.fleet.costs import Costs
from benchmarks.fleet.fleet import Fleet
from benchmarks.fleet.loading import load, lookup
from benchmarks.fleet.saving import save
from benchmarks.fleet.trace import BLOCK_TOKENS, Population, Request, arrivals, kept, span_s
from benchmarks.fleet.world import Job, World

_CONVERSATIONS_MIN = 50
"""Fewer would be no population: then time is stretched instead."""
_ARRIVES, _LOOKED_UP, _READY, _COMPUTED = range(4)


@dataclass(frozen=True, slots=True)
class Run:
    """A simulation that has ended."""

    world: World
    span_s: float
    """Length of the trace as it was laid over the fleet."""
    end_s: float
    """When the last prompt was computed."""


def population(requests: Sequence[Request], fleet: Fleet, costs: Costs) -> Population:
    """So many copies of the trace that the simulated replicas are loaded as ``fleet.load`` says.

    Where whole copies would be too many, each lacks some conversations; time is stretched a little
    so that the load comes out exactly.
    """
    model = costs.models[fleet.model]
    time_s = fleet.simulated(costs) * fleet.load * span_s(requests)
    wanted = time_s / sum(model.prefill_s(0, request.tokens) for request in requests)
    copies = max(1, math.ceil(wanted))
    share = max(wanted / copies, _CONVERSATIONS_MIN / len(requests))
    work_s = sum(
        model.prefill_s(0, request.tokens)
        for copy in range(copies)
        for request in kept(requests, copy, share)
    )
    return Population(copies, work_s / time_s, fleet.overlap, fleet.seed, share)


def simulate(requests: Sequence[Request], fleet: Fleet, costs: Costs) -> Run:
    """Run the fleet over the trace, from empty caches on."""
    world, laid = World(fleet, costs), population(requests, fleet, costs)
    events: list[tuple[float, int, int, Job]] = []
    serial = 0
    end_s = 0.0
    coming = iter(arrivals(requests, laid))
    arrival = next(coming, None)
    while arrival is not None or events:
        if arrival is not None and (not events or arrival.at_s <= events[0][0]):
            now, kind = arrival.at_s, _ARRIVES
            job = world.place(arrival, now)
            arrival = next(coming, None)
        else:
            now, _, kind, job = heapq.heappop(events)
        following = _advance(world, job, now, kind)
        if following is not None:
            serial += 1
            heapq.heappush(events, (following[0], serial, following[1], job))
        end_s = max(end_s, now)
    return Run(world, span_s(requests) * laid.stretch, end_s)


def _advance(world: World, job: Job, now: float, kind: int) -> tuple[float, int] | None:
    """Let happen what happens now; returns when what comes next for this request."""
    if kind == _ARRIVES:
        world.counts.requests += 1
        world.counts.prompt += job.arrival.tokens
        if not world.fleet.shared:
            return load(world, job, now, 0), _READY
        job.stored, took_s = lookup(world, job, now)
        return now + took_s, _LOOKED_UP
    if kind == _LOOKED_UP:
        return load(world, job, now, job.stored), _READY
    tokens = job.arrival.tokens
    if kind == _READY:
        work_s = world.model.prefill_s(job.reused, tokens)
        world.counts.computed += tokens - job.reused
        world.counts.compute_s += work_s
        job.start_s = job.replica.prefill.start_s(now)
        return job.replica.prefill.take(now, work_s), _COMPUTED
    world.counts.ttft_s.append(now - job.arrival.at_s)
    sizes = [BLOCK_TOKENS] * len(job.private)
    sizes[-1] = tokens - BLOCK_TOKENS * (len(sizes) - 1)
    job.replica.cache.add(job.private, sizes)
    if world.fleet.shared:
        save(world, job, job.start_s, now)
    return None
