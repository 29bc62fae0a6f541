"""Run replicas with random requests while servers and stores fail.

    .venv/bin/python benchmarks/soak.py --minutes 10 --faults [--replicas 2] [--json]
    .venv/bin/python benchmarks/soak.py --minutes 10 --engine none [--s3]

Real vLLM engines on the CPU, one process each, share one Redis and one bucket. Requests with shared
prefixes arrive in bursts and are aborted or preempted. Engines drop their caches, sleep and update
their weights. With ``--faults`` both servers refuse, delay, truncate, change or lose responses, die
and return empty; stored bytes change, and engines are killed. Every answer is compared with that of
an engine without a connector.

``--engine none`` is the quick form, which only transfers and always injects faults: see
``soak_transfers.py``.

Exits with 1 if an answer was wrong or missing, if an error was logged, or if slabs, blocks,
threads, files or memory leak.
"""

import argparse
import json
import sys
from pathlib import Path

if not __package__:  # run by its path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console


def main() -> int:
    """Run the soak, print the result and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, help="duration, instead of --minutes")
    parser.add_argument("--engine", choices=("vllm", "none"), default="vllm")
    parser.add_argument("--faults", action="store_true", help="make servers and engines fail")
    parser.add_argument("--replicas", type=int, help="default: 2 engines, or 3 without")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--s3", action="store_true", help="with --engine none: use a Ceph radosgw")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=Path, help="draw memory, files and slabs over time here")
    parser.add_argument("--keep", type=Path, help="copy the engines' logs here if the soak fails")
    arguments = parser.parse_args()
    if arguments.seconds is None:
        arguments.seconds = 60 * arguments.minutes
    if arguments.replicas is None:
        arguments.replicas = 2 if arguments.engine == "vllm" else 3
    if arguments.engine == "none":
        from benchmarks import soak_transfers

        return soak_transfers.run(arguments)
    from benchmarks import soak_engine

    console = Console(stderr=arguments.json)
    result = soak_engine.soak(arguments, console)
    if arguments.plot is not None:
        from benchmarks.soak_picture import draw

        draw(result, arguments.plot)
    if arguments.json:
        print(json.dumps(result))
    else:
        soak_engine.show(result, console)
    return 1 if result["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
