"""Replicas of any two shapes, against going through all cells of all ranks."""

from collections import Counter
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objkv.keys.topology import Shard, Topology, cover, pp_layers, rank_shard

TP_SIZES, PP_SIZES, HEADS = range(1, 17), range(1, 9), range(1, 33)
LAYERS = (1, 2, 3, 7, 8, 9, 13, 16, 23, 32)
HASHES = tuple(bytes([first]) + bytes(19) for first in (0, 1, 2, 3, 7, 15, 254, 255))

prefix_hashes = st.binary(min_size=20, max_size=20)
Cells = set[tuple[int, int]]


def possible(heads: int) -> list[int]:
    """The TP sizes that vLLM runs with so many KV heads."""
    return [tp for tp in TP_SIZES if heads % tp == 0 or tp % heads == 0]


@st.composite
def two_shapes(draw: st.DrawFn) -> tuple[Topology, Topology]:
    heads = draw(st.sampled_from(HEADS))
    layers = draw(st.sampled_from(LAYERS))

    def stages() -> tuple[int, ...]:
        pp_size = draw(st.sampled_from(PP_SIZES))
        if draw(st.booleans()):
            return pp_layers(layers, pp_size)
        cuts = sorted(
            draw(st.lists(st.integers(0, layers), min_size=pp_size - 1, max_size=pp_size - 1))
        )
        return tuple(b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True))

    tp_sizes = st.sampled_from(possible(heads))
    one = Topology(draw(tp_sizes), heads, stages())
    return one, Topology(draw(tp_sizes), heads, stages())


def cells(shard: Shard) -> Cells:
    return set(
        product(range(shard.layer_start, shard.layer_end), range(shard.head_start, shard.head_end))
    )


