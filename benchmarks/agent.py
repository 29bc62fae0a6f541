"""Measure what loads from a node agent's memory leave to the engine's other threads.

    python -m benchmarks.agent [--rounds N] [--ranks N] [--json]

A worker loads a gigabyte into a paged cache while another thread of its process counts. How much
less it counts than alone is the time for which loads held the interpreter's lock, and what the two
took from each other on one core.

``step_p99`` is the 99th percentile of the time in which that thread counts to 20,000, about a
millisecond, as a share of what it is alone: so much longer a scheduler's slowest steps take.
``python_ms_per_gb`` is the processor time of all threads of the worker for the same load without
its copies and system calls, which do not hold the lock; ``processor_ms_per_gb`` includes the system
calls. A busy machine disturbs them little, a slow hour of a shared one as much as everything else:
``counting_ms`` is how long one thread takes to count to 20,000.

With ``--ranks`` the ranks of a replica, a process each, save the prompt together and load it at the
same moment. Nothing else runs then.
"""

import argparse
import json
import math
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np

from benchmarks.worker import BOUND_S, Side, step_of, stored
from objkv.connector.model.groups import Geometry
from objkv.keys.identity import GroupIdentity
from objkv.keys.prefix import prefix_hashes, root_hash, token_digest
from objkv.transfer.loading.loader import Loader
from objkv.transfer.plan import ChunkMove, LoadMove, LoadPlan, SaveMove
from tests.support.agents import AgentProcess
from tests.support.paged_cache import paged_group

CHUNK, BLOCK, CHUNKS = 256, 16, 32
GROUP = GroupIdentity(
    "full", None, tuple(f"l{n}" for n in range(32)), heads=8, content=256, block_size=BLOCK
)
NAMESPACE = "0123456789abcdef" * 2
TOKENS = list(range(1000, 1000 + CHUNKS * CHUNK))
HASHES = prefix_hashes(NAMESPACE, TOKENS, CHUNK)
REPEATS = 20
"""Loads without copies per round: the kernel divides processor time by ticks of milliseconds."""
STEP, ALONE_S = 20_000, 1.0


def move(chunk: int) -> ChunkMove:
    """A chunk of the prompt, in blocks of its own."""
    blocks = CHUNK // BLOCK
    first = 1 + chunk * blocks
    return ChunkMove(
        chunk,
        0,
        HASHES[chunk],
        HASHES[chunk - 1] if chunk else root_hash(NAMESPACE),
        chunk * CHUNK,
        (chunk + 1) * CHUNK,
        0,
        tuple(range(first, first + blocks)),
    )


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

    def p99_s(self, start: float, end: float) -> float:
        """Return the 99th percentile of the duration of steps in a span of time."""
        ends = [step for step in self.steps if start <= step <= end]
        return float(np.percentile(np.diff(ends), 99)) if len(ends) > 1 else math.nan

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


class Processor(NamedTuple):
    """Processor time of a process."""

    user_s: float
    system_s: float


def without_copies(loads: Loader, plan: LoadPlan) -> Processor:
    """Return the processor time of a load by an agent that copies nothing."""

    def nothing(*_: object) -> None: ...

    with mock.patch.object(np, "copyto", nothing):
        before = resource.getrusage(resource.RUSAGE_SELF)
        for _ in range(REPEATS):
            loads.submit(plan)
            loads.wait_over(BOUND_S)
            assert not loads.take_finished(sync=False)[0].failed_blocks
        after = resource.getrusage(resource.RUSAGE_SELF)
    return Processor(
        (after.ru_utime - before.ru_utime) / REPEATS, (after.ru_stime - before.ru_stime) / REPEATS
    )


def counting_s() -> float:
    """Return how long one thread takes to count to ``STEP``."""
    begun = time.perf_counter()
    sum(1 for _ in range(STEP))
    return time.perf_counter() - begun


class Held(NamedTuple):
    """What a load and a counting thread took from each other."""

    seconds: float
    """Of the load."""
    held_s: float
    """For how much of it the lock was held by others than the counter."""
    step_p99: float
    """Of the counter's steps, as a share of what it is without a load."""


