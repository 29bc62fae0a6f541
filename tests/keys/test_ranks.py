"""Names of chunks and shards, and what each rank of a replica holds and saves, against going
through all cells."""

from collections import Counter
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objkv.keys.chunk import ChunkKey, effective_chunk_tokens
from objkv.keys.topology import Shard, TokenPart, Topology

TP_SIZES, PP_SIZES, HEADS = range(1, 17), range(1, 9), range(1, 33)
LAYERS = (1, 2, 3, 7, 8, 9, 13, 16, 23, 32)
prefix_hashes = st.binary(min_size=20, max_size=20)
Cells = set[tuple[int, int]]


def possible(heads: int) -> list[int]:
    """The TP sizes that vLLM runs with so many KV heads."""
    return [tp for tp in TP_SIZES if heads % tp == 0 or tp % heads == 0]


@st.composite
def shapes(draw: st.DrawFn) -> Topology:
    """Of any TP, PP and DCP size, on any number of nodes."""
    heads = draw(st.sampled_from(HEADS))
    layers, pp_size = draw(st.sampled_from(LAYERS)), draw(st.sampled_from(PP_SIZES))
    cuts = draw(st.lists(st.integers(0, layers), min_size=pp_size - 1, max_size=pp_size - 1))
    stages = tuple(b - a for a, b in pairwise([0, *sorted(cuts), layers]))
    tp_size = draw(st.sampled_from(possible(heads)))
    copies = max(1, tp_size // heads)
    dcp_size = draw(st.sampled_from([n for n in range(1, copies + 1) if copies % n == 0]))
    ranks = tp_size * pp_size
    nodes = draw(st.sampled_from([1, 2, 4, *(n for n in range(1, ranks + 1) if ranks % n == 0)]))
    return Topology(tp_size, heads, stages, dcp_size, 1, nodes)


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
    replicas = max(1, tp_size // heads)
    return {
        (layer, head)
        for layer in range(before, before + topology.layers[pp_rank])
        for head in range(heads)
        if (head * tp_size // heads if heads >= tp_size else head) == tp_rank // replicas
    }


def writers(topology: Topology, prefix_hash: bytes) -> list[int]:
    """The ranks that save a chunk."""
    shares = ((rank, topology.held(rank)) for rank in range(topology.size))
    return [rank for rank, share in shares if share and share.writes(prefix_hash)]


def check(topology: Topology, prefix_hash: bytes) -> None:
    """Each rank holds what vLLM gives it, and the writers save everything once."""
    held = {rank: cells_of(topology, rank) for rank in range(topology.size)}
    everything = set(product(range(sum(topology.layers)), range(topology.heads)))
    saved = Counter(cell for rank in writers(topology, prefix_hash) for cell in held[rank])
    assert saved == Counter(everything)
    for rank, expected in held.items():
        share = topology.held(rank)
        assert (cells(share.shard) if share else set()) == expected


def test_every_size_alone() -> None:
    for heads in HEADS:
        for tp_size in possible(heads):
            check(Topology(tp_size, heads, (2,)), bytes(20))
            check(Topology(tp_size, heads, (2,)), b"\xff" * 20)
    for layers, pp_size in product(LAYERS, PP_SIZES):
        cuts = [layers * stage // pp_size for stage in range(pp_size + 1)]
        stages = tuple(b - a for a, b in pairwise(cuts))
        check(Topology(1, 1, stages), bytes(20))


@given(shapes(), prefix_hashes)
def test_every_shape_holds_and_saves_all(shape: Topology, prefix_hash: bytes) -> None:
    if shape.dcp_size == 1:
        check(shape, prefix_hash)
    saved = dict[Shard, list[int]]()
    for rank in writers(shape, prefix_hash):
        saved.setdefault(shape.joined(rank)[0], []).append(rank)
    counted = Counter[tuple[int, int, int]]()
    for payload, ranks in saved.items():
        own = [share.shard for rank in ranks if (share := shape.held(rank))]
        has = [(*cell, one.tokens.rank) for one in own for cell in cells(one)]
        tokens = range(shape.dcp_size) if payload.tokens.size == 1 else [payload.tokens.rank]
        assert sorted(has) == sorted((*cell, n) for cell in cells(payload) for n in tokens)
        assert {shape.joined(rank)[1] for rank in ranks} == {len(ranks)}
        if len(ranks) > 1:
            assert len({rank * shape.nodes // shape.size for rank in ranks}) == 1
        counted.update(has)
    sizes = sum(shape.layers), shape.heads, shape.dcp_size
    assert counted == Counter(product(*map(range, sizes)))


@pytest.mark.parametrize(
    ("shape", "payloads"),
    [
        (Topology(16, 16, (4,), nodes=2), "L0-4_H0-8 L0-4_H8-16"),
        (Topology(16, 8, (4,), nodes=2), "L0-4_H0-4 L0-4_H4-8"),
        (Topology(16, 2, (4,), nodes=4), "L0-4_H0-1 L0-4_H1-2"),
        (Topology(16, 1, (4,), nodes=2), "L0-4_H0-1"),
        (Topology(4, 4, (3, 2), nodes=2), "L0-3_H0-4 L3-5_H0-4"),
        (Topology(2, 4, (3, 2, 1, 1), nodes=2), "L0-5_H0-4 L5-7_H0-4"),
        (Topology(4, 4, (3, 2), nodes=4), "L0-3_H0-2 L0-3_H2-4 L3-5_H0-2 L3-5_H2-4"),
        (Topology(4, 4, (0, 2), nodes=2), "L0-2_H0-4"),
        (Topology(8, 2, (4,), 4, nodes=2), "L0-4_H0-1 L0-4_H1-2"),
        (Topology(8, 1, (4,), 2, nodes=4), "L0-4_H0-1"),
        # No rectangles, or such as others have some of.
        (Topology(4, 1, (4,), 4, nodes=2), " ".join(f"L0-4_H0-1_T{n}of4" for n in range(4))),
        (Topology(2, 2, (1, 1, 1), nodes=2), " ".join(f"L{n}-{n + 1}_H{h}-{h + 1}"
                                                      for n in range(3) for h in range(2))),
        (Topology(12, 4, (1,), nodes=3), " ".join(f"L0-1_H{n}-{n + 1}" for n in range(4))),
        (Topology(3, 3, (1,), nodes=2), " ".join(f"L0-1_H{n}-{n + 1}" for n in range(3))),
    ],
    ids=str,
)  # fmt: skip
def test_ranks_of_a_node_write_one_payload(shape: Topology, payloads: str) -> None:
    held = [rank for rank in range(shape.size) if shape.held(rank) is not None]
    assert {str(shape.joined(rank)[0]) for rank in held} == {*payloads.split()}


def test_each_replica_saves_as_many_chunks_as_the_others() -> None:
    for heads, tp_size in ((1, 8), (2, 8), (4, 16)):
        topology = Topology(tp_size, heads, (3, 3))
        counts = Counter(
            rank for first in range(256) for rank in writers(topology, bytes([first]) + bytes(19))
        )
        assert counts == dict.fromkeys(range(topology.size), 256 // (tp_size // heads))


def test_what_vllm_could_not_run_is_refused_with_what_to_change() -> None:
    for heads, tp_size in product(HEADS, TP_SIZES):
        if tp_size in possible(heads):
            Topology(tp_size, heads, (1,))
            continue
        with pytest.raises(ValueError, match="tensor-parallel size must be"):
            Topology(tp_size, heads, (1,))
    for layers in ((), (0, 0), (3, -1)):
        with pytest.raises(ValueError, match="at least one layer in total"):
            Topology(1, 1, layers)
    with pytest.raises(ValueError, match="divisor of 2"):
        Topology(8, 4, (2,), 4)


divisions = st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4, 8])).map(
    lambda pair: (pair[0] * pair[1], pair[1])
)
"""TP size and DCP size, of a model with one head."""


def tokens_of(part: TokenPart, tokens: int = 64) -> set[int]:
    return {t for t in range(tokens) if t // part.interleave % part.size == part.rank}


@given(divisions, divisions)
def test_parts_of_another_division_have_all_tokens_of_a_rank(
    one: tuple[int, int], other: tuple[int, int]
) -> None:
    reader, size = Topology(one[0], 1, (2,), one[1]), other[1]
    for rank in range(reader.size):
        share = reader.held(rank)
        assert share is not None
        own, sources = share.shard.tokens, share.shard.tokens.sources(TokenPart(0, size))
        assert set().union(*map(tokens_of, sources)) >= tokens_of(own)
        assert all(tokens_of(source) & tokens_of(own) for source in sources)
        if size >= own.size:
            assert set().union(*map(tokens_of, sources)) == tokens_of(own)


def test_tokens_that_are_dealt_out_otherwise_are_not_combined() -> None:
    assert TokenPart(0, 4, 2).sources(TokenPart(0, 4, 2)) == (TokenPart(0, 4, 2),)
    for other in ((4, 1), (2, 2), (2, 1), (1, 1)):
        assert not TokenPart(0, 4, 2).sources(TokenPart(0, *other))
    assert not TokenPart(0, 4).sources(TokenPart(0, 4, 2))
    assert not TokenPart(0, 4).sources(TokenPart(0, 3))


def test_names_of_parts_of_the_tokens_are_read_as_they_are_written() -> None:
    for text in ("L0-2_H0-1_T0of2", "L0-2_H0-1_T3of4i16"):
        assert str(Shard.parse(text)) == text


number = st.integers(0, 200)
shards = st.tuples(number, st.integers(1, 99), number, st.integers(1, 99)).map(
    lambda t: Shard(t[0], t[0] + t[1], t[2], t[2] + t[3])
)
keys = st.builds(
    ChunkKey,
    namespace=st.binary(min_size=16, max_size=16).map(bytes.hex),
    prefix_hash=st.binary(min_size=20, max_size=20),
    group=number,
    shard=shards,
)
KEY = ChunkKey("0123456789abcdef" * 2, bytes(range(20)), 3, Shard(0, 32, 0, 8))
PATH = (
    "0123456789abcdef0123456789abcdef/00/000102030405060708090a0b0c0d0e0f10111213/"
    "3.L0-32_H0-8.safetensors"
)


@given(keys)
def test_a_key_parses_to_itself(key: ChunkKey) -> None:
    assert ChunkKey.parse(key.path()) == key


def test_a_key_prints_as_documented() -> None:
    assert KEY.path() == PATH
    assert KEY.field == "3.L0-32_H0-8"


@pytest.mark.parametrize(
    "text",
    ["", "L0-1", "L0-1_H0-0", "L1-1_H0-1", "L2-1_H0-1", "L00-1_H0-1", "L0-1_H0-1 ", "L0-1_H0-1\n",
     "L-1-1_H0-1", "L0-1_H0-1_", "l0-1_h0-1", "L0-1３_H0-1", "L0-" + "9" * 5000 + "_H0-1",
     *(f"L0-2_H0-1_T{part}" for part in ("2of2", "0of1", "0of2i1", "0of2i0", "00of2", "0of", "0",
                                         "of2"))],
)  # fmt: skip
def test_what_is_not_a_shard_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Shard.parse(text)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/" + PATH,
        PATH + "\n",
        PATH.upper(),
        PATH.replace("/00/", "/01/"),
        PATH.replace("3.L", "03.L"),
        PATH.replace("3.L", "3３.L"),
        PATH.replace("3.L", "-3.L"),
        PATH.replace("H0-8", "H8-8"),
        PATH.removesuffix(".safetensors"),
        PATH.replace("0123456789abcdef/", "/"),
        "prefix/" + PATH,
    ],
)
def test_what_is_not_the_path_of_a_chunk_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        ChunkKey.parse(path)


@given(st.integers(-1, 5000), st.lists(st.integers(1, 200), min_size=1, max_size=3).map(tuple))
def test_a_chunk_is_the_smallest_common_multiple_that_reaches_the_wish(
    wish: int, block_sizes: tuple[int, ...]
) -> None:
    effective = effective_chunk_tokens(wish, block_sizes)
    smaller = range(max(wish, 1), effective)
    assert effective >= max(wish, 1)
    assert all(effective % size == 0 for size in block_sizes)
    assert not any(all(n % size == 0 for size in block_sizes) for n in smaller[:2000])
