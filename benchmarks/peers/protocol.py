"""The protocol between run.py and a worker in its peer's own environment: one JSON object per line.

Needs numpy and xxhash, but not objkv. Requests and their replies (or ``{"error": ...}``):

    open     servers, role, threads          {}           connect
    prepare  value_bytes, values             {}           buffers for one size of values
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

Bytes = npt.NDArray[np.uint8]
LAYERS = 32
"""Of the model whose chunks the values are."""


@dataclass(frozen=True)
class Servers:
    """Where things are; all on loopback, without credentials that are checked."""

    redis_port: int
    s3_port: int
    bucket: str
    folder: str
    """Of this run, for whatever a peer keeps in files."""


class Worker:
    """What a peer's file provides. All calls come from one thread. ``put``, ``get`` and ``lookup``
    are timed, the others are not. What raises here is to be written; the rest may stay as it is."""

    buffers: list[Bytes]
    """One a value: what is put, and what a ``get`` brought."""

    def open(self, servers: Servers, role: str, threads: int) -> None:
        """Connect. ``role`` is ``writer`` or ``reader``: two processes, as two replicas are."""
        self.servers, self.role, self.threads = servers, role, threads

    def prepare(self, value_bytes: int, values: int) -> None:
        """Make ``buffers`` for one size of values."""
        self.buffers = [np.zeros(value_bytes, np.uint8) for _ in range(values)]

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


def fill(buffers: Sequence[Bytes], seed: int) -> list[str]:
    """Give each buffer contents of its own, the same noise under a stamp that nothing repeats.
    Returns their digests."""
    for i, buffer in enumerate(buffers):
        buffer[:] = np.frombuffer(np.random.default_rng(0).bytes(buffer.size), np.uint8)
        buffer[:16] = np.frombuffer(np.array([seed, i]).tobytes(), np.uint8)
    return digests(buffers)


def digests(buffers: Sequence[Bytes]) -> list[str]:
    """One of each."""
    return [xxhash.xxh3_64_hexdigest(buffer.data) for buffer in buffers]


def answer(worker: Worker, do: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Carry out a request."""
    names = asked.get("names", [])

    def timed(call: Callable[[list[str]], Any]) -> tuple[float, Any]:
        started = time.perf_counter()
        found = call(names)
        return time.perf_counter() - started, found

    if do == "open":
        worker.open(Servers(**asked["servers"]), asked["role"], asked["threads"])
    elif do == "prepare":
        worker.prepare(**asked)
    elif do == "put":
        put = fill(worker.buffers, asked["seed"])
        worker.stage()
        return {"seconds": timed(worker.put)[0], "digests": put}
    elif do == "get":
        seconds, _ = timed(worker.get)
        return {"seconds": seconds, "digests": digests(worker.got(len(names)))}
    elif do == "lookup":
        seconds, found = timed(worker.lookup)
        return {"seconds": seconds, "found": found}
    elif do == "clear":
        worker.clear()
    elif do == "close":
        worker.close()
    return {}


def serve(worker: Worker) -> None:
    """Answer requests until one was ``close``, or there are no more."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        asked = json.loads(line)
        do = asked.pop("do")
        try:
            found = answer(worker, do, asked)
        except BaseException as exc:
            traceback.print_exc()
            found = {"error": f"{type(exc).__name__}: {exc}"}
        print(json.dumps(found), file=answers)
        if do == "close":
            break
    answers.flush()
    os._exit(0)  # some peers' threads outlive their close
