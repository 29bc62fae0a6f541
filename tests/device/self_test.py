"""Tests that a device's lanes move the right bytes in every layout, and change no others.

``python -m tests.device.self_test KIND`` runs it on a device (see ``open_device``).

Each layout is tested with each way in which lanes can copy: whole blocks in batches, the driver's
kernels, and PyTorch's. A host lane does the same on the CPU, and all bytes must be equal then.
"""

import math
import random
import sys
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from objkv.connector.kv.wiring import use_batched_copies
from objkv.errors import TransferError
from objkv.keys.topology import Topology
from objkv.transfer.devices import BatchCopy, DeviceDriver, DeviceLane, driver_of, open_lane
from objkv.transfer.kernels import PageKernels, TritonKernels
from objkv.transfer.lanes import Lane, PagedLayers, Recast
from objkv.transfer.paging import GroupShape, PagedGroup, check_pages
from tests.device import simulated
from tests.device.devices import SIMULATED, Verdict, open_device, report, tried
from tests.support.layouts import placed

_LAYERS, _BLOCKS = 3, 24
_MOVED, _CHUNKS = 8, 2
"""Blocks of each operation, and chunks of a gather."""
Shape = tuple[int, int, int]
"""Heads, block size, content."""


@dataclass(frozen=True, slots=True)
class CacheForm:
    name: str
    layout: str
    shape: Shape
    dtype: torch.dtype = torch.bfloat16
    kernel_blocks: int = 1
    """Blocks of the attention kernel per block of vLLM."""

    @property
    def nbytes(self) -> int:
        heads, size, content = self.shape
        return _LAYERS * _BLOCKS * heads * size * content * self.dtype.itemsize

    def group(self, memory: torch.Tensor) -> PagedGroup:
        heads, size, _ = self.shape
        rank = Topology(1, heads, (_LAYERS,)).held(0)
        assert rank is not None
        shape = GroupShape(
            tuple(f"layers.{number}" for number in range(_LAYERS)),
            blocks=_MOVED // _CHUNKS,
            block_size=size * self.kernel_blocks,
            rank_shard=rank,
        )
        sizes = (_LAYERS, _BLOCKS, *self.shape)
        return PagedGroup(shape, placed(memory.view(self.dtype), self.layout, sizes).unbind(0))


_HND, _NHD = "LBHNC", "LBNHC"
FORMS = (
    CacheForm("HND", _HND, (8, 16, 128)),
    CacheForm("NHD", _NHD, (8, 16, 128)),
    CacheForm("one head, as with MLA", _HND, (1, 64, 576)),
    CacheForm("layers within blocks", "BLHNC", (8, 16, 128)),
    CacheForm("fp8, HND", _HND, (8, 32, 128), torch.float8_e4m3fn),
    CacheForm("fp8, NHD", _NHD, (8, 32, 128), torch.float8_e4m3fn),
    CacheForm("content of odd length, NHD", _NHD, (3, 16, 33)),
    CacheForm("split kernel blocks, HND", _HND, (8, 16, 128), kernel_blocks=2),
    CacheForm("split kernel blocks, NHD", _NHD, (8, 16, 128), kernel_blocks=2),
)


def one_way(
    driver: DeviceDriver, kernels: PageKernels, batch_copy: BatchCopy | None
) -> DeviceDriver:
    way = copy(driver)
    way.kernels, way.batch_copy = kernels, batch_copy
    return way


def run_self_test(device: torch.device) -> Iterator[Verdict]:
    driver = driver_of(device)
    for form in FORMS:
        for name, way in _ways(driver):
            yield tried(f"{form.name}: {name}", partial(_move_all, form, device, way))
        yield tried(f"{form.name}: check at start", partial(_start, form, device))
    if not isinstance(driver.kernels, TritonKernels):
        yield Verdict("Triton kernels", None, "this device's driver has none")
    if driver.batch_copy is None:
        yield Verdict("batches of copies", None, "this device's driver has none")


