"""Compare moving chunks between a paged cache and an agent's store with copying the same bytes.

    .venv/bin/python -m benchmarks.transfers [--chunks 8] [--rounds 5] [--json]

One chunk has the shape of an 8B model's: 256 tokens, 32 layers, 8 KV heads of 128, bf16: 32 MiB.
Every round measures all rows in turn, so that interference affects all of them. Figures are medians
over rounds, and ratios compare with the plain copy of the same round. A save ends when all chunks
are stored in a folder. The first load is by an agent that has nothing: it fetches and verifies
every byte, and makes its arena's memory, page by page. The next one reads from the arena. Pages are
normally distributed random numbers, which compress a little worse than real KV.
"""

import argparse
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

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

NAMESPACE = "0" * 32
GEOMETRY = Geometry((LLAMA_8B,), CHUNK, BLOCK, tp_size=1)
CODECS = ("none", "lz4", "blosc", "blosclz4")
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

    def same(self) -> bool:
        """Whether both halves are equal."""
        return all(torch.equal(c[1 : 1 + self.blocks], c[1 + self.blocks :]) for c in self.caches)


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
        return saved, load(rig, side), load(rig, side)


def load(rig: Rig, side: Side) -> float:
    """Seconds of one load into the second half of the cache."""
    for cached in rig.caches:
        cached[1 + rig.blocks :].zero_()
    seconds = side.load(step_of(NAMESPACE, rig.loads))
    assert rig.same()
    return seconds


def measure(chunks: int, rounds: int) -> list[dict[str, float | str]]:
    """One row per codec, medians over rounds."""
    rig = Rig(chunks)
    rig.copy()
    copies: list[float] = []
    times: dict[str, list[tuple[float, ...]]] = {codec: [] for codec in CODECS}
    for number in range(rounds + 1):
        for codec in CODECS:
            copy_s = rig.copy()
            with tempfile.TemporaryDirectory(prefix="objkv-") as folder:
                seconds = save_and_load(rig, Path(folder), codec)
            if number:  # the first one warms up
                copies.append(copy_s)
                times[codec].append((*seconds, copy_s))
    rows: list[dict[str, float | str]] = [
        {"codec": "plain copy", "load_mb_s": rig.nbytes / 1e6 / statistics.median(copies)}
    ]
    for codec, measured in times.items():
        saved, first, again = (
            rig.nbytes / 1e6 / statistics.median(one[n] for one in measured) for n in range(3)
        )
        rows.append(
            {
                "codec": codec,
                "save_mb_s": saved,
                "first_load_mb_s": first,
                "load_mb_s": again,
                "load_to_copy": statistics.median(m[3] / m[2] for m in measured),
            }
        )
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = measure(arguments.chunks, arguments.rounds)
    if arguments.json:
        print(json.dumps(rows))
        return
    table = Table(title=f"{arguments.chunks} chunks of 32 MiB, medians of {arguments.rounds}")
    for column in ("codec", "save MB/s", "first load MB/s", "load MB/s", "of a plain copy"):
        table.add_column(column, justify="right")
    for row in rows:
        rates = [row.get(f"{name}_mb_s") for name in ("save", "first_load", "load")]
        cells = [f"{rate:.0f}" if rate else "" for rate in rates]
        cells += [f"{row['load_to_copy']:.2f}" if "load_to_copy" in row else ""]
        table.add_row(str(row["codec"]), *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
