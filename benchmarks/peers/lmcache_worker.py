"""LMCache's remote connectors, without vLLM: ``resp`` or ``s3``, alone or with ``engine`` below a
whole LMCacheEngine. Runs in LMCache's environment.

Written for 0.5.6. Values are chunks of 256 tokens in LMCache's own allocator, as its engine passes
them to the connector. Puts use ``batched_put`` if it exists, and otherwise run all at once.
"""

import asyncio
import hashlib
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Coroutine, Sequence
from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector import GPUConnectorInterface
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.connector import CreateConnector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from protocol import LAYERS, Bytes, Servers, Worker, serve

TOKENS = 256
WAIT_S = 100.0
LOOK_S = 0.001
CALL_S = 60.0
"""Bound of a call: their synchronous calls may hang (a lost wake-up), so none is used."""


class LMCacheWorker(Worker):
    """One connector per size of values: the size is part of its configuration."""

    def __init__(self, scheme: str) -> None:
        self._scheme = scheme
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def prepare(self, value_bytes: int, values: int) -> None:
        """A connector, its allocator with room for the values, and the values to put."""
        config = config_of(self._scheme, self.servers, self.threads, value_bytes * values)
        metadata = metadata_of(value_bytes)
        local = LocalCPUBackend(config, metadata, "cpu")
        self._connector = CreateConnector(config.remote_url, self._loop, local, config, metadata)
        if self._scheme == "s3":
            with_bucket(self._connector, self.servers.bucket)
        self._objects: list[Any] = []
        self._got: list[Any] = []
        if self.role == "writer":
            shapes, dtypes = metadata.get_shapes(), metadata.get_dtypes()
            self._objects = [local.allocate(shapes, dtypes) for _ in range(values)]
        self.buffers = [_bytes(item) for item in self._objects]

    def put(self, names: Sequence[str]) -> None:
        """Returns when the server has acknowledged all values."""
        keys = [_key(name) for name in names]
        for item in self._objects:
            item.ref_count_up()  # a put gives one back
        self._run(self._put_all(keys))

    async def _put_all(self, keys: list[CacheEngineKey]) -> None:
        if self._connector.support_batched_put():
            await self._connector.batched_put(keys, self._objects)
        else:
            await asyncio.gather(*map(self._connector.put, keys, self._objects))

    def get(self, names: Sequence[str]) -> None:
        """Into memory of LMCache's allocator; that of the get before is given back."""
        for item in self._got:
            item.ref_count_down()
        self._got = self._run(self._connector.batched_get([_key(name) for name in names]))

    def got(self, count: int) -> list[Bytes]:
        """That memory."""
        assert len(self._got) == count
        return [_bytes(item) for item in self._got]

    def lookup(self, names: Sequence[str]) -> int:
        """Their batched question, as a scheduler asks it before a load."""
        keys = [_key(name) for name in names]
        return int(self._run(self._connector.batched_async_contains("bench", keys)))

    def _run(self, call: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(CALL_S)


def config_of(scheme: str, servers: Servers, threads: int, nbytes: int) -> LMCacheEngineConfig:
    """Their defaults, but for what a connector needs, and threads. ``nbytes``: of all values."""
    url = f"resp://127.0.0.1:{servers.redis_port}"
    extra: dict[str, Any] = {"resp_num_threads": threads}
    if scheme == "s3":  # it expects the bucket in the host's name, see ``with_bucket``
        url = f"s3://127.0.0.1:{servers.s3_port}"
        extra = {
            "s3_region": "us-east-1",
            "s3_num_io_threads": threads,
            "s3_prefer_http2": False,
            "disable_tls": True,
            "aws_access_key_id": "bench",
            "aws_secret_access_key": "bench",
        }
    return LMCacheEngineConfig.from_defaults(
        chunk_size=TOKENS,
        local_cpu=False,
        max_local_cpu_size=2.5 * nbytes / 2**30,
        remote_url=url,
        remote_serde="naive",
        save_unfull_chunk=False,
        extra_config={"save_chunk_meta": False, **extra},
    )


def metadata_of(value_bytes: int) -> LMCacheMetadata:
    """A model with as many layers, whose chunks of ``TOKENS`` tokens have the size of a value."""
    kv_width = value_bytes // (2 * 2 * TOKENS * LAYERS)
    heads = max(1, kv_width // 128)
    return LMCacheMetadata(
        model_name="bench",
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.bfloat16,
        kv_shape=(LAYERS, 2, TOKENS, heads, kv_width // heads),
        chunk_size=TOKENS,
    )


def with_bucket(connector: Any, bucket: str) -> None:
    """Put the bucket in front of the paths of an S3 connector: loopback has one name only."""
    inner = connector.getWrappedConnector()
    path = inner._format_safe_path
    inner._format_safe_path = lambda key: f"/{bucket}{path(key)}"


def _key(name: str) -> CacheEngineKey:
    return CacheEngineKey("bench", 1, 0, int(name[:16], 16), torch.bfloat16)


def _bytes(item: Any) -> Bytes:
    whole: Bytes = item.raw_data.view(torch.uint8).reshape(-1).numpy()
    return whole


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
    """One engine per size of values; the values of a put are the chunks of one prompt.

    Like objkv's worker, and unlike the connector alone, it copies out of and into a paged cache
    (one copy per chunk) and hashes the tokens. ``store`` returns before anything is stored, so a
    put lasts until the server has all keys. The worker queries the server, because lookups of the
    engine delay its stores.
    """

    def __init__(self, scheme: str) -> None:
        self._scheme = scheme

    def prepare(self, value_bytes: int, values: int) -> None:
        """An engine, and the pages of as many chunks. That of the size before is left alone: its
        end was seen to hang."""
        super().prepare(value_bytes, values)
        self._engine: Any = LMCacheEngineBuilder.get_or_create(
            f"bench-{value_bytes}",
            config_of(self._scheme, self.servers, self.threads, value_bytes * values),
            metadata_of(value_bytes),
            HostPages(self.buffers),
            lambda tensor, rank: None,
            lambda item, rank: item,
        )
        self._engine.post_init()
        if self._scheme == "s3":
            backends = self._engine.storage_manager.storage_backends.values()
            connectors = (b.connection for b in backends if hasattr(b, "connection"))
            with_bucket(next(connectors), self.servers.bucket)

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

    def lookup(self, names: Sequence[str]) -> int:
        """With the hashing of the tokens."""
        return int(self._engine.lookup(_tokens(names))) // TOKENS

    def _count(self) -> int:
        if self._scheme == "resp":
            with socket.create_connection(("127.0.0.1", self.servers.redis_port)) as server:
                server.sendall(b"DBSIZE\r\n")
                return int(server.makefile("rb").readline()[1:])
        place = f"http://127.0.0.1:{self.servers.s3_port}/{self.servers.bucket}?list-type=2"
        with urllib.request.urlopen(place) as answer:
            return int(answer.read().count(b"<Key>"))


def _tokens(names: Sequence[str]) -> list[int]:
    """A prompt whose chunks nothing shares with any other."""
    digests = [hashlib.sha256(name.encode()).digest() for name in names]
    return [byte + 256 * (i % 64) for d in digests for i, byte in enumerate(d * (TOKENS // 32))]


if __name__ == "__main__":
    scheme, *engine = sys.argv[1:]
    serve(LMCacheEngineWorker(scheme) if engine else LMCacheWorker(scheme))
