"""Opens the device that a program tests or measures: this machine's GPU, or the simulated one."""

import sys
from importlib import import_module
from types import ModuleType

import torch

from objkv.ops.bench.gpu import SIMULATED, simulated_source
from objkv.transfer.devices import driver_of


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


def device_name(device: torch.device) -> str:
    """Return the name that the driver gives a device."""
    return str(torch.get_device_module(device).get_device_name(device))
