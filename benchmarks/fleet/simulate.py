"""The simulation: requests arrive, are looked up, loaded, computed and saved, event by event.

A replica works in steps, as vLLM does: a step goes on with the prompt that was begun, then takes
those that were loaded, then those that wait, until it has ``STEP_TOKENS``. Whether a request loads
is decided when it is taken; its load goes on beside, and the step takes the next. Decoding and
failures are left out: see ``docs/scaling.md``.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.fleet.agent import load, lookup, save
from benchmarks.fleet.costs import Costs
from benchmarks.fleet.fleet import Fleet
from benchmarks.fleet.trace import BLOCK_TOKENS, Population, Request, arrivals, kept, span_s
from benchmarks.fleet.world import Job, Replica, World

_CONVERSATIONS_MIN = 50
"""Fewer would be no population: then time is stretched instead."""
STEP_TOKENS = 8192
"""vLLM's default ``max_num_batched_tokens`` on an H100."""


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
    return Population(copies, work_s / time_s, share)


def simulate(requests: Sequence[Request], fleet: Fleet, costs: Costs) -> World:
    """Run the fleet over the trace, from empty caches on. Returns what it has come to."""
    laid = population(requests, fleet, costs)
    world = World(fleet, costs, span_s(requests) * laid.stretch)
    Replay(world).run(arrivals(requests, laid))
    return world


class Replay:
    """What happens to the arrivals, in the order of its time."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._serial = 0

    def run(self, coming: Sequence[Request]) -> None:
        """Let everything happen."""
        for arrival in coming:
            self._happen(arrival.at_s)
            self._arrive(arrival)
        self._happen(math.inf)

    def _happen(self, until_s: float) -> None:
        while self._events and self._events[0][0] < until_s:
            now, _, event = heapq.heappop(self._events)
            event(now)

    def _at(self, at_s: float, event: Callable[[float], None]) -> None:
        self._serial += 1
        heapq.heappush(self._events, (at_s, self._serial, event))

    def _arrive(self, arrival: Request) -> None:
        world, now = self._world, arrival.at_s
        world.counts.prompt += arrival.tokens
        job = world.place(arrival)
        if not world.fleet.shared:
            self._wait(job, now)
            return
        job.stored, took_s = lookup(world, job, now)
        self._at(now + took_s, partial(self._wait, job))

    def _wait(self, job: Job, now: float) -> None:
        job.computed = min(job.replica.cache.match(job.private), job.arrival.tokens - 1)
        job.replica.waiting.append(job)
        self._wake(job.replica, now)

    def _loaded(self, job: Job, now: float) -> None:
        job.replica.loaded.append(job)
        self._wake(job.replica, now)

    def _wake(self, replica: Replica, now: float) -> None:
        if not replica.is_stepping:
            self._step(replica, now)

    def _step(self, replica: Replica, now: float) -> None:
        """Plan a step and let it end when its tokens are computed."""
        batch, end_s = list[Job](), now
        room = STEP_TOKENS
        while room and (job := self._take(replica, now)):
            tokens = min(room, job.arrival.tokens - job.computed)
            if job.computed == job.reused:
                job.start_s = end_s
            end_s += self._world.model.prefill_s(job.computed, job.computed + tokens)
            job.computed += tokens
            room -= tokens
            batch.append(job)
        replica.is_stepping = bool(batch)
        if batch:
            self._at(end_s, partial(self._step_ended, replica, batch))

    def _take(self, replica: Replica, now: float) -> Job | None:
        """The next request to compute; loads of those before it are begun."""
        if replica.running:
            job, replica.running = replica.running, None
            return job
        if replica.loaded:
            return replica.loaded.popleft()
        world = self._world
        while replica.waiting:
            job = replica.waiting.popleft()
            ready_s = load(world, job, now)
            job.computed = job.reused
            work_s = world.model.prefill_s(job.reused, job.arrival.tokens)
            world.counts.computed += job.arrival.tokens - job.reused
            world.counts.compute_s += work_s
            if ready_s <= now:
                return job
            self._at(ready_s, partial(self._loaded, job))
        return None

    def _step_ended(self, replica: Replica, batch: list[Job], now: float) -> None:
        for job in batch:
            if job.computed < job.arrival.tokens:
                replica.running = job
            else:
                self._computed(job, now)
        self._step(replica, now)

    def _computed(self, job: Job, now: float) -> None:
        world, tokens = self._world, job.arrival.tokens
        world.counts.ttft_s.append(now - job.arrival.at_s)
        sizes = [BLOCK_TOKENS] * len(job.private)
        sizes[-1] = tokens - BLOCK_TOKENS * (len(sizes) - 1)
        job.replica.cache.add(job.private, sizes)
        if world.fleet.shared:
            save(world, job, job.start_s, now)
