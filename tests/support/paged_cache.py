"""A paged KV cache as vLLM registers it, without vLLM: replicas over one store, a lane that copies
late, and stores that give bytes in pieces."""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, repeat
from typing import Any, ClassVar, Self

import torch

from objkv.agent.client import WINDOW
from objkv.agent.core import CoreLimits
from objkv.agent.fill import PartPolicy
from objkv.cache.chunks import CacheSettings, ChunkCache
from objkv.cache.match import stored_blocks
from objkv.codec.payload import payload_bytes_max
from objkv.codec.seal import Seal
from objkv.keys.identity import GroupIdentity
from objkv.keys.prefix import prefix_hashes, token_digest
from objkv.keys.topology import Topology
from objkv.stores.base import Arrived, HotStore, WriteStore, check_fits
from objkv.telemetry import MemoryRecorder
from objkv.tracing import NO_TRACING, Tracing
from objkv.transfer.devices import driver_of, open_lane
from objkv.transfer.lanes import Lane
from objkv.transfer.loading.loader import Loader, LoadLimits
from objkv.transfer.paging import GroupShape, PagedGroup
from objkv.transfer.plan import ChunkMove, LoadOutcome, LoadPlan, SaveMove, SavePlan
from objkv.transfer.registration import ArenaRegistration
from objkv.transfer.saver import SaveLimits, Saver
from objkv.transfer.slabs import SlabPool
from tests.agent.consistency import forget_all
from tests.contracts.memory_index import MemoryIndex
from tests.contracts.memory_store import MemoryStore
from tests.support.device import HOST, current_device, pinning
from tests.support.inside import InsideAgent, InsideJoin
from tests.support.plans import LoadMove, move_of, packed
from tests.support.waiting import PATIENCE_S, wait_until


def paged_group(
    identity: GroupIdentity,
    *,
    chunk_tokens: int,
    num_blocks: int,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    tp: tuple[int, int] = (0, 1),
) -> tuple[PagedGroup, list[torch.Tensor]]:
    """A rank's group over random blocks, and its tensors ``[num_blocks, H, N, C]``, one a layer.

    ``tp`` is (rank, size). Block 0 is the null block, as in vLLM.
    """
    rank = Topology(tp[1], identity.heads, (len(identity.layers),)).held(tp[0])
    assert rank is not None
    heads = rank.shard.head_end - rank.shard.head_start
    generator = torch.Generator().manual_seed(seed)
    shape = (num_blocks, heads, identity.block_size, identity.content)
    device = current_device()
    caches = [torch.randn(shape, generator=generator).to(dtype) for _ in identity.layers]
    caches = [cache.to(device) for cache in caches]
    blocks = stored_blocks(identity, chunk_tokens)
    paged = PagedGroup(GroupShape(identity.layers, blocks, identity.block_size, rank), caches)
    return paged, caches


def same_blocks(
    left: Sequence[torch.Tensor],
    left_ids: Sequence[int],
    right: Sequence[torch.Tensor],
    right_ids: Sequence[int],
) -> bool:
    return all(
        torch.equal(
            a.cpu()[list(left_ids)].contiguous().view(torch.uint8),
            b.cpu()[list(right_ids)].contiguous().view(torch.uint8),
        )
        for a, b in zip(left, right, strict=True)
    )


NAMESPACE = "0123456789abcdef" * 2
CHUNK = 64
BLOCKS = CHUNK // 32
GROUP = GroupIdentity("full", None, ("l0", "l1", "l2"), heads=2, content=16, block_size=32)
WHOLE = PartPolicy()
"""The payloads of these tests are so small that each comes in one request."""
IN_PARTS = PartPolicy(parts_max=4, part_bytes_min=1)
"""Unless a test wants several."""
TOKENS = list(range(1000, 1000 + 4 * CHUNK))
HASHES = prefix_hashes(NAMESPACE, TOKENS, CHUNK)


