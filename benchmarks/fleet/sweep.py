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
    for ranges, savers in ((16, 4), (0, 16), (16, 16), (120, 16), (56, 4), (56, 8)):
        case = changed(fleet, ranges_max=ranges, save_threads=savers)
        yield Case("connections", f"ranges {ranges}, save {savers}", case)
    for store in costs.bulk:
        if store != fleet.bulk:
            yield Case("bulk", store, replace(fleet, bulk=store))
    for admission in ("never", "always", "alone"):
        yield Case("admission", admission, changed(fleet, admission=admission))
    for chunk in (128, 512, 1024, 2048):
        yield Case("chunk_tokens", str(chunk), changed(fleet, chunk_tokens=chunk))
    for ttl_s in (60, 300, 900, 3600, 86_400, 7 * 86_400):
        yield Case("ttl_s", str(ttl_s), changed(fleet, ttl_s=ttl_s))
    for quota in (0.1, 0.3, 1.0):
        bytes_max = quota * 1e12 * fleet.replicas
        yield Case("quota", f"{quota} TB a replica", changed(fleet, quota_bytes=bytes_max))
    yield Case("routing", "affine, no objkv", replace(fleet, routing="affine", shared=False))
    yield Case("routing", "affine", replace(fleet, routing="affine"))
    every = changed(fleet, hot_save_bytes_max=1 << 30, hot_bytes=1e12)
    yield Case("hot", "1 TB of Redis", every)
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
