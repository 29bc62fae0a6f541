"""How ranks of context parallelism divide tokens, compared with counting token by token."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objkv.keys.topology import Shard, TokenPart, Topology

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
def test_parts_of_another_division_have_all_tokens_of_a_rank(
    one: tuple[int, int], other: tuple[int, int]
) -> None:
    reader, size = Topology(one[0], 1, (2,), one[1]), other[1]
    for rank in range(reader.size):
        share = reader.held(rank)
        assert share is not None
        own, sources = share.shard.tokens, share.shard.tokens.sources(size, 1)
        assert set().union(*map(tokens_of, sources)) >= tokens_of(own)
        assert all(tokens_of(source) & tokens_of(own) for source in sources)
        if size >= own.size:
            assert set().union(*map(tokens_of, sources)) == tokens_of(own)


def test_tokens_that_are_dealt_out_otherwise_are_not_combined() -> None:
    assert TokenPart(0, 4, 2).sources(4, 2) == (TokenPart(0, 4, 2),)
    for other in ((4, 1), (2, 2), (2, 1), (1, 1)):
        assert not TokenPart(0, 4, 2).sources(*other)
    assert not TokenPart(0, 4).sources(4, 2)
    assert not TokenPart(0, 4).sources(3, 1)


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
