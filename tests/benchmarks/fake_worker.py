"""A peer that keeps values as files, and can be told to lie."""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "peers"))

import numpy as np
from protocol import Bytes, Case, Servers, Worker, serve


class FakeWorker(Worker):
    def open(self, servers: Servers, role: str, threads: int) -> None:
        print("what a library prints is no answer")
        self._folder, self._role = Path(servers.folder), role

    def prepare(self, case: Case) -> list[Bytes]:
        self._buffers = [np.zeros(case.value_bytes, np.uint8) for _ in range(case.values)]
        return self._buffers if self._role == "writer" else []

    def put(self, names: Sequence[str]) -> None:
        for name, value in zip(names, self._buffers, strict=True):
            (self._folder / name).write_bytes(value)

    def get(self, names: Sequence[str]) -> None:
        for name, buffer in zip(names, self._buffers, strict=True):
            buffer[:] = np.frombuffer((self._folder / name).read_bytes(), np.uint8)
        if sys.argv[1] == "lies":
            self._buffers[-1][-1] ^= 1

    def got(self, count: int) -> list[Bytes]:
        return self._buffers[:count]

    def lookup(self, names: Sequence[str]) -> int:
        stored = [(self._folder / name).exists() for name in names]
        return stored.index(False) if False in stored else len(stored)


if __name__ == "__main__":
    serve(FakeWorker())
