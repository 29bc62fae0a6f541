"""Opens the device that a program tests or measures: this machine's GPU, or the simulated one."""

import sys
from importlib import import_module
from types import ModuleType

import torch

from objkv.ops.bench.gpu import SIMULATED, simulated_source
from objkv.transfer.devices import driver_of

LAUNCH_US, COPY_GBPS, KERNEL_GBPS = 3.0, 50.0, 1500.0
"""The time model of the simulated device."""


def open_device(kind: str) -> torch.device | None:
    """Return the first device of a kind and select it for this thread, or None if there is none.

    ``kind``: a type of PyTorch's, ``gpu`` for any accelerator, or ``sim`` for the simulated device,
    which is built in half a minute when it is first used. Raises ``ConfigError`` for a device that
    objkv does not support.
    """
    if kind == SIMULATED:
        simulated_controls().load()
        return torch.device(kind, 0)
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or kind not in ("gpu", found.type):
        return None
    device = torch.device(found.type, 0)
    driver_of(device)
    torch.get_device_module(device).set_device(device)
    return device


def simulated_controls() -> ModuleType:
    """Return the controls of the simulated device. Raises ``ConfigError`` outside of the source
    tree, where it does not exist."""
    root = str(simulated_source())
    if root not in sys.path:
        sys.path.insert(0, root)
    return import_module("tests.device.simulated")


def model_time(on: bool = True) -> None:
    """Let operations of the simulated device take the time of a GPU behind PCIe 5, and move no
    bytes, or let them do as they did before."""
    speeds = (LAUNCH_US, COPY_GBPS, KERNEL_GBPS) if on else (0.0, 0.0, 0.0)
    names = ("launch_us", "copy_gbps", "kernel_gbps")
    simulated_controls().cost(**dict(zip(names, speeds, strict=True)), dry=on)


def plain_copy(host: torch.Tensor, device: torch.Tensor, nbytes: int, *, up: bool) -> float:
    """Copy ``nbytes`` between page-locked memory and the device, in pieces of these tensors' size.
    Returns device seconds."""
    api = torch.get_device_module(device.device)
    begin, end = api.Event(enable_timing=True), api.Event(enable_timing=True)
    target, source = (device, host) if up else (host, device)
    begin.record()
    for at in range(0, nbytes, host.nbytes):
        size = min(nbytes - at, host.nbytes)
        target[:size].copy_(source[:size], non_blocking=True)
    end.record()
    api.synchronize(device.device)
    return float(begin.elapsed_time(end)) / 1e3


def device_name(device: torch.device) -> str:
    """Return the name that the driver gives a device."""
    return str(torch.get_device_module(device).get_device_name(device))
