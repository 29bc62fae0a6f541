"""What the kernel does with memory that this process has mapped."""

from pathlib import Path
from typing import Any

import numpy as np


def flags_of(memory: Any) -> set[str]:
    """The kernel's two-letter flags of a buffer's mapping."""
    address, found = np.frombuffer(memory, np.uint8).ctypes.data, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(maxsplit=1)[0]
        if "-" in head:
            start, end = (int(one, 16) for one in head.split("-"))
            found = start <= address < end
        elif found and head == "VmFlags:":
            return set(line.split()[1:])
    raise AssertionError("not mapped")


def is_private(memory: Any) -> bool:
    """Whether a buffer is in no core dump and in no child of this process."""
    return {"dd", "dc"} <= flags_of(memory)
