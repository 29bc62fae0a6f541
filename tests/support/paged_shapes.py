"""Replicas of any TP and PP size, block size and layout, over one memory store: for tests of what
they read of each other. What is computed is a fixed function of layer, head, token and element, so
that the pages of every replica are known in advance."""

from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import numpy as np
import torch

from objkv.agent.fill import PartPolicy
from objkv.cache.chunks import CacheSettings, ChunkCache
from objkv.cache.match import payloads_of
from objkv.codec.payload import payload_bytes_max
from objkv.keys.identity import GroupIdentity
from objkv.keys.prefix import prefix_hashes, token_digest
from objkv.keys.topology import Shard, Topology
from objkv.stores.base import WriteStore
from objkv.telemetry import MemoryRecorder
from objkv.transfer.loading.loader import LoadLimits
from objkv.transfer.paging import GroupShape, PagedGroup
from objkv.transfer.plan import ChunkMove, LoadOutcome, LoadPlan, SaveMove, SavePlan
from tests.contracts.memory_index import MemoryIndex
from tests.support.inside import InsideJoin
from tests.support.layouts import placed
from tests.support.paged_cache import NAMESPACE, PATIENCE_S, Worker
from tests.support.plans import LoadMove, move_of, packed

CONTENT = 4
LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""vLLM's ``KVCacheLayout``: the physical order of layers, blocks, heads, tokens and content."""


def truth(layers: range, heads: range, tokens: range) -> np.ndarray:
    """``[layers, heads, tokens, CONTENT]`` int32: what any replica computes for them."""
    grid = np.meshgrid(layers, heads, tokens, range(CONTENT), indexing="ij")
    layer, head, token, element = (axis.astype(np.int32) for axis in grid)
    return ((layer * 64 + head) * 8192 + token) * CONTENT + element


@dataclass(frozen=True)
class ShapeOfReplica:
    tp: int = 1
    pp: int = 1
    block_size: int = 4
    layout: str = "LBHNC"
    codec: str = "none"
    dcp: int = 1
    interleave: int = 1
    nodes: int = 1

    @property
    def block_tokens(self) -> int:
        """Tokens that a block covers on all ranks together."""
        return self.block_size * self.dcp


@dataclass(frozen=True)
class Model:
    heads: int = 4
    layers: int = 4
    chunk: int = 16
    chunks: int = 3
    divisible: bool = True

    @property
    def tokens(self) -> list[int]:
        return list(range(500, 500 + self.chunk * self.chunks))

    @property
    def hashes(self) -> list[bytes]:
        return prefix_hashes(NAMESPACE, self.tokens, self.chunk)

    @property
    def identity(self) -> GroupIdentity:
        return GroupIdentity("full", None, self.names, self.heads, CONTENT, block_size=4)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"model.layers.{i}.attn" for i in range(self.layers))


