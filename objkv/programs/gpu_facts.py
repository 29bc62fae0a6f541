"""The facts about this machine's GPU, and its copy rates.

``python -m objkv.programs.gpu_facts`` prints one ``GpuFacts`` as JSON, or nothing without a GPU.
"""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from objkv.ops.doctor.settings import installed_version
from objkv.ops.gpu_check import GpuFacts
from objkv.transfer.devices import driver_of

_COPIED_BYTES = 512 << 20
_PACKAGES = ("objkv", "vllm", "torch", "triton")
_DRIVERS = ("nvidia", "amdgpu", "xe", "i915")
"""Kernel modules whose version is that of a GPU's driver."""
_MODULES, _PCI = Path("/sys/module"), Path("/sys/bus/pci/devices")


def open_gpu() -> torch.device | None:
    """Select this machine's first GPU for this thread, and return it; None if there is none.
    Raises ``ConfigError`` for a device that objkv does not support."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return None
    device = torch.device(found.type, 0)
    driver_of(device)
    torch.get_device_module(device).set_device(device)
    return device


def device_name(device: torch.device) -> str:
    """Return the name that the driver gives a device."""
    return str(torch.get_device_module(device).get_device_name(device))


def plain_copy(host: torch.Tensor, device: torch.Tensor, nbytes: int, *, up: bool) -> float:
    """Copy ``nbytes`` to or from page-locked memory, in pieces of these tensors' size. Returns
    device seconds."""
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


def read_facts(device: torch.device) -> GpuFacts:
    """Describe a device, its driver and its link. Lines that cannot be read are left out."""
    api, driver = torch.get_device_module(device), driver_of(device)
    up, down = _copy_rates(device)  # first: an idle link may be slower
    speed, lanes = _link(device)
    free, total = api.mem_get_info(device)
    lines: dict[str, str | None] = {
        "Memory": f"{total / 2**30:.1f} GiB, {free / 2**30:.1f} GiB free",
        "Driver": _driver(),
        "CUDA": torch.version.cuda,
        "ROCm": torch.version.hip,
        "XPU": getattr(torch.version, "xpu", None),
        "Kernels": type(driver.kernels).__name__,
        **{package: installed_version(package) for package in _PACKAGES},
    }
    return GpuFacts(
        device=device_name(device),
        about={name: text for name, text in lines.items() if text},
        to_device_gb_s=up,
        to_host_gb_s=down,
        link=f"{speed}, {lanes} lanes" if speed and lanes else None,
        link_gb_s=link_gb_s(speed, lanes),
    )


def link_gb_s(speed: str, lanes: str) -> float | None:
    """Return what a PCIe link carries in each direction, such as ``32.0 GT/s PCIe`` with 16
    lanes; None if that cannot be read."""
    found = re.match(r"([\d.]+) GT/s", speed)
    if found is None or not lanes.isdecimal():
        return None
    transfers = float(found[1])
    coding = 128 / 130 if transfers >= 8 else 8 / 10
    return transfers * int(lanes) * coding / 8


def _copy_rates(device: torch.device) -> tuple[float, float]:
    host = torch.empty(_COPIED_BYTES, dtype=torch.uint8)
    plain = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device=device)
    unpin = driver_of(device).pin(host)
    up, down = (
        host.nbytes / min(plain_copy(host, plain, host.nbytes, up=up) for _ in range(3)) / 1e9
        for up in (True, False)
    )
    unpin()
    return up, down


def _driver() -> str | None:
    for name in _DRIVERS:
        if version := _read(_MODULES / name / "version"):
            return f"{name} {version}"
    return None


def _link(device: torch.device) -> tuple[str, str]:
    """Return speed and lanes of the PCIe link, as Linux knows them; empty if it does not."""
    read: Any = getattr(torch.get_device_module(device), "get_device_properties", lambda _: None)
    properties = read(device)
    domain, bus, slot = (
        getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device")
    )
    if bus is None or slot is None:
        return "", ""
    place = _PCI / f"{domain or 0:04x}:{bus:02x}:{slot:02x}.0"
    return _read(place / "current_link_speed"), _read(place / "current_link_width")


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def main() -> None:
    """Print the facts. Prints nothing without a GPU."""
    device = open_gpu()
    if device is not None:
        print(json.dumps(asdict(read_facts(device))), flush=True)


if __name__ == "__main__":
    main()
