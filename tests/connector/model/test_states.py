"""States of every kind of layer, split as vLLM splits them: each rank of a replica of any TP and PP
size loads the bytes that it would have computed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import MambaSpec

from objkv.agent.fill import PartPolicy
from objkv.cache.chunks import CacheSettings, ChunkCache
from objkv.cache.match import payloads_of
from objkv.codec.payload import payload_bytes_max
from objkv.connector.kv.wiring import read_pages
from objkv.connector.model.groups import Geometry, read_group
from objkv.connector.model.subgroups import SubGroup
from objkv.keys.identity import GroupIdentity
from objkv.keys.prefix import prefix_hashes, root_hash, token_digest
from objkv.keys.states import SplitState
from objkv.telemetry import MemoryRecorder
from objkv.transfer.loading.loader import LoadLimits
from objkv.transfer.plan import ChunkMove, LoadPlan, SaveMove, SavePlan
from tests.contracts.memory_index import MemoryIndex
from tests.contracts.memory_store import MemoryStore
from tests.support.inside import InsideJoin
from tests.support.paged_cache import NAMESPACE, PATIENCE_S, Worker, stores
from tests.support.plans import LoadMove, packed

LAYERS = tuple(f"model.layers.{layer}.mixer" for layer in range(4))
CHUNK, BLOCKS = 16, 6
HASH = prefix_hashes(NAMESPACE, list(range(CHUNK)), CHUNK)[0]


@dataclass(frozen=True)
class Kind:
    """A kind of layer: how vLLM calculates the shapes of its state, and what they consist of."""

    backend: str
    shapes: Any
    conv: tuple[int, ...] = ()
    """Channels of each part of the convolution over all ranks."""
    everywhere: tuple[int, ...] = ()
    """The parts that each rank has all of."""
    temporal: tuple[int, ...] = ()
    """Shape over all ranks, of which the first dimension is split."""
    config: tuple[tuple[str, int], ...] = ()


def gdn(tp: int) -> Any:
    return Shapes.gated_delta_net_state_shape(tp, 4, 8, 8, 4, 4)


def mamba2(groups: int) -> Any:
    return lambda tp: Shapes.mamba2_state_shape(tp, 64, groups, 16, 4, 8, 4)


KINDS = {
    "GDN": Kind("GDN_ATTN", gdn, (32, 32, 32), (), (8, 4, 8)),
    "KDA": Kind(
        "GDN_ATTN", lambda tp: Shapes.kda_state_shape(tp, 8, 4), (32, 32, 32), (), (8, 4, 4)
    ),
    "Mamba 2, groups": Kind(
        "MAMBA2", mamba2(4), (64, 32, 32), (), (16, 4, 8), (("mamba_n_groups", 4),)
    ),
    "Mamba 2, one group": Kind(
        "MAMBA2", mamba2(1), (64, 8, 8), (1, 2), (16, 4, 8), (("n_groups", 1),)
    ),
    "Mamba": Kind("MAMBA1", lambda tp: Shapes.mamba1_state_shape(tp, 48, 4, 4), (48,), (), (48, 4)),
    "linear": Kind(
        "LINEAR", lambda tp: Shapes.linear_attention_state_shape(8, tp, 4), temporal=(8, 4, 4)
    ),
    "short convolution": Kind(
        "SHORT_CONV", lambda tp: Shapes.short_conv_state_shape(tp, 48, 3), (48,)
    ),
}


@contextmanager
def conv_layout(name: str) -> Iterator[None]:
    with patch.object(mamba_utils, "get_conv_state_layout", lambda: name):
        yield


def config(kind: Kind, tp: int) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(**dict(kind.config))),
        parallel_config=SimpleNamespace(tensor_parallel_size=tp),
        cache_config=SimpleNamespace(),
    )


def spec(kind: Kind, tp: int) -> MambaSpec:
    shapes = kind.shapes(tp)
    dtypes = ((torch.bfloat16,) if kind.conv else ()) + (torch.float32,)
    return MambaSpec(
        CHUNK,
        shapes,
        dtypes[: len(shapes)],
        mamba_type=MambaAttentionBackendEnum[kind.backend],
        mamba_cache_mode="align",
    )


def identity(kind: Kind, tp: int) -> GroupIdentity:
    return read_group(config(kind, tp), SubGroup(0, tuple(LAYERS), spec(kind, tp)))


def states(kind: Kind, tp: int, rank: int, layer: int) -> torch.Tensor:
    """The bytes of one rank's state of a layer, put together as vLLM's layers do."""
    source = torch.Generator().manual_seed(layer)
    pieces = []
    tokens = kind.shapes(1)[0][0 if mamba_utils.get_conv_state_layout() == "SD" else 1]
    if kind.conv:
        parts = []
        for i, channels in enumerate(kind.conv):
            whole = torch.randn((tokens, channels), generator=source).to(torch.bfloat16)
            parts.append(whole if i in kind.everywhere else whole.chunk(tp, dim=1)[rank])
        conv = torch.cat(parts, dim=1)
        pieces.append(conv if mamba_utils.get_conv_state_layout() == "SD" else conv.T)
    if kind.temporal:
        pieces.append(torch.randn(kind.temporal, generator=source).chunk(tp)[rank])
    assert [tuple(piece.shape) for piece in pieces] == [tuple(s) for s in kind.shapes(tp)]
    return torch.cat([piece.contiguous().flatten().view(torch.int8) for piece in pieces])


Places = tuple[MemoryStore, MemoryIndex]


class StateRank(Worker):
    """One rank, whose blocks hold rubbish until it computes or loads."""

    def __init__(
        self,
        kind: Kind,
        ranks: tuple[int, int],
        geometry: Geometry,
        codec: str,
        places: Places,
        joins: dict[str, InsideJoin],
    ) -> None:
        tp_rank, pp_rank = ranks
        self.identity, shape = geometry.groups[0], geometry.shape(0, tp_rank, pp_rank)
        assert shape is not None
        self.layers = [LAYERS.index(name) for name in shape.layers]
        self.right = [states(kind, geometry.tp_size, tp_rank, layer) for layer in self.layers]
        size = len(self.right[0])
        # Pages are padded to those of attention, and rubbish is around them.
        memory = torch.randint(-128, 127, (BLOCKS, len(self.layers), size + 40), dtype=torch.int8)
        self.memory = memory
        self.size = size
        caches = {name: memory[:, i, None, None, :size] for i, name in enumerate(shape.layers)}
        paged = read_pages(geometry, ranks, caches)[0]
        recorder = MemoryRecorder()
        whole = geometry.tp_size * len(LAYERS)  # what others have is at most so much longer
        room = whole * payload_bytes_max(paged.layers, tokens=CHUNK) + 4096
        settings = CacheSettings("w", ttl_s=3600, lease_ms=600_000, hot_save_bytes_max=0)
        super().__init__(
            paged,
            ChunkCache(places[0], None, places[1], settings, recorder),
            recorder,
            name="w",
            load=LoadLimits(64, PATIENCE_S, PATIENCE_S, PATIENCE_S),
            slab_bytes=room,
            codec=codec,
            part_policy=PartPolicy(3, 1),
            arena_bytes=4 * (room + (64 << 10)),  # a header of all ranks' frames may be longer
            joins=joins,
        )

    def compute(self, block: int) -> None:
        for i, state in enumerate(self.right):
            self.memory[block, i, : self.size] = state


def replica(
    kind: Kind, shape: tuple[int, Sequence[int], str, int], places: Places
) -> list[StateRank]:
    tp, stages, codec, nodes = shape
    geometry = Geometry(
        (identity(kind, tp),),
        CHUNK,
        CHUNK,
        tp_size=tp,
        stages=(tuple(stages),) if len(stages) > 1 else (),
        nodes=nodes,
    )
    joins: dict[str, InsideJoin] = {}
    return [
        StateRank(kind, (tp_rank, pp_rank), geometry, codec, places, joins)
        for pp_rank in range(len(stages))
        for tp_rank in range(tp)
    ]


def move(block: int) -> ChunkMove:
    return ChunkMove(0, 0, HASH, root_hash(NAMESPACE), 0, CHUNK, 0, (block,))


def load(rank: StateRank, places: Places, block: int) -> Any:
    (record,) = places[1].lookup(NAMESPACE, [HASH])
    assert record is not None
    one = move(block)
    moves = [LoadMove(one, shard) for shard in payloads_of(record.shards, 0, rank.identity)]
    return rank.outcome(LoadPlan("r", NAMESPACE, packed(moves), sync=False))


replicas = st.tuples(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([(4,), (2, 2), (1, 3)]),
    st.sampled_from(["none", "lz4", "blosc"]),
    st.sampled_from([1, 1, 2]),
)


@given(st.sampled_from(sorted(KINDS)), st.sampled_from(["SD", "DS"]), replicas, replicas)
@settings(max_examples=12, deadline=None)
def test_every_rank_loads_the_bytes_that_it_would_have_computed(
    name: str, layout: str, writer: tuple[Any, ...], reader: tuple[Any, ...]
) -> None:
    kind, places = KINDS[name], stores()
    with conv_layout(layout):
        assert identity(kind, writer[0]) == identity(kind, reader[0])
        for rank in replica(kind, writer, places):
            rank.compute(2)
            digest = token_digest(tuple(range(CHUNK)))
            assert not rank.save_all(
                (SavePlan("r", NAMESPACE, (SaveMove(move(2), digest, None),)),)
            )
            rank.close()
        for rank in replica(kind, reader, places):
            before = rank.memory.clone()
            assert not load(rank, places, 4).failed
            for i, state in enumerate(rank.right):
                assert torch.equal(rank.memory[4, i, : rank.size], state)
            before[4, :, : rank.size] = rank.memory[4, :, : rank.size]
            assert torch.equal(rank.memory, before)  # nothing else was written
            rank.close()


@pytest.mark.parametrize("layout", ["SD", "DS"])
@pytest.mark.parametrize("name", KINDS)
def test_the_identity_is_independent_of_the_ranks_but_not_of_the_layout(
    name: str, layout: str
) -> None:
    kind = KINDS[name]
    with conv_layout(layout):
        one, two, four = (identity(kind, tp) for tp in (1, 2, 4))
    assert one == two == four
    split = SplitState.parse(one.state)
    assert split is not None
    assert str(split) == one.state
    assert one.heads == split.units
    with conv_layout("SD" if layout == "DS" else "DS"):
        assert (identity(kind, 1) == one) == (not kind.conv)


def test_a_state_in_detail() -> None:
    with conv_layout("SD"):
        found = identity(KINDS["Mamba 2, one group"], 2)
        assert found.state == "mamba2 split bfloat16:3x64+8*+8* float32:1x512"
        assert found.heads == 16
        assert found.content == 3 * (4 + 8 + 8) * 2 + 32 * 4
        gdn_state = "gdn_attn split bfloat16:3x32+32+32 float32:1x256"
        assert identity(KINDS["GDN"], 1).state == gdn_state


def opaque(found: GroupIdentity, tp: int) -> bool:
    return SplitState.parse(found.state) is None and found.heads == tp


def test_a_state_whose_division_is_not_known_is_shared_by_as_many_ranks_only() -> None:
    kind = KINDS["Mamba 2, one group"]
    with conv_layout("SD"):
        # Each rank has one group: without the number of groups it may be a copy or a part.
        assert opaque(identity(replace(kind, config=()), 4), 4)
        assert opaque(identity(replace(kind, config=(("n_groups", 3),)), 4), 4)
        assert opaque(identity(replace(kind, config=(("n_groups", 1), ("mamba_ngroups", 4))), 4), 4)
        odd = spec(KINDS["GDN"], 2)
        for changed in (
            replace(odd, shapes=((3, 49), odd.shapes[1])),
            replace(odd, shapes=((3, 16), odd.shapes[1])),
            replace(odd, shapes=(*odd.shapes, (4, 4)), dtypes=(*odd.dtypes, torch.float32)),
            replace(odd, dtypes=(torch.float8_e4m3fn, torch.float32)),
            replace(odd, mamba_type=MambaAttentionBackendEnum.MAMBA1),
        ):
            group = SubGroup(0, tuple(LAYERS), changed)
            assert opaque(read_group(config(KINDS["GDN"], 2), group), 2)
        # 3 ranks have each a third, but units are not thirds.
        assert opaque(identity(Kind("SHORT_CONV", lambda _: ((2, 16),)), 7), 7)