def held(work: Callable[[], float]) -> Held:
    """Run a load beside a counting thread."""
    counting = Counting()
    before, begun = counting.count, time.perf_counter()
    time.sleep(ALONE_S)  # it counts alone
    rate = (counting.count - before) / (time.perf_counter() - begun)
    alone_s = counting.p99_s(begun, time.perf_counter())
    before, begun = counting.count, time.perf_counter()
    seconds = work()
    whole = time.perf_counter() - begun
    counted = counting.count - before
    step_s = counting.p99_s(begun, begun + whole)
    counting.end()
    return Held(seconds, whole - counted / rate, step_s / alone_s)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=1)
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
        if options.ranks > 1:
            document = measure_ranks(agent.url, options.ranks, options.rounds)
        else:
            side, gigabytes = opened(stack, agent.url)
            (plan,) = step_of(NAMESPACE, saved(side)).loads
            document = measure(side.worker.loader, plan, options.rounds, gigabytes)
    show({"agent": document}, as_json=options.json)


def opened(stack: ExitStack, url: str, rank: int = 0, ranks: int = 1) -> tuple[Side, float]:
    """A worker, and the gigabytes of the prompt that it has."""
    blocks = 1 + CHUNKS * CHUNK // BLOCK
    paged, caches = paged_group(
        GROUP, chunk_tokens=CHUNK, num_blocks=blocks, seed=1 + rank, tp=(rank, ranks)
    )
    geometry = Geometry((GROUP,), CHUNK, BLOCK, tp_size=ranks)
    side = Side(stack, {"agent": url}, geometry, caches, rank)
    return side, CHUNKS * paged.raw_bytes / 1e9


def saved(side: Side, await_others: Callable[[], object] = lambda: None) -> list[LoadMove]:
    """Save the prompt; the moves that load it."""
    saves = []
    for chunk in range(CHUNKS):
        digest = token_digest(tuple(TOKENS[chunk * CHUNK : (chunk + 1) * CHUNK]))
        saves.append(SaveMove(move(chunk), digest, None))
        await_others()  # an agent joins few payloads at a time
        side.save(NAMESPACE, saves[-1:])
    return stored(side.index, NAMESPACE, saves)


def measure_ranks(url: str, ranks: int, rounds: int) -> dict[str, float]:
    """Medians over rounds in which all ranks load the prompt at the same moment."""
    context = multiprocessing.get_context("fork")
    barrier, found = context.Barrier(ranks, timeout=BOUND_S), context.Queue()

    def run(rank: int) -> None:
        with ExitStack() as stack:
            side, gigabytes = opened(stack, url, rank, ranks)
            (plan,) = step_of(NAMESPACE, saved(side, barrier.wait)).loads
            for number in range(rounds + 1):
                barrier.wait()
                begun, processor = time.perf_counter(), time.process_time()
                ended = begun + load_once(side.worker.loader, plan)
                found.put((number, gigabytes, begun, ended, time.process_time() - processor))

    processes = [context.Process(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for process in processes:
        process.start()
    loads = defaultdict[int, list[list[float]]](list)
    for _ in range((rounds + 1) * ranks):
        number, *load = found.get(timeout=BOUND_S)
        loads[number].append(load)
    for process in processes:
        process.join(BOUND_S)
    rates, costs = list[float](), list[float]()
    for number in range(1, rounds + 1):  # the first fills caches
        sizes, begun, ended, processor = zip(*loads[number], strict=True)
        rates.append(sum(sizes) / (max(ended) - min(begun)))
        costs.append(1e3 * sum(processor) / sum(sizes))
    return {
        "gb_per_s": statistics.median(rates),
        "processor_ms_per_gb": statistics.median(costs),
    }


def measure(loads: Loader, plan: LoadPlan, rounds: int, gigabytes: float) -> dict[str, float]:
    """Medians over rounds."""
    found: list[Held] = []
    python: list[Processor] = []
    counting: list[float] = []
    for number in range(rounds + 1):
        one = held(partial(load_once, loads, plan))
        if number:  # the first fills caches
            found.append(one)
        python.append(without_copies(loads, plan))
        counting += [counting_s() for _ in range(REPEATS)]
    return {
        "gb_per_s": gigabytes / statistics.median(one.seconds for one in found),
        "lock_ms_per_gb": 1e3 * statistics.median(one.held_s for one in found) / gigabytes,
        "step_p99": statistics.median(one.step_p99 for one in found),
        "python_ms_per_gb": 1e3 * statistics.median(one.user_s for one in python) / gigabytes,
        "processor_ms_per_gb": 1e3 * statistics.median(map(sum, python)) / gigabytes,
        "counting_ms": 1e3 * statistics.median(counting),
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
