"""Measure what fetching processes take off a node agent that loads by TLS.

    python -m benchmarks.agent_fetch [--processes 0,1,2] [--rounds N] [--codec none]
                                     [--share PERCENT] [--json]

An S3 server in memory sends payloads of 32 MiB on loopback. An agent for each number of processes
loads the same payloads into an arena that is too small for all of them, in turn. Elapsed time says
little on a machine with few cores, since the server needs one as well. So besides there is the
processor time of the agent itself, which bounds what one agent can serve, and that of its
processes, per GB that was fetched.

With ``--share`` each process of each agent gets so many percent of a core, and not more, while the
server has as much as it needs. So a small machine shows how elapsed time scales where each process
has a core. It needs root, and groups of processor time (cgroup version 1 or 2).
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from benchmarks.agent import CHUNK, HASHES, NAMESPACE, TOKENS, show, stores
from objkv.agent.client import AgentConnection
from objkv.agent.fill import Wanted
from objkv.agent.memory.arena import CellState
from objkv.agent.queue import Urgency
from objkv.assembly.backends import open_backends
from objkv.codec.payload import Claim, LayerSpec, Provenance, encode, read_header
from objkv.config import load_config
from objkv.index.base import ChunkEntry, ShardRecord
from objkv.keys.chunk import ChunkKey
from objkv.keys.prefix import root_hash, token_digest
from objkv.keys.topology import Shard
from objkv.telemetry import NullRecorder
from tests.agent.test_http import Router
from tests.support.agents import AgentProcess

PATIENCE_S = 120.0
LAYERS = [LayerSpec(f"l{n}", "BF16", (16, 8, 16, 256)) for n in range(32)]
"""1 MiB each."""
CHUNKS, TOGETHER = 16, 8
ARENA = "320MiB"
PERIOD_US = 10_000
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Cost(NamedTuple):
    """One load of all payloads."""

    gb: float
    """Bytes fetched from the store."""
    seconds: float
    agent_s: float
    """Processor time of the agent."""
    processes_s: float
    """Processor time of its processes."""


def stored(settings: dict[str, str], codec: str) -> list[Wanted]:
    """Store the payloads; half of each compresses."""
    config, found = load_config(settings, environ={}), []
    with open_backends(config, NullRecorder()) as backends:
        for number in range(CHUNKS):
            parent = HASHES[number - 1] if number else root_hash(NAMESPACE)
            start, end = number * CHUNK, (number + 1) * CHUNK
            key = ChunkKey(NAMESPACE, HASHES[number], 0, Shard(0, 32, 0, 8))
            claim = Claim(key, parent, start, end)
            pages = [os.urandom(one.nbytes // 2).ljust(one.nbytes, b"\0") for one in LAYERS]
            provenance = Provenance(token_digest(tuple(TOKENS[start:end])), "bench", 1)
            payload = encode(claim, LAYERS, pages, codec=codec, provenance=provenance)
            backends.bulk.put(key.path(), payload)
            header = read_header(payload)
            record = ShardRecord(
                header.nbytes, header.raw_bytes, header.codec, False, header.checksum, 1
            )
            entry = ChunkEntry(NAMESPACE, HASHES[number], parent, start, end)
            backends.index.publish(entry, {key.field: record}, ttl_s=3_600)
            found.append(Wanted(claim, record))
    return found


def limit(stack: ExitStack, pid: int, percent: int) -> None:
    """Give a process this share of a core until the stack ends."""
    root, quota_us = Path("/sys/fs/cgroup"), PERIOD_US * percent // 100
    is_old = (root / "cpu").is_dir()
    group = (root / "cpu" if is_old else root) / f"objkv-{os.getpid()}-{pid}"
    group.mkdir()
    stack.callback(remove, group)
    if is_old:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(quota_us))
    else:
        (group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
    (group / "cgroup.procs").write_text(str(pid))


def remove(group: Path) -> None:
    """Remove a group once its process has ended."""
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            group.rmdir()
            return
        except OSError:
            if time.monotonic() >= end:
                raise
        time.sleep(0.01)


def processor_s(pid: int) -> float:
    """Processor time of a process, all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


class Side:
    """An agent with a number of processes."""

    def __init__(self, stack: ExitStack, settings: dict[str, str], processes: int) -> None:
        own = {"agent_memory_bytes": ARENA, "agent_fetch_processes": str(processes)}
        self.processes = processes
        self.agent = stack.enter_context(AgentProcess(settings | own, fresh=True))
        self.client = AgentConnection(self.agent.path, wants_arena=True, call_s=PATIENCE_S)

    def fetched(self) -> float:
        """GB that the agent has fetched so far."""
        _, text = Router(Path(f"{self.agent.path}.http")).ask("GET", "/metrics")
        (line,) = [x for x in text.splitlines() if x.startswith("objkv_agent_load_bytes_total ")]
        return float(line.split()[1]) / 1e9

    def spent(self) -> tuple[float, float]:
        """Processor time so far: the agent's, and that of its processes."""
        pid = self.agent.process.pid
        return processor_s(pid), sum(map(processor_s, children(pid)))

    def load(self, wanted: Sequence[Wanted]) -> Cost:
        """Load all payloads."""
        before, (agent_s, processes_s) = self.fetched(), self.spent()
        begun = time.perf_counter()
        for first in range(0, len(wanted), TOGETHER):
            some = wanted[first : first + TOGETHER]
            leases = self.client.open(some, deadline_s=PATIENCE_S, urgency=Urgency.BETWEEN_STEPS)
            for lease in leases:
                progress = lease.progress
                while progress.state is CellState.FILLING:
                    progress = self.client.arena.board.read(lease.cell)
                    if progress.state is CellState.FILLING:
                        self.client.wait(PATIENCE_S, self.client.event)
                assert progress.state is CellState.READY, progress
            self.client.release([lease.number for lease in leases])
        seconds = time.perf_counter() - begun
        after_s, after_processes_s = self.spent()
        return Cost(
            self.fetched() - before, seconds, after_s - agent_s, after_processes_s - processes_s
        )

    def settle(self, wanted: Sequence[Wanted]) -> None:
        """Load until the processes are ready."""
        pid, end = self.agent.process.pid, time.monotonic() + PATIENCE_S
        self.load(wanted)
        while len(children(pid)) < self.processes:
            assert time.monotonic() < end
            self.load(wanted)
        while self.processes and self.load(wanted).processes_s < 0.1:
            assert time.monotonic() < end


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", default="0,1,2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--codec", default="none")
    parser.add_argument("--share", type=int)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        settings = stores(stack, folder, tls=True) | {"load_deadline_ms": "60000"}
        wanted = stored(settings, options.codec)
        groups = stack.enter_context(ExitStack())
        sides = [Side(stack, settings, int(count)) for count in options.processes.split(",")]
        for side in sides:
            side.settle(wanted)
            pid = side.agent.process.pid
            for one in () if options.share is None else (pid, *children(pid)):
                limit(groups, one, options.share)
        found: dict[int, list[Cost]] = {side.processes: [] for side in sides}
        for _ in range(options.rounds):
            for side in sides:
                found[side.processes].append(side.load(wanted))
    document = {
        str(processes): {
            "gb_per_s": statistics.median(one.gb / one.seconds for one in costs),
            "agent_s_per_gb": statistics.median(one.agent_s / one.gb for one in costs),
            "processes_s_per_gb": statistics.median(one.processes_s / one.gb for one in costs),
        }
        for processes, costs in found.items()
    }
    show(document, as_json=options.json)


if __name__ == "__main__":
    main()
