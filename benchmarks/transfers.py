"""Compare moving chunks between a paged cache and a store with copying the same bytes.

    .venv/bin/python -m benchmarks.transfers [--chunks 8] [--rounds 5] [--json]

One chunk has the shape of an 8B model's: 256 tokens, 32 layers, 8 KV heads of 128, bf16: 32 MiB.
Every round measures all rows in turn, so that interference affects all of them. Figures are medians
over rounds, and ratios compare with the plain copy of the same round. Loads verify every byte.
A worker's first load also makes its arena's memory, page by page; later ones use it again.
Pages are normally distributed random numbers, which compress a little worse than real KV.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.inside import InsideLoads
from objkv.cache.chunks import CacheSettings, ChunkCache
from objkv.codec.payload import payload_bytes_max
from objkv.index.memory import MemoryIndex
from objkv.keys.identity import GroupIdentity
from objkv.keys.prefix import prefix_hashes, root_hash, token_digest
from objkv.keys.topology import rank_shard
from objkv.stores.base import PruneStore
from objkv.stores.local import LocalStore
from objkv.stores.memory import MemoryStore
from objkv.telemetry import NullRecorder
from objkv.transfer.lanes import HostLane
from objkv.transfer.loading.loader import Loader
from objkv.transfer.loading.loads import LoadLimits
from objkv.transfer.paging import GroupShape, PagedGroup
from objkv.transfer.plan import ChunkMove, LoadMove, LoadPlan, SaveMove, SavePlan
from objkv.transfer.saver import SaveLimits, Saver
from objkv.transfer.slabs import SlabPool

NAMESPACE = "0" * 32
CHUNK, BLOCK = 256, 32
GROUP = GroupIdentity(
    "full", None, tuple(f"layers.{i}" for i in range(32)), heads=8, content=256, block_size=BLOCK
)
CODECS = ("none", "lz4", "blosc", "blosclz4")


class Rig:
    """A paged cache that holds the chunks twice: saved from the first half, loaded into the
    second."""

    def __init__(self, chunks: int) -> None:
        self.chunks = chunks
        self.tokens = list(range(chunks * CHUNK))
        self.hashes = prefix_hashes(NAMESPACE, self.tokens, CHUNK)
        self.blocks = chunks * CHUNK // BLOCK
        shape = (1 + 2 * self.blocks, GROUP.heads, BLOCK, GROUP.content)
        self.caches = [torch.randn(shape).to(torch.bfloat16) for _ in GROUP.layers]
        rank = rank_shard(layers=32, heads=GROUP.heads, tp_rank=0, tp_size=1)
        self.paged = PagedGroup(GroupShape(GROUP.layers, CHUNK // BLOCK, BLOCK, rank), self.caches)
        self.nbytes = chunks * self.paged.raw_bytes

    def copy(self) -> float:
        """Seconds to copy the same bytes within the cache."""
        started = time.perf_counter()
        for cache in self.caches:
            cache[1 + self.blocks :].copy_(cache[1 : 1 + self.blocks])
        return time.perf_counter() - started

    def move(self, chunk: int, base: int) -> ChunkMove:
        """Chunk ``chunk`` at the half that begins with block ``base``."""
        first = base + chunk * CHUNK // BLOCK
        return ChunkMove(
            chunk=chunk,
            group=0,
            prefix_hash=self.hashes[chunk],
            parent_hash=self.hashes[chunk - 1] if chunk else root_hash(NAMESPACE),
            token_start=chunk * CHUNK,
            token_end=(chunk + 1) * CHUNK,
            first_block=0,
            block_ids=tuple(range(first, first + CHUNK // BLOCK)),
        )

    def same(self) -> bool:
        """Whether both halves are equal."""
        return all(torch.equal(c[1 : 1 + self.blocks], c[1 + self.blocks :]) for c in self.caches)


def save_and_load(rig: Rig, store: PruneStore, codec: str) -> tuple[float, float, float]:
    """Seconds until all chunks are stored, until all are loaded and verified by a new worker, and
    the same again in memory that was in use before."""
    index = MemoryIndex()
    settings = CacheSettings("bench", ttl_s=600, lease_ms=60_000, hot_save_bytes_max=0)
    cache = ChunkCache(store, None, index, settings, NullRecorder())
    size = payload_bytes_max(rig.paged.layers)
    saver = Saver(
        cache,
        {0: rig.paged},
        SlabPool("save", count=rig.chunks, slab_bytes=size),
        lane=HostLane(),
        limits=SaveLimits(2, rig.chunks, 600.0, codec, "bench"),
        recorder=NullRecorder(),
    )
    inside = InsideLoads(
        cache,
        {0: rig.paged},
        NullRecorder(),
        payloads=rig.chunks,
        payload_bytes=size,
        threads=2,
        limits=LoadLimits(rig.chunks, 600.0, 600.0),
    )
    saves = tuple(
        SaveMove(rig.move(c, 1), token_digest(rig.tokens[c * CHUNK : (c + 1) * CHUNK]), None)
        for c in range(rig.chunks)
    )
    started = time.perf_counter()
    assert not saver.gather((SavePlan("r", NAMESPACE, saves),))
    assert saver.drain(600.0)
    saved = time.perf_counter() - started
    loads = tuple(
        LoadMove(rig.move(c, 1 + rig.blocks), tuple(record.shards.items()))
        for c, record in enumerate(index.lookup(NAMESPACE, rig.hashes))
        if record is not None
    )
    assert len(loads) == rig.chunks
    first = load(rig, inside.loader, loads)
    inside.forget()
    again = load(rig, inside.loader, loads)
    saver.close(1.0)
    inside.loader.close()
    return saved, first, again


def load(rig: Rig, loader: Loader, loads: tuple[LoadMove, ...]) -> float:
    """Seconds of one load into the second half of the cache."""
    for cached in rig.caches:
        cached[1 + rig.blocks :].zero_()
    started = time.perf_counter()
    loader.submit(LoadPlan("r", NAMESPACE, loads, sync=True))
    (outcome,) = loader.take_finished(sync=True)
    seconds = time.perf_counter() - started
    assert not outcome.failed
    assert rig.same()
    return seconds


@contextmanager
def places() -> Iterator[dict[str, Callable[[str], PruneStore]]]:
    """Fresh stores by name; the folder goes away afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        number = iter(range(1_000_000))
        yield {
            "memory": lambda _: MemoryStore(),
            "local": lambda codec: LocalStore(Path(folder) / f"{codec}-{next(number)}"),
        }