def _ways(driver: DeviceDriver) -> Iterator[tuple[str, DeviceDriver]]:
    kernels = driver.kernels
    if type(kernels) is not PageKernels:
        name = "Triton kernels" if isinstance(kernels, TritonKernels) else "the driver's kernels"
        yield name, one_way(driver, kernels, None)
    yield "PyTorch's kernels", one_way(driver, PageKernels(), None)
    if driver.batch_copy is not None:
        # Blocks that are not contiguous are copied by kernels here, too.
        yield "batches of copies", one_way(driver, kernels, driver.batch_copy)


def _start(form: CacheForm, device: torch.device) -> bool:
    check_pages(form.group(_random(form.nbytes, 0).to(device)), open_lane(device))
    return True


def _move_all(form: CacheForm, device: torch.device, way: DeviceDriver) -> bool:
    """Scatter and gather pages. Raises ``TransferError`` if any byte is wrong then."""
    lane, copies = DeviceLane(device, way, urgent=True), (way.kernels, way.batch_copy)
    memory = _random(form.nbytes, 0)
    there = memory.to(device)
    host, group = form.group(memory), form.group(there)
    lane.prepare(group.pages)
    _check((way.kernels, way.batch_copy) == copies, "fails, so that a slower way is used")
    lane.follow(lane.mark_compute())
    for seed, name in enumerate(("own", "part", "other heads", "other blocks"), 1):
        kept = _scattered(name, seed, group.pages, lane)
        _scattered(name, seed, host.pages, Lane())
        lane.mark().wait()
        del kept
        _check(torch.equal(there.cpu(), memory), f"wrong bytes after a scatter of {name} pages")
    gathered = _gathered(group, lane)
    lane.mark().wait()
    _check(torch.equal(gathered, _gathered(host, Lane())), "wrong bytes after a gather")
    _check(torch.equal(there.cpu(), memory), "a gather changed the cache")
    return True


def _check(is_right: bool, fault: str) -> None:
    if not is_right:
        raise TransferError(fault)


def _scattered(name: str, seed: int, layers: PagedLayers, lane: Lane) -> torch.Tensor:
    """Scatter random pages. Returns their memory, which must stay until they are copied."""
    blocks, heads, size, content = layers.caches[0].shape
    each = _MOVED // _CHUNKS
    frame, recast = (each, heads, size), None
    if name == "part":
        recast = Recast(frame, (0, heads), first_block=2, blocks=each - 2)
    elif name == "other heads":
        frame = (each, heads + 2, size)
        recast = Recast(frame, (1, 1 + heads), first_block=0, blocks=each)
    elif name == "other blocks":
        frame = (each // 2, heads, 2 * size)
        recast = Recast(frame, (0, heads), first_block=1, blocks=each - 2)
    nbytes = math.prod(frame) * content * layers.caches[0].dtype.itemsize
    memory = _random(_CHUNKS * len(layers) * nbytes, seed).pin_memory()
    starts = (np.arange(_CHUNKS * len(layers)) * nbytes).reshape(_CHUNKS, -1)
    count = each if recast is None else recast.blocks
    ids = np.array(_some_blocks(blocks, _CHUNKS * count, seed)).reshape(_CHUNKS, -1)
    lane.scatter(memory.numpy().data, starts, layers, ids, recast)
    return memory


def _gathered(group: PagedGroup, lane: Lane) -> torch.Tensor:
    """Gather some chunks. Returns their bytes, which are complete when a later mark is done."""
    ids = np.array(_some_blocks(len(group.caches[0]) // group.split, _MOVED, 9))
    memory = torch.zeros(_CHUNKS * group.raw_bytes, dtype=torch.uint8).pin_memory()
    starts = np.arange(_CHUNKS) * group.raw_bytes
    ids = group.blocks(ids.reshape(_CHUNKS, -1))
    lane.gather(group.pages, ids, memory.numpy().data, starts)
    return memory


def _some_blocks(blocks: int, count: int, seed: int) -> list[int]:
    return random.Random(seed).sample(range(1, blocks), count)


def _random(nbytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def main(kind: str) -> int:
    device = open_device(kind)
    use_batched_copies(device)
    if kind == SIMULATED:
        simulated.DRIVER.use_batch_copy(True)
    return report(run_self_test(device))


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
