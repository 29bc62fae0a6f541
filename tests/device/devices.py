"""Opens the device that a program tests or measures: this machine's GPU, or the simulated one."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Verdict:
    name: str
    is_right: bool | None
    """Whether all bytes were right, and no wait took too long; None if it cannot be tested here."""
    fault: str = ""
    """The exception that ended it, or the reason for skipping it."""


def tried(name: str, work: Callable[[], bool]) -> Verdict:
    try:
        return Verdict(name, work())
    except Exception as exc:  # a kernel that does not compile, an address that does not exist
        return Verdict(name, False, f"{type(exc).__name__}: {exc}".splitlines()[0])


def report(verdicts: Iterable[Verdict]) -> int:
    """Print a line for each. Exit code 1 if one is wrong."""
    failed = False
    for one in verdicts:
        failed = failed or one.is_right is False
        word = {True: "ok", False: "FAILED", None: "-"}[one.is_right]
        print(f"{word:6} {one.name}{one.fault and ': ' + one.fault}", flush=True)
    return int(failed)


def model_time(on: bool = True) -> None:
    """Let operations of the simulated device take the time of a GPU behind PCIe 5, and move no
    bytes, or let them do as they did before."""
    launch_us, copy_gbps, kernel_gbps = (LAUNCH_US, COPY_GBPS, KERNEL_GBPS) if on else (0.0,) * 3
    simulated.cost(launch_us=launch_us, copy_gbps=copy_gbps, kernel_gbps=kernel_gbps, dry=on)
