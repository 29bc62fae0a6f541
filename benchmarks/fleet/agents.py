"""The fleet with an agent per node: what is put into the bucket, what that costs and what it saves.

``run.py --agents`` prints it. The second half of the trace is simulated, from empty caches on: the
defaults were chosen on the first.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.table import Table

from benchmarks.fleet.costs import Costs
from benchmarks.fleet.fleet import Agents, Fleet, Policy, Routing
from benchmarks.fleet.report import Summary
from benchmarks.fleet.sweep import Case, Runs
from benchmarks.fleet.trace import Request
from objkv.cache.worth import SWEEP_WAIT_S, ChunkCost, PutRule
from objkv.config.prices import Prices

ARENA_SHARE = 1 / 8
"""objkv's default: of the node's memory."""
LIFE_H = 4.5
"""How long a payload is stored: ``ttl_s`` of 14,400 and a sweep each hour."""
_TB = 1e12
_GB_MONTH_HOURS = 730.0
_COLUMNS = (
    "GPU %", "node %", "bucket %", "loaded, of no agents", "put TB/h", "put, of no agents",
    "drops %", "PUT M/h", "GET M/h", "requests $/h", "disk wear", "GPU time saved", "pays up to h",
    "left $", "TTFT p50 s", "mean",
)  # fmt: skip
_STEP_TOKENS = 2048
"""Of a prompt's beginning, by which the GPU time of a token is taken."""


@dataclass(frozen=True, slots=True)
class Row:
    """One fleet, beside the same without agents. Dollars and bytes are the whole fleet's in an
    hour, at list prices."""

    routing: str
    name: str
    found: Summary
    base: Summary
    storage_usd_h: float
    """For each hour that a payload is stored."""
    disk_usd: float

    @property
    def node(self) -> float:
        """Share of prompt tokens loaded from the agent's memory or disk."""
        return self.found.arena + self.found.disk

    @property
    def requests_usd(self) -> float:
        """What the bucket costs besides storage."""
        return self.found.request_usd + self.found.egress_usd

    @property
    def pays_up_to_h(self) -> float:
        """The longest life of payloads at which no more is spent than saved; 0: none."""
        left = self.found.gpu_usd_saved - self.requests_usd - self.disk_usd
        return max(0.0, left / self.storage_usd_h) if self.storage_usd_h else 0.0

    @property
    def net_usd(self) -> float:
        """GPU time saved without what is spent, if payloads live for ``LIFE_H``."""
        spent = self.requests_usd + self.disk_usd + self.storage_usd_h * LIFE_H
        return self.found.gpu_usd_saved - spent

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"pays_up_to_h": self.pays_up_to_h, "net_usd": self.net_usd}


def with_nodes(costs: Costs, model: str, replicas: int) -> Costs:
    """The same costs with so many replicas of the model on each node. Raises ``ValueError``."""
    if replicas < 1:
        raise ValueError("a node has at least one replica")
    known = costs.models[model]
    models = costs.models | {model: replace(known, replicas_per_host=replicas)}
    return replace(costs, models=models)


def cases(fleet: Fleet, costs: Costs) -> Iterator[Case]:
    """Without agents, then with the default arena and one thing changed at a time."""

    def agents(policy: Policy, disk_tb: float = 0) -> Fleet:
        memory = costs.node.memory_bytes * ARENA_SHARE
        return replace(fleet, agents=Agents(memory, disk_tb * _TB, save_to_bucket=policy))

    found = {
        "no agents": fleet,
        "all": agents("all"),
        "reused": agents("reused"),
        "auto (default)": agents(decided(fleet, costs)),
        "reused, disk 4 TB": agents("reused", 4),
    }
    for name, case in found.items():
        yield Case("agents", name, case)


def decided(fleet: Fleet, costs: Costs) -> Policy:
    """What ``auto`` puts, once the GPU time of a chunk is known."""
    model, bulk, settings = costs.models[fleet.model], costs.bulk[fleet.bulk], fleet.settings
    prices = Prices(
        bulk.gb_month_usd,
        1000 * bulk.put_usd,
        1000 * bulk.get_usd,
        gpu_hour=costs.client.gpu_hour_usd,
        put_gb=bulk.put_gb_usd,
        source=fleet.bulk,
    )
    rule = PutRule("auto", prices, settings.ttl_s + SWEEP_WAIT_S)
    tokens = settings.chunk_tokens
    payload = model.token_bytes * tokens
    gpu_s = model.gpus * model.prefill_s(0, _STEP_TOKENS) * tokens / _STEP_TOKENS
    return rule.decide(ChunkCost(1, payload, gpu_s)).puts


def all_rows(requests: Sequence[Request], costs: Costs, fleet: Fleet) -> list[Row]:
    """The second half of the trace with both routings."""
    half = requests[len(requests) // 2 :]
    half = [replace(one, at_s=one.at_s - half[0].at_s) for one in half]
    runs, out = Runs(half, costs), list[Row]()
    routings: tuple[Routing, ...] = ("random", "affine")
    for routing in routings:
        base: Summary | None = None
        for case in cases(replace(fleet, routing=routing), costs):
            summary = runs.summary(case)
            base = base or summary
            out.append(_row(case, runs, (summary, base)))
    return out


def tables(found: Sequence[Row]) -> Iterator[Table]:
    """One table for each routing."""
    for routing in dict.fromkeys(row.routing for row in found):
        out = Table(title=f"{routing} routing")
        out.add_column("save_to_bucket", no_wrap=True)
        for column in _COLUMNS:
            out.add_column(column, justify="right")
        for row in found:
            if row.routing == routing:
                out.add_row(row.name, *_cells(row))
        yield out


def _row(case: Case, runs: Runs, summaries: tuple[Summary, Summary]) -> Row:
    summary, base = summaries
    run = runs.run(case.fleet)
    world, per_h = run.world, 3600 * run.world.scale / run.span_s
    written = sum(host.cache.disk_written for host in world.hosts) * per_h
    gb_h = 3600 * summary.saved_bytes_s / 1e9
    return Row(
        case.fleet.routing,
        case.name,
        summary,
        base,
        storage_usd_h=gb_h * world.bulk.gb_month_usd / _GB_MONTH_HOURS,
        disk_usd=written / _TB * world.costs.node.disk_usd_tb,
    )


def _cells(row: Row) -> list[str]:
    found, base = row.found, row.base
    return [
        *(f"{100 * share:.1f}" for share in (found.gpu, row.node, found.bulk)),
        f"{(row.node + found.bulk) / max(base.bulk, 1e-9):.2f}",
        f"{3600 * found.saved_bytes_s / _TB:.1f}",
        f"{found.saved_bytes_s / max(base.saved_bytes_s, 1e-9):.2f}",
        f"{100 * found.dropped:.0f}",
        f"{3600 * found.puts_s / 1e6:.2f}",
        f"{3600 * found.gets_s / 1e6:.2f}",
        f"{row.requests_usd:.1f}",
        f"{row.disk_usd:.1f}",
        f"{found.gpu_usd_saved:.1f}",
        f"{row.pays_up_to_h:.0f}",
        f"{row.net_usd:+.1f}",
        f"{found.ttft_p50_s:.2f}",
        f"{found.ttft_mean_s:.2f}",
    ]
