"""A replica without an engine: the product's own backends, cache, lookups, loader and saver over a
paged cache on the host, with stores and an index that fail on demand.

Only this file depends on how these parts are wired together.
"""

import random
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch

from benchmarks.inside import InsideLoads
from benchmarks.soak_prompts import (
    BLOCK,
    BLOCKS,
    CHUNK,
    GROUPS,
    NAMESPACE,
    Prompt,
    shard_of,
)
from objkv.assembly.backends import open_backends
from objkv.cache.chunks import CacheSettings, ChunkCache
from objkv.cache.lookup import LookupLimits, LookupService, Records
from objkv.cache.match import usable_chunks
from objkv.codec.payload import payload_bytes_max
from objkv.config import Config
from objkv.errors import StoreUnavailable
from objkv.index.base import WriteIndex
from objkv.index.guarded import GuardedIndex
from objkv.index.near import NearIndex
from objkv.keys.prefix import root_hash, token_digest
from objkv.net.breaker import Change
from objkv.net.guard import CallPolicy
from objkv.telemetry import MemoryRecorder
from objkv.testing.flaky import FlakyStore
from objkv.transfer.lanes import HostLane
from objkv.transfer.loading.loads import LoadLimits
from objkv.transfer.paging import GroupShape, PagedGroup
from objkv.transfer.plan import ChunkMove, LoadMove, LoadOutcome, LoadPlan, SaveMove, SavePlan
from objkv.transfer.saver import SaveLimits, Saver
from objkv.transfer.slabs import SlabPool

POISON = 255
"""What blocks without an owner hold; no truth holds it."""
SLABS = 10
"""For saves, and as much memory for loads; fewer than a crowd of requests wants."""

P = ParamSpec("P")
T = TypeVar("T")
Tables = tuple[list[int], ...]
"""Per group the physical blocks of a request, in the order of its tokens."""


class FlakyIndex(GuardedIndex, CallPolicy):
    """Refuses a share of its calls, as drawn."""

    share = 0.0

    def __init__(self, inner: WriteIndex) -> None:
        super().__init__(inner, guard=self)

    def call(self, verb: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if self.share and random.random() < self.share:
            raise StoreUnavailable(f"{verb} refused, as the soak wants it")
        return call(*args, **kwargs)


class Replica:
    """All methods are called by one thread, the replica's forward thread; stores, index and slabs
    may be looked at, and made to fail, by others."""

    def __init__(self, name: str, config: Config, blocks: int) -> None:
        self.recorder = MemoryRecorder()
        self._backends = open_backends(config, self.recorder, on_change=self._count_change)
        assert self._backends.hot is not None
        self.bulk = FlakyStore(self._backends.bulk)
        self.hot = FlakyStore(self._backends.hot)
        self.index = FlakyIndex(self._backends.index)
        fields = sorted(f"{g}.{shard_of(group).shard}" for g, group in enumerate(GROUPS))
        self.near = NearIndex(
            self.index, records_max=2_000, ttl_s=2.0, miss_ttl_s=0.2, fields=fields
        )
        limits = LookupLimits(config.lookup_deadline_ms / 1000, config.lookup_queue_max)
        self.lookups = LookupService(self.near, fields, self.recorder, limits)
        self.caches = [
            [
                torch.full((1 + blocks, group.heads, BLOCK, group.content), POISON).byte()
                for _ in group.layers
            ]
            for group in GROUPS
        ]
        paged = {
            g: PagedGroup(GroupShape(group.layers, BLOCKS, BLOCK, shard_of(group)), self.caches[g])
            for g, group in enumerate(GROUPS)
        }
        size = max(payload_bytes_max(p.layers, tokens=CHUNK) for p in paged.values())
        self.slabs = SlabPool("save", count=SLABS, slab_bytes=size)
        settings = CacheSettings(
            name,
            config.ttl_s,
            config.lease_ms,
            config.hot_payload_bytes_max,
            config.hot_save_bytes_max,
            config.hot_promote_loads,
            config.hot_promote_bytes_max,
        )
        cache = ChunkCache(self.bulk, self.hot, self.index, settings, self.recorder)
        self._cache = cache
        self.loads = InsideLoads(
            cache,
            paged,
            self.recorder,
            payloads=SLABS,
            payload_bytes=size,
            threads=4,
            limits=LoadLimits(64, config.load_deadline_ms / 1000, 1.0),
        )
        self.loader = self.loads.loader
        self.saver = Saver(
            cache,
            paged,
            self.slabs,
            lane=HostLane(),
            limits=SaveLimits(2, 16, config.save_deadline_ms / 1000, config.codec, name),
            recorder=self.recorder,
        )

    def match(self, request: str, prompt_: Prompt) -> tuple[int, Records] | None:
        """How many leading chunks can be loaded, and their records; None while not known."""
        records = self.lookups.ask(request, NAMESPACE, prompt_.hashes)
        if records is None:
            return None
        return usable_chunks(records, GROUPS, CHUNK), records

    def load(
        self, request: str, prompt_: Prompt, tables: Tables, records: Records, *, sync: bool
    ) -> None:
        """Start loading as many leading chunks as there are records."""
        moves = [
            LoadMove(_move(prompt_, c, g, tables), tuple(shards.items()))
            for c, shards in enumerate(records)
            if shards is not None
            for g in range(len(GROUPS))
        ]
        self.loader.submit(LoadPlan(request, NAMESPACE, tuple(moves), sync))

    def step_layers(self) -> list[LoadOutcome]:
        """A forward pass that waits for loads within the step, layer by layer."""
        for g, group in enumerate(GROUPS):
            for layer in range(len(group.layers)):
                self.loader.wait_layer(g, layer)
        return self.loader.take_finished(sync=True)

    def save(self, request: str, prompt_: Prompt, tables: Tables, chunks: Sequence[int]) -> int:
        """Take these chunks out; how many were dropped at once."""
        moves = tuple(
            SaveMove(
                _move(prompt_, c, g, tables),
                token_digest(list(prompt_.tokens[c * CHUNK : (c + 1) * CHUNK])),
                None,
            )
            for c in chunks
            for g in range(len(GROUPS))
        )
        return len(self.saver.gather((SavePlan(request, NAMESPACE, moves),)))

    def note(self, outcome: LoadOutcome) -> None:
        """Believe no record any longer that was found wrong."""
        for namespace, prefix_hash in outcome.rejected:
            self.near.invalidate(namespace, prefix_hash)

    def close(self) -> None:
        """As a replica that shuts down, whatever is under way."""
        self.saver.close(2.0)
        self.loader.close()
        self._cache.close(1.0)
        self.lookups.close()
        self._backends.close()

    def _count_change(self, change: Change) -> None:
        if change.error is not None:
            self.recorder.count(f"{change.end}_given_up")


def _move(prompt_: Prompt, chunk: int, group: int, tables: Tables) -> ChunkMove:
    return ChunkMove(
        chunk=chunk,
        group=group,
        prefix_hash=prompt_.hashes[chunk],
        parent_hash=prompt_.hashes[chunk - 1] if chunk else root_hash(NAMESPACE),
        token_start=chunk * CHUNK,
        token_end=(chunk + 1) * CHUNK,
        first_block=0,
        block_ids=tuple(tables[group][chunk * BLOCKS : (chunk + 1) * BLOCKS]),
    )
