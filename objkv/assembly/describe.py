"""What the index's server says of itself: for ``objkv doctor`` only."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import redis
from redis import exceptions

from objkv.assembly.redis import Client, connect_redis
from objkv.config import Config
from objkv.errors import StoreUnavailable
from objkv.ops.server import ServerFacts


def describe_index(config: Config, *, clock: Callable[[], float] = time.time) -> ServerFacts | None:
    """Version, memory policy and clock of the server, on a connection of its own.

    None where the index is no server. Of a cluster one node speaks for all. Raises
    ``StoreUnavailable``; what the ACL denies is told in the facts.
    """
    if not config.index_url.startswith("redis"):
        return None
    client = connect_redis(config.index_url, config)
    try:
        with _translated():
            return describe_redis(_one_node(client), clock=clock)
    finally:
        client.close()


def describe_redis(node: redis.Redis, *, clock: Callable[[], float] = time.time) -> ServerFacts:
    """The facts of one server, by ``INFO`` and ``TIME`` (ACL: ``+info +time``)."""
    denied: list[str] = []
    info: Mapping[str, Any] = _allowed(node.info, "INFO", denied) or {}
    before_s = clock()
    told = _allowed(node.time, "TIME", denied)
    after_s = clock()
    skew_s = None
    if told is not None:
        server_s = told[0] + told[1] / 1e6
        # It looked at its clock at any moment in between: a late answer is no wrong clock.
        skew_s = round(server_s - min(max(server_s, before_s), after_s), 3)
    valkey = info.get("valkey_version")
    return ServerFacts(
        product="valkey" if valkey else "redis",
        version=valkey or info.get("redis_version"),
        mode=info.get("server_mode") or info.get("redis_mode"),
        maxmemory_bytes=_number(info.get("maxmemory")),
        maxmemory_policy=info.get("maxmemory_policy"),
        used_bytes=_number(info.get("used_memory")),
        clock_skew_s=skew_s,
        denied=tuple(denied),
    )


def _one_node(client: Client) -> redis.Redis:
    if isinstance(client, redis.RedisCluster):
        node = client.get_default_node()
        one: redis.Redis = client.get_redis_connection(node)
        return one
    return client


def _allowed(call: Callable[[], Any], name: str, denied: list[str]) -> Any:
    try:
        return call()
    except exceptions.NoPermissionError:
        denied.append(name)
        return None


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) else None


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (exceptions.RedisError, exceptions.RedisClusterException) as exc:
        raise StoreUnavailable(f"describe index: {exc}") from exc
