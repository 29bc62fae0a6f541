"""Measures transfers between host memory and a paged cache on a device, against plain copies.

``python -m objkv.connector.programs.bench_gpu DEVICE CHUNKS ROUNDS`` prints one JSON line, or
nothing without such a device. Chunks are those of an 8B model: 256 tokens, 32 layers, 32 MiB.
"""

import sys
import time
from collections.abc import Callable

import torch

from objkv.assembly.backends import open_bulk, open_index
from objkv.cache.chunks import CacheSettings, ChunkCache
from objkv.codec.payload import Claim, Provenance, encode, payload_bytes_max, read_header
from objkv.config import load_config
from objkv.index.base import ShardRecord
from objkv.keys.chunk import ChunkKey
from objkv.keys.identity import GroupIdentity
from objkv.keys.prefix import prefix_hashes, root_hash, token_digest
from objkv.keys.topology import rank_shard
from objkv.ops.bench.gpu import GpuAnswer
from objkv.ops.bench.harness import Timings, interleave
from objkv.ops.bench.sample import NAMESPACE, kv_like
from objkv.telemetry import NullRecorder
from objkv.transfer.devices import driver_of, open_lane
from objkv.transfer.loader import Loader, LoadLimits
from objkv.transfer.paging import GroupShape, PagedGroup
from objkv.transfer.plan import ChunkMove, LoadMove, LoadPlan
from objkv.transfer.slabs import SlabPool

_CHUNK_TOKENS, _BLOCK_TOKENS = 256, 16
_BLOCKS = _CHUNK_TOKENS // _BLOCK_TOKENS
_LAYERS = tuple(f"layers.{number}" for number in range(32))
_GROUP = GroupIdentity("full", None, _LAYERS, heads=8, content=256, block_size=_BLOCK_TOKENS)
_THREADS = 8
_DEADLINE_S = 120.0
_MATRIX = {"cuda": 4096, "cpu": 256}


