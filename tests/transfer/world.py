"""Two replicas' transfers over one memory store: what the tests of this folder are played in."""

import time
from collections.abc import Callable

import torch

from objkv.cache.chunks import CacheSettings, ChunkCache
from objkv.codec.payload import payload_bytes_max
from objkv.codec.seal import Seal
from objkv.index.memory import MemoryIndex
from objkv.keys.identity import GroupIdentity
from objkv.keys.prefix import prefix_hashes, root_hash, token_digest
from objkv.stores.base import WriteStore
from objkv.stores.memory import MemoryStore
from objkv.telemetry import MemoryRecorder
from objkv.tracing import NO_TRACING, Tracing
from objkv.transfer.fetch import Cuts
from objkv.transfer.lanes import HostLane, Lane
from objkv.transfer.loader import Loader, LoadLimits
from objkv.transfer.plan import ChunkMove, LoadMove, LoadOutcome, LoadPlan, SaveMove, SavePlan
from objkv.transfer.saver import SaveLimits, Saver
from objkv.transfer.slabs import SlabPool
from tests.transfer.paged_cache import paged_group

PATIENCE_S = 120.0
"""For other threads to come, on a machine that is busy with other things."""
NAMESPACE = "0123456789abcdef" * 2
CHUNK = 64
BLOCKS = CHUNK // 32
GROUP = GroupIdentity("full", None, ("l0", "l1", "l2"), heads=2, content=16, block_size=32)
WHOLE = Cuts()
"""The payloads of these tests are so small that each comes in one request."""
IN_SPANS = Cuts(step_spans_max=4, span_bytes_min=1)
"""Unless a test wants several."""
TOKENS = list(range(1000, 1000 + 4 * CHUNK))
HASHES = prefix_hashes(NAMESPACE, TOKENS, CHUNK)


class Replica:
    """One worker's loader and saver over a paged cache of its own."""

    def __init__(
        self,
        store: WriteStore,
        index: MemoryIndex,
        *,
        seed: int,
        codec: str = "none",
        slabs: int = 8,
        deadline_s: float = PATIENCE_S,
        step_deadline_s: float = PATIENCE_S,
        queue_max: int = 64,
        group: GroupIdentity = GROUP,
        cuts: Cuts = WHOLE,
        hot: WriteStore | None = None,
        num_blocks: int = 32,
        join_s: float = PATIENCE_S,
        lane: Callable[[], Lane] = HostLane,
        seal: Seal | None = None,
        tracing: Tracing = NO_TRACING,
    ) -> None:
        self.recorder = MemoryRecorder()
        self.paged, self.caches = paged_group(
            group, chunk_tokens=CHUNK, num_blocks=num_blocks, seed=seed
        )
        settings = CacheSettings(
            f"replica-{seed}", ttl_s=3600, lease_ms=600_000, hot_payload_bytes_max=1 << 20
        )
        self.index = index
        self.cache = ChunkCache(store, hot, index, settings, self.recorder, seal=seal)
        size = payload_bytes_max(self.paged.layers)
        self.load_slabs = SlabPool("load", count=slabs, slab_bytes=size, pinned=False)
        self.save_slabs = SlabPool("save", count=slabs, slab_bytes=size, pinned=False)
        groups = {0: self.paged}
        self.loader = Loader(
            self.cache,
            groups,
            self.load_slabs,
            lane_for_thread=lane,
            limits=LoadLimits(2, queue_max, deadline_s, step_deadline_s, cuts, join_s),
            recorder=self.recorder,
            tracing=tracing,
        )
        self.saver = Saver(
            self.cache,
            groups,
            self.save_slabs,
            lane=HostLane(),
            limits=SaveLimits(1, queue_max, PATIENCE_S, codec, f"replica-{seed}"),
            recorder=self.recorder,
        )

    def save(self, chunks: range, first_block: int = 1, request: str = "r") -> set[tuple[str, int]]:
        """Save chunks whose blocks follow each other from ``first_block``; waits until stored."""
        moves = []
        for c in chunks:
            tokens = tuple(TOKENS[c * CHUNK : (c + 1) * CHUNK])
            moves.append(SaveMove(self.move(c, first_block), token_digest(tokens), None))
        dropped = self.saver.gather((SavePlan(request, NAMESPACE, tuple(moves)),))
        assert self.saver.drain(PATIENCE_S)
        return dropped

    def load(
        self, chunks: range, first_block: int, *, skip: int = 0, sync: bool = False
    ) -> LoadOutcome:
        """Load chunks, without the first ``skip`` blocks of the first one; waits for the end."""
        self.loader.submit(self.load_plan(chunks, first_block, skip=skip, sync=sync))
        if sync:
            (outcome,) = self.loader.take_finished(sync=True)
            return outcome
        return self.outcome()

    def outcome(self) -> LoadOutcome:
        """The one outcome of a load between steps."""
        found: list[LoadOutcome] = []

        def told() -> bool:
            found.extend(self.loader.take_finished(sync=False))
            return bool(found)

        wait_until(told)
        (outcome,) = found
        return outcome

    def load_plan(
        self, chunks: range, first_block: int, *, skip: int = 0, sync: bool = False
    ) -> LoadPlan:
        """A plan whose records come from the index; blocks follow each other."""
        moves = []
        for c in chunks:
            (record,) = self.index.lookup(NAMESPACE, [HASHES[c]])
            shards = tuple(record.shards.items()) if record else ()
            cut = skip if c == chunks[0] else 0
            moves.append(LoadMove(self.move(c, first_block, cut=cut, base=chunks[0]), shards))
        return LoadPlan("r", NAMESPACE, tuple(moves), sync)

    def move(self, chunk: int, first_block: int, *, cut: int = 0, base: int = 0) -> ChunkMove:
        """Chunk ``chunk``, its blocks counted from ``first_block`` at chunk ``base``."""
        start = first_block + (chunk - base) * BLOCKS
        return ChunkMove(
            chunk=chunk,
            group=0,
            prefix_hash=HASHES[chunk],
            parent_hash=HASHES[chunk - 1] if chunk else root_hash(NAMESPACE),
            token_start=chunk * CHUNK,
            token_end=(chunk + 1) * CHUNK,
            first_block=cut,
            block_ids=tuple(range(start + cut, start + BLOCKS)),
        )

    def path(self, chunk: int) -> str:
        """Where this rank's payload of a chunk is."""
        digest = HASHES[chunk].hex()
        shard = self.paged.shape.rank_shard.shard
        return f"{NAMESPACE}/{digest[:2]}/{digest}/0.{shard}.safetensors"

    def snapshot(self) -> list[torch.Tensor]:
        """A copy of the whole paged cache."""
        return [cache.clone() for cache in self.caches]

    def close(self) -> None:
        """Stop its threads; no slab may be left leased."""
        self.saver.close(1.0)
        self.loader.close()


def wait_until(condition: Callable[[], bool], seconds_max: float = PATIENCE_S) -> None:
    """Poll for something that other threads do."""
    end = time.monotonic() + seconds_max
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.001)


def stores() -> tuple[MemoryStore, MemoryIndex]:
    """An empty bulk store and index."""
    return MemoryStore(), MemoryIndex()
