"""Compare moving chunks between a paged cache and an agent's store with copying the same bytes.

One chunk has the shape of an 8B model's: 256 tokens, 32 layers, 8 KV heads of 128, bf16: 32 MiB. A
save ends when all chunks are stored in a folder. The first load is by an agent that has nothing: it
fetches and verifies every byte, and makes its arena's memory, page by page. The next one reads from
the arena. Pages are normally distributed random numbers, which compress a little worse than real
KV.
"""

import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

import torch

from benchmarks.alone import run_alone
from benchmarks.harness import BenchSetting, Compared, Section, Timings
from benchmarks.worker import (
    BLOCK,
    BLOCKS,
    CHUNK,
    LLAMA_8B,
    Side,
    moves_of,
    saves_of,
    step_of,
    stored,
)
from objkv.assembly.backends import open_index
from objkv.config import load_config
from objkv.connector.model.groups import Geometry
from objkv.telemetry import NullRecorder
from tests.support.agents import AgentProcess
from tests.support.plans import LoadMove

CHUNKS = 8
NAMESPACE = "0" * 32
GEOMETRY = Geometry((LLAMA_8B,), CHUNK, BLOCK, tp_size=1)
CODECS = ("none", "lz4", "blosc", "blosclz4")
STEPS = ("save", "first load", "load")
ARENA = "4GiB"


class Rig:
    """A paged cache that holds the chunks twice: saved from the first half, loaded into the
    second."""

    def __init__(self, chunks: int) -> None:
        self.blocks = chunks * BLOCKS
        shape = (1 + 2 * self.blocks, LLAMA_8B.heads, BLOCK, LLAMA_8B.content)
        self.caches = [torch.randn(shape).to(torch.bfloat16) for _ in LLAMA_8B.layers]
        tokens, blocks = range(chunks * CHUNK), range(1, shape[0])
        self.saves = saves_of(moves_of(NAMESPACE, tokens, blocks))
        moves = moves_of(NAMESPACE, tokens, blocks[self.blocks :])
        self.loads = [LoadMove(move, None) for move in moves]
        half = self.caches[0][1 + self.blocks :]
        self.nbytes = len(self.caches) * half.numel() * half.element_size()

    def copy(self) -> float:
        """Seconds to copy the same bytes within the cache."""
        started = time.perf_counter()
        for cache in self.caches:
            cache[1 + self.blocks :].copy_(cache[1 : 1 + self.blocks])
        return time.perf_counter() - started

    def load(self, side: Side) -> float:
        """Seconds of one load into the second half of the cache."""
        for cache in self.caches:
            cache[1 + self.blocks :].zero_()
        seconds = side.load(step_of(NAMESPACE, self.loads))
        for cache in self.caches:
            assert torch.equal(cache[1 : 1 + self.blocks], cache[1 + self.blocks :])
        return seconds


def save_and_load(rig: Rig, folder: Path, codec: str) -> tuple[float, float, float]:
    """Seconds until all chunks are stored, until all are loaded by an agent that has none of them,
    and until they are loaded again."""
    settings = {
        "bulk_url": f"file://{folder}/chunks",
        "index_url": f"sqlite://{folder}/index",
        "codec": codec,
        "agent_memory_bytes": ARENA,
    }
    with ExitStack() as stack:
        agent = stack.enter_context(AgentProcess(settings, fresh=True))
        index = open_index(load_config(settings, environ={}), NullRecorder())
        stack.callback(index.close)
        side = Side(stack, {"agent": agent.url}, GEOMETRY, rig.caches)
        started = time.perf_counter()
        side.save(NAMESPACE, rig.saves)
        stored(index, NAMESPACE, rig.saves)
        saved = time.perf_counter() - started
    with ExitStack() as stack:
        agent = stack.enter_context(AgentProcess(settings, fresh=True))
        side = Side(stack, {"agent": agent.url}, GEOMETRY, rig.caches)
        return saved, rig.load(side), rig.load(side)


def bench_transfers(setting: BenchSetting) -> Section:
    """A save and two loads with each codec."""
    rig = Rig(1 if setting.quick else CHUNKS)
    rig.copy()
    seconds = defaultdict[str, list[float]](list)
    for number in range(setting.rounds + 1):
        for codec in CODECS:
            setting.report_stage("transfers", f"{codec}, round {number} of {setting.rounds}")
            copy_s = rig.copy()
            with tempfile.TemporaryDirectory(dir=setting.folder) as folder:
                found = save_and_load(rig, Path(folder), codec)
            if number:  # the first one warms up
                for step, took_s in zip((*STEPS, "copy"), (*found, copy_s), strict=True):
                    seconds[f"{step}, {codec}"].append(took_s)
    timings = Timings(seconds)
    rows = (
        Compared(timings, f"{step}, {codec}", f"copy, {codec}", "plain copy").throughput(
            f"{step}, {codec}", rig.nbytes
        )
        for codec in CODECS
        for step in STEPS
    )
    return Section("transfers", tuple(rows), {})


if __name__ == "__main__":
    run_alone(bench_transfers)