def cells_of(topology: Topology, rank: int) -> Cells:
    """Return the cells that a rank holds, by vLLM's distribution: counted independently, without
    shards."""
    pp_rank, tp_rank = rank // topology.tp_size, rank % topology.tp_size
    before = sum(topology.layers[:pp_rank])
    heads, tp_size = topology.heads, topology.tp_size
    return {
        (layer, head)
        for layer in range(before, before + topology.layers[pp_rank])
        for head in range(heads)
        if (head * tp_size // heads if heads >= tp_size else head) == tp_rank // topology.replicas
    }


def check(reader: Topology, writer: Topology, prefix_hash: bytes) -> None:
    """The parts read of each target are exactly the rank's shard, whatever the two shapes."""
    saved = {rank: cells_of(writer, rank) for rank in writer.writers(prefix_hash)}
    everything = set(product(range(sum(writer.layers)), range(writer.heads)))
    assert Counter(cell for kept in saved.values() for cell in kept) == Counter(everything)
    for rank in range(reader.size):
        need = cells_of(reader, rank)
        held = reader.held(rank)
        assert (cells(held.shard) if held else set()) == need
        targets = reader.target_ranks(rank, writer, prefix_hash)
        assert set(targets) == {target for target, kept in saved.items() if kept & need}


def test_every_tp_size_reads_from_every_other() -> None:
    for heads in HEADS:
        for mine, theirs in product(possible(heads), repeat=2):
            reader, writer = (Topology(tp, heads, (2,)) for tp in (mine, theirs))
            for prefix_hash in HASHES[:: len(HASHES) - 1]:
                check(reader, writer, prefix_hash)


def test_every_pp_size_reads_from_every_other() -> None:
    for layers, mine, theirs in product(LAYERS, PP_SIZES, PP_SIZES):
        reader, writer = (Topology(1, 1, pp_layers(layers, pp)) for pp in (mine, theirs))
        check(reader, writer, HASHES[0])


@given(two_shapes(), prefix_hashes)
def test_every_shape_reads_from_every_other(
    shapes: tuple[Topology, Topology], prefix_hash: bytes
) -> None:
    check(*shapes, prefix_hash)


@given(two_shapes(), prefix_hashes, st.data())
def test_target_ranks_are_those_whose_shards_cover_the_need(
    shapes: tuple[Topology, Topology], prefix_hash: bytes, data: st.DataObject
) -> None:
    reader, writer = shapes
    rank = data.draw(st.integers(0, reader.size - 1))
    need = reader.held(rank)
    if need is None:
        assert reader.target_ranks(rank, writer, prefix_hash) == ()
        return
    saved = {
        share.shard: target
        for target in writer.writers(prefix_hash)
        if (share := writer.held(target))
    }
    parts = cover(need.shard, saved)
    assert parts is not None
    targets = reader.target_ranks(rank, writer, prefix_hash)
    assert sorted(saved[part.source] for part in parts) == sorted(targets)


def test_each_replica_saves_about_as_many_chunks_as_the_others() -> None:
    for heads, tp_size in ((1, 8), (2, 8), (4, 16)):
        topology = Topology(tp_size, heads, (3, 3))
        counts = Counter(
            rank for first in range(256) for rank in topology.writers(bytes([first]) + bytes(19))
        )
        assert counts == dict.fromkeys(range(topology.size), 256 // topology.replicas)


def seed_targets(rank: int, reader: Topology, writer: Topology) -> set[int]:
    """As vLLM's ``get_target_remote_ranks`` names them, with stages of one length."""

    def along(place: int, mine: int, theirs: int) -> range:
        ratio = max(mine, theirs) // min(mine, theirs)
        if mine < theirs:
            return range(place * ratio, (place + 1) * ratio)
        return range(place // ratio, place // ratio + 1)

    pp_rank, tp_rank = divmod(rank, reader.tp_size)
    return {
        pp * writer.tp_size + tp
        for pp in along(pp_rank, reader.pp_size, writer.pp_size)
        for tp in along(tp_rank, reader.tp_size, writer.tp_size)
    }


def test_targets_are_those_of_vllm_where_nothing_is_replicated() -> None:
    sizes = [(tp, pp) for tp in (1, 2, 4, 8, 16) for pp in (1, 2, 4, 8)]
    for mine, theirs in product(sizes, repeat=2):
        reader, writer = (Topology(tp, 16, pp_layers(16, pp)) for tp, pp in (mine, theirs))
        for rank in range(reader.size):
            targets = reader.target_ranks(rank, writer, HASHES[3])
            assert set(targets) == seed_targets(rank, reader, writer)


@given(two_shapes(), prefix_hashes, st.data())
def test_targets_hold_what_those_of_vllm_hold_where_something_is(
    shapes: tuple[Topology, Topology], prefix_hash: bytes, data: st.DataObject
) -> None:
    reader, writer = (Topology(shape.tp_size, shape.heads, (2,)) for shape in shapes)
    if max(reader.tp_size, writer.tp_size) % min(reader.tp_size, writer.tp_size):
        return
    rank = data.draw(st.integers(0, reader.size - 1))
    need = cells_of(reader, rank)
    named = seed_targets(rank, reader, writer)
    reached = set().union(*(cells_of(writer, target) for target in named))
    targets = reader.target_ranks(rank, writer, prefix_hash)
    assert need <= reached
    assert len(targets) <= len(named)


def test_ranks_are_numbered_stage_by_stage() -> None:
    topology = Topology(4, 8, (1, 1, 1))
    assert topology.size == 12
    assert topology.rank(2, 3) == 11
    assert [topology.rank(pp, tp) for pp in range(3) for tp in range(4)] == list(range(12))
    held = topology.held(topology.rank(1, 2))
    assert held is not None
    assert held.shard == Shard(1, 2, 4, 6)


def test_ratios_say_who_has_more_by_their_sign() -> None:
    small, large = Topology(2, 8, (8, 8), 16), Topology(8, 8, (4,) * 4, 64)
    assert (large.tp_ratio(small), small.tp_ratio(large), small.tp_ratio(small)) == (4, -4, 1)
    assert (large.pp_ratio(small), small.pp_ratio(large), small.pp_ratio(small)) == (2, -2, 1)
    assert (large.block_ratio(small), small.block_ratio(large)) == (4, -4)


def test_ratios_undo_each_other() -> None:
    for heads, pp_one, pp_other in product((16, 32), PP_SIZES, PP_SIZES):
        for tp_one, tp_other in product(possible(heads), repeat=2):
            one = Topology(tp_one, heads, pp_layers(32, pp_one))
            other = Topology(tp_other, heads, pp_layers(32, pp_other))
            for ratio, mine, theirs in (
                (Topology.tp_ratio, tp_one, tp_other),
                (Topology.pp_ratio, pp_one, pp_other),
            ):
                if max(mine, theirs) % min(mine, theirs):
                    with pytest.raises(ValueError, match="set one to a multiple of the other"):
                        ratio(one, other)
                    continue
                assert mine * max(1, -ratio(one, other)) == theirs * max(1, ratio(one, other))
                assert ratio(one, other) in (-ratio(other, one), ratio(other, one))


def test_sizes_without_a_ratio_share_all_the_same() -> None:
    three, two = Topology(3, 6, (4, 2)), Topology(2, 6, (2, 2, 2))
    for ratio in (Topology.tp_ratio, Topology.pp_ratio):
        with pytest.raises(ValueError, match="set one to a multiple of the other"):
            ratio(three, two)
    check(three, two, HASHES[0])
    check(two, three, HASHES[0])


def test_block_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="block_size is 16 here and 24 there"):
        Topology(1, 1, (1,), 16).block_ratio(Topology(1, 1, (1,), 24))


def test_kv_is_replicated_only_by_more_ranks_than_heads() -> None:
    assert not Topology(8, 8, (1,)).replicated
    assert not Topology(1, 1, (1,)).replicated
    assert Topology(16, 8, (1,)).replicas == 2
    assert Topology(4, 1, (1,)).replicas == 4  # MLA


def test_what_vllm_could_not_run_is_refused_with_what_to_change() -> None:
    for heads, tp_size in product(HEADS, TP_SIZES):
        if tp_size in possible(heads):
            Topology(tp_size, heads, (1,))
            continue
        with pytest.raises(ValueError, match="set tensor_parallel_size"):
            Topology(tp_size, heads, (1,))
    for layers in ((), (0, 0), (3, -1)):
        with pytest.raises(ValueError, match="at least one layer in total"):
            Topology(1, 1, layers)


def test_a_stage_without_layers_holds_and_reads_nothing() -> None:
    topology = Topology(2, 2, (0, 3))
    assert topology.held(1) is None
    assert topology.layer_range(0) == (0, 0)
    assert topology.target_ranks(0, topology, HASHES[0]) == ()
    assert topology.writers(HASHES[0]) == (2, 3)


def test_a_rank_of_a_pipeline_holds_its_stage() -> None:
    share = rank_shard(layers=7, heads=4, tp_rank=1, tp_size=2, layer_range=(3, 5))
    assert share.shard == Shard(3, 5, 2, 4)


def test_layers_are_spread_evenly_and_what_remains_over_all_stages_but_the_last() -> None:
    assert pp_layers(8, 4) == (2, 2, 2, 2)
    assert pp_layers(9, 4) == (2, 2, 3, 2)
    assert pp_layers(11, 4) == (3, 3, 3, 2)
    for layers, pp_size in product(range(40), PP_SIZES):
        counts = pp_layers(layers, pp_size)
        assert (len(counts), sum(counts)) == (pp_size, layers)
        assert max(counts) - min(counts) <= 1
