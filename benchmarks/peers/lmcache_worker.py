"""LMCache's remote connectors, without vLLM: ``resp`` or ``s3``. Runs in LMCache's environment.

Written for 0.5.6. Values are chunks of 256 tokens in LMCache's own allocator, as its engine passes
them to the connector. Puts use ``batched_put`` if it exists, and otherwise run all at once.
"""

import asyncio
import sys
import threading
from collections.abc import Coroutine, Sequence
from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.connector import CreateConnector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from protocol import Bytes, Case, Servers, Worker, serve

TOKENS = 256
CALL_S = 60.0
"""Bound of a call: their synchronous calls may hang (a lost wake-up), so none is used."""


class LMCacheWorker(Worker):
    """One connector per size of values: the size is part of its configuration."""

    def __init__(self, scheme: str) -> None:
        self._scheme = scheme
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def open(self, servers: Servers, role: str, threads: int) -> None:
        """Only remembered: a connector needs to know the size of its values."""
        self._servers, self._role, self._threads = servers, role, threads

    def prepare(self, case: Case) -> list[Bytes]:
        """A connector, its allocator with room for the values, and the values to put."""
        config, metadata = (
            config_of(self._scheme, self._servers, self._threads, case),
            metadata_of(case),
        )
        local = LocalCPUBackend(config, metadata, "cpu")
        self._connector = CreateConnector(config.remote_url, self._loop, local, config, metadata)
        if self._scheme == "s3":
            with_bucket(self._connector, self._servers.bucket)
        self._objects: list[Any] = []
        self._got: list[Any] = []
        if self._role == "writer":
            shapes, dtypes = metadata.get_shapes(), metadata.get_dtypes()
            self._objects = [local.allocate(shapes, dtypes) for _ in range(case.values)]
        return [_bytes(item) for item in self._objects]

    def put(self, names: Sequence[str]) -> None:
        """Returns when the server has acknowledged all values."""
        keys = [_key(name) for name in names]
        for item in self._objects:
            item.ref_count_up()  # a put gives one back
        if self._connector.support_batched_put():
            self._run(self._connector.batched_put(keys, self._objects[: len(keys)]))
        else:
            put = self._connector.put
            self._run(_all([put(k, o) for k, o in zip(keys, self._objects, strict=True)]))

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


def config_of(scheme: str, servers: Servers, threads: int, case: Case) -> LMCacheEngineConfig:
    """Their defaults, but for what a connector needs, and threads."""
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
        max_local_cpu_size=2.5 * case.value_bytes * case.values / 2**30,
        remote_url=url,
        remote_serde="naive",
        save_unfull_chunk=False,
        extra_config={"save_chunk_meta": False, **extra},
    )


def metadata_of(case: Case) -> LMCacheMetadata:
    """A model with as many layers, whose chunks of ``TOKENS`` tokens have the size of a value."""
    kv_width = case.value_bytes // (2 * 2 * TOKENS * case.layers)
    heads = max(1, kv_width // 128)
    return LMCacheMetadata(
        model_name="bench",
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.bfloat16,
        kv_shape=(case.layers, 2, TOKENS, heads, kv_width // heads),
        chunk_size=TOKENS,
    )


def with_bucket(connector: Any, bucket: str) -> None:
    """Put the bucket in front of the paths of an S3 connector: loopback has one name only."""
    inner = connector.getWrappedConnector()
    path = inner._format_safe_path
    inner._format_safe_path = lambda key: f"/{bucket}{path(key)}"


async def _all(calls: list[Coroutine[Any, Any, Any]]) -> None:
    await asyncio.gather(*calls)


def _key(name: str) -> CacheEngineKey:
    return CacheEngineKey("bench", 1, 0, int(name[:16], 16), torch.bfloat16)


def _bytes(item: Any) -> Bytes:
    whole: Bytes = item.raw_data.view(torch.uint8).reshape(-1).numpy()
    return whole


if __name__ == "__main__":
    serve(LMCacheWorker(sys.argv[1]))
