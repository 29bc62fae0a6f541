"""Pages of other heads and block sizes, token by token; and beside what vLLM does in place."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from objkv.transfer.lanes import Recast, deal_tokens

CONTENT = 3


def numbered(blocks: int, heads: int, size: int) -> np.ndarray:
    """Pages in which every element says which token, head and element it is."""
    token = np.arange(blocks * size).reshape(blocks, 1, size, 1)
    head = np.arange(heads).reshape(1, heads, 1, 1)
    return (token * 100 + head) * 10 + np.arange(CONTENT)


sizes = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24])


@given(sizes, sizes, st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_every_token_of_every_head_is_where_it_belongs(
    size: int, wanted: int, heads: int, pieces: int, as_tensor: bool
) -> None:
    tokens = np.lcm(size, wanted) * pieces
    pages = numbered(tokens // size, heads, size)
    dealt = np.asarray(deal_tokens(torch.from_numpy(pages) if as_tensor else pages, wanted))
    assert dealt.shape == (tokens // wanted, heads, wanted, CONTENT)
    assert np.array_equal(dealt, numbered(tokens // wanted, heads, wanted))


@given(sizes, st.data())
def test_some_heads_of_some_blocks_are_taken(size: int, data: st.DataObject) -> None:
    pages = numbered(24 // size, 4, size)
    wanted = data.draw(sizes)
    first = data.draw(st.integers(0, 3))
    end = data.draw(st.integers(first + 1, 4))
    block = data.draw(st.integers(0, 24 // wanted - 1))
    count = data.draw(st.integers(1, 24 // wanted - block))
    taken = Recast((first, end), wanted, block, count)(pages)
    whole = numbered(24 // wanted, 4, wanted)
    assert np.array_equal(taken, whole[block : block + count, first:end])


def test_more_blocks_than_there_are_would_fill_them_all_with_one_page() -> None:
    with pytest.raises(AssertionError):
        Recast((0, 2), 4, 1, 2)(numbered(2, 2, 4))


def test_the_same_block_size_copies_nothing() -> None:
    pages = numbered(4, 4, 8)
    assert np.shares_memory(Recast((1, 3), 8, 1, 2)(pages), pages)


@pytest.mark.parametrize("ratio", [1, 2, 4])
@pytest.mark.parametrize("reader_nhd", [False, True])
def test_what_vllm_mends_after_a_raw_copy_is_right_at_once(ratio: int, reader_nhd: bool) -> None:
    """vLLM 0.14 copies ``ratio`` blocks of a prefill in HND, ``[heads, size, content]`` each, into
    one block of the decode and then mends that in place (``kv_postprocess_blksize_on_receive``,
    ``..._layout_...``, ``..._blksize_and_layout_...``). Here bytes go where they belong."""
    heads, size, blocks = 2, 4, 3
    remote = numbered(blocks * ratio, heads, size)  # HND: as it lies in memory
    wanted = size * ratio
    local = torch.full((blocks, heads, wanted, CONTENT), -1, dtype=torch.int64)
    if reader_nhd:
        local = torch.full((blocks, wanted, heads, CONTENT), -1).swapaxes(1, 2)
    local[:] = deal_tokens(torch.from_numpy(remote), wanted)
    physical = local.swapaxes(1, 2).contiguous() if reader_nhd else local
    raw = remote.reshape(blocks, ratio, heads, size, CONTENT)
    for block in range(blocks):
        for token in range(wanted):
            for head in range(heads):
                told = raw[block, token // size, head, token % size]
                place = (block, token, head) if reader_nhd else (block, head, token)
                assert np.array_equal(physical[place].numpy(), told)
