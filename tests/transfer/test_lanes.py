"""What lanes do, on the host and, with CUDA played by fakes, on a GPU."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from objkv.errors import ConfigError
from objkv.keys.identity import GroupIdentity
from objkv.keys.topology import Part
from objkv.transfer.lanes import CudaLane, HostLane, Lane, Recast, deal_tokens, open_lane
from objkv.transfer.paging import PagedGroup
from objkv.transfer.sources import PayloadLayout
from tests.support.paged_cache import paged_group, same_blocks

# What lanes do, on the host and, with CUDA played by fakes, on a GPU.


GROUP = GroupIdentity("full", None, ("l0", "l1", "l2"), heads=2, content=16, block_size=32)
CHUNK = 64


def test_a_device_that_nothing_is_known_of_is_refused() -> None:
    """Otherwise each chunk of each prompt would fail by itself, for ever."""
    assert isinstance(open_lane(torch.device("cpu")), HostLane)
    with pytest.raises(ConfigError, match="xpu"):
        open_lane(torch.device("xpu"))


class FakeStream:
    def __init__(self, _device: torch.device, priority: int = 0) -> None:
        self.priority = priority
        self.waited_for: list[object] = []

    def wait_stream(self, other: object) -> None:
        self.waited_for.append(other)


class Cuda:
    """Stands for ``torch.cuda`` with the CPU as its device: what is done is done at once, on the
    stream that is current then, and is counted."""

    def __init__(self) -> None:
        self.current: list[FakeStream] = []
        self.uploads = 0

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.current.append(stream)
        yield
        self.current.pop()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    fake = Cuda()

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        assert fake.current, "on the compute stream"
        fake.uploads += 1
        return tensor

    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", fake.stream)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    return fake


def cuda_lane(*, urgent: bool = False) -> CudaLane:
    return CudaLane(torch.device("cpu"), urgent=urgent)


def test_loads_go_before_the_model_and_saves_do_not(cuda: Cuda) -> None:
    assert [open_priority(urgent=u) for u in (True, False)] == [-1, 0]


def open_priority(*, urgent: bool) -> int:
    lane = open_lane(torch.device("cuda"), urgent=urgent)
    assert isinstance(lane, CudaLane)
    return lane._stream.priority


@pytest.fixture(params=["host", "cuda"])
def lane(request: pytest.FixtureRequest) -> Lane:
    if request.param == "host":
        return HostLane()
    request.getfixturevalue("cuda")
    return cuda_lane()


def own_source(paged: PagedGroup) -> PayloadLayout:
    shard = paged.shape.rank_shard.shard
    return PayloadLayout(paged, Part(shard, shard), paged.shape.block_size)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.uint8], ids=str
)
def test_pages_are_scattered_into_their_blocks_and_no_others(
    lane: Lane, dtype: torch.dtype
) -> None:
    paged, caches = paged_group(GROUP, chunk_tokens=CHUNK, num_blocks=8, dtype=dtype)
    _, others = paged_group(GROUP, chunk_tokens=CHUNK, num_blocks=8, dtype=dtype, seed=1)
    before = [cache.clone() for cache in caches]
    placed = lane.place([6, 3])
    for layer, other in enumerate(others):
        pages = other[1:3].contiguous().view(torch.uint8).flatten().numpy().data
        own_source(paged).scatter(lane, layer, pages, 0, placed)
    assert same_blocks(caches, [6, 3], others, [1, 2])
    rest = [0, 1, 2, 4, 5, 7]
    assert same_blocks(caches, rest, before, rest)


def test_a_part_of_the_pages_is_scattered_where_the_first_blocks_are_not_wanted(
    lane: Lane,
) -> None:
    paged, caches = paged_group(GROUP, chunk_tokens=CHUNK, num_blocks=8)
    _, others = paged_group(GROUP, chunk_tokens=CHUNK, num_blocks=8, seed=1)
    pages = others[0][1:3].contiguous().view(torch.uint8).flatten().numpy().data
    own_source(paged).scatter(lane, 0, pages, 1, lane.place([5]))
    assert same_blocks(caches[:1], [5], others[:1], [2])


def test_caches_may_lie_in_memory_in_any_order(lane: Lane) -> None:
    memory = torch.zeros(32, 8, 2, 16)
    cache = memory.permute(1, 2, 0, 3)  # [8 blocks, 2 heads, 32 tokens, 16], as attention wants it
    pages = torch.randn(2, 2, 32, 16)
    placed = lane.place([6, 3])
    lane.scatter(pages.numpy(), cache, placed)
    assert torch.equal(cache[[6, 3]], pages)
    out = [torch.empty(1, 2, 32, 16), torch.empty(1, 2, 32, 16)]
    lane.gather(cache, placed, out)
    assert torch.equal(torch.cat(out), pages)


def test_the_chunks_of_a_step_are_gathered_each_into_its_own_pages(lane: Lane) -> None:
    paged, caches = paged_group(GROUP, chunk_tokens=CHUNK, num_blocks=8)
    slabs = [torch.zeros(paged.raw_bytes + 7, dtype=torch.uint8) for _ in range(2)]
    ids = [[2, 5], [1, 7]]
    views = paged.gather_many(lane, ids, slabs)
    for mine, blocks in zip(views, ids, strict=True):
        for view, cache in zip(mine, caches, strict=True):
            assert bytes(view) == bytes(cache[blocks].contiguous().view(torch.uint8).flatten())
    assert bytes(views[1][2]) == bytes(slabs[1][2 * 4096 : 3 * 4096])
    assert paged.gather_many(lane, [], []) == []


def test_block_ids_are_uploaded_once_for_all_layers_and_chunks(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane, selects = cuda_lane(), []
    paged, _ = paged_group(GROUP, chunk_tokens=CHUNK, num_blocks=16)
    slabs = [torch.zeros(paged.raw_bytes, dtype=torch.uint8) for _ in range(3)]
    ids = [[2 * i + 1, 2 * i + 2] for i in range(3)]
    select = torch.index_select

    def counted(cache: torch.Tensor, dim: int, index: torch.Tensor, *, out: torch.Tensor) -> None:
        selects.append(len(index))
        select(cache, dim, index, out=out)

    monkeypatch.setattr(torch, "index_select", counted)
    paged.gather_many(lane, ids, slabs)
    assert cuda.uploads == 1
    assert selects == [6, 6, 6], "one kernel a layer"


def test_staging_is_used_again_and_grows_when_it_must(cuda: Cuda) -> None:
    lane, cache = cuda_lane(), torch.zeros(8, 2, 32, 16)
    placed = lane.place([6, 3])
    lane.scatter(torch.ones(2, 2, 32, 16).numpy(), cache, placed)
    first = lane._staging
    lane.scatter(torch.ones(1, 2, 32, 16).numpy(), cache, lane.place([1]))
    assert lane._staging is first
    lane.gather(cache, lane.place(range(8)), [torch.empty(8, 2, 32, 16)])
    assert lane._staging is not first
    assert lane._staging is not None
    assert lane._staging.numel() == 8 * 2 * 32 * 16 * 4


@pytest.mark.parametrize("seed", range(4))
def test_blocks_side_by_side_or_not_are_scattered_and_gathered_alike(lane: Lane, seed: int) -> None:
    source = random.Random(seed)
    cache = torch.zeros(32, 64, 2, 16).permute(1, 2, 0, 3)  # [64 blocks, 2 heads, 32 tokens, 16]
    ids = source.sample(range(64), 40)  # many pieces
    if seed % 2:
        ids = [*range(9, 20), *range(3, 7), 50, 49, *range(20, 26)]  # few
    pages = torch.randn(len(ids), 2, 32, 16)
    lane.scatter(pages.numpy(), cache, lane.place(ids))
    assert torch.equal(cache[ids], pages)
    rest = [block for block in range(64) if block not in ids]
    assert not cache[rest].any()
    out = [torch.empty(n, 2, 32, 16) for n in (1, 7, len(ids) - 8)]
    lane.gather(cache, lane.place(ids), out)
    assert torch.equal(torch.cat(out), pages)


@pytest.mark.parametrize("ids", [[7, 8], [64], [*range(0, 40, 2), 64]])
def test_a_block_that_is_not_there_is_an_error(ids: list[int]) -> None:
    lane, cache = HostLane(), torch.zeros(8, 2, 32, 16)
    with pytest.raises(IndexError):
        lane.scatter(torch.ones(len(ids), 2, 32, 16).numpy(), cache, lane.place(ids))
    with pytest.raises(IndexError):
        lane.gather(cache, lane.place(ids), [torch.empty(len(ids), 2, 32, 16)])


# Pages of other heads and block sizes, token by token; and beside what vLLM does in place.


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
