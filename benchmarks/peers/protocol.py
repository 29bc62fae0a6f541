"""The protocol between run.py and a worker in its peer's own environment: one JSON object per line.

Needs numpy and xxhash, but not objkv. Requests and their replies (or ``{"error": ...}``):

    open     servers, role, threads          {}           connect
    prepare  value_bytes, values, layers     {}           buffers for one size of values
    put      names, seed                     seconds, digests: ends when the servers have all
    get      names                           seconds, digests: of the bytes in the buffers
    lookup   names                           seconds, found: length of the stored prefix
    clear                                    {}           remove values that only it can
    close                                    {}

The worker measures only the call of the peer, without filling buffers and computing digests. Output
of libraries goes to stderr.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

Bytes = npt.NDArray[np.uint8]
STAMP_BYTES = 16


@dataclass(frozen=True)
class Servers:
    """Where things are; all on loopback, without credentials that anybody checks."""

    redis_port: int
    s3_port: int
    bucket: str
    folder: str
    """Of this run, for whatever a peer keeps in files."""


@dataclass(frozen=True)
class Case:
    """One size of values."""

    value_bytes: int
    values: int
    """At once."""
    layers: int


class Worker:
    """What a peer's file provides. All calls come from one thread. ``put``, ``get`` and ``lookup``
    are timed, the others are not. What raises here is to be written; the rest may stay as it is."""

    buffers: list[Bytes]
    """One a value: what is put, and what a ``get`` brought."""

    def open(self, servers: Servers, role: str, threads: int) -> None:
        """Connect. ``role`` is ``writer`` or ``reader``: two processes, as two replicas are."""
        self.servers, self.role, self.threads = servers, role, threads

    def prepare(self, case: Case) -> None:
        """Make ``buffers`` for one size of values."""
        self.buffers = [np.zeros(case.value_bytes, np.uint8) for _ in range(case.values)]

    def stage(self) -> None:
        """Before a put: bring what is in the buffers to where the peer takes it from."""

    def put(self, names: Sequence[str]) -> None:
        """Store the buffers under these names; returns when the servers have all of them."""
        raise NotImplementedError

    def get(self, names: Sequence[str]) -> None:
        """Bring the values into memory that was allocated before."""
        raise NotImplementedError

    def got(self, count: int) -> list[Bytes]:
        """What the last ``get`` brought, one a value."""
        return self.buffers[:count]

    def lookup(self, names: Sequence[str]) -> int:
        """How many of the names lead, without a gap, to something that is stored."""
        raise NotImplementedError

    def clear(self) -> None:
        """Remove what was put, if it is in no server that run.py empties itself."""

    def close(self) -> None:
        """Disconnect, where the end of the process would not do."""


def fill(buffers: Sequence[Bytes], base: Bytes, seed: int) -> None:
    """Give each buffer contents of its own: the same noise, under a stamp that nothing repeats."""
    for i, buffer in enumerate(buffers):
        np.copyto(buffer, base)
        stamp = np.frombuffer(np.array([seed, i], dtype=np.int64).tobytes(), np.uint8)
        buffer[:STAMP_BYTES] = stamp


def digests(buffers: Sequence[Bytes]) -> list[str]:
    """One of each."""
    return [xxhash.xxh3_64_hexdigest(buffer.data) for buffer in buffers]


class _Server:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._base = np.empty(0, np.uint8)

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        do = asked.pop("do")
        if do == "open":
            servers = Servers(**asked["servers"])
            self._worker.open(servers, asked["role"], asked["threads"])
        elif do == "prepare":
            case = Case(**asked)
            self._worker.prepare(case)
            noise = np.random.default_rng(case.value_bytes)
            self._base = noise.integers(0, 256, case.value_bytes, dtype=np.uint8)
        elif do == "put":
            fill(self._worker.buffers, self._base, asked["seed"])
            put = digests(self._worker.buffers)
            self._worker.stage()
            started = time.perf_counter()
            self._worker.put(asked["names"])
            return {"seconds": time.perf_counter() - started, "digests": put}
        elif do == "get":
            started = time.perf_counter()
            self._worker.get(asked["names"])
            seconds = time.perf_counter() - started
            return {"seconds": seconds, "digests": digests(self._worker.got(len(asked["names"])))}
        elif do == "lookup":
            started = time.perf_counter()
            found = self._worker.lookup(asked["names"])
            return {"seconds": time.perf_counter() - started, "found": found}
        elif do == "clear":
            self._worker.clear()
        elif do == "close":
            self._worker.close()
        else:
            raise ValueError(f"unknown request {do!r}")
        return {}


def serve(worker: Worker) -> None:
    """Answer requests until there are none, or one was ``close``."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    server = _Server(worker)
    for line in sys.stdin:
        asked = json.loads(line)
        last = asked["do"] == "close"
        try:
            answer = server.answer(asked)
        except BaseException as exc:
            traceback.print_exc()
            answer = {"error": f"{type(exc).__name__}: {exc}"}
        print(json.dumps(answer), file=answers)
        if last:
            break
    answers.flush()
    os._exit(0)  # some peers' threads outlive their close
