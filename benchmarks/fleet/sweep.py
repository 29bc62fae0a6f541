"""Which fleets are compared: one thing is changed at a time, from one base."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.fleet.costs import Costs
from benchmarks.fleet.fleet import Fleet
from benchmarks.fleet.report import Summary, summarise
from benchmarks.fleet.simulate import Run, simulate
from benchmarks.fleet.trace import Request


@dataclass(frozen=True, slots=True)
class Case:
    """One fleet of a comparison."""

    group: str
    name: str
    fleet: Fleet


def changed(fleet: Fleet, **settings: Any) -> Fleet:
    """The fleet with these settings changed."""
    return replace(fleet, settings=replace(fleet.settings, **settings))


def cases(fleet: Fleet, costs: Costs) -> Iterator[Case]:
    """The default comparison: what ``run.py`` prints."""
    yield Case("objkv", "none", replace(fleet, shared=False))
    yield Case("objkv", "default settings", fleet)
    few = changed(fleet, ranges_max=16, save_threads=4)
    yield Case("connections", "24 and 4 savers", few)
    for store in costs.bulk:
        if store != fleet.bulk:
            yield Case("bulk", store, replace(fleet, bulk=store))
    for chunk in (512,):
        yield Case("chunk_tokens", str(chunk), changed(fleet, chunk_tokens=chunk))
    for ttl_s in (900, 3600, 86_400):
        yield Case("ttl_s", str(ttl_s), changed(fleet, ttl_s=ttl_s))
    yield Case("routing", "affine, no objkv", replace(fleet, routing="affine", shared=False))
    yield Case("routing", "affine", replace(fleet, routing="affine"))
    yield from scale_cases(fleet)


def scale_cases(fleet: Fleet, times: Sequence[int] = (10, 100, 512)) -> Iterator[Case]:
    """The base, larger: with primaries enough, and the largest with one only."""
    for factor in times:
        larger = replace(fleet, replicas=fleet.replicas * factor)
        enough = replace(larger, redis_primaries=10 * factor)
        yield Case("replicas", f"{larger.replicas}, enough primaries", enough)
    yield Case("replicas", f"{larger.replicas}, one primary", larger)


class Runs:
    """Runs fleets over one trace, each once."""

    def __init__(self, requests: Sequence[Request], costs: Costs) -> None:
        self._requests, self.costs = requests, costs
        self._done: dict[Fleet, Run] = {}

    def run(self, fleet: Fleet) -> Run:
        """The simulation of this fleet."""
        if fleet not in self._done:
            self._done[fleet] = simulate(self._requests, fleet, self.costs)
            self._done[fleet].world.empty()
        return self._done[fleet]

    def without(self, fleet: Fleet) -> Run:
        """The same fleet without objkv."""
        bare = replace(fleet, shared=False, settings=Fleet().settings, redis_primaries=1)
        return self.run(bare)

    def summary(self, case: Case) -> Summary:
        """Its figures, against the same fleet without objkv."""
        name = f"{case.group}: {case.name}"
        return summarise(name, self.run(case.fleet), self.without(case.fleet))
