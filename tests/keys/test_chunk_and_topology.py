"""Names of chunks and shards: what prints parses back, what does not print alike is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objkv.keys.chunk import ChunkKey, effective_chunk_tokens
from objkv.keys.topology import RankShard, Shard, rank_shard

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


@given(shards)
def test_a_shard_parses_to_itself(shard: Shard) -> None:
    assert Shard.parse(str(shard)) == shard


@given(keys)
def test_a_key_parses_to_itself(key: ChunkKey) -> None:
    assert ChunkKey.parse(key.path()) == key


def test_a_key_prints_as_documented() -> None:
    assert KEY.path() == PATH
    assert KEY.field == "3.L0-32_H0-8"


@given(keys, keys)
def test_different_keys_have_different_paths(one: ChunkKey, other: ChunkKey) -> None:
    assert (one.path() == other.path()) == (one == other)


@pytest.mark.parametrize(
    "text",
    ["", "L0-1", "L0-1_H0-0", "L1-1_H0-1", "L2-1_H0-1", "L00-1_H0-1", "L0-1_H0-1 ", "L0-1_H0-1\n",
     "L-1-1_H0-1", "L0-1_H0-1_", "l0-1_h0-1", "L0-1３_H0-1", "L0-" + "9" * 5000 + "_H0-1"],
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


@given(st.text(max_size=120) | st.text("0123456789abcdef/.LH-_safetnor", max_size=120))
def test_garbage_is_refused_or_prints_back_unchanged(text: str) -> None:
    for parse, show in ((Shard.parse, str), (ChunkKey.parse, lambda key: key.path())):
        try:
            value = parse(text)
        except ValueError:
            continue
        assert show(value) == text


@given(st.data())
def test_a_path_with_one_character_changed_is_refused_or_another_key(data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(PATH) - 1))
    changed = PATH[:at] + data.draw(st.characters()) + PATH[at + 1 :]
    try:
        key = ChunkKey.parse(changed)
    except ValueError:
        return
    assert key.path() == changed


tp_sizes = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 32])
head_counts = st.sampled_from([1, 2, 3, 4, 6, 8, 16, 40])


def ranks(heads: int, tp_size: int) -> list[RankShard]:
    return [rank_shard(layers=7, heads=heads, tp_rank=r, tp_size=tp_size) for r in range(tp_size)]


@given(head_counts, tp_sizes, st.binary(min_size=20, max_size=20))
def test_the_ranks_that_write_a_chunk_cover_every_head_exactly_once(
    heads: int, tp_size: int, prefix_hash: bytes
) -> None:
    try:
        held = ranks(heads, tp_size)
    except ValueError:
        assert max(heads, tp_size) % min(heads, tp_size)
        return
    written = [r.shard for r in held if r.writes(prefix_hash)]
    covered = [h for shard in written for h in range(shard.head_start, shard.head_end)]
    assert sorted(covered) == list(range(heads))
    assert {(shard.layer_start, shard.layer_end) for shard in written} == {(0, 7)}


@given(head_counts, tp_sizes)
def test_ranks_that_hold_the_same_are_told_apart_by_their_replica(heads: int, tp_size: int) -> None:
    try:
        held = ranks(heads, tp_size)
    except ValueError:
        return
    assert len({(r.shard, r.replica) for r in held}) == tp_size
    assert all(0 <= r.replica < r.replicas for r in held)


def test_the_writer_of_replicated_kv_rotates_with_the_hash() -> None:
    held = ranks(heads=1, tp_size=4)
    for first_byte in range(8):
        prefix_hash = bytes([first_byte]) + bytes(19)
        assert [r.writes(prefix_hash) for r in held].index(True) == first_byte % 4


def test_heads_are_dealt_out_as_vllm_does() -> None:
    assert str(ranks(heads=8, tp_size=2)[1].shard) == "L0-7_H4-8"
    assert [str(r.shard) for r in ranks(heads=2, tp_size=4)] == [
        "L0-7_H0-1", "L0-7_H0-1", "L0-7_H1-2", "L0-7_H1-2",
    ]  # fmt: skip


@given(st.integers(-1, 5000), st.lists(st.integers(1, 200), min_size=1, max_size=3).map(tuple))
def test_a_chunk_is_the_smallest_common_multiple_that_reaches_the_wish(
    wish: int, block_sizes: tuple[int, ...]
) -> None:
    effective = effective_chunk_tokens(wish, block_sizes)
    smaller = range(max(wish, 1), effective)
    assert effective >= max(wish, 1)
    assert all(effective % size == 0 for size in block_sizes)
    assert not any(all(n % size == 0 for size in block_sizes) for n in smaller[:2000])


def test_a_chunk_of_a_hybrid_model_is_a_multiple_of_all_its_block_sizes() -> None:
    assert effective_chunk_tokens(256, (16,)) == 256
    assert effective_chunk_tokens(256, (160, 16)) == 320
    assert effective_chunk_tokens(1, (16, 24)) == 48
