"""The parts that a reader takes of other shapes' shards, compared with counting cell by cell."""

from collections import Counter
from itertools import pairwise, permutations
from random import Random

from hypothesis import example, given
from hypothesis import strategies as st

from objkv.keys.topology import Part, Shard, cover

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
def test_the_order_of_what_is_held_does_not_matter(
    need: Shard, held: list[Shard], random: Random
) -> None:
    shuffled = held * 2
    random.shuffle(shuffled)
    assert cover(need, shuffled) == cover(need, held) == cover(need, frozenset(held))


@given(shards(), st.lists(shards(), max_size=12))
def test_no_source_is_there_in_vain(need: Shard, held: list[Shard]) -> None:
    sources = {part.source for part in cover(need, held) or ()}
    for source in sources:
        others = set().union(*(cells(other) for other in sources - {source}))
        assert not cells(need) <= others


@given(shards(), st.lists(shards(), max_size=12))
def test_the_shard_itself_is_taken_alone(need: Shard, held: list[Shard]) -> None:
    assert cover(need, [*held, need]) == (Part(need, need),)


@given(shards(), st.lists(shards(), max_size=12))
def test_parts_come_in_the_order_of_the_layers(need: Shard, held: list[Shard]) -> None:
    for one, other in pairwise(cover(need, held) or ()):
        assert one.take < other.take


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


def test_a_grid_of_any_shape_covers_a_shard_of_any_other() -> None:
    sizes = (1, 2, 4, 8)
    for (tp, pp), (reader_tp, reader_pp) in permutations(
        [(tp, pp) for tp in sizes for pp in (1, 2, 3, 4)], 2
    ):
        held = grid(13, 8, pp=pp, tp=tp)
        for need in grid(13, 8, pp=reader_pp, tp=reader_tp):
            parts = cover(need, held)
            assert parts is not None
            assert len(parts) == sum(bool(cells(need) & cells(source)) for source in held)
