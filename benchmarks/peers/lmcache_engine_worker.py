"""A whole LMCacheEngine without vLLM, over ``resp`` or ``s3``. Runs in LMCache's environment.

Written for 0.5.6. Like objkv's worker, and unlike the connector alone, it copies out of and into a
paged cache (one copy per chunk) and hashes the tokens. ``store`` returns before anything is stored,
so a put lasts until the server has all keys. The worker queries the server, because lookups of the
engine delay its stores.
"""

import hashlib
import socket
import sys
import time
import urllib.request
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.gpu_connector import GPUConnectorInterface
from lmcache_worker import TOKENS, config_of, metadata_of, with_bucket
from protocol import Bytes, Case, Servers, Worker, serve

WAIT_S = 100.0
LOOK_S = 0.001


class HostPages(GPUConnectorInterface):  # type: ignore[misc]  # LMCache is not typed
    """In place of a GPU's paged cache: one buffer a chunk."""

    def __init__(self, buffers: Sequence[Bytes]) -> None:
        self._buffers = [torch.from_numpy(buffer) for buffer in buffers]

    def to_gpu(self, memory_obj: Any, start: int, end: int, **_: Any) -> None:
        """Out of LMCache's memory."""
        self._buffers[start // TOKENS].copy_(memory_obj.raw_data.view(torch.uint8).view(-1))

    def from_gpu(self, memory_obj: Any, start: int, end: int, **_: Any) -> None:
        """Into LMCache's memory."""
        memory_obj.raw_data.view(torch.uint8).view(-1).copy_(self._buffers[start // TOKENS])

    def batched_to_gpu(self, memory_objs: Any, starts: Any, ends: Any, **_: Any) -> None:
        """One after the other."""
        for item, start, end in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(item, start, end)

    def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **_: Any) -> None:
        """One after the other."""
        for item, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(item, start, end)

    def get_shape(self, num_tokens: int) -> torch.Size:
        """Asked of layerwise connectors only."""
        raise NotImplementedError


class LMCacheEngineWorker(Worker):
    """One engine per size of values; the values of a put are the chunks of one prompt."""

    def __init__(self, scheme: str) -> None:
        self._scheme = scheme
        self._engine: Any = None
        self._engines = 0

    def open(self, servers: Servers, role: str, threads: int) -> None:
        """Only remembered: an engine needs to know the size of its values."""
        self._servers, self._role, self._threads = servers, role, threads

    def prepare(self, case: Case) -> list[Bytes]:
        """An engine, and the pages of as many chunks."""
        self._engines += 1  # the one before is left alone: its end was seen to hang
        config, metadata = (
            config_of(self._scheme, self._servers, self._threads, case),
            metadata_of(case),
        )
        self._buffers = [np.zeros(case.value_bytes, np.uint8) for _ in range(case.values)]
        self._engine = LMCacheEngineBuilder.get_or_create(
            f"bench-{self._engines}",
            config,
            metadata,
            HostPages(self._buffers),
            lambda tensor, rank: None,
            lambda item, rank: item,
        )
        self._engine.post_init()
        if self._scheme == "s3":
            with_bucket(self._connector(), self._servers.bucket)
        return self._buffers if self._role == "writer" else []

    def stage(self) -> None:
        """The buffers are the pages; how many keys there are before."""
        self._before = self._count()

    def put(self, names: Sequence[str]) -> None:
        """Returns when the server has one key more for each."""
        self._engine.store(_tokens(names))
        until = time.monotonic() + WAIT_S
        while self._count() < self._before + len(names):
            if time.monotonic() > until:
                raise TimeoutError(f"{self._count() - self._before} keys in {WAIT_S} s")
            time.sleep(LOOK_S)

    def get(self, names: Sequence[str]) -> None:
        """Into the pages."""
        found = int(self._engine.retrieve(_tokens(names), req_id="bench").sum())
        if found != len(names) * TOKENS:
            raise RuntimeError(f"{found} tokens were retrieved")

    def got(self, count: int) -> list[Bytes]:
        """The pages."""
        return self._buffers[:count]

    def lookup(self, names: Sequence[str]) -> int:
        """With the hashing of the tokens."""
        return int(self._engine.lookup(_tokens(names))) // TOKENS

    def _connector(self) -> Any:
        backends = self._engine.storage_manager.storage_backends.values()
        return next(b.connection for b in backends if hasattr(b, "connection"))

    def _count(self) -> int:
        if self._scheme == "resp":
            with socket.create_connection(("127.0.0.1", self._servers.redis_port)) as server:
                server.sendall(b"DBSIZE\r\n")
                return int(server.makefile("rb").readline()[1:])
        place = f"http://127.0.0.1:{self._servers.s3_port}/{self._servers.bucket}?list-type=2"
        with urllib.request.urlopen(place) as answer:
            return int(answer.read().count(b"<Key>"))


def _tokens(names: Sequence[str]) -> list[int]:
    """A prompt whose chunks nothing shares with any other."""
    digests = [hashlib.sha256(name.encode()).digest() for name in names]
    return [byte + 256 * (i % 64) for d in digests for i, byte in enumerate(d * (TOKENS // 32))]


if __name__ == "__main__":
    serve(LMCacheEngineWorker(sys.argv[1]))
