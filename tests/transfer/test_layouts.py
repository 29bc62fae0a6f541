"""Replicas of other TP, PP and block sizes, and of other layouts, read each other's payloads."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from objkv.codec.payload import LayerSpec
from objkv.errors import PayloadError
from objkv.keys.topology import Topology
from objkv.transfer.devices import open_lane
from objkv.transfer.layouts import PayloadLayout
from objkv.transfer.paging import GroupShape, PagedGroup
from objkv.transfer.plan import LoadPlan
from tests.contracts.memory_index import MemoryIndex
from tests.contracts.memory_store import MemoryStore
from tests.support.device import ON_HOST, host_bytes
from tests.support.paged_cache import NAMESPACE
from tests.support.paged_shapes import LAYOUTS, Model, ShapedReplica, ShapeOfReplica
from tests.support.plans import packed, unpacked

MODEL = Model(heads=8, layers=4)


def saved(model: Model, writer: ShapeOfReplica) -> tuple[MemoryStore, MemoryIndex]:
    """What a replica has computed and saved."""
    store, index = MemoryStore(), MemoryIndex()
    with ShapedReplica(model, writer, store, index) as one:
        one.compute_and_save()
    return store, index


def all_read(model: Model, reader: ShapeOfReplica, store: MemoryStore, index: MemoryIndex) -> None:
    """Every rank of ``reader`` has what it would have computed."""
    with ShapedReplica(model, reader, store, index) as other:
        for rank in other.ranks:
            assert not rank.load(index).failed
            assert same(rank.loaded(), rank.expected())


def none_read(model: Model, reader: ShapeOfReplica, store: MemoryStore, index: MemoryIndex) -> None:
    with ShapedReplica(model, reader, store, index) as other:
        for rank in other.ranks:
            assert rank.load(index).failed
            assert bool((rank.loaded().view(torch.int32) == -1).all())


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.view(torch.int32), right.view(torch.int32))


PAIRS: dict[str, list[tuple[Any, Any]]] = {
    "tp": list(product([1, 2, 4, 8], [1, 2, 4, 8])),
    "pp": [(1, 2), (2, 1), (2, 4), (4, 2)],
    "block_size": [(4, 8), (8, 4), (2, 16), (16, 2), (8, 12), (12, 8)],
    "layout": list(product(LAYOUTS, LAYOUTS)),
}
"""Of a writer and of a reader."""


@pytest.mark.parametrize(
    ("what", "writer", "reader"), [(name, *pair) for name in PAIRS for pair in PAIRS[name]]
)
def test_replicas_of_any_shape_read_each_other(what: str, writer: Any, reader: Any) -> None:
    model = Model(heads=2, layers=2, chunk=24) if 12 in (writer, reader) else MODEL
    all_read(
        model, ShapeOfReplica(**{what: reader}), *saved(model, ShapeOfReplica(**{what: writer}))
    )


def test_replicated_heads_are_saved_once_and_read_by_all() -> None:
    model = Model(heads=2, layers=2)
    store, index = MemoryStore(), MemoryIndex()
    with ShapedReplica(model, ShapeOfReplica(tp=8), store, index) as one:
        one.compute_and_save()
        saves = [int(rank.recorder.drain().get("saves", 0)) for rank in one.ranks]
    assert sum(saves) == model.chunks
    assert len(list(store.scan(""))) == model.chunks
    for tp in (1, 8, 2):
        all_read(model, ShapeOfReplica(tp=tp), store, index)


DCP = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 2), (8, 4)]
"""TP size and DCP size of a model with one or two heads."""


@pytest.mark.parametrize(("writer", "reader"), list(product(DCP, DCP)))
def test_any_dcp_size_reads_any_other(writer: tuple[int, int], reader: tuple[int, int]) -> None:
    model = Model(heads=1 if 1 in (a // b for a, b in (writer, reader)) else 2)
    one, other = (ShapeOfReplica(tp=tp, dcp=dcp) for tp, dcp in (writer, reader))
    all_read(model, other, *saved(model, one))


@pytest.mark.parametrize("interleave", [2, 4])
def test_dcp_that_deals_out_several_tokens_is_read_by_the_same(interleave: int) -> None:
    model = Model(heads=1)
    shape = ShapeOfReplica(tp=4, dcp=2, interleave=interleave)
    all_read(model, replace(shape, tp=2), *saved(model, shape))
    for other in (ShapeOfReplica(), replace(shape, interleave=1)):
        none_read(model, other, *saved(model, shape))


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        (ShapeOfReplica(tp=2, dcp=2), ShapeOfReplica()),
        (ShapeOfReplica(block_size=8), ShapeOfReplica(block_size=4)),
    ],
    ids=["another DCP size", "another block size"],
)
def test_pages_that_are_not_canonical_are_refused_in(
    writer: ShapeOfReplica, reader: ShapeOfReplica
) -> None:
    model = Model(heads=1, divisible=False)
    none_read(model, reader, *saved(model, writer))


RANKS_MAX = 8
"""Of a replica of any shape: more are more of the same."""
EXAMPLES = 12
"""In CI the same on the host and on the device, which differ in when a copy is made."""


def of_few_ranks(shape: ShapeOfReplica) -> ShapeOfReplica:
    """The shape with as many stages of a pipeline as leave it few enough ranks."""
    return replace(shape, pp=min(shape.pp, RANKS_MAX // shape.tp))


def dealt(shape: ShapeOfReplica, dcp: int) -> ShapeOfReplica:
    """The shape with DCP as far as its TP size and the model's chunk allow."""
    return replace(shape, dcp=min(dcp, shape.tp, 16 // shape.block_size))


shapes = st.builds(
    ShapeOfReplica,
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2, 4]),
    block_size=st.sampled_from([2, 4, 8, 16]),
    layout=st.sampled_from(sorted(LAYOUTS)),
    codec=st.sampled_from(["none", "lz4", "blosc", "blosclz4"]),
    nodes=st.sampled_from([1, 1, 2, 4]),
).map(of_few_ranks)