class ShapedRank(Worker):
    def __init__(
        self,
        model: Model,
        shape: ShapeOfReplica,
        ranks: tuple[int, int],
        store: WriteStore,
        index: MemoryIndex,
        queue_max: int = 64,
        joins: dict[str, InsideJoin] | None = None,
    ) -> None:
        tp_rank, pp_rank = ranks
        self.model, self.shape = model, shape
        each = model.layers // shape.pp  # as long as that divides them
        self.layers = range(pp_rank * each, (pp_rank + 1) * each)
        cut = (each,) * shape.pp, shape.dcp, shape.interleave, shape.nodes
        topology = self.topology = Topology(shape.tp, model.heads, *cut)
        self.number = pp_rank * shape.tp + tp_rank
        held = topology.held(self.number)
        assert held is not None
        self.rank = held
        self.heads = range(held.shard.head_start, held.shard.head_end)
        self.blocks = model.chunk * model.chunks // shape.block_tokens
        self.memory = self._allocate(2 * self.blocks + 1)
        self.index, recorder = index, MemoryRecorder()
        paged = PagedGroup(self._group_shape(), list(self.memory.unbind(0)))
        settings = CacheSettings("writer", ttl_s=3600, lease_ms=600_000, hot_save_bytes_max=0)
        payload_bytes = payload_bytes_max(paged.layers, tokens=model.chunk)
        super().__init__(
            paged,
            ChunkCache(store, None, index, settings, recorder),
            recorder,
            name="writer",
            load=LoadLimits(queue_max, PATIENCE_S, PATIENCE_S, PATIENCE_S),
            slab_bytes=payload_bytes + 4096,
            codec=shape.codec,
            part_policy=PartPolicy(parts_max=3, part_bytes_min=1),
            arena_bytes=32 * (shape.tp * shape.pp * payload_bytes + 8192),
            joins=joins,
        )

    def compute(self) -> None:
        """Fill blocks 1, 2, ... with what the prompt comes to."""
        self.memory.view(torch.int32)[:, 1 : 1 + self.blocks] = self.expected()

    def expected(self) -> torch.Tensor:
        """``[layers, blocks, heads, block_size, CONTENT]`` of the whole prompt."""
        tokens = range(self.model.chunk * self.model.chunks)
        part = self.rank.shard.tokens
        mine = [t for t in tokens if t // part.interleave % part.size == part.rank]
        whole = truth(self.layers, self.heads, tokens)[:, :, mine]
        size = self.shape.block_size
        cut = whole.reshape(len(self.layers), len(self.heads), self.blocks, size, CONTENT)
        return torch.from_numpy(np.ascontiguousarray(cut.swapaxes(1, 2)))

    def save_plan(self, number: int = 0) -> tuple[SavePlan]:
        each = self.model.chunk // self.shape.block_tokens
        digest, moves = token_digest(self.model.tokens), []
        for chunk in range(self.model.chunks):
            ids = tuple(range(1 + chunk * each, 1 + (chunk + 1) * each))
            moves.append(SaveMove(self.move(chunk, 0, ids), digest, None))
        return (SavePlan("r", NAMESPACE, tuple(moves), number=number),)

    def plan(self, index: MemoryIndex, *, skip: int = 0, sync: bool = False) -> LoadPlan:
        """The prompt without its first ``skip`` blocks, into blocks behind those that ``compute``
        fills."""
        each, moves = self.model.chunk // self.shape.block_tokens, []
        base = 1 + self.blocks
        for chunk, record in enumerate(index.lookup(NAMESPACE, self.model.hashes)):
            ids = tuple(range(base + chunk * each, base + (chunk + 1) * each))
            cut = min(each, max(0, skip - chunk * each))
            if cut < each:
                known = dict(record.shards) if record else {}
                move = self.move(chunk, cut, ids[cut:])
                shards = payloads_of(known, 0, self.model.identity) or (None,)
                moves += [LoadMove(move, shard) for shard in shards]
        return LoadPlan("r", NAMESPACE, packed(moves), sync)

    def load(self, index: MemoryIndex, *, skip: int = 0, sync: bool = False) -> LoadOutcome:
        return self.outcome(self.plan(index, skip=skip, sync=sync))

    def loaded(self) -> torch.Tensor:
        return self.memory[:, 1 + self.blocks :].contiguous()

    def close(self) -> None:
        super().close()
        assert self.leased == 0

    def _allocate(self, blocks: int) -> torch.Tensor:
        """``[layers, blocks, heads, block_size, CONTENT]``, in the physical order of the layout."""
        sizes = (len(self.layers), blocks, len(self.heads), self.shape.block_size, CONTENT)
        memory = torch.full((prod(sizes),), -1, dtype=torch.int32)
        return placed(memory, self.shape.layout, sizes).view(torch.float32)

    def _group_shape(self) -> GroupShape:
        model, size, topology = self.model, self.shape.block_size, self.topology
        is_dealt = self.shape.dcp == 1 or (self.shape.interleave == 1 and model.divisible)
        payload, joined = topology.joined(self.number) if is_dealt else (self.rank.shard, 1)
        names = model.names[self.layers.start : self.layers.stop]
        return GroupShape(
            names,
            model.chunk // self.shape.block_tokens,
            size,
            self.rank,
            model_layers=model.names,
            heads=model.heads,
            divisible=model.divisible,
            payload=None if payload == Shard(0, model.layers, 0, model.heads) else payload,
            joined=joined,
        )

    def move(self, chunk: int, first_block: int, ids: tuple[int, ...]) -> ChunkMove:
        model = self.model
        return move_of(chunk, model.hashes, NAMESPACE, model.chunk, ids, first_block)


class ShapedReplica:
    def __init__(self, model: Model, shape: ShapeOfReplica, *stores: Any, **how: Any) -> None:
        """``stores``: a store and an index. ``how``: of each rank."""
        self.model, how["joins"] = model, dict[str, InsideJoin]()
        places = product(range(shape.pp), range(shape.tp))
        self.ranks = [ShapedRank(model, shape, (tp, pp), *stores, **how) for pp, tp in places]

    def __enter__(self) -> "ShapedReplica":
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.close()

    def compute_and_save(self) -> None:
        for rank in self.ranks:
            rank.compute()
            assert not rank.save_all(rank.save_plan())
