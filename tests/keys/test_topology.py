"""The parts that a reader takes of other shapes' shards, compared with counting cell by cell."""

from collections import Counter
from itertools import pairwise
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from objkv.keys.topology import Part, Shard, TokenPart, Topology, cover

LAYERS, HEADS = 6, 6


def shards(layers: int = LAYERS, heads: int = HEADS) -> st.SearchStrategy[Shard]:
    def span(size: int) -> st.SearchStrategy[tuple[int, int]]:
        pairs = [(a, b) for a in range(size) for b in range(a + 1, size + 1)]
        return st.sampled_from(pairs)

    return st.tuples(span(layers), span(heads)).map(lambda t: Shard(*t[0], *t[1]))


def cells(shard: Shard) -> set[tuple[int, int]]:
    return {
        (layer, head)
        for layer in range(shard.layer_start, shard.layer_end)
        for head in range(shard.head_start, shard.head_end)
    }


def grid(layers: int, heads: int, *, pp: int, tp: int) -> list[Shard]:
    return [
        Shard(
            p * layers // pp,
            (p + 1) * layers // pp,
            t * heads // tp,
            (t + 1) * heads // tp,
        )
        for p in range(pp)
        for t in range(tp)
    ]


@given(shards(), st.lists(shards(), max_size=12))
@example(Shard(0, 2, 0, 2), [Shard(0, 2, 0, 1), Shard(0, 1, 0, 2), Shard(1, 2, 1, 2)])
def test_parts_are_the_need_exactly_or_it_cannot_be_reached(need: Shard, held: list[Shard]) -> None:
    parts = cover(need, held)
    reach = set().union(*(cells(shard) for shard in held)) if held else set()
    assert (parts is not None) == (cells(need) <= reach)
    if parts is None:
        return
    counted = Counter(cell for part in parts for cell in cells(part.take))
    assert counted == Counter(cells(need))
    for part in parts:
        assert part.source in held
        assert cells(part.take) <= cells(part.source)


@given(shards(), st.lists(shards(), max_size=12), st.randoms(use_true_random=False))
def test_a_cover_has_one_order_and_no_source_in_vain(
    need: Shard, held: list[Shard], random: Random
) -> None:
    found = cover(need, held)
    shuffled = held * 2
    random.shuffle(shuffled)
    assert cover(need, shuffled) == found == cover(need, frozenset(held))
    assert cover(need, [*held, need]) == (Part(need, need),)
    for one, other in pairwise(found or ()):
        assert one.take < other.take
    sources = {part.source for part in found or ()}
    for source in sources:
        others = set().union(*(cells(other) for other in sources - {source}))
        assert not cells(need) <= others


def test_of_two_ways_to_be_covered_the_one_with_fewer_payloads_is_taken() -> None:
    need = Shard(0, 32, 0, 8)
    held = grid(32, 8, pp=1, tp=8) + grid(32, 8, pp=2, tp=1)
    parts = cover(need, held)
    assert parts == tuple(Part(shard, shard) for shard in grid(32, 8, pp=2, tp=1))


def test_small_payloads_are_preferred_to_one_that_is_mostly_superfluous() -> None:
    need = Shard(0, 32, 0, 2)
    small = [Shard(0, 32, 0, 1), Shard(0, 32, 1, 2)]
    assert cover(need, [Shard(0, 32, 0, 8), *small]) == tuple(Part(one, one) for one in small)


def test_a_payload_that_others_make_superfluous_is_left_out() -> None:
    whole, half = grid(32, 8, pp=1, tp=8), Shard(0, 16, 0, 8)
    parts = cover(Shard(0, 32, 0, 8), [half, *whole])
    assert parts == tuple(Part(shard, shard) for shard in whole)


def test_a_source_whose_share_is_no_rectangle_has_several_parts() -> None:
    corner, rest = Shard(0, 5, 0, 5), Shard(1, 6, 1, 6)
    slivers = [Shard(0, 1, 5, 6), Shard(5, 6, 0, 1)]
    assert cover(Shard(0, 6, 0, 6), [corner, rest, *slivers]) == (
        Part(slivers[0], slivers[0]),
        Part(corner, corner),
        Part(rest, Shard(1, 5, 5, 6)),
        Part(slivers[1], slivers[1]),
        Part(rest, Shard(5, 6, 1, 6)),
    )


divisions = st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4, 8])).map(
    lambda pair: (pair[0] * pair[1], pair[1])
)
"""TP size and DCP size, of a model with one head."""


def tokens_of(part: TokenPart, tokens: int = 64) -> set[int]:
    return {t for t in range(tokens) if t // part.interleave % part.size == part.rank}


@given(divisions, st.sampled_from([1, 2, 4]), st.integers(1, 3), st.binary(min_size=1, max_size=1))
def test_with_dcp_the_writers_save_every_token_of_every_layer_once(
    division: tuple[int, int], interleave: int, stages: int, prefix_hash: bytes
) -> None:
    tp_size, dcp_size = division
    topology = Topology(tp_size, 1, (2,) * stages, dcp_size, interleave if dcp_size > 1 else 1)
    counted = Counter(
        (layer, token)
        for rank in range(topology.size)
        if (share := topology.held(rank)) is not None and share.writes(prefix_hash)
        for layer in range(share.shard.layer_start, share.shard.layer_end)
        for token in tokens_of(share.shard.tokens)
    )
    assert counted == Counter({(layer, t): 1 for layer in range(2 * stages) for t in range(64)})


@given(divisions, divisions)
def test_with_dcp_a_cover_has_all_tokens_of_the_need(
    one: tuple[int, int], other: tuple[int, int]
) -> None:
    writer, reader = (Topology(tp, 1, (2,), dcp) for tp, dcp in (one, other))
    held = [share.shard for rank in range(writer.size) if (share := writer.held(rank))]
    for rank in range(reader.size):
        share = reader.held(rank)
        assert share is not None
        parts = cover(share.shard, held)
        assert parts is not None
        found = set().union(*(tokens_of(part.source.tokens) for part in parts))
        assert found >= tokens_of(share.shard.tokens)
        missing = [shard for shard in held if shard.tokens != parts[0].source.tokens]
        assert cover(share.shard, missing) is None


def test_tokens_that_are_dealt_out_otherwise_are_not_combined() -> None:
    dealt = [Shard(0, 1, 0, 1, TokenPart(rank, 4)) for rank in range(4)]
    assert cover(Shard(0, 1, 0, 1, TokenPart(0, 4, 2)), dealt) is None


def test_names_of_parts_of_the_tokens_are_read_in_one_form_only() -> None:
    for text in ("L0-2_H0-1_T0of2", "L0-2_H0-1_T3of4i16"):
        assert str(Shard.parse(text)) == text
    assert str(Shard(0, 2, 0, 1)) == "L0-2_H0-1"
    for text in ("_T2of2", "_T0of1", "_T0of2i1", "_T0of2i0", "_T00of2", "_T0of", "_T0", "_Tof2"):
        with pytest.raises(ValueError, match="L0-2_H0-1"):
            Shard.parse(f"L0-2_H0-1{text}")


def test_ranks_with_other_heads_cannot_divide_tokens() -> None:
    with pytest.raises(ValueError, match="divisor of 2"):
        Topology(8, 4, (2,), 4)
