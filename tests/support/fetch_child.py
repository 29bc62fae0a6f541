"""A fetching process over a folder, which tests can hold up.

A get of ``held/...`` reads half of the value, reports that, makes the file ``half-<pid>`` in the
folder of gates, and waits for ``go-<pid>`` there, whatever its deadline. Then it writes the rest.
A get of ``lying/...`` reports more bytes than there are.
"""

import os
import sys
import time
from pathlib import Path

from objkv.stores.base import Arrived
from objkv.stores.local import LocalStore
from objkv.stores.processes import run


class HeldStore(LocalStore):
    def __init__(self, folder: Path, gates: Path) -> None:
        super().__init__(folder)
        self._gates = gates

    def get_into(
        self, key: str, buffer: memoryview, arrived: Arrived | None = None, start: int | None = None
    ) -> int | None:
        if key.startswith("lying/"):
            assert arrived is not None
            arrived(len(buffer) + 1)
        if not key.startswith("held/"):
            return super().get_into(key, buffer, arrived, start)
        value = self.get(key)
        assert value is not None
        half = len(value) // 2
        buffer[:half] = value[:half]
        assert arrived is not None
        arrived(half)
        (self._gates / f"half-{os.getpid()}").touch()
        while not (self._gates / f"go-{os.getpid()}").exists():
            time.sleep(0.001)
        buffer[half : len(value)] = value[half:]
        arrived(len(value))
        return len(value)


def main() -> None:
    folder, gates, *descriptors = sys.argv[1:]
    run(descriptors, lambda: HeldStore(Path(folder), Path(gates)))


if __name__ == "__main__":
    main()
    os._exit(0)
