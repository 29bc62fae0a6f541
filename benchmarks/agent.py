"""Measure what loads from a node agent's memory leave to the engine's other threads.

    python -m benchmarks.agent [--rounds N] [--json]

A worker loads a gigabyte into a paged cache while another thread of its process counts. How much
less it counts than alone is the time for which loads held the interpreter's lock, and what the two
took from each other on one core.

``step_p99`` is the 99th percentile of the time in which that thread counts to 20,000, about a
millisecond, as a share of what it is alone: so much longer a scheduler's slowest steps take.
``python_ms_per_gb`` is the processor time of all threads of the worker for the same load without
its copies and system calls, which do not hold the lock. A busy machine disturbs it little, a slow
hour of a shared one as much as everything else.
"""

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import numpy as np

from benchmarks.worker import (
    BLOCK,
    BLOCKS,
    BOUND_S,
    CHUNK,
    LLAMA_8B,
    Side,
    moves_of,
    saves_of,
    step_of,
    stored,
)
from objkv.connector.model.groups import Geometry
from objkv.transfer.loading.loader import Loader
from objkv.transfer.plan import LoadPlan
from tests.support.agents import AgentProcess
from tests.support.paged_cache import paged_group
from tests.support.plans import LoadMove

CHUNKS = 32
NAMESPACE = "0123456789abcdef" * 2
REPEATS = 20
"""Loads without copies per round: the kernel divides processor time by ticks of milliseconds."""
STEP, ALONE_S = 20_000, 1.0


class Counting:
    """A thread that counts, as a scheduler that is busy in Python does."""

    def __init__(self) -> None:
        self.count = 0
        self.steps: list[float] = []
        """When each step of ``STEP`` counts ended."""
        self._ended = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended:
            for _ in range(STEP):
                self.count += 1
            self.steps.append(time.perf_counter())

    def during(self, work: Callable[[], object]) -> tuple[float, int, float]:
        """Return the seconds of ``work``, what was counted meanwhile, and the 99th percentile of
        the duration of a step."""
        before, begun = self.count, time.perf_counter()
        work()
        ended, counted = time.perf_counter(), self.count - before
        steps = np.diff([step for step in self.steps if begun <= step <= ended])
        return ended - begun, counted, float(np.percentile(steps, 99)) if len(steps) else np.nan

    def end(self) -> None:
        """Stop it."""
        self._ended = True
        self._thread.join()


def load_once(loads: Loader, plan: LoadPlan) -> float:
    """Load the prompt; the seconds it took."""
    begun = time.perf_counter()
    loads.submit(plan)
    loads.wait_over(BOUND_S)
    assert not loads.take_finished(sync=False)[0].failed_blocks
    return time.perf_counter() - begun


def without_copies(loads: Loader, plan: LoadPlan) -> float:
    """Return the processor seconds of Python for a load that copies nothing."""

    def nothing(*_: object) -> None: ...

    with mock.patch.object(np, "copyto", nothing):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
        for _ in range(REPEATS):
            load_once(loads, plan)
        return (resource.getrusage(resource.RUSAGE_SELF).ru_utime - before) / REPEATS


def held(loads: Loader, plan: LoadPlan) -> tuple[float, float, float]:
    """Load beside a counting thread. Return the load's seconds, for how many of them others than
    the counter held the lock, and the 99th percentile of its steps by what it is alone."""
    counting = Counting()
    alone_s, alone, alone_p99_s = counting.during(lambda: time.sleep(ALONE_S))
    seconds, counted, p99_s = counting.during(lambda: load_once(loads, plan))
    counting.end()
    return seconds, seconds - counted * alone_s / alone, p99_s / alone_p99_s


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="objkv-")))
        settings = {
            "bulk_url": f"file://{folder}/c",
            "index_url": f"sqlite://{folder}/i",
            "agent_memory_bytes": "2GiB",
        }
        agent = stack.enter_context(AgentProcess(settings, fresh=True))
        side, gigabytes = opened(stack, agent.url)
        (plan,) = step_of(NAMESPACE, saved(side)).loads
        document = measure(side.worker.loader, plan, options.rounds, gigabytes)
    show({"agent": document}, as_json=options.json)


def opened(stack: ExitStack, url: str) -> tuple[Side, float]:
    """A worker, and the gigabytes of the prompt that it has."""
    blocks = 1 + CHUNKS * BLOCKS
    paged, caches = paged_group(LLAMA_8B, chunk_tokens=CHUNK, num_blocks=blocks, seed=1)
    side = Side(stack, {"agent": url}, Geometry((LLAMA_8B,), CHUNK, BLOCK, tp_size=1), caches)
    return side, CHUNKS * paged.raw_bytes / 1e9


def saved(side: Side) -> list[LoadMove]:
    """Save the prompt; the moves that load it."""
    tokens, blocks = range(CHUNKS * CHUNK), range(1, 1 + CHUNKS * BLOCKS)
    saves = saves_of(moves_of(NAMESPACE, tokens, blocks))
    for save in saves:
        side.save(NAMESPACE, [save])
    return stored(side.index, NAMESPACE, saves)


def measure(loads: Loader, plan: LoadPlan, rounds: int, gigabytes: float) -> dict[str, float]:
    """Medians over rounds, of which the first fills caches."""
    found = [(*held(loads, plan), without_copies(loads, plan)) for _ in range(rounds + 1)][1:]
    seconds, held_s, step_p99, python_s = zip(*found, strict=True)
    return {
        "gb_per_s": gigabytes / statistics.median(seconds),
        "lock_ms_per_gb": 1e3 * statistics.median(held_s) / gigabytes,
        "step_p99": statistics.median(step_p99),
        "python_ms_per_gb": 1e3 * statistics.median(python_s) / gigabytes,
    }


def show(document: Mapping[str, Mapping[str, float]], *, as_json: bool) -> None:
    """Print the numbers of each side."""
    if as_json:
        json.dump(document, sys.stdout)
        return
    print("load", *os.getloadavg())
    for name, numbers in document.items():
        print(name, " ".join(f"{key}={value:.3f}" for key, value in numbers.items()))


if __name__ == "__main__":
    main()
