"""The simulated device computes the same as the CPU: page kernels, batches of copies, operators."""

import threading
from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch

from objkv.transfer.devices import driver_of
from objkv.transfer.kernels import TorchKernels
from objkv.transfer.lanes import PagedLayers, Recast

WORDS = (torch.uint8, torch.int16, torch.int32, torch.int64)
DEVICE = "sim:0"


@pytest.fixture
def device(sim: ModuleType) -> torch.device:
    return torch.device(DEVICE)


def words(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random integers of the whole range."""
    generator = torch.Generator().manual_seed(seed)
    nbytes = dtype.itemsize * int(np.prod(shape))
    return (
        torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
        .view(dtype)
        .view(shape)
    )


# Page kernels. Blocks are [16 blocks, 2 heads, 8 tokens, 6 words] in any physical order.


def hnd(memory: torch.Tensor, layer: int) -> torch.Tensor:
    return memory[layer].view(16, 2, 8, 6)


def nhd(memory: torch.Tensor, layer: int) -> torch.Tensor:
    return memory[layer].view(16, 8, 2, 6).transpose(1, 2)


def layers_in_blocks(memory: torch.Tensor, layer: int) -> torch.Tensor:
    return memory.view(16, 3, 2, 8, 6)[:, layer]


def layers_in_tokens(memory: torch.Tensor, layer: int) -> torch.Tensor:
    return memory.view(16, 8, 3, 2, 6)[:, :, layer].transpose(1, 2)


def content_first(memory: torch.Tensor, layer: int) -> torch.Tensor:
    return memory[layer].view(6, 16, 2, 8).permute(1, 2, 3, 0)


def heads_first(memory: torch.Tensor, layer: int) -> torch.Tensor:
    return memory[layer].view(2, 16, 8, 6).transpose(0, 1)


LAYOUTS = [hnd, nhd, layers_in_blocks, layers_in_tokens, content_first, heads_first]
Layout = Callable[[torch.Tensor, int], torch.Tensor]


def caches(dtype: torch.dtype, layout: Layout) -> tuple[list[torch.Tensor], PagedLayers]:
    """Memory of three layers on the CPU and on the device, and the layers on the device."""
    host = words((3, 16 * 2 * 8 * 6), dtype, 1)
    memory = host.to(DEVICE)
    return [host, memory], PagedLayers([layout(memory, layer) for layer in range(3)])


@pytest.mark.parametrize("dtype", WORDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("page", "recast"),
    [
        ((5, 2, 8), Recast((0, 2), 8, 0, 5)),
        ((5, 4, 8), Recast((1, 3), 8, 1, 4)),  # some heads, without the first block
        ((4, 2, 16), Recast((0, 2), 8, 1, 6)),  # from larger blocks
        ((8, 3, 4), Recast((1, 3), 8, 0, 4)),  # from smaller ones
        ((4, 2, 12), Recast((0, 2), 8, 2, 3)),  # from blocks that end within others
    ],
)
def test_scatter_writes_the_same_as_on_the_cpu(
    device: torch.device,
    dtype: torch.dtype,
    layout: Layout,
    page: tuple[int, int, int],
    recast: Recast,
) -> None:
    (host, memory), layers = caches(dtype, layout)
    expected = PagedLayers([layout(host, layer) for layer in range(3)])
    staged = words((3, *page, 6), dtype, 2)
    ids = torch.randperm(16)[: recast.blocks]
    TorchKernels().scatter(staged, expected, ids, recast)
    driver_of(device).kernels.scatter(staged.to(device), layers, ids.to(device), recast)
    assert torch.equal(memory.cpu(), host)


@pytest.mark.parametrize("dtype", WORDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gather_reads_the_same_as_on_the_cpu(
    device: torch.device, dtype: torch.dtype, layout: Layout
) -> None:
    (host, _), layers = caches(dtype, layout)
    ids = torch.randperm(16)[:6]
    expected = torch.zeros(2, 3, 3, 2, 8, 6, dtype=dtype)
    found = torch.zeros_like(expected, device=device)
    TorchKernels().gather(PagedLayers([layout(host, n) for n in range(3)]), ids, expected)
    driver_of(device).kernels.gather(layers, ids.to(device), found)
    assert torch.equal(found.cpu(), expected)


def test_pages_may_have_any_strides(device: torch.device) -> None:
    (host, memory), layers = caches(torch.int16, hnd)
    staged = words((6, 8, 2, 5, 3), torch.int16, 3).permute(4, 3, 2, 1, 0)
    chosen = torch.tensor([3, 1, 15, 0, 7])
    recast = Recast((0, 2), 8, 0, 5)
    expected = PagedLayers([hnd(host, n) for n in range(3)])
    TorchKernels().scatter(staged, expected, chosen, recast)
    on_device = staged.permute(4, 3, 2, 1, 0).contiguous().to(device).permute(4, 3, 2, 1, 0)
    kernels, ids = driver_of(device).kernels, chosen.to(device)
    kernels.scatter(on_device, layers, ids, recast)
    assert torch.equal(memory.cpu(), host)
    found = torch.zeros(6, 8, 2, 5, 3, 1, dtype=torch.int16, device=device)
    kernels.gather(layers, ids, found.permute(5, 4, 3, 2, 1, 0))
    assert torch.equal(found.permute(5, 4, 3, 2, 1, 0)[0].cpu(), staged)


def test_all_layers_are_one_launch(sim: ModuleType, device: torch.device) -> None:
    _, layers = caches(torch.int32, nhd)
    ids = torch.arange(5, device=device)
    staged = torch.zeros(1, 3, 5, 2, 8, 6, dtype=torch.int32, device=device)
    sim.counts()
    driver_of(device).kernels.gather(layers, ids, staged)
    driver_of(device).kernels.scatter(staged[0], layers, ids, Recast((0, 2), 8, 0, 5))
    assert sim.counts() == {("kernel", "MainThread"): 2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_end": 1}, "of shape"),
        ({"head_start": 1, "head_end": 3}, "of shape"),
        ({"first_block": 1}, "of shape"),
        ({"ids": torch.arange(5)}, "on the device"),
        ({"staged": torch.zeros(3, 5, 2, 8, 6)}, "device words"),
    ],
)
def test_kernels_refuse_other_shapes(
    device: torch.device, change: dict[str, object], message: str
) -> None:
    _, layers = caches(torch.int32, hnd)
    arguments = {
        "staged": torch.zeros(3, 5, 2, 8, 6, dtype=torch.int32, device=device),
        "caches": layers.caches,
        "ids": torch.arange(5, device=device),
        "first_block": 0,
        "head_start": 0,
        "head_end": 2,
    }
    with pytest.raises(RuntimeError, match=message):
        torch.ops.simdev.scatter_pages(**arguments | change)


# Batches of copies


def copy_pieces(
    sim: ModuleType, pairs: list[tuple[torch.Tensor, torch.Tensor]], any_order: bool = False
) -> None:
    """Copy tensors to tensors in one call."""
    sources, targets = zip(*pairs, strict=True)
    sim.DRIVER.use_batch_copy(True)
    sim.DRIVER.batch_copy(
        torch.tensor([t.data_ptr() for t in sources]),
        torch.tensor([t.data_ptr() for t in targets]),
        torch.tensor([t.nbytes for t in sources]),
        any_order,
    )


@pytest.mark.parametrize("any_order", [True, False])
def test_a_batch_copies_both_ways(sim: ModuleType, device: torch.device, any_order: bool) -> None:
    host, memory = words((20, 1000), torch.uint8, 1), torch.zeros(20, 1000, dtype=torch.uint8)
    undo = sim.DRIVER.pin(host)
    found = torch.zeros(20, 1000, dtype=torch.uint8, pin_memory=True)
    memory = memory.to(device)
    order = torch.randperm(20).tolist()
    sim.counts()
    copy_pieces(sim, [(host[k], memory[n]) for n, k in enumerate(order)], any_order)
    copy_pieces(sim, [(memory[n], found[k]) for n, k in enumerate(order)])
    assert sim.counts() == {("batch copy", "MainThread"): 2}
    torch.sim.synchronize()
    assert torch.equal(found, host)
    undo()


@pytest.mark.parametrize(("any_order", "changed"), [(False, 40), (True, None)])
def test_a_batch_in_any_order_may_read_before_its_stream_gets_there(
    sim: ModuleType, device: torch.device, any_order: bool, changed: int | None
) -> None:
    sources = torch.zeros(40, 8, pin_memory=True)
    targets = torch.zeros(40, 8, device=device)
    stream = torch.sim.current_stream(device)
    sim.hold(stream)
    copy_pieces(sim, list(zip(sources, targets, strict=True)), any_order)
    sources.fill_(1)
    sim.hold(stream, False)
    late = int(targets[:, 0].cpu().sum())
    assert late == changed if changed is not None else 0 < late < 40


def test_a_batch_cannot_reach_other_memory(sim: ModuleType, device: torch.device) -> None:
    memory = torch.zeros(2, 8, device=device)
    pinned = torch.zeros(2, 8, pin_memory=True)
    second = torch.zeros(2, 8, device="sim:1")
    beyond = torch.from_numpy(np.zeros(3 * 4096, dtype=np.uint8))[:2048]
    undo = sim.DRIVER.pin(beyond)
    too_long = torch.from_numpy(np.lib.stride_tricks.as_strided(beyond.numpy(), (4096,), (1,)))
    for source, target in [
        (torch.zeros(8), memory[0]),
        (memory[0], torch.zeros(8)),
        (pinned[0], second[0]),
        (too_long, memory[0]),
    ]:
        copy_pieces(sim, [(pinned[0], memory[0]), (source, target)])
        assert "cannot reach" in sim.take_error()
    undo()


def test_a_batch_keeps_registered_memory_in_use(sim: ModuleType, device: torch.device) -> None:
    memory, host = torch.zeros(8, device=device), torch.zeros(8)
    undo = sim.DRIVER.pin(host)
    sim.hold(torch.sim.current_stream(device))
    copy_pieces(sim, [(host, memory)])
    with pytest.raises(RuntimeError, match="under way"):
        undo()
    assert "under way" in sim.take_error()


# Many streams write one cache. An operator that copied the whole of it would write back old bytes.


def by_index_copy(cache: torch.Tensor, ids: torch.Tensor, pages: torch.Tensor) -> None:
    cache.index_copy_(0, ids, pages)


def by_index_out(cache: torch.Tensor, ids: torch.Tensor, pages: torch.Tensor) -> None:
    torch.index_copy(cache, 0, ids, pages, out=cache)


def by_index_put(cache: torch.Tensor, ids: torch.Tensor, pages: torch.Tensor) -> None:
    cache[ids] = pages


def by_kernel(cache: torch.Tensor, ids: torch.Tensor, pages: torch.Tensor) -> None:
    form = (1, 1, cache.shape[1])
    torch.ops.simdev.scatter_pages(
        pages.view(1, len(pages), *form), [cache.view(len(cache), *form)], ids, 0, 0, 1
    )


@pytest.mark.parametrize("write", [by_index_copy, by_index_out, by_index_put, by_kernel])
def test_streams_write_one_cache_at_the_same_time(
    sim: ModuleType, device: torch.device, write: Callable[..., None]
) -> None:
    blocks, streams, page = 128, 4, 16_384
    cache = torch.zeros(blocks, page, dtype=torch.int64, device=device)  # 16 MiB
    order = torch.randperm(blocks).view(streams, -1)
    values = torch.arange(blocks * page, device=device).view(blocks, page)
    torch.sim.synchronize(device)
    sim.slow(device, 0, 500)

    def work(ids: torch.Tensor) -> None:
        stream = torch.sim.Stream(device)
        with torch.sim.stream(stream):
            for part in ids.split(4):  # 512 KiB
                chosen = part.to(device)
                write(cache, chosen, values.index_select(0, chosen))
        stream.synchronize()

    threads = [threading.Thread(target=work, args=(ids,)) for ids in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(cache.cpu(), values.cpu())


# PyTorch's operators


@pytest.mark.parametrize(
    "operate",
    [
        lambda a, b, i: a + b * 2,
        lambda a, b, i: a.add_(b).mul_(3),
        lambda a, b, i: torch.add(a, b, out=torch.empty(0, device=a.device)),
        lambda a, b, i: (a > b).float(),
        lambda a, b, i: torch.where(a > b, a, b),
        lambda a, b, i: a @ b,
        lambda a, b, i: torch.softmax(a, -1),
        lambda a, b, i: a.sum(0) + b.mean(1) + a.max(),
        lambda a, b, i: torch.cat([a, b.t()]),
        lambda a, b, i: torch.stack([a, b])[:, 1:3].transpose(0, 2).contiguous(),
        lambda a, b, i: a[i] + b.index_select(1, i)[0, 0],
        lambda a, b, i: a.masked_fill_(a > 0, 1.0),
        lambda a, b, i: a.index_add_(0, i, b[i]),
        lambda a, b, i: a.to(torch.bfloat16).view(torch.int16),
        lambda a, b, i: torch.sort(a, 0)[1],
        lambda a, b, i: (a > 0).nonzero(),
        lambda a, b, i: torch._foreach_add([a, b], 1.0)[1],
        lambda a, b, i: a.copy_(b.t()),
        lambda a, b, i: a[1:3].fill_(float(b[0, 0])),
        lambda a, b, i: torch.arange(5, device=a.device),
        lambda a, b, i: a.new_zeros(3, 4),
        lambda a, b, i: a.expand(2, 4, 4).clone().flip(0),
    ],
)
def test_operators_compute_the_same_as_on_the_cpu(
    sim: ModuleType, device: torch.device, operate: Callable[..., torch.Tensor]
) -> None:
    sim.slow(device, 0, 200)
    a, b, ids = torch.randn(4, 4), torch.randn(4, 4), torch.tensor([2, 0])
    found = operate(a.to(device), b.to(device), ids.to(device))
    expected = operate(a.clone(), b, ids)
    assert found.device == device
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found.cpu(), expected)


def test_tensors_of_inference_mode_can_be_written(sim: ModuleType, device: torch.device) -> None:
    """vLLM makes its cache in inference mode, and objkv's threads are not in it."""
    with torch.inference_mode():
        cache = torch.zeros(1, 4, 1, 1, 8, dtype=torch.int64, device=device)
        cache.add_(1)
    pages, ids = torch.full_like(cache, 5), torch.arange(4, device=device)
    torch.ops.simdev.scatter_pages(pages, [cache[0]], ids, 0, 0, 1)
    with torch.inference_mode():
        cache[0, 0].mul_(2)
        assert cache.cpu().flatten(1).tolist() == [[10] * 8 + [5] * 24]
