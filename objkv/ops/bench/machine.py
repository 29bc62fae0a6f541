"""The machine that figures come from: without it they mean nothing."""

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from objkv.ops.engine import DISTRIBUTIONS, installed_version, library_versions


@dataclass(frozen=True, slots=True)
class Machine:
    """What it is, and how busy it was before the first round."""

    cpu: str
    cores: int
    """That this process may use."""
    memory_bytes: int | None
    system: str
    python: str
    load: float | None
    """Mean number of runnable threads over the minute before; near 0 on an idle machine."""
    libraries: Mapping[str, str]


def describe_machine() -> Machine:
    """The machine that this runs on."""
    versions = library_versions() | {name: installed_version(name) for name in DISTRIBUTIONS}
    return Machine(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else _cores(),
        memory_bytes=_memory_bytes(),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        load=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        libraries={name: version for name, version in versions.items() if version},
    )


def _cores() -> int:
    return os.cpu_count() or 1


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
