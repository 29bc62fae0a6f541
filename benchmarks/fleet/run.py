"""Simulate a fleet with an agent per node over the request trace, and print the effect of each
setting.

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

from benchmarks.fleet.costs import read_costs
from benchmarks.fleet.fleet import Fleet, Settings, cases
from benchmarks.fleet.report import COLUMNS, Summary
from benchmarks.fleet.simulate import simulate
from benchmarks.fleet.trace import SAMPLE_FILE, read_trace, reusable_share


def main() -> None:
    """Simulate and print."""
    default, costs = Fleet(), read_costs()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, default=SAMPLE_FILE)
    parser.add_argument("--replicas", type=int, default=default.replicas)
    parser.add_argument("--model", choices=costs.models, default=default.model)
    parser.add_argument("--bulk", choices=costs.bulk, default=default.bulk)
    parser.add_argument("--load", type=float, default=default.load)
    parser.add_argument("--simulated", type=int, default=default.simulated_max, help="at most")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    requests = read_trace(given.trace)
    base = Fleet(
        replicas=given.replicas,
        model=given.model,
        bulk=given.bulk,
        load=given.load,
        simulated_max=given.simulated,
    )
    bare: dict[Fleet, Summary] = {}
    found = []
    for name, fleet in cases(base, costs):
        without = replace(fleet, shared=False, bulk=base.bulk, redis_primaries=1, disk_bytes=0.0)
        without = replace(without, settings=Settings())
        if without not in bare:
            bare[without] = Summary(name, simulate(requests, without, costs), None)
        if fleet == without:
            found.append(bare[without])
        else:
            found.append(Summary(name, simulate(requests, fleet, costs), bare[without]))
    share = reusable_share(requests)
    if given.json:
        document = {"trace_requests": len(requests), "reusable_blocks": share}
        print(json.dumps(document | {"cases": [vars(summary) for summary in found]}))
        return
    table = Table(title=f"simulated: {base.replicas} replicas of {base.model} on {base.bulk}")
    table.add_column("what", no_wrap=True)
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for summary in found:
        table.add_row(summary.name, *(shown(summary) for shown in COLUMNS.values()))
    console = Console(width=max(230, Console().width))
    console.print(table)
    console.print(
        f"{len(requests):,} requests; an infinite shared cache would have had {100 * share:.1f} % "
        "of their blocks. GB: Redis index after ttl_s. Dollars of a replica in an hour, at list "
        "prices. Pays up to: hours that a payload is stored."
    )


if __name__ == "__main__":
    main()
