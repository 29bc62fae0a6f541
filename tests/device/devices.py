"""Opens the device that a program tests or measures: this machine's GPU, or the simulated one."""

import torch

from objkv.programs.gpu_facts import open_gpu
from tests.device import simulated

SIMULATED = "sim"
"""The simulated device, as PyTorch knows it."""
LAUNCH_US, COPY_GBPS, KERNEL_GBPS = 3.0, 50.0, 1500.0
"""The time model of the simulated device."""


def open_device(kind: str) -> torch.device:
    """Return ``gpu``, this machine's first one, or ``sim``, which is built in half a minute when it
    is first used, and select it for this thread. Ends the program without a GPU."""
    if kind == SIMULATED:
        simulated.load()
        torch.set_num_threads(1)  # PyTorch's own threads would take the cores of its streams
        return torch.device(kind, 0)
    device = open_gpu()
    if device is None:
        raise SystemExit("PyTorch finds no GPU here; SIMULATED=1 uses a simulated one")
    return device


def model_time(on: bool = True) -> None:
    """Let operations of the simulated device take the time of a GPU behind PCIe 5, and move no
    bytes, or let them do as they did before."""
    launch_us, copy_gbps, kernel_gbps = (LAUNCH_US, COPY_GBPS, KERNEL_GBPS) if on else (0.0,) * 3
    simulated.cost(launch_us=launch_us, copy_gbps=copy_gbps, kernel_gbps=kernel_gbps, dry=on)
