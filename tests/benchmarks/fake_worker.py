"""A peer that keeps values as files, and can be told to lie."""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "peers"))

import numpy as np
from protocol import Servers, Worker, serve


class FakeWorker(Worker):
    def open(self, servers: Servers, role: str, threads: int) -> None:
        print("what a library prints is no answer")
        self._folder = Path(servers.folder)

    def put(self, names: Sequence[str]) -> None:
        for name, value in zip(names, self.buffers, strict=True):
            (self._folder / name).write_bytes(value)

    def get(self, names: Sequence[str]) -> None:
        for name, buffer in zip(names, self.buffers, strict=True):
            buffer[:] = np.frombuffer((self._folder / name).read_bytes(), np.uint8)
        if sys.argv[1] == "lies":
            self.buffers[-1][-1] ^= 1

    def lookup(self, names: Sequence[str]) -> int:
        stored = [(self._folder / name).exists() for name in names]
        return stored.index(False) if False in stored else len(stored)


if __name__ == "__main__":
    serve(FakeWorker())