dealt_shapes = st.builds(dealt, shapes, st.sampled_from([1, 1, 2, 4]))


@given(st.sampled_from([1, 2, 4, 8]), dealt_shapes, dealt_shapes, st.integers(0, 7), st.booleans())
@settings(max_examples=2 * EXAMPLES, deadline=None)
def test_any_shape_reads_any_other_from_any_block_on(
    heads: int, writer: ShapeOfReplica, reader: ShapeOfReplica, skip: int, sync: bool
) -> None:
    """If a block of the reader has as many slots as there are ranks that fill it."""
    model = Model(heads=heads if writer.dcp == reader.dcp == 1 else 1)
    store, index = saved(model, writer)
    fits = reader.block_size % max(1, writer.dcp // reader.dcp) == 0
    with ShapedReplica(model, reader, store, index) as other:
        for rank in other.ranks:
            outcome = rank.load(index, skip=skip, sync=sync)
            if not outcome.failed:
                expected, loaded = rank.expected(), rank.loaded()
                assert same(loaded[:, skip:], expected[:, skip:])
                assert bool((loaded[:, :skip].view(torch.int32) == -1).all())
            assert outcome.failed == (not fits and skip < rank.blocks)


@given(dealt_shapes, dealt_shapes, st.data())
@settings(max_examples=EXAMPLES, deadline=None)
def test_a_flipped_bit_of_what_a_rank_needs_is_never_loaded(
    writer: ShapeOfReplica, reader: ShapeOfReplica, data: st.DataObject
) -> None:
    model = MODEL if writer.dcp == reader.dcp == 1 else Model(heads=1)
    store, index = saved(model, writer)
    path = data.draw(st.sampled_from(sorted(entry.key for entry in store.scan(""))))
    payload = bytearray(store.get(path) or b"")
    bit = data.draw(st.integers(0, 8 * len(payload) - 1))
    payload[bit // 8] ^= 1 << bit % 8
    store.put(path, bytes(payload))
    with ShapedReplica(model, reader, store, index) as other:
        for rank in other.ranks:
            before = rank.loaded()
            outcome = rank.load(index)
            right, loaded = rank.expected(), rank.loaded()
            for block in range(rank.blocks):
                if 1 + rank.blocks + block not in outcome.failed_blocks:
                    assert same(loaded[:, block], right[:, block])
                else:  # right, or as it was: no layer holds anything else
                    for layer in range(len(rank.layers)):
                        now = loaded[layer, block]
                        assert same(now, right[layer, block]) or partly(
                            now, right[layer, block], before[layer, block]
                        )


def partly(now: torch.Tensor, right: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether every token of every head is right, or as it was: they may come out of several
    payloads."""
    rows = (every.reshape(-1, every.shape[-1]) for every in (now, right, before))
    return all(same(a, b) or same(a, c) for a, b, c in zip(*rows, strict=True))


SPANNING = ShapeOfReplica(tp=8, nodes=2)
"""A replica whose ranks are on several nodes: each has a payload of its own."""


def test_a_chunk_of_which_a_shard_is_missing_is_not_loaded() -> None:
    store, index = saved(MODEL, SPANNING)
    gone = next(e.key for e in store.scan("") if MODEL.hashes[1].hex() in e.key)
    store.delete(gone)
    with ShapedReplica(MODEL, ShapeOfReplica(tp=1), store, index) as other:
        (rank,) = other.ranks
        outcome = rank.load(index)
        each = MODEL.chunk // 4
        first = 1 + rank.blocks + each
        assert outcome.failed_blocks == frozenset(range(first, first + 2 * each))
        assert outcome.rejected == {(NAMESPACE, MODEL.hashes[1])}


def test_a_chunk_in_several_payloads_is_a_miss_if_the_queue_does_not_take_all_of_them() -> None:
    store, index = saved(MODEL, SPANNING)
    queue_max = 2 * MODEL.chunks
    with ShapedReplica(MODEL, ShapeOfReplica(), store, index, queue_max=queue_max) as other:
        (rank,) = other.ranks
        for _ in range(3):  # what was taken has left its place
            assert not rank.load(index).failed
        assert rank.recorder.drain().get("load_refused", 0) == 0
    with ShapedReplica(MODEL, ShapeOfReplica(), store, index, queue_max=queue_max - 1) as other:
        (rank,) = other.ranks
        each = MODEL.chunk // 4
        last = 1 + 2 * rank.blocks - each
        assert rank.load(index).failed_blocks == frozenset(range(last, last + each))


@pytest.mark.parametrize(("first", "count"), [(0, 4), (1, 3), (3, 1), (0, 5), (1, 4), (4, 1)])
@pytest.mark.parametrize("given_heads", [2, 4])
def test_blocks_of_several_payloads_are_written_and_no_more_blocks_than_they_have(
    device: torch.device, given_heads: int, first: int, count: int
) -> None:
    """Otherwise the next layer's pages would be written, or another payload's."""
    share = Topology(4 // given_heads, given_heads, (2,)).held(0)
    assert share is not None
    share = replace(share, shard=replace(share.shard, head_end=2))
    caches = [torch.zeros(24, 2, 16, 4, device=device) for _ in range(2)]
    group = PagedGroup(GroupShape(("a", "b"), 4, 16, share, heads=given_heads), caches)
    found = tuple(LayerSpec(name, "F32", (4, given_heads, 16, 4)) for name in "ab")
    layout = PayloadLayout(group, None, found, 0)
    payloads = torch.randn(3, 2, 4, given_heads, 16, 4)
    memory, lane = host_bytes(payloads), open_lane(device)
    starts = np.arange(3)[:, None] * (len(memory) // 3) + layout.starts
    ids = np.random.default_rng(1).permutation(24)[: 3 * count].reshape(3, count)
    given = range(2), memory.numpy().data, starts, ids, first
    if first + count > 4:
        with pytest.raises(ValueError, match="blocks"):
            layout.scatter(lane, *given)
        return
    lane.follow(lane.mark_compute())  # the caches are filled with zeros on the compute stream
    layout.scatter(lane, *given)
    lane.mark().wait()
    expected = torch.zeros(2, 24, 2, 16, 4)
    for payload, blocks in zip(payloads, ids, strict=True):
        expected[:, blocks] = payload[:, first : first + count, :2]
    assert torch.equal(torch.stack([cache.cpu() for cache in caches]), expected)


@ON_HOST
def test_a_rank_without_a_layer_of_a_group_has_nothing_to_load_of_it() -> None:
    # Of a model with several groups, a stage of the pipeline may have no layer of one.
    store, index = MemoryStore(), MemoryIndex()
    with ShapedReplica(MODEL, ShapeOfReplica(), store, index) as replica:
        (rank,) = replica.ranks
        replica.compute_and_save()
        assert not rank.load(index).failed
        moves = [
            replace(one, move=replace(one.move, group=1))
            for one in unpacked(rank.plan(index).moves)
        ]
        assert not rank.outcome(LoadPlan("r", NAMESPACE, packed(moves), sync=False)).failed


def test_frames_that_divide_a_block_are_a_fault_of_the_payload() -> None:
    share = Topology(1, 2, (1,)).held(0)
    assert share is not None
    group = PagedGroup(GroupShape(("a",), 1, 16, share), [torch.zeros(4, 2, 16, 4)])
    found = tuple(LayerSpec(name, "F32", (1, 2, 16, 4)) for name in "ab")
    with pytest.raises(PayloadError, match="tokens"):
        PayloadLayout(group, None, found, 0)