class Rig:
    """A paged cache on a device, a store in memory that holds ``chunks`` payloads, and a loader."""

    def __init__(self, device: torch.device, chunks: int) -> None:
        self._device = device
        self._chunks = chunks
        self._paged = self._paged_cache()
        self._loader = self._open_loader()
        self._lane = open_lane(device)
        self._page = kv_like(self._paged.layers[0].nbytes)
        self._plan = tuple(self._stored(chunk) for chunk in range(chunks))
        # Source and target of the plain copies: the same number of bytes, contiguous.
        self.nbytes = chunks * self._paged.raw_bytes
        pinned = device.type == "cuda"
        self._host = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=pinned)
        self._plain = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        self._loads = 0
        self._operand = torch.randn(2 * (_MATRIX[device.type],), device=device)
        self._products = 1

    def _paged_cache(self) -> PagedGroup:
        rank = rank_shard(layers=len(_LAYERS), heads=_GROUP.heads, tp_rank=0, tp_size=1)
        self._shard = rank.shard
        blocks = (1 + self._chunks * _BLOCKS, _GROUP.heads, _BLOCK_TOKENS, _GROUP.content)
        self._caches = [
            torch.zeros(blocks, dtype=torch.bfloat16, device=self._device) for _ in _LAYERS
        ]
        return PagedGroup(GroupShape(_LAYERS, _BLOCKS, _BLOCK_TOKENS, rank), self._caches)

    def _open_loader(self) -> Loader:
        config = load_config({"bulk_url": "memory:", "index_url": "memory:"}, environ={})
        recorder = NullRecorder()
        self._bulk = open_bulk(config, recorder)
        self._cache = ChunkCache(
            self._bulk,
            None,
            open_index(config, recorder),
            CacheSettings("bench", ttl_s=600, lease_ms=60_000, hot_payload_bytes_max=0),
            recorder,
        )
        self._slabs = SlabPool(
            "bench",
            count=_THREADS,
            slab_bytes=payload_bytes_max(self._paged.layers),
            pin=None if self._device.type == "cpu" else driver_of(self._device).pin,
        )
        return Loader(
            self._cache,
            {0: self._paged},
            self._slabs,
            lane_for_thread=lambda: open_lane(self._device, urgent=True),
            limits=LoadLimits(_THREADS, self._chunks, _DEADLINE_S, _DEADLINE_S),
            recorder=recorder,
        )

    def to_device(self) -> float:
        """Copy all bytes from host to device; seconds."""
        return self._timed(lambda: self._plain.copy_(self._host, non_blocking=True))

    def to_host(self) -> float:
        """Copy all bytes from device to host; seconds."""
        return self._timed(lambda: self._host.copy_(self._plain, non_blocking=True))

    def load(self) -> float:
        """Load from the memory store into the paged cache with verification; seconds."""
        return self._timed(self._load)

    def gather(self) -> float:
        """Copy from the paged cache into host memory; seconds."""

        def gather() -> None:
            ids = [load.move.block_ids for load in self._plan]
            pages = list(self._host.split(self._paged.raw_bytes))
            self._lane.follow(self._lane.mark_compute())
            self._paged.gather(self._lane, ids, pages)
            self._lane.mark().wait()

        return self._timed(gather)

    def compute(self) -> float:
        """Multiply matrices; seconds."""
        return self._timed(self._compute)

    def both(self) -> float:
        """Load while multiplying matrices; seconds."""

        def both() -> None:
            plan = self._submit()
            self._compute()
            self._finish(plan)

        return self._timed(both)

    def calibrate(self) -> None:
        """Adjust ``compute`` to take about as long as a load."""
        self.load()
        load_s = self.load()
        self.compute()
        self._products = max(1, round(load_s / self.compute()))

    def verify(self) -> None:
        """Raise AssertionError unless the paged cache holds the stored bytes."""
        expected = torch.frombuffer(bytearray(self._page), dtype=torch.bfloat16)
        for cache in self._caches:
            for load in self._plan:
                blocks = cache[load.move.block_ids[0] : load.move.block_ids[-1] + 1]
                assert torch.equal(blocks.cpu().flatten(), expected)

    def close(self) -> None:
        """End the loader's threads."""
        self._loader.close()

    def _load(self) -> None:
        self._finish(self._submit())

    def _submit(self) -> str:
        self._loads += 1
        name = f"load {self._loads}"
        self._loader.submit(LoadPlan(name, NAMESPACE, self._plan, sync=False))
        return name

    def _finish(self, name: str) -> None:
        while not (outcomes := self._loader.take_finished(sync=False)):
            time.sleep(50e-6)
        assert [outcome.request_id for outcome in outcomes] == [name]
        assert not outcomes[0].failed, "a load failed"

    def _compute(self) -> None:
        for _ in range(self._products):
            torch.mm(self._operand, self._operand)

    def _timed(self, work: Callable[[], object]) -> float:
        self._synchronize()
        started = time.perf_counter()
        work()
        self._synchronize()
        return time.perf_counter() - started

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _stored(self, chunk: int) -> LoadMove:
        """Store one chunk and return the move that loads it."""
        tokens = list(range(self._chunks * _CHUNK_TOKENS))
        hashes = prefix_hashes(NAMESPACE, tokens, _CHUNK_TOKENS)
        parent = hashes[chunk - 1] if chunk else root_hash(NAMESPACE)
        start, first = chunk * _CHUNK_TOKENS, 1 + chunk * _BLOCKS
        key = ChunkKey(NAMESPACE, hashes[chunk], 0, self._shard)
        payload = encode(
            Claim(key, parent, start, start + _CHUNK_TOKENS),
            self._paged.layers,
            [self._page] * len(_LAYERS),
            codec="none",
            provenance=Provenance(token_digest(()), "objkv bench", 0),
        )
        self._bulk.put(key.path(), payload)
        header = read_header(payload)
        size = len(payload)
        record = ShardRecord(size, self._paged.raw_bytes, "none", False, header.checksum, 0)
        move = ChunkMove(
            chunk=chunk,
            group=0,
            prefix_hash=hashes[chunk],
            parent_hash=parent,
            token_start=start,
            token_end=start + _CHUNK_TOKENS,
            first_block=0,
            block_ids=tuple(range(first, first + _BLOCKS)),
        )
        return LoadMove(move, ((key.field, record),))


def measure(device: torch.device, chunks: int, rounds: int) -> GpuAnswer:
    """Measure all sides, interleaved."""
    rig = Rig(device, chunks)
    try:
        rig.calibrate()
        rig.verify()
        names = ("to_device", "load", "to_host", "gather", "compute", "both")
        timings: Timings = interleave({name: getattr(rig, name) for name in names}, rounds)
    finally:
        rig.close()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    return GpuAnswer(device=name, nbytes=rig.nbytes, seconds=timings.seconds)


def main() -> None:
    """Measure and print the result; print nothing without the device."""
    name, chunks, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if name == "cuda" and not torch.cuda.is_available():
        return
    print(measure(torch.device(name), chunks, rounds).model_dump_json(), flush=True)


if __name__ == "__main__":
    main()
