"""What lanes do, on the host and on the simulated device."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from threading import Barrier

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from objkv.errors import ConfigError
from objkv.transfer.devices import DeviceLane, _whole_blocks, open_lane
from objkv.transfer.lanes import Lane, PagedLayers, Recast, as_words
from tests.support.device import ON_HOST, host_bytes
from tests.support.layouts import placed
from tests.support.paged_shapes import LAYOUTS
from tests.transfer.test_loader import watched


def test_a_device_lane_inherits_nothing_of_the_host_s() -> None:
    """Whose marks are always done, and which waits for none."""
    assert {name for name in vars(Lane) if name[0] != "_"} <= vars(DeviceLane).keys()


def test_a_device_that_nothing_is_known_of_is_refused() -> None:
    """Otherwise each chunk of each prompt would fail by itself, for ever."""
    assert type(open_lane(torch.device("cpu"))) is Lane
    with pytest.raises(ConfigError, match="CUDA, ROCm, XPU and CPU but not mps"):
        open_lane(torch.device("mps"))


@pytest.fixture
def lane(device: torch.device) -> Lane:
    return open_lane(device)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """What numpy copied to."""
    return watched(monkeypatch, np, "copyto", lambda target, source: target)


@pytest.mark.parametrize("place", ["before", "between", "after"])
def test_layers_between_which_the_payload_lies_are_copied_one_by_one(
    place: str, copies: list[np.ndarray]
) -> None:
    blocks, nbytes = 4, 4 * 2 * 8 * 4 * 4
    whole = np.zeros(6 * nbytes, np.uint8)  # a layer, a gap, a layer, a gap, and so on
    at = {"before": 0, "between": 2, "after": 5}[place] * nbytes
    first = {"before": 1, "between": 1, "after": 0}[place]
    parts = [whole[(first + 2 * n) * nbytes :][:nbytes] for n in range(2)]
    caches = [torch.from_numpy(part).view(torch.float32).view(blocks, 2, 8, 4) for part in parts]
    payload = np.arange(2 * nbytes // blocks, dtype=np.int64).astype(np.uint8)
    whole[at : at + len(payload)] = payload
    memory = whole[at : at + len(payload)].data
    starts = np.array([[0, nbytes // blocks]])
    Lane().scatter(memory, starts, PagedLayers(caches), np.array([[3]]))
    assert [len(target) for target in copies] == ([1, 1] if place == "between" else [2])
    for n, part in enumerate(parts):
        size = nbytes // blocks
        assert part[3 * size :].tolist() == payload[n * size : (n + 1) * size].tolist()


OUTSIDE: dict[str, tuple[list[list[int]], list[list[int]]]] = {
    "more blocks": ([[0, 512]], [[3, 4, 5]]),
    "behind": ([[0, 513]], [[3, 4]]),
    "before": ([[-1, 512]], [[3, 4]]),
    "far behind": ([[0, 512], [0, 1 << 62]], [[3, 4], [5, 6]]),
    "overflow": ([[0, 512], [0, (1 << 63) - 1]], [[3, 4], [5, 6]]),
    "too large": ([[0, (1 << 63) - 1]], [[3, 4, 5, 6, 7]]),
    "block behind": ([[0, 512]], [[3, 8]]),
    "before all": ([[0, 512]], [[3, -1]]),
}


@pytest.mark.parametrize(("starts", "ids"), OUTSIDE.values(), ids=OUTSIDE)
def test_bytes_outside_of_their_memory_and_blocks_outside_of_the_cache_are_refused(
    lane: Lane, device: torch.device, starts: list[list[int]], ids: list[list[int]]
) -> None:
    memory, zeros = host_bytes(torch.ones(1024, dtype=torch.uint8)), np.zeros(len(ids), np.int64)
    layers = PagedLayers([torch.zeros(8, 2, 4, 4, dtype=torch.int64, device=device)] * 2)
    given = memory.numpy().data, np.array(starts), layers, np.array(ids)
    with pytest.raises(IndexError):
        lane.scatter(*given)
    if len(ids[0]) == 2:
        with pytest.raises(IndexError):
            lane.scatter(*given, Recast((2, 2, 4), (0, 2), 0, 2))
    lane.follow(lane.mark_compute())
    lane.scatter(memory.numpy().data, zeros[:, None] + [0, 512], layers, zeros[:, None])
    lane.mark().wait()
    assert layers.caches[0].cpu().sum() == 32 * 0x0101010101010101 * (len(layers) - 1)
    with pytest.raises(IndexError):
        lane.gather(layers, np.array(ids), memory.numpy().data, np.array(starts)[:, 1] - 511)


def test_starts_that_do_not_match_their_blocks_or_layers_are_refused(
    lane: Lane, device: torch.device
) -> None:
    """Otherwise a layer would be left out, or one frame written to the blocks of many payloads."""
    memory = host_bytes(torch.ones(1024, dtype=torch.uint8)).numpy().data
    layers = PagedLayers([torch.zeros(8, 2, 4, 4, dtype=torch.int64, device=device)] * 2)
    for shape in ((1, 2), (2, 1), (2, 3), (3, 2)):
        with pytest.raises(ValueError, match="starts of"):
            lane.scatter(memory, np.zeros(shape, np.int64), layers, np.array([[3], [4]]))
    for count in (1, 3):
        with pytest.raises(ValueError, match="starts of"):
            lane.gather(layers, np.array([[3], [4]]), memory, np.zeros(count, np.int64))


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_each_page_of_many_payloads_goes_to_its_block_and_back(
    device: torch.device, data: st.DataObject
) -> None:
    """As a loop over payloads, layers and blocks copies them: any layout, runs, distances between
    frames, layers of two shapes, heads of more or fewer, and blocks of another size."""
    order = data.draw(st.sampled_from([*LAYOUTS, "BNLHC"]))
    count, blocks, heads, size, content = data.draw(st.integers(1, 4)), 12, 2, 4, 3
    shape = count, blocks, heads, size, content
    flat = torch.zeros(prod(shape), dtype=torch.int64, device=device)
    caches = list(placed(flat, order, shape))
    if data.draw(st.booleans()):  # they are not at one distance
        caches.insert(data.draw(st.integers(0, count)), torch.zeros_like(caches[0]))
        caches.append(torch.zeros(blocks, heads, 2 * size, 1, dtype=torch.int64, device=device))
    layers, lane = PagedLayers(caches), open_lane(device)
    n, each = data.draw(st.sampled_from([(1, 1), (1, 7), (2, 3), (3, 4), (5, 2)]))
    ids = np.array(data.draw(st.one_of(st.permutations(range(12)), st.just(list(range(12))))))
    ids, recast = ids[: n * each].reshape(n, each), None
    frame = each, heads, 0
    if data.draw(st.booleans()):
        first, more = data.draw(st.integers(0, 1)), data.draw(st.integers(0, 2))
        frame = each + first, heads + more, 0
        recast = Recast(frame, (more, more + heads), first, each)
    sizes = layers.frame_bytes(each, recast)
    gaps = 8 * np.array(data.draw(st.lists(st.integers(0, 2), min_size=len(sizes) * n + 1)))
    order_of = np.array(data.draw(st.permutations(range(n * len(sizes)))))
    lengths = np.tile(sizes, n) + gaps[: n * len(sizes)]
    starts = np.empty(n * len(sizes), np.int64)
    starts[order_of] = np.cumsum(lengths[order_of]) - lengths[order_of]
    starts = starts.reshape(n, -1)
    memory = host_bytes(torch.randint(0, 256, (int(lengths.sum()),), dtype=torch.uint8))
    lane.follow(lane.mark_compute())
    lane.scatter(memory.numpy().data, starts, layers, ids, recast)
    lane.mark().wait()
    for layer, cache in enumerate(caches):
        expected = torch.zeros(cache.shape, dtype=torch.int64)
        for row, blocks_of in zip(starts, ids, strict=True):
            page = frame[0], frame[1], *cache.shape[2:]
            given = memory[row[layer] : row[layer] + sizes[layer]].view(torch.int64).view(page)
            for at, block in enumerate(blocks_of):
                expected[block] = given[at + page[0] - each, page[1] - heads :]
        assert torch.equal(cache.cpu(), expected)
    chunk_bytes = int(layers.frame_bytes(each).sum())
    out, places = host_bytes(torch.zeros(n * (chunk_bytes + 8))), np.arange(n) * (chunk_bytes + 8)
    lane.gather(layers, ids, out.numpy().data, places)
    lane.mark().wait()
    for place, blocks_of in zip(places, ids, strict=True):
        pages = [cache.cpu()[blocks_of].flatten() for cache in caches]
        found = out[place : place + chunk_bytes].view(torch.int64)
        assert torch.equal(found, torch.cat(pages))


@ON_HOST
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_copies_of_whole_blocks_are_few_and_end_at_seams(data: st.DataObject) -> None:
    n, each, count = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6)), 2
    follows = data.draw(st.booleans())
    memory = torch.zeros(count, 20, 2, 3, 2, dtype=torch.int64)  # blocks of 96 bytes
    layers = PagedLayers(list(memory if follows else memory[:, ::2]))
    blocks = data.draw(st.permutations(range(layers.blocks)))
    ids = np.array(sorted(blocks) if data.draw(st.booleans()) else blocks)[: n * each]
    n, each = len(ids) // each, each
    ids = ids[: n * each].reshape(n, each)
    starts = np.array(data.draw(st.lists(st.integers(0, 4096), min_size=n * 2, max_size=n * 2)))
    seam = data.draw(st.sampled_from([32, 64, 128, 1 << 20]))
    host, device, sizes = _whole_blocks(starts.reshape(n, 2), layers, ids, seam)
    found = sorted(
        (d + at, h + at)
        for h, d, nbytes in zip(host, device, sizes, strict=True)
        for at in range(nbytes)
    )
    assert found == sorted(
        (
            layers.addresses[layer] + block * layers.strides[layer] + byte,
            row[layer] + at * 96 + byte,
        )
        for row, placed in zip(starts.reshape(n, 2), ids, strict=True)
        for layer in range(2)
        for at, block in enumerate(placed)
        for byte in range(96)
    )
    assert (host // seam == (host + sizes - 1) // seam).all()
    if seam == 1 << 20:
        runs = sum(int((np.diff(row) != 1).sum()) + 1 for row in ids)
        assert len(host) == 2 * (runs if follows else ids.size)


@ON_HOST
def test_a_payload_in_consecutive_blocks_is_one_copy_on_the_host(copies: list[np.ndarray]) -> None:
    """numpy waits for the interpreter after each, up to 5 ms if another thread computes."""
    caches = torch.zeros(6, 16, 2, 4, 3, dtype=torch.int64)
    memory = host_bytes(torch.ones(2, 6, 4, 2, 4, 3, dtype=torch.int64))
    starts = np.arange(12).reshape(2, 6) * (len(memory) // 12)
    ids = np.array([[3, 4, 5, 6], [9, 10, 1, 2]])
    Lane().scatter(memory.numpy().data, starts, PagedLayers(list(caches)), ids)
    sizes = [target.nbytes for target in copies]
    assert sizes == [len(memory) // 2, len(memory) // 4, len(memory) // 4]
    assert caches.sum() == len(memory) // 8


@pytest.mark.parametrize("content", [1, 2, 3, 4, 5, 6, 8, 90])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
def test_pages_are_copied_as_the_largest_words_that_fit(content: int, dtype: torch.dtype) -> None:
    cache = torch.zeros(3, 2, 4, content, dtype=dtype)
    words = as_words(cache)
    row = content * cache.element_size()
    assert words.element_size() == max(n for n in (1, 2, 4, 8) if row % n == 0)
    words[1] = 1
    assert cache[1].view(torch.uint8).any()
    assert not cache[[0, 2]].view(torch.uint8).any()


@ON_HOST
def test_threads_that_cut_layers_at_once_share_one_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    # A second one would be freed, with its addresses, while another lane's kernel reads them.
    layers = PagedLayers([torch.zeros(4, 1, 2, 4, dtype=torch.int32)] * 3)
    both, begin = Barrier(2), PagedLayers.__init__

    def begin_together(self: PagedLayers, caches: Sequence[torch.Tensor]) -> None:
        both.wait(5.0)
        begin(self, caches)

    monkeypatch.setattr(PagedLayers, "__init__", begin_together)
    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(layers.cut, [range(1, 3)] * 2)
    assert one is other


def test_words_do_not_span_rows_that_start_at_odd_places() -> None:
    memory = torch.zeros(9, 2, 1, 100, dtype=torch.int8)
    assert as_words(memory[..., :90]).dtype == torch.int16
    assert as_words(memory[..., 1:89]).element_size() == 1
    assert as_words(torch.zeros(2, 2, 4, 8).transpose(2, 3)).dtype == torch.int32
