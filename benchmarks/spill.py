"""Measure the disk below an agent's arena: which payloads to write, and how fast it is.

    python -m benchmarks.spill [--trace conversation_trace.jsonl] [--folder DIR] [--rounds N]

First a trace is replayed through an arena and a disk under each rule for writing. Their
sizes are shares of all different blocks, and only the second half of the trace is used. Then
payloads of 32 MiB are filled into an arena from a folder: verified, by one thread, from the page
cache and without it, against memcpy and against the same payload in a store that is a folder.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.arena import Ours
from benchmarks.fleet.trace import SAMPLE_FILE, Request, read_trace
from objkv.agent.core import Core, CoreLimits
from objkv.agent.fill import Wanted
from objkv.agent.memory.arena import Arena, CellState
from objkv.agent.queue import Urgency
from objkv.agent.residents import Resident
from objkv.agent.spill.disk import FOLDER, Disk, DiskFolder
from objkv.cache.chunks import CacheSettings, ChunkCache, shard_record
from objkv.codec.payload import read_header
from objkv.index.memory import MemoryIndex
from objkv.ops.bench.sample import PAYLOAD_32_MIB, PayloadSample, make_samples
from objkv.stores.base import copy_bytes
from objkv.stores.local import LocalStore
from objkv.telemetry import MemoryRecorder

SIZES = ((0.02, 0.1), (0.05, 0.2), (0.05, 0.4), (0.1, 0.4))
"""Shares of arena and disk."""
RULES = ("all", "read", "read from the arena")
_DEADLINE_S = 60.0
_PAYLOADS = 4


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of all blocks that requests wanted."""

    arena: float
    disk: float
    stores: float
    """Not on the node, but wanted before, so stored."""
    written: float


def replay(requests: Sequence[Request], arena: int, disk: int, rule: str) -> Shares:
    """Replay a trace. ``arena``, ``disk``: their room, in blocks."""
    memory, spilled, seen = Ours(arena), Ours(disk), set[int]()
    counts = dict.fromkeys(("arena", "disk", "stores", "written", "all"), 0)

    def write(block: int) -> None:
        if not spilled.has(block):
            spilled.add(block)
            counts["written"] += 1

    for request in requests:
        for block in request.blocks:
            counts["all"] += 1
            if memory.has(block):
                counts["arena"] += 1
                memory.use(block)
                write(block)
                continue
            memory.add(block)
            if spilled.has(block):
                counts["disk"] += 1
                spilled.use(block)
            else:
                counts["stores"] += block in seen
                if rule == "all" or (rule == "read" and block in seen):
                    write(block)
            seen.add(block)
    total = counts.pop("all")
    return Shares(**{name: count / total for name, count in counts.items()})


def print_rules(trace: Path) -> None:
    """Print a table of rules and sizes."""
    requests = list(read_trace(trace))
    requests = requests[len(requests) // 2 :]
    blocks = len({block for request in requests for block in request.blocks})
    print("arena  disk  written are         arena   disk  stores  written")
    for arena, disk in SIZES:
        for rule in RULES:
            found = replay(requests, max(1, int(arena * blocks)), max(1, int(disk * blocks)), rule)
            print(
                f"{arena:5.0%} {disk:5.0%}  {rule:19} {found.arena:6.3f} {found.disk:6.3f} "
                f"{found.stores:7.3f} {found.written:8.3f}"
            )


class FillBench:
    """An agent's core over a folder as the store, with another folder as the disk if wanted."""

    def __init__(self, folder: Path, samples: Sequence[PayloadSample], *, has_disk: bool) -> None:
        store, self.recorder = LocalStore(folder / "store"), MemoryRecorder()
        self.files = folder / "disk" / FOLDER
        settings = CacheSettings("bench", ttl_s=3600, lease_ms=60_000, hot_payload_bytes_max=0)
        cache = ChunkCache(store, None, MemoryIndex(), settings, self.recorder)
        arena = Arena.create(2 * sum(len(one.payload) for one in samples))
        disk = Disk(DiskFolder(folder / "disk"), 1 << 34) if has_disk else None
        self.core = Core(cache, arena, CoreLimits(1, 1000), self.recorder, disk=disk)
        self.wanted = []
        for one in samples:
            store.put(one.claim.key.path(), one.payload)
            self.wanted.append(Wanted(one.claim, shard_record(read_header(one.payload))))
        self.fill()
        if self.core.spill is not None:
            assert self.core.spill.drain(_DEADLINE_S)

    def wake(self) -> None:
        """See ``Waiter``."""

    def fill(self) -> float:
        """Fill all payloads, one after another. Returns the seconds."""
        for one in self.wanted:
            self.core.residents.forget(one.claim.key.path())
        began = time.perf_counter()
        for one in self.wanted:
            (lease,) = self.core.open(self, [one], deadline_s=_DEADLINE_S, urgency=Urgency.IN_STEP)
            assert isinstance(lease, Resident)
            while lease.state is CellState.FILLING:
                time.sleep(1e-4)
            assert lease.state is CellState.READY
            self.core.residents.release(lease)
        return time.perf_counter() - began

    def fill_cold(self) -> float:
        """The same, with the disk's files outside of the page cache."""
        for file in self.files.iterdir():
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
        return self.fill()


def print_speeds(folder: Path | None, rounds: int) -> None:
    """Print GB/s."""
    samples = make_samples(PAYLOAD_32_MIB, _PAYLOADS)
    nbytes = sum(len(one.payload) for one in samples)
    target = memoryview(bytearray(len(samples[0].payload)))

    def copy() -> float:
        began = time.perf_counter()
        for one in samples:
            copy_bytes(target, one.payload, len(target))
        return time.perf_counter() - began

    with tempfile.TemporaryDirectory(dir=folder) as name:
        with_disk = FillBench(Path(name) / "a", samples, has_disk=True)
        without = FillBench(Path(name) / "b", samples, has_disk=False)
        works: dict[str, Callable[[], float]] = {
            "memcpy": copy,
            "store in a folder": without.fill,
            "disk, page cache": with_disk.fill,
        }
        times: dict[str, list[float]] = {name: [] for name in works}
        for _ in range(rounds):
            for name, work in works.items():
                times[name].append(work())
        # Afterwards: bytes that were read ahead are in smaller pieces of the page cache.
        times["disk, no page cache"] = [with_disk.fill_cold() for _ in range(rounds)]
        for name, seconds in times.items():
            print(f"{name:20} {nbytes / statistics.median(seconds) / 1e9:6.2f} GB/s")
        print(f"from disk: {with_disk.recorder.value('agent_disk_hits'):.0f} payloads")
        with_disk.core.close(_DEADLINE_S)
        without.core.close(_DEADLINE_S)


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, default=SAMPLE_FILE)
    parser.add_argument("--folder", type=Path, help="on the disk to measure")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    print_rules(options.trace)
    print_speeds(options.folder, options.rounds)


if __name__ == "__main__":
    main()
