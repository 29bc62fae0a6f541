"""Stores on quick S3 servers, for the tests of the short way."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from objkv.config import Config
from objkv.stores.s3.client import S3Access, open_s3_access
from objkv.stores.s3.store import S3Store

MIB = 1 << 20
BUCKET = "kv-cache"


def s3_access(url: str, **settings: Any) -> S3Access:
    """Client and connections for ``url`` with keys that quick servers do not look at."""
    return open_s3_access(
        Config(
            **{
                "s3_endpoint_url": url,
                "s3_addressing": "path",
                "s3_access_key_id": "test",
                "s3_secret_access_key": "testsecret",
                "load_deadline_ms": 60_000,
                **settings,
            }
        )
    )


def store_of(
    access: S3Access, *, bucket: str = BUCKET, prefix: str = "p", **settings: Any
) -> S3Store:
    limits = {name: settings.pop(name) for name in ("range_bytes",) if name in settings}
    limits["ranges_max"] = settings.pop("ranges_max", 0)
    config = Config().model_copy(update={"load_deadline_ms": 30_000, **settings})
    return S3Store(access, config, bucket=bucket, prefix=prefix, **limits)


@contextmanager
def s3_store(url: str, **options: Any) -> Iterator[S3Store]:
    """A store at ``url``; keywords ``client``, a dict of settings of the client, ``prefix``, and
    settings of the store."""
    access = s3_access(url, **options.pop("client", {}))
    store = store_of(access, **options)
    try:
        yield store
    finally:
        store.close()


def pattern(nbytes: int, seed: int = 0) -> bytes:
    """Bytes in which every MiB differs from every other."""
    unit = bytes((number * 7 + seed) % 256 for number in range(256)) * (MIB >> 8)
    out = bytearray(unit * (nbytes // MIB + 1))
    for at in range(0, len(out), 4096):
        out[at : at + 4] = (at >> 12 ^ seed).to_bytes(4, "little")
    return bytes(out[:nbytes])
