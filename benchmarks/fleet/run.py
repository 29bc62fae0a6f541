"""Simulate a fleet over the request trace and print the effect of each setting.

    python benchmarks/fleet/run.py [--replicas 8] [--model llama-3.1-70b] [--json]

Without ``--trace`` it uses the included sample. The full trace is ``conversation_trace.jsonl`` in
the folder ``FAST25-release/traces`` of the public repository kvcache-ai/Mooncake. The
results are simulated from the figures in ``costs.toml``, and some of these are estimates.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

if __package__ in (None, ""):  # started as a script: its folder would hide modules of Python's own
    sys.path[0] = str(Path(__file__).parents[2])

from rich.console import Console
from rich.table import Table

from benchmarks.fleet.agents import all_rows, tables, with_nodes
from benchmarks.fleet.costs import COSTS_FILE, Costs, read_costs
from benchmarks.fleet.fleet import Fleet
from benchmarks.fleet.report import Summary
from benchmarks.fleet.sweep import Runs, cases
from benchmarks.fleet.trace import SAMPLE_FILE, Request, read_trace, reusable_share

_COLUMNS = (
    "GPU %", "bulk %", "computed %", "TTFT p50 s", "p90", "p99", "mean, of no objkv", "drops %",
    "Redis ops/s", "busy", "GB", "PUT/s", "GET/s", "NIC %", "store $/h", "GPU $/h saved",
)  # fmt: skip


def cells(summary: Summary, without_s: float) -> list[str]:
    """One row of the table; money is for one replica."""
    nic = max(summary.nic_receive, summary.nic_send)
    return [
        f"{100 * summary.gpu:.1f}",
        f"{100 * (summary.bulk):.1f}",
        f"{100 * summary.computed:.1f}",
        f"{summary.ttft_p50_s:.2f}",
        f"{summary.ttft_p90_s:.1f}",
        f"{summary.ttft_p99_s:.1f}",
        f"{summary.ttft_mean_s / without_s:.2f}",
        f"{100 * summary.dropped:.0f}",
        f"{summary.redis_ops_s:,.0f}",
        f"{summary.redis_busy:.3f}",
        f"{summary.redis_bytes / 1e9:,.1f}",
        f"{summary.puts_s:,.0f}",
        f"{summary.gets_s:,.0f}",
        f"{100 * nic:.0f}",
        f"{summary.usd / summary.replicas:.2f}",
        f"{summary.gpu_usd_saved / summary.replicas:.2f}",
    ]


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, default=SAMPLE_FILE)
    parser.add_argument("--costs", type=Path, default=COSTS_FILE)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--model", default=Fleet().model)
    parser.add_argument("--bulk", default=Fleet().bulk)
    parser.add_argument("--load", type=float, default=Fleet().load)
    parser.add_argument(
        "--simulated", type=int, default=4, help="maximum number of simulated replicas"
    )
    parser.add_argument(
        "--agents", action="store_true", help="compare which payloads agents put into the bucket"
    )
    parser.add_argument(
        "--replicas-per-node", type=int, default=4, help="of one agent, with --agents"
    )
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def print_agents(
    given: argparse.Namespace, costs: Costs, requests: list[Request], fleet: Fleet
) -> None:
    """Simulate node agents and print. All replicas are simulated."""
    try:
        costs = with_nodes(costs, given.model, given.replicas_per_node)
    except ValueError as exc:
        raise SystemExit(str(exc)) from exc
    found = all_rows(requests, costs, replace(fleet, simulated_max=fleet.replicas))
    if given.json:
        print(json.dumps({"trace_requests": len(requests), "cases": [r.as_json() for r in found]}))
        return
    console = Console(width=max(230, Console().width))
    for one in tables(found):
        console.print(one)
    console.print(
        f"{fleet.replicas} replicas of {given.model}, {given.replicas_per_node} on a node; dollars "
        "are the fleet's in an hour. Pays up to: hours that a payload is stored."
    )


def main() -> None:
    """Simulate and print."""
    given = options()
    costs, requests = read_costs(given.costs), read_trace(given.trace)
    for name, known in ((given.model, costs.models), (given.bulk, costs.bulk)):
        if name not in known:
            raise SystemExit(f"{name!r}: {given.costs} has {', '.join(known)}")
    try:
        fleet = Fleet(
            replicas=given.replicas,
            model=given.model,
            bulk=given.bulk,
            load=given.load,
            simulated_max=given.simulated,
        )
    except ValueError as exc:
        raise SystemExit(str(exc)) from exc
    if given.agents:
        print_agents(given, costs, requests, fleet)
        return
    runs = Runs(requests, costs)
    table = Table(title=f"simulated: {fleet.replicas} replicas of {fleet.model} on {fleet.bulk}")
    table.add_column("what", no_wrap=True)
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    summaries = []
    for case in cases(fleet, costs):
        summary = runs.summary(case)
        summaries.append(summary)
        bare = runs.without(case.fleet).world.counts.ttft_s
        table.add_row(summary.name, *cells(summary, sum(bare) / len(bare)))
    share = reusable_share(requests)
    if given.json:
        found = {"trace_requests": len(requests), "reusable_blocks": share}
        print(json.dumps(found | {"cases": [summary.as_json() for summary in summaries]}))
        return
    console = Console(width=max(190, Console().width))
    console.print(table)
    console.print(
        f"{len(requests):,} requests; an infinite shared cache would have had {100 * share:.1f} % "
        "of their blocks. GB: Redis index after ttl_s. Money: for one replica, list prices."
    )


if __name__ == "__main__":
    main()
