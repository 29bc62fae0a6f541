"""Replicas live at random for as long as asked, while what is under them fails.

    .venv/bin/python benchmarks/soak.py --minutes 10 --faults [--replicas 2] [--json]
    .venv/bin/python benchmarks/soak.py --minutes 10 --engine none [--s3]

Real vLLM engines on the CPU, each a process, share one Redis and one bucket. Requests on shared
stems come in bursts, are aborted and preempted; engines forget, sleep, update their weights. With
``--faults`` answers of both servers are refused, late, cut short, changed or never come, servers
die and come back empty, stored bytes change, and engines are killed. Every answer is compared with
that of an engine without a connector.

``--engine none`` is the quick form, of transfers alone, with faults in any case: see
``soak_transfers.py``.

Ends with exit code 1 if any answer was wrong or never came, anything was logged as an error, or
slabs, blocks, threads, files or memory are left or grow.
"""

import argparse
import json
import sys
from pathlib import Path

if not __package__:  # run by its path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console


def main() -> int:
    """Soak, print, and tell by the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, help="instead of --minutes")
    parser.add_argument("--engine", choices=("vllm", "none"), default="vllm")
    parser.add_argument("--faults", action="store_true", help="make servers and engines fail")
    parser.add_argument("--replicas", type=int, help="default: 2 engines, or 3 without")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--s3", action="store_true", help="--engine none: on a Ceph radosgw")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=Path, help="a picture of memory, files and slabs over time")
    parser.add_argument("--keep", type=Path, help="where the engines' logs go if it breaks")
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