def measure(chunks: int, rounds: int) -> list[dict[str, float | str]]:
    """One row per store and codec, medians over rounds."""
    rig = Rig(chunks)
    rig.copy()
    copies: list[float] = []
    times: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    with places() as stores:
        for round_number in range(rounds + 1):
            for codec in CODECS:
                for name, make in stores.items():
                    copy_s = rig.copy()
                    seconds = save_and_load(rig, make(codec), codec)
                    if round_number:  # the first one warms up
                        copies.append(copy_s)
                        times.setdefault((name, codec), []).append((*seconds, copy_s))
    rows: list[dict[str, float | str]] = [
        {
            "store": "-",
            "codec": "plain copy",
            "load_mb_s": rig.nbytes / 1e6 / statistics.median(copies),
        }
    ]
    for (name, codec), measured in times.items():
        rows.append(
            {
                "store": name,
                "codec": codec,
                "save_mb_s": rig.nbytes / 1e6 / statistics.median(m[0] for m in measured),
                "first_load_mb_s": rig.nbytes / 1e6 / statistics.median(m[1] for m in measured),
                "load_mb_s": rig.nbytes / 1e6 / statistics.median(m[2] for m in measured),
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
    for column in (
        "store",
        "codec",
        "save MB/s",
        "first load MB/s",
        "load MB/s",
        "of a plain copy",
    ):
        table.add_column(column, justify="right")
    for row in rows:
        rates = [row.get(f"{name}_mb_s") for name in ("save", "first_load", "load")]
        cells = [f"{rate:.0f}" if rate else "" for rate in rates]
        cells += [f"{row['load_to_copy']:.2f}" if "load_to_copy" in row else ""]
        table.add_row(str(row["store"]), str(row["codec"]), *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