class Worker:
    """A rank's loader and saver over its pages. Tests of transfers close it at their end."""

    opened: ClassVar[list["Worker"]] = []

    def __init__(
        self,
        paged: PagedGroup,
        cache: ChunkCache,
        recorder: MemoryRecorder,
        *,
        name: str,
        load: LoadLimits,
        slab_bytes: int,
        slabs: int = 8,
        threads: int = 2,
        part_policy: PartPolicy = WHOLE,
        codec: str = "none",
        arena_bytes: int | None = None,
        save_queue_max: int = 64,
        lane: Lane | None = None,
        clock: Callable[[], float] = time.monotonic,
        tracing: Tracing = NO_TRACING,
        joins: dict[str, InsideJoin] | None = None,
    ) -> None:
        self.paged, self.cache, self.recorder = paged, cache, recorder
        self.load_slabs, self.save_slabs = (
            SlabPool(kind, count=slabs, slab_bytes=slab_bytes, pin=pinning())
            for kind in ("load", "save")
        )
        self.inside = InsideAgent(
            cache,
            max(4, slabs) * (slab_bytes // 4096 + 1) * 4096 if arena_bytes is None else arena_bytes,
            CoreLimits(threads, WINDOW, part_policy=part_policy),
            recorder,
            codec,
            joins,
        )
        on_device = None
        if lane is None and paged.device != HOST:
            lane = open_lane(paged.device)
            pin = driver_of(paged.device).pin_read_only
            on_device = ArenaRegistration(self.load_slabs, pin, begin=lane.adopt_thread)
        self.loader = Loader(
            {0: paged},
            lane or Lane(),
            self.inside.connect,
            limits=load,
            recorder=recorder,
            clock=clock,
            tracing=tracing,
            on_device=on_device,
        )
        self.saver = self.saver_of(SaveLimits(save_queue_max, PATIENCE_S, name))
        Worker.opened.append(self)

    def saver_of(
        self,
        limits: SaveLimits,
        lane: Lane | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> Saver:
        return Saver(
            self.inside.saves,
            {0: self.paged},
            self.save_slabs,
            lane=lane or open_lane(self.paged.device),
            limits=limits,
            recorder=self.recorder,
            clock=clock,
        )

    def save_all(self, plans: tuple[SavePlan, ...]) -> set[tuple[str, int]]:
        """Save chunks; waits until they are stored. Those dropped."""
        self.saver.gather(plans)
        assert self.saver.drain(PATIENCE_S)
        return self.saver.take_dropped()

    @property
    def leased(self) -> int:
        return self.inside.core.arena_cache.leased()

    def forget(self) -> None:
        forget_all(self.inside.core.arena_cache)

    def outcome(self, plan: LoadPlan | None = None) -> LoadOutcome:
        """The outcome of ``plan``, or of the one load between steps that is under way."""
        if plan is not None:
            self.loader.submit(plan)
        found: list[LoadOutcome] = []
        sync = plan is not None and plan.sync
        wait_until(lambda: bool(found.extend(self.loader.take_finished(sync=sync)) or found))
        (outcome,) = found
        return outcome

    def keep(self) -> Self:
        Worker.opened.remove(self)
        return self

    def close(self) -> None:
        self.saver.close(1.0)
        self.loader.close()
        self.inside.close(PATIENCE_S)
        if self in Worker.opened:
            Worker.opened.remove(self)


class Replica(Worker):
    def __init__(
        self,
        store: WriteStore,
        index: MemoryIndex,
        *,
        seed: int,
        deadline_s: float = PATIENCE_S,
        step_deadline_s: float = PATIENCE_S,
        queue_max: int = 64,
        group: GroupIdentity = GROUP,
        hot: HotStore | None = None,
        num_blocks: int = 32,
        join_s: float = PATIENCE_S,
        seal: Seal | None = None,
        room: Any = None,
        **options: Any,
    ) -> None:
        paged, self.caches = paged_group(
            group, chunk_tokens=CHUNK, num_blocks=num_blocks, seed=seed
        )
        name, recorder = f"replica-{seed}", MemoryRecorder()
        settings = CacheSettings(name, ttl_s=3600, lease_ms=600_000, hot_save_bytes_max=1 << 20)
        self.index = index
        super().__init__(
            paged,
            ChunkCache(store, hot, index, settings, recorder, seal=seal, room=room),
            recorder,
            name=name,
            load=LoadLimits(queue_max, deadline_s, step_deadline_s, join_s),
            slab_bytes=payload_bytes_max(paged.layers),
            save_queue_max=queue_max,
            **options,
        )

    def save(self, chunks: range, first_block: int = 1, request: str = "r") -> set[tuple[str, int]]:
        """Save chunks whose blocks follow each other from ``first_block``; waits until stored."""
        saves = []
        for c in chunks:
            digest = token_digest(tuple(TOKENS[c * CHUNK : (c + 1) * CHUNK]))
            saves.append(SaveMove(self.move(c, first_block), digest, None))
        return self.save_all((SavePlan(request, NAMESPACE, tuple(saves)),))

    def load(self, chunks: range, first_block: int, **how: Any) -> LoadOutcome:
        """As ``load_plan`` says; waits for the end."""
        return self.outcome(self.load_plan(chunks, first_block, **how))

    def load_plan(
        self, chunks: range, first_block: int, *, skip: int = 0, sync: bool = False
    ) -> LoadPlan:
        """Chunks, without the first ``skip`` blocks of the first one."""
        cuts = [skip if c == chunks[0] else 0 for c in chunks]
        moves = [
            LoadMove(self.move(c, first_block, cut=cut, base=chunks[0]), None)
            for c, cut in zip(chunks, cuts, strict=True)
        ]
        return LoadPlan("r", NAMESPACE, packed(moves), sync)

    def move(self, chunk: int, first_block: int, *, cut: int = 0, base: int = 0) -> ChunkMove:
        """Chunk ``chunk``, its blocks counted from ``first_block`` at chunk ``base``."""
        start = first_block + (chunk - base) * BLOCKS
        ids = range(start + cut, start + BLOCKS)
        return move_of(chunk, HASHES, NAMESPACE, CHUNK, ids, cut)

    def path(self, chunk: int) -> str:
        digest = HASHES[chunk].hex()
        return f"{NAMESPACE}/{digest[:2]}/{digest}/0.safetensors"

    def snapshot(self) -> list[torch.Tensor]:
        return [cache.cpu().clone() for cache in self.caches]


def stores() -> tuple[MemoryStore, MemoryIndex]:
    return MemoryStore(), MemoryIndex()


class PiecewiseStore(MemoryStore):
    """Tells of bytes in pieces of the sizes that ``pieces`` gives for each call; what has not
    arrived yet is noise."""

    def __init__(self, pieces: Callable[[], Iterator[int]] = lambda: repeat(1000)) -> None:
        super().__init__()
        self.pieces = pieces
        self.requests: list[tuple[str, int]] = []
        """(key, first byte) of each get."""

    def get_into(
        self, key: str, buffer: memoryview, arrived: Arrived | None = None, start: int | None = None
    ) -> int | None:
        if start is None:
            start = 0
            check_fits(key, len(self.get(key) or b""), buffer)
        self.requests.append((key, start))
        value = self.get(key)
        if value is None:
            return None
        value = value[start : start + len(buffer)]
        buffer[:] = b"\xaa" * len(buffer)
        at = 0
        for piece in chain(self.pieces(), repeat(len(value))):
            part = value[at : at + piece]
            buffer[at : at + len(part)] = part
            at += len(part)
            if arrived is not None:
                arrived(at)
            if at == len(value):
                return at
        raise AssertionError
